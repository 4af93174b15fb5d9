#include <cuda_fp16.h>

#include <algorithm>

#include "kernels/scan/channels.cuh"
#include "kernels/scan/rows.h"
#include "kernels/scan/scan.h"
#include "kernels/scan/tile_queries.cuh"
#include "kernels/scan/tiles.h"
#include "lib/backend/index_ops.h"
#include "lib/check.h"

namespace sluice::cuda {
namespace {

// Part of a batch that one round of launches takes: tokens with all of their KV heads, or some KV
// heads of one token.
struct Part {
  std::int64_t token = 0;
  std::int64_t tokens = 0;
  int kv_head = 0;
  int kv_heads = 0;
};

// The parameters of a part of a call. `candidates` becomes the part's list, to which they point.
EstimateParams call_of(const EstimateParams& p, const Part& part, SelectionView& candidates) {
  EstimateParams of = p;
  of.batch.tokens += part.token;
  of.batch.count = part.tokens;
  of.shape.kv_heads = part.kv_heads;
  of.shape.query_heads = part.kv_heads * p.shape.group();
  of.q += part.token * p.q_stride + std::int64_t{part.kv_head} * p.shape.group() * p.shape.head_dim;
  if (p.index.tiles.codes != nullptr) {
    of.index.tiles.codes = p.index.tiles.codes_of(p.shape.head_dim, part.kv_head, 0);
    of.index.tiles.scales = p.index.tiles.scales_of(p.shape.head_dim, part.kv_head, 0, 0);
  }
  if (p.index.bounds.bounds != nullptr) {
    of.index.bounds.bounds = p.index.bounds.of(p.shape.head_dim, part.kv_head, 0, 0);
  }
  if (p.rows.device != nullptr) of.rows.device += part.kv_head * p.rows.device_stride;
  if (p.rows.host != nullptr) of.rows.host += part.kv_head * p.rows.host_stride;
  const std::int64_t head = part.token * p.shape.kv_heads + part.kv_head;
  const std::int64_t query = head * p.shape.group();
  of.logits.data += query * p.logits.stride * static_cast<std::int64_t>(sizeof(__half));
  of.logits.digest.first += query;
  if (p.candidates != nullptr) {
    candidates = *p.candidates;
    candidates.positions += head * candidates.capacity;
    candidates.heads += head;
    if (p.pages_read != nullptr) of.pages_read += head;
    if (p.resident != nullptr) of.resident += head;
    of.candidates = &candidates;
  }
  return of;
}

// KV heads per round: their data fits the scratch, and their tiles can be counted in 32 bits.
std::int64_t heads_of_round(const EstimateParams& p, const Launch& launch) {
  SelectionView candidates;
  const EstimateParams one = call_of(p, {0, 1, 0, 1}, candidates);
  const std::size_t bytes = tile_scan_scratch_bytes(one);
  check(bytes <= launch.scratch_bytes, "estimate: scratch");
  return std::min(static_cast<std::int64_t>(launch.scratch_bytes / bytes),
                  kMostTiles / std::max<std::int64_t>(most_tiles(p), 1));
}

void estimate_tiles(const ScanPass& pass, const Launch& launch) {
  const PrepareArgs prepare = prepare_args(pass, launch);
  if (pass.estimate->skip_newest) {
    prepare_scan(pass, prepare, launch);
  } else {
    scan_rows(pass, &prepare, launch);
  }
  scan_tiles(pass, launch);
}

void estimate_pass(const ScanPass& pass, const Launch& launch) {
  const EstimateParams& p = *pass.estimate;
  const bool has_pages = most_pages(p.batch) > 0;
  if (p.method == Selector::exact && p.candidates == nullptr) {
    scan_all_rows(pass, launch);
  } else if (has_pages && (p.method == Selector::int4 || p.method == Selector::sparq)) {
    estimate_tiles(pass, launch);
  } else {
    if (!p.skip_newest) scan_rows(pass, nullptr, launch);
    if (p.method == Selector::quest && has_pages) scan_bounds(pass, launch);
    if (p.method == Selector::exact) scan_candidate_rows(pass, launch);
  }
}

void estimate_part(const EstimateParams& p, const Launch& launch) {
  for (int first = 0; first < p.shape.group(); first += kMaxQueries) {
    estimate_pass({&p, first, std::min(kMaxQueries, p.shape.group() - first)}, launch);
  }
}

}  // namespace

void estimate(const EstimateParams& p, const Launch& launch) {
  const int d = p.shape.head_dim;
  check(d > 0 && d % 2 == 0 && d <= kMaxHeadDim, "estimate: head_dim");
  check(p.method != Selector::sparq || p.channels > 0, "estimate: channels");
  check(p.method == Selector::int4 || p.method == Selector::sparq || p.method == Selector::quest ||
            p.method == Selector::exact || p.method == Selector::newest,
        "estimate: method");
  check(p.logits.digest.data == nullptr || p.logits.digest.pages >= most_pages(p.batch),
        "estimate: digest");
  check(
      p.candidates != nullptr ||
          p.logits.stride >= (p.skip_newest ? most_pages(p.batch) * kPageTokens : p.batch.capacity),
      "estimate: stride");
  const std::int64_t heads = heads_of_round(p, launch);
  const std::int64_t tokens = std::clamp<std::int64_t>(heads / p.shape.kv_heads, 1, kScanTokens);
  const int kv_heads = static_cast<int>(std::min<std::int64_t>(heads, p.shape.kv_heads));
  for (std::int64_t token = 0; token < p.batch.count; token += tokens) {
    for (int kv_head = 0; kv_head < p.shape.kv_heads; kv_head += kv_heads) {
      SelectionView candidates;
      const Part part = {token, std::min(tokens, p.batch.count - token), kv_head,
                         std::min(kv_heads, p.shape.kv_heads - kv_head)};
      estimate_part(call_of(p, part, candidates), launch);
    }
  }
}

}  // namespace sluice::cuda
