#include "offload/index_layout.h"

#include <algorithm>

#include "lib/selection.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

// Enough rows for a typical selection in one piece, few enough to stay in a cache.
constexpr std::int64_t kArenaRows = 256;

std::int64_t aligned(std::int64_t logits) {
  constexpr std::int64_t kUnit = LogitView::kLogitAlignment;
  return (logits + kUnit - 1) / kUnit * kUnit;
}

bool reads_tiles(const Policy& p) {
  return scans_tiles(p) || (p.candidates.limited() && p.select != Selector::exact);
}

std::int64_t most_selected(const Policy& p, std::int64_t context) {
  if (p.select == Selector::streaming) return std::min(p.sinks + p.recent, context);
  const std::int64_t chosen = p.prune == Pruner::top_k ? p.k.of(context) : p.cap.of(context);
  return std::min(std::max(chosen, p.sinks + p.recent), context);
}

}  // namespace

bool scans_tiles(const Policy& p) {
  return p.select == Selector::int4 || p.select == Selector::sparq;
}

std::int64_t candidates_of(const Policy& p, std::int64_t count) {
  const Budget& kept = p.prune == Pruner::top_k ? p.k : p.cap;
  const std::int64_t least = kept.limited() ? 2 * kept.of(count) : 0;
  return std::min(count, std::max(p.candidates.of(count), least) + p.sinks + p.recent);
}

std::int64_t IndexLayout::logit_stride() const { return aligned(context); }

std::int64_t IndexLayout::candidate_stride() const {
  return candidates > 0 ? aligned(candidates + kPageTokens) : 0;
}

std::uint64_t IndexLayout::index_bytes() const {
  const auto heads = static_cast<std::uint64_t>(shape.kv_heads);
  const auto tokens = static_cast<std::uint64_t>(pages()) * heads;
  KeyTiles tiles;
  tiles.bits = bits;
  tiles.capacity = pages();
  std::uint64_t total = 0;
  for (const LayerIndex& layer : layers) {
    if (layer.tiles) {
      total += tiles.codes_bytes(shape.kv_heads, shape.head_dim) +
               tokens * static_cast<std::uint64_t>(shape.head_dim) * 2 * sizeof(std::uint16_t);
    }
    if (layer.bounds) total += tokens * PageBounds().page_bytes(shape.head_dim);
    if (layer.sums) total += heads * static_cast<std::uint64_t>(shape.head_dim) * sizeof(float);
  }
  return total;
}

std::size_t IndexLayout::digest_bytes() const {
  return digested ? LogitDigest::bytes_of(shape.query_heads, logit_stride()) : 0;
}

std::uint64_t IndexLayout::work_bytes() const {
  if (!selects()) return 0;
  const auto queries = static_cast<std::uint64_t>(shape.query_heads);
  const auto heads = static_cast<std::uint64_t>(shape.kv_heads);
  return queries * static_cast<std::uint64_t>(logit_stride() + candidate_stride()) *
             size_of(logits.dtype) +
         digest_bytes() + queries * sizeof(float) +
         heads * static_cast<std::uint64_t>(slots * selected + candidates) * sizeof(std::int32_t) +
         heads * static_cast<std::uint64_t>(arena_rows) * shape.row_bytes() + report_bytes() +
         bad_bytes();
}

std::uint64_t IndexLayout::report_bytes() const {
  const auto heads = static_cast<std::uint64_t>(shape.kv_heads) * sizeof(HeadSelection);
  const auto queries = static_cast<std::uint64_t>(shape.query_heads) * sizeof(float);
  return 2 * static_cast<std::uint64_t>(shape.layers * batch) * (heads + queries);
}

std::uint64_t IndexLayout::bad_bytes() const {
  return static_cast<std::uint64_t>(shape.layers) * static_cast<std::uint64_t>(shape.kv_heads) *
         sizeof(std::int32_t);
}

std::uint64_t IndexLayout::host_bytes() const {
  return selects() ? report_bytes() + bad_bytes() : 0;
}

IndexLayout plan_index(const KvShape& shape, std::int64_t context, std::int64_t batch,
                       std::span<const Policy> policies, const LogitFormat& logits) {
  IndexLayout layout;
  layout.logits = logits;
  layout.digested =
      context >= logits.digested_from && std::any_of(policies.begin(), policies.end(), scans_tiles);
  layout.shape = shape;
  layout.context = context;
  layout.batch = batch;
  layout.layers.resize(static_cast<std::size_t>(shape.layers));
  int bits = 0;
  for (const Policy& policy : policies) {
    validate(policy, shape);
    layout.zipvl = layout.zipvl || policy.prefill.tau > 0.0;
    if (policy.prefill.evict) {
      // Even dense layers then attend to a list: of what is left.
      layout.slots = std::max<std::int64_t>(layout.slots, 1);
      layout.selected = context;
    }
    if (policy.select == Selector::dense) continue;
    layout.slots = std::max(layout.slots, policy.anchors.empty() ? std::int64_t{1} : batch);
    layout.selected = std::max(layout.selected, most_selected(policy, context));
    if (policy.candidates.limited()) {
      layout.candidates = std::max(layout.candidates, candidates_of(policy, context));
    }
    if (reads_tiles(policy)) {
      if (bits != 0 && bits != policy.bits) {
        throw Error(ErrorCode::usage,
                    "policy: one session cannot hold the index at both 2 and 4 bits");
      }
      bits = policy.bits;
    }
    for (int layer = 0; layer < shape.layers; ++layer) {
      if (!policy.selects(layer)) continue;
      LayerIndex& index = layout.layers[static_cast<std::size_t>(layer)];
      index.tiles = index.tiles || reads_tiles(policy);
      index.bounds = index.bounds || policy.select == Selector::quest;
      index.sums = index.sums || policy.compensate == Compensation::mean_value;
    }
  }
  if (bits != 0) layout.bits = bits;
  layout.arena_rows = layout.selects() ? std::min(kArenaRows, layout.selected) : 0;
  return layout;
}

}  // namespace sluice
