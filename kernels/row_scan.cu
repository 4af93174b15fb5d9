#include <algorithm>

#include "kernels/dispatch.h"
#include "kernels/row_scan.cuh"
#include "kernels/row_scan.h"
#include "lib/backend.h"

namespace sluice::cuda {
namespace {

// Work beyond one wave of blocks is split finer, so that all end together, but not so fine that
// making queries ready counts.
constexpr int kWaves = 3;
constexpr int kLeastTiles = 12;  // of a warp

RowScanArgs common_args(const ScanPass& pass) {
  const EstimateParams& p = *pass.estimate;
  RowScanArgs a{};
  const int d = p.shape.head_dim;
  const int channels = p.method == Selector::sparq ? std::min(p.channels, d) : d;
  a.queries = {p.q, p.shape.group(), d, channels, pass.first_query, pass.queries};
  a.row_bytes = static_cast<std::int64_t>(p.shape.row_bytes());
  a.logits = reinterpret_cast<__half*>(p.logits.data);
  a.stride = p.logits.stride;
  a.elements = d;
  a.wide = d % 8 == 0;
  if (p.candidates != nullptr) {
    a.positions = p.candidates->positions;
    a.position_capacity = p.candidates->capacity;
    a.candidates = p.candidates->heads;
  } else {
    a.first_logit = p.pages * kPageTokens;
  }
  return a;
}

// Blocks for `rows` rows of every head.
int blocks_of(std::int64_t rows, int heads, const Launch& launch) {
  const std::int64_t block_rows = kRowWarps * kTileRows;
  const std::int64_t useful = (rows + block_rows - 1) / block_rows;
  const std::int64_t wave =
      (std::int64_t{launch.device->multiprocessors} * kRowBlocks + heads - 1) / heads;
  const std::int64_t fine = std::min(kWaves * wave, useful / kLeastTiles);
  return static_cast<int>(std::min(useful, std::max(wave, fine)));
}

template <typename T, RowKind kKind, int kColumns>
void launch_columns(const RowScanArgs& a, const dim3& grid, const Launch& launch) {
  const int blocks = (a.elements + kBlockElements - 1) / kBlockElements;
  const std::size_t shared =
      static_cast<std::size_t>(blocks) * 2 * kColumns * kWarp * sizeof(uint4);
  const auto kernel = row_scan_kernel<T, kKind, kColumns>;
  require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared)),
          "row scan");
  launch_early("row scan", kernel, grid, kQueryThreads, shared, launch, a);
}

template <typename T, RowKind kKind>
void launch_kind(RowScanArgs a, std::int64_t rows, int heads, bool prepares, const Launch& launch) {
  a.scan_blocks = blocks_of(rows, heads, launch);
  if (a.scan_blocks == 0) return;
  int blocks = a.scan_blocks;
  a.prepare_block = prepares ? 0 : -1;
  // Of few heads a block of its own is sooner ready.
  if (prepares && (blocks + 1) * heads <= launch.device->multiprocessors) {
    a.prepare_block = blocks++;
  }
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(heads));
  if (a.queries.count <= 8) {
    launch_columns<T, kKind, 1>(a, grid, launch);
  } else {
    launch_columns<T, kKind, 2>(a, grid, launch);
  }
}

}  // namespace

void scan_rows(const ScanPass& pass, const PrepareArgs* prepare, const Launch& launch) {
  const EstimateParams& p = *pass.estimate;
  RowScanArgs a = common_args(pass);
  a.rows = head_rows(p.rows);
  a.counts = head_counts(p.rows);
  if (prepare != nullptr) a.prepare = *prepare;
  std::int64_t longest = 0;
  for (const RowSpan& span : p.rows) longest = std::max(longest, span.count);
  dispatch_rows(p.shape.dtype, [&](auto row) {
    launch_kind<decltype(row), RowKind::rows>(a, longest, p.shape.kv_heads, prepare != nullptr,
                                              launch);
  });
}

void scan_candidate_rows(const ScanPass& pass, const Launch& launch) {
  const EstimateParams& p = *pass.estimate;
  RowScanArgs a = common_args(pass);
  a.rows = head_rows(p.candidate_rows);
  dispatch_rows(p.shape.dtype, [&](auto row) {
    launch_kind<decltype(row), RowKind::candidates>(a, a.position_capacity, p.shape.kv_heads, false,
                                                    launch);
  });
}

void scan_bounds(const ScanPass& pass, const Launch& launch) {
  const EstimateParams& p = *pass.estimate;
  RowScanArgs a = common_args(pass);
  const int d = p.shape.head_dim;
  a.row_bytes = 2 * d * static_cast<std::int64_t>(sizeof(std::uint16_t));
  a.rows.base = reinterpret_cast<const std::byte*>(p.index.bounds.bounds);
  a.rows.stride = p.index.bounds.capacity * kBoundsPerPage * a.row_bytes;
  a.counts.uniform = p.pages * kBoundsPerPage;
  a.first_logit = 0;
  a.elements = 2 * d;
  a.wide = d % 4 == 0;
  launch_kind<__half, RowKind::bounds>(a, a.counts.uniform, p.shape.kv_heads, false, launch);
}

}  // namespace sluice::cuda
