#include <algorithm>

#include "kernels/estimate.h"
#include "kernels/row_scan.h"
#include "kernels/tile_scan.h"
#include "kernels/tile_scan_queries.cuh"
#include "lib/backend.h"
#include "lib/check.h"

namespace sluice::cuda {
namespace {

void estimate_tiles(const ScanPass& pass, const Launch& launch) {
  const EstimateParams& p = *pass.estimate;
  const PrepareArgs prepare = prepare_args(pass, launch);
  const bool has_rows =
      std::any_of(p.rows.begin(), p.rows.end(), [](const RowSpan& span) { return span.count > 0; });
  if (has_rows) {
    scan_rows(pass, &prepare, launch);
  } else {
    prepare_scan(prepare, p.shape.kv_heads, launch);
  }
  scan_tiles(pass, launch);
}

}  // namespace

void estimate(const EstimateParams& p, const Launch& launch) {
  const int d = p.shape.head_dim;
  check(d > 0 && d % 2 == 0 && d <= kMaxHeadDim, "estimate: head_dim");
  check(p.method != Selector::sparq || p.channels > 0, "estimate: channels");
  check(p.method == Selector::int4 || p.method == Selector::sparq || p.method == Selector::quest ||
            p.method == Selector::exact,
        "estimate: method");
  for (int first = 0; first < p.shape.group(); first += kMaxQueries) {
    const ScanPass pass{&p, first, std::min(kMaxQueries, p.shape.group() - first)};
    const bool tiles = (p.method == Selector::int4 || p.method == Selector::sparq) && p.pages > 0;
    if (tiles) {
      estimate_tiles(pass, launch);
      continue;
    }
    scan_rows(pass, nullptr, launch);
    if (p.method == Selector::quest) scan_bounds(pass, launch);
    if (p.method == Selector::exact && p.candidates != nullptr) scan_candidate_rows(pass, launch);
  }
}

}  // namespace sluice::cuda
