#include "offload/index_layout.h"

#include <algorithm>

#include "lib/batch.h"
#include "lib/selection.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

// Enough rows for a typical selection in one piece, few enough to stay in a cache.
constexpr std::int64_t kArenaRows = 256;
// Of logits at a time; what would take more is estimated a few tokens after the other.
constexpr std::int64_t kWaveBytes = std::int64_t{256} << 20;

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

Quota candidates_of(const Policy& p) {
  return {p.candidates, p.prune == Pruner::top_k ? p.k : p.cap, p.sinks + p.recent};
}

std::int64_t IndexLayout::logit_stride() const { return aligned(context); }

std::int64_t IndexLayout::candidate_stride() const {
  return candidates > 0 ? aligned(candidates + kPageTokens) : 0;
}

std::uint64_t IndexLayout::index_bytes() const {
  const auto heads = static_cast<std::uint64_t>(shape.kv_heads);
  const auto pages = static_cast<std::uint64_t>(tiles * kTilePages) * heads;
  const auto channels = static_cast<std::uint64_t>(shape.head_dim);
  KeyTiles of_tiles;
  of_tiles.bits = bits;
  of_tiles.slots = tiles;
  std::uint64_t total = 0;
  for (const LayerIndex& layer : layers) {
    if (layer.tiles) {
      total += of_tiles.codes_bytes(shape.kv_heads, shape.head_dim) +
               pages * channels * 2 * sizeof(std::uint16_t);
    }
    if (layer.bounds) total += pages * PageBounds().page_bytes(shape.head_dim);
    if (layer.sums) {
      total += static_cast<std::uint64_t>(sequences) * heads * channels * sizeof(float);
    }
  }
  return total;
}

bool IndexLayout::sums_values() const {
  return std::any_of(layers.begin(), layers.end(), [](const LayerIndex& l) { return l.sums; });
}

std::size_t IndexLayout::digest_bytes() const {
  return digested ? LogitDigest::bytes_of(wave * shape.query_heads, logit_stride()) : 0;
}

std::uint64_t IndexLayout::work_bytes() const {
  if (!selects()) return 0;
  const auto queries = static_cast<std::uint64_t>(shape.query_heads * wave);
  const auto heads = static_cast<std::uint64_t>(shape.kv_heads);
  const auto at_once = static_cast<std::uint64_t>(wave);
  const std::uint64_t sums = sums_values()
                                 ? heads * static_cast<std::uint64_t>(batch) *
                                       static_cast<std::uint64_t>(shape.head_dim) * sizeof(float)
                                 : 0;
  return queries * static_cast<std::uint64_t>(logit_stride() + candidate_stride()) *
             size_of(logits.dtype) +
         digest_bytes() + queries * sizeof(float) + sums +
         heads * static_cast<std::uint64_t>(slots * selected) * sizeof(std::int32_t) +
         heads * at_once * static_cast<std::uint64_t>(candidates) * sizeof(std::int32_t) +
         heads * static_cast<std::uint64_t>(arena_rows) * shape.row_bytes() + report_bytes() +
         bad_bytes();
}

std::uint64_t IndexLayout::report_bytes() const {
  const auto heads = static_cast<std::uint64_t>(shape.kv_heads) * sizeof(HeadSelection);
  const auto queries = static_cast<std::uint64_t>(shape.query_heads) * sizeof(float);
  return 2 * static_cast<std::uint64_t>(shape.layers * batch) * (heads + queries);
}

std::uint64_t IndexLayout::bad_bytes() const {
  return static_cast<std::uint64_t>(shape.layers * sequences) *
         static_cast<std::uint64_t>(shape.kv_heads) * sizeof(std::int32_t);
}

std::uint64_t IndexLayout::host_bytes() const {
  return selects() ? report_bytes() + bad_bytes() : 0;
}

std::uint64_t IndexLayout::table_bytes() const {
  const auto of_sequence = static_cast<std::uint64_t>(pages()) * sizeof(PageSlots) +
                           static_cast<std::uint64_t>(sequence_tiles()) * sizeof(std::int32_t);
  return static_cast<std::uint64_t>(sequences) * of_sequence +
         static_cast<std::uint64_t>(batch) * sizeof(BatchToken);
}

std::int64_t blocks_for(std::int64_t context, std::int64_t sequences, std::int64_t tokens) {
  const auto whole = [](std::int64_t count) { return (count + kPageTokens - 1) / kPageTokens; };
  // Of its own blocks a fork's first begins with what it shares, and its last is not full.
  return std::min(sequences * whole(context), whole(tokens) + 2 * (sequences - 1));
}

namespace {

// What one policy adds to a layout.
void include(IndexLayout& layout, const Policy& policy) {
  layout.zipvl = layout.zipvl || policy.prefill.tau > 0.0;
  if (policy.prefill.evict) {
    // Even dense layers then attend to a list: of what is left.
    layout.slots = std::max(layout.slots, layout.wave);
    layout.selected = layout.context;
  }
  if (policy.select == Selector::dense) return;
  layout.slots = std::max(layout.slots, policy.anchors.empty() ? layout.wave : layout.batch);
  layout.selected = std::max(layout.selected, most_selected(policy, layout.context));
  if (policy.candidates.limited()) {
    layout.candidates = std::max(layout.candidates, candidates_of(policy).of(layout.context));
  }
  for (int layer = 0; layer < layout.shape.layers; ++layer) {
    if (!policy.selects(layer)) continue;
    LayerIndex& index = layout.layers[static_cast<std::size_t>(layer)];
    index.tiles = index.tiles || reads_tiles(policy);
    index.bounds = index.bounds || policy.select == Selector::quest;
    index.sums = index.sums || policy.compensate == Compensation::mean_value;
  }
}

// Of the index, for all policies together.
int bits_of(std::span<const Policy> policies) {
  int bits = 0;
  for (const Policy& policy : policies) {
    if (policy.select == Selector::dense || !reads_tiles(policy)) continue;
    if (bits != 0 && bits != policy.bits) {
      throw Error(ErrorCode::usage,
                  "policy: one session cannot hold the index at both 2 and 4 bits");
    }
    bits = policy.bits;
  }
  return bits != 0 ? bits : IndexLayout().bits;
}

}  // namespace

IndexLayout plan_index(const KvRequest& request) {
  for (const Policy& policy : request.policies) validate(policy, request.shape);
  IndexLayout layout;
  layout.shape = request.shape;
  layout.context = request.context;
  layout.sequences = request.sequences;
  layout.batch = std::min(std::max(request.decode_batch, request.sequences), kMostBatch);
  layout.logits = request.logits;
  layout.digested = request.context >= request.logits.digested_from &&
                    std::any_of(request.policies.begin(), request.policies.end(), scans_tiles);
  const std::int64_t tokens =
      request.tokens > 0 ? request.tokens : request.sequences * request.context;
  layout.tiles = std::min(request.sequences * layout.sequence_tiles(),
                          (tokens / kPageTokens + 1) / kTilePages + 2 * request.sequences);
  layout.layers.resize(static_cast<std::size_t>(request.shape.layers));
  const std::int64_t token_bytes = layout.logit_stride() * request.shape.query_heads *
                                   static_cast<std::int64_t>(size_of(request.logits.dtype));
  layout.wave = std::clamp<std::int64_t>(kWaveBytes / token_bytes, 1, layout.batch);
  for (const Policy& policy : request.policies) include(layout, policy);
  layout.bits = bits_of(request.policies);
  layout.arena_rows = layout.selects() ? std::min(kArenaRows, layout.selected) : 0;
  return layout;
}

}  // namespace sluice
