#include "offload/plan/index_layout.h"

#include <algorithm>

#include "lib/backend/index_ops.h"
#include "lib/text.h"
#include "lib/value_tiles.h"
#include "sluice/batch.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

// Enough rows for a typical selection at once, few enough to stay in the processor's cache.
constexpr std::int64_t kArenaRows = 256;
// Most bytes of logits at a time; larger batches are estimated in waves of tokens.
constexpr std::int64_t kWaveBytes = std::int64_t{256} << 20;

std::int64_t aligned(std::int64_t logits) {
  constexpr std::int64_t kUnit = LogitView::kLogitAlignment;
  return (logits + kUnit - 1) / kUnit * kUnit;
}

std::size_t count_of(std::int64_t a, std::int64_t b = 1, std::int64_t c = 1) {
  return static_cast<std::size_t>(a * b * c);
}

// Candidates are re-scored by tiles, unless rows proposed them.
IndexNeeds needs_of(const Policy& p, const IndexLayout& layout, const Scorers& scorers) {
  const Scorer& scorer = scorers.at(p.select);
  IndexNeeds needs = scorer.needs(use_of(p, layout.shape, layout.context));
  needs.tiles = needs.tiles || (p.candidates.limited() && !scorer.reads_rows());
  return needs;
}

}  // namespace

ScorerUse use_of(const Policy& policy, const KvShape& shape, std::int64_t context) {
  return {shape, policy.select.parameters, policy.bits, context};
}

std::int64_t most_selected(const Policy& p, std::int64_t context, const Scorers& scorers) {
  if (!scorers.at(p.select).info().estimates()) return std::min(p.sinks + p.recent, context);
  const std::int64_t chosen = p.prune == Pruner::top_k   ? p.k.of(context)
                              : p.prune == Pruner::top_p ? p.cap.of(context)
                                                         : 1;
  return std::min(std::max(chosen, p.sinks + p.recent), context);
}

Quota candidates_of(const Policy& p) {
  return {p.candidates, p.prune == Pruner::top_k ? p.k : p.cap, p.sinks + p.recent};
}

std::vector<int> IndexLayout::dense_layers() const {
  std::vector<int> dense;
  if (evicts) return dense;
  for (int layer = 0; layer < shape.layers; ++layer) {
    const auto at = static_cast<std::size_t>(layer);
    if (!selecting[at] && !windowed[at]) dense.push_back(layer);
  }
  if (static_cast<int>(dense.size()) == shape.layers) dense.clear();
  return dense;
}

std::int64_t IndexLayout::logit_stride() const { return aligned(context); }

std::int64_t IndexLayout::candidate_stride() const {
  return candidates > 0 ? aligned(candidates + kPageTokens) : 0;
}

std::int64_t IndexLayout::slot(int layer, std::int64_t token) const {
  if (reports_positions) return layer * batch + token;
  // A layer may choose while the one before still attends to what it chose.
  if (early) return layer % 2 * batch + token;
  // Followers need an anchor's positions later; without followers one wave's positions suffice.
  return slots >= batch ? token : token % wave;
}

std::uint64_t LayerIndexBytes::sum() const {
  std::uint64_t total = codes + scales + bounds + values + sums;
  for (const Own& part : own) total += part.pages + part.sequences;
  return total;
}

std::uint64_t SelectionBytes::sum() const {
  return logits + digest + page_weights + candidate_logits + lse + positions + early + candidates +
         token_sums + arena + report + bad;
}

LayerIndexBytes IndexLayout::layer_bytes(std::size_t layer) const {
  const LayerIndex& wanted = layers[layer];
  const std::size_t pages = count_of(tiles, kTilePages, shape.kv_heads);
  LayerIndexBytes bytes;
  if (wanted.bits > 0) {
    KeyTiles of_keys;
    of_keys.bits = wanted.bits;
    of_keys.slots = tiles;
    bytes.codes = of_keys.codes_bytes(shape.kv_heads, shape.head_dim);
    bytes.scales = pages * count_of(shape.head_dim, 2) * sizeof(std::uint16_t);
  }
  if (wanted.bounds) bytes.bounds = pages * PageBounds().page_bytes(shape.head_dim);
  if (wanted.value_bits > 0) {
    bytes.values = pages * value_page_bytes(layer);
  }
  if (wanted.sums) {
    bytes.sums = count_of(sequences + kept_sums(), shape.kv_heads, shape.head_dim) * sizeof(float);
  }
  for (const OwnIndex& own : wanted.own) {
    bytes.own.push_back({pages * own.page_bytes, count_of(sequences) * own.sequence_bytes});
  }
  return bytes;
}

std::uint64_t IndexLayout::index_bytes() const {
  std::uint64_t total = 0;
  for (std::size_t layer = 0; layer < layers.size(); ++layer) total += layer_bytes(layer).sum();
  return total;
}

std::uint64_t IndexLayout::tile_bytes() const {
  std::uint64_t total = 0;
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    const LayerIndexBytes bytes = layer_bytes(layer);
    total += bytes.codes + bytes.scales + bytes.bounds + bytes.values;
    for (const LayerIndexBytes::Own& own : bytes.own) total += own.pages;
  }
  return total / static_cast<std::uint64_t>(tiles);
}

std::uint64_t IndexLayout::parked_bytes() const {
  if (parked_tiles() == 0) return 0;
  return static_cast<std::uint64_t>(parked_tiles()) * tile_bytes();
}

bool IndexLayout::sums_values() const {
  return std::any_of(layers.begin(), layers.end(), [](const LayerIndex& l) { return l.sums; });
}

bool IndexLayout::keeps_values() const {
  return std::any_of(layers.begin(), layers.end(),
                     [](const LayerIndex& l) { return l.value_bits > 0; });
}

bool IndexLayout::halves_values() const {
  return std::any_of(layers.begin(), layers.end(),
                     [](const LayerIndex& l) { return l.half_values; });
}

std::size_t IndexLayout::value_page_bytes(std::size_t layer) const {
  const LayerIndex& kept = layers[layer];
  return ValueTiles::page_bytes(kept.value_bits,
                                ValueTiles::channels(shape.head_dim, kept.half_values));
}

SelectionBytes IndexLayout::selection_bytes() const {
  SelectionBytes bytes;
  if (!selects()) return bytes;
  const std::size_t queries = count_of(wave, shape.query_heads);
  const std::size_t logit = size_of(logits.dtype);
  bytes.logits = queries * count_of(logit_stride()) * logit;
  if (digested) {
    bytes.digest = logits.digest_bytes(wave * shape.query_heads, logit_stride());
    if (keeps_values()) {
      bytes.page_weights = logits.page_weights_bytes(wave * shape.kv_heads, logit_stride());
    }
  }
  bytes.candidate_logits = queries * count_of(candidate_stride()) * logit;
  bytes.lse = queries * sizeof(float);
  bytes.positions = count_of(slots, shape.kv_heads, selected) * sizeof(std::int32_t);
  bytes.candidates = count_of(wave, shape.kv_heads, candidates) * sizeof(std::int32_t);
  if (sums_values()) {
    bytes.token_sums = count_of(batch, shape.kv_heads, shape.head_dim) * sizeof(float);
  }
  bytes.arena = count_of(shape.kv_heads, arena_rows) * shape.row_bytes();
  bytes.report = report_bytes();
  bytes.bad = bad_bytes();
  bytes.early = early_bytes().sum();
  return bytes;
}

EarlyBytes IndexLayout::early_bytes() const {
  EarlyBytes bytes;
  if (!early) return bytes;
  const std::size_t queries = count_of(wave, shape.query_heads);
  bytes.lse = count_of(2, batch, shape.query_heads) * sizeof(float);
  bytes.weighed = count_of(wave, shape.kv_heads) * sizeof(std::int32_t);
  bytes.alpha = queries * sizeof(float);
  if (!whole_layer_early) return bytes;
  bytes.logits = queries * count_of(logit_stride()) * size_of(logits.dtype);
  if (digested) bytes.digest = logits.digest_bytes(wave * shape.query_heads, logit_stride());
  bytes.candidate_logits = queries * count_of(candidate_stride()) * size_of(logits.dtype);
  bytes.candidates = count_of(wave, shape.kv_heads, candidates) * sizeof(std::int32_t);
  return bytes;
}

std::size_t IndexLayout::report_bytes() const {
  const std::size_t heads = count_of(shape.kv_heads) * sizeof(HeadSelection);
  const std::size_t queries = count_of(shape.query_heads) * sizeof(float);
  // Pages read, rows on the device, rows evicted and, with values, value pages read.
  const std::size_t count = count_of(shape.kv_heads) * sizeof(std::int32_t);
  const std::size_t counts = keeps_values() ? 4 : 3;
  // Layers that choose early report twice: of choosing and of weighing.
  const std::size_t selections = early ? 3 : 2;
  return count_of(shape.layers, batch) * (selections * heads + 2 * queries + counts * count);
}

std::size_t IndexLayout::bad_bytes() const {
  const std::size_t kinds = keeps_values() ? 2 : 1;
  return kinds * count_of(shape.layers, sequences, shape.kv_heads) * sizeof(std::int32_t);
}

std::uint64_t IndexLayout::host_bytes() const {
  const SelectionBytes bytes = selection_bytes();
  return bytes.report + bytes.bad + (reports_positions ? bytes.positions : 0);
}

std::size_t IndexLayout::page_table_bytes() const {
  // One table for every set of layers, see KvPlan::sets().
  const std::int64_t sets = evicts ? shape.layers : dense_layers().empty() ? 1 : 2;
  return count_of(sets, sequences, pages()) * sizeof(PageSlots);
}

std::size_t IndexLayout::tile_table_bytes() const {
  return count_of(evicts ? shape.layers : 1, sequences, sequence_tiles()) * sizeof(std::int32_t);
}

std::size_t IndexLayout::token_bytes() const {
  // As their sequences have them, and as each layer does.
  return count_of(evicts ? 1 + shape.layers : 1, batch) * sizeof(BatchToken);
}

std::uint64_t IndexLayout::table_bytes() const {
  return page_table_bytes() + tile_table_bytes() + token_bytes();
}

namespace {

void include_own(LayerIndex& index, const Method& method, const IndexNeeds& needs) {
  const auto is_same = [&](const OwnIndex& own) { return own.method == method; };
  if (!needs.own() || std::any_of(index.own.begin(), index.own.end(), is_same)) return;
  // Up to this size, the bytes of any number of pages are counted without overflow.
  constexpr std::size_t kMost = std::size_t{1} << 30;
  if (needs.page_bytes > kMost || needs.sequence_bytes > kMost) {
    throw Error(ErrorCode::usage, "the scorer " + in_quotes(method.name) + " asks for " +
                                      std::to_string(needs.page_bytes) + " bytes a page and " +
                                      std::to_string(needs.sequence_bytes) +
                                      " a sequence; it may have 1 GiB of each");
  }
  const auto rounded = [](std::size_t bytes) {
    return (bytes + ScorerMemory::kAlignment - 1) / ScorerMemory::kAlignment *
           ScorerMemory::kAlignment;
  };
  index.own.push_back({method, rounded(needs.page_bytes), rounded(needs.sequence_bytes)});
}

// A layer is kept in one number of bits, the same for all policies.
void keep_in(int& bits, int wanted, const std::string& what) {
  if (bits != 0 && bits != wanted) {
    throw Error(ErrorCode::usage, "policy: one session cannot hold " + what + " at both " +
                                      std::to_string(std::min(bits, wanted)) + " and " +
                                      std::to_string(std::max(bits, wanted)) + " bits");
  }
  bits = wanted;
}

// Keys are rotated before they are coded, unless the policy reads single channels of them.
void keep_rotated(LayerIndex& index, bool rotated) {
  if (index.bits != 0 && index.rotated != rotated) {
    throw Error(ErrorCode::usage,
                "policy: select=sparq reads the channels of keys as they are, all others read "
                "rotated keys; one session cannot hold both");
  }
  index.rotated = rotated;
}

void keep_values(LayerIndex& index, const ValueBits& values) {
  if (index.value_bits != 0 && index.half_values != values.half) {
    throw Error(ErrorCode::usage,
                "policy: one session cannot hold values in both all and half of their components");
  }
  keep_in(index.value_bits, values.bits, "values");
  index.half_values = values.half;
}

// Adds a selecting layer's needs, by the policy in force in that layer.
void include_layer(IndexLayout& layout, LayerIndex& index, int layer, const Policy& policy,
                   const Scorers& scorers) {
  const IndexNeeds needs = needs_of(policy, layout, scorers);
  layout.selected = std::max(layout.selected, most_selected(policy, layout.context, scorers));
  if (policy.candidates.limited()) {
    layout.candidates = std::max(layout.candidates, candidates_of(policy).of(layout.context));
  }
  const bool by_values = policy.compensates(layer, Compensation::values);
  if (needs.tiles) {
    keep_rotated(index, !scorers.at(policy.select).reads_channels());
    keep_in(index.bits, policy.bits, "the index");
  }
  if (by_values) keep_values(index, policy.values);
  index.bounds = index.bounds || needs.bounds;
  index.sums = index.sums || by_values || policy.compensates(layer, Compensation::mean_value);
  include_own(index, policy.select, needs);
}

// Adds one policy's needs to a layout.
void include(IndexLayout& layout, const Policy& policy, const Scorers& scorers) {
  layout.zipvl = layout.zipvl || policy.prefill.tau > 0.0;
  layout.evicts = layout.evicts || policy.prefill.evict;
  layout.lists_pages = layout.lists_pages || policy.prefill.pages > 0.0;
  for (int layer = 0; layer < layout.shape.layers; ++layer) {
    (policy.is_dense(layer) ? layout.attending_all
                            : layout.selecting)[static_cast<std::size_t>(layer)] = true;
  }
  if (scorers.at(policy.select).info().kind == ScorerInfo::Kind::dense) return;
  const int layers = layout.shape.layers;
  const bool whole = policy.any_early(layers, Early::layer);
  layout.early = layout.early || whole || policy.any_early(layers, Early::half);
  layout.whole_layer_early = layout.whole_layer_early || whole;
  layout.slots = std::max(layout.slots, policy.anchors.empty() ? layout.wave : layout.batch);
  for (int layer = 0; layer < layout.shape.layers; ++layer) {
    if (!policy.selects(layer)) continue;
    include_layer(layout, layout.layers[static_cast<std::size_t>(layer)], layer, policy.at(layer),
                  scorers);
  }
}

// Returns true if some layer attends to value tiles.
bool reads_values(const Policy& policy, int layers) {
  for (int layer = 0; layer < layers; ++layer) {
    if (policy.compensates(layer, Compensation::values)) return true;
  }
  return false;
}

// Tokens that one policy evicts are gone for the others, too, so the restrictions of an evicting
// policy (validate()) hold for all of them.
void require_compatible(std::span<const Policy> policies, bool reports_positions) {
  const auto any = [&](const auto& does) {
    return std::any_of(policies.begin(), policies.end(), does);
  };
  if (!any([](const Policy& p) { return p.prefill.evict; })) return;
  const auto refuse = [&](const auto& does, const std::string& what) {
    if (!any(does)) return;
    throw Error(ErrorCode::usage,
                "policy: one session cannot have both a prefill that evicts and " + what);
  };
  refuse([](const Policy& p) { return !p.anchors.empty(); }, "anchors");
  refuse([](const Policy& p) { return p.correct > 0; }, "corrections (`correct`)");
  refuse([&](const Policy&) { return reports_positions; },
         "reported positions (`reports_positions`), because layers number the rows that are left");
}

void require_runs(const Scorer& scorer, Processor processor) {
  if (scorer.runs_on(processor)) return;
  throw Error(ErrorCode::unsupported, "select=" + scorer.info().name + " does not run on " +
                                          std::string(to_string(processor)));
}

// Refuses policies beyond the limits of the backend's select() and attend_tiles().
void require_within(const LogitFormat& most, const KvRequest& request, const Policy& policy) {
  const ScorerInfo& scorer = request.scorers->at(policy.select).info();
  if (scorer.kind == ScorerInfo::Kind::dense && policy.prefill.tau == 0.0) return;
  const auto require = [&](std::int64_t is, std::int64_t limit, const std::string& what) {
    if (is <= limit) return;
    throw Error(ErrorCode::unsupported, "on this device the policy '" + to_string(policy) +
                                            "' takes up to " + std::to_string(limit) + what +
                                            ", not " + std::to_string(is));
  };
  require(request.shape.group(), most.most_group, " query heads per KV head");
  const bool reads_tiles = reads_values(policy, request.shape.layers);
  if (scorer.estimates()) {
    require(request.context, reads_tiles ? most.most_tile_tokens : most.most_tokens,
            " tokens of context");
  }
}

bool digests_some_layer(const KvRequest& request, const Policy& policy) {
  if (request.context >= request.on.logits.digested_from) return true;
  for (int layer = 0; layer < request.shape.layers; ++layer) {
    if (weighs_pages(request.on.logits, policy, layer, request.context)) return true;
  }
  return false;
}

}  // namespace

bool weighs_pages(const LogitFormat& format, const Policy& policy, int layer, std::int64_t tokens) {
  return format.weighs(tokens) && policy.compensates(layer, Compensation::values) &&
         !policy.candidates.limited();
}

namespace {

void require_fits_windows(const Policy& policy, std::span<const std::int64_t> windows) {
  const auto is_windowed = [&](int layer) {
    return !windows.empty() && windows[static_cast<std::size_t>(layer)] > 0;
  };
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorCode::unsupported, "the policy '" + to_string(policy) + "' " + why);
  };
  const bool any =
      std::any_of(windows.begin(), windows.end(), [](std::int64_t w) { return w > 0; });
  if (any && policy.prefill.tau > 0.0) {
    refuse(
        "chooses among all tokens of a prompt, and layers of this model see a window of them; "
        "take another `prefill`");
  }
  for (const int layer : policy.anchors) {
    if (!is_windowed(layer)) continue;
    refuse("has other layers follow layer " + std::to_string(layer) +
           ", which sees only a window of " +
           std::to_string(windows[static_cast<std::size_t>(layer)]) +
           " tokens; take other `anchors`");
  }
}

// Leaves tiles of `indexed_tokens` tokens on the device, and two for those that a step copies
// because forks share them. Without a device tier the index is in host memory anyway.
void park_tiles(IndexLayout& layout, const KvRequest& request) {
  if (request.indexed_tokens == 0) return;
  if (layout.evicts) {
    throw Error(ErrorCode::usage,
                "`indexed_tokens` takes policies whose prefill evicts nothing; leave it at 0, so "
                "that the index of all tokens stays on the device");
  }
  const bool in_place = !request.disk && !request.device_cap && request.on.attends_host_rows;
  if (in_place || layout.all_tiles == 0 || layout.tile_bytes() == 0) return;
  constexpr std::int64_t kTileTokens = std::int64_t{kTilePages} * kPageTokens;
  const std::int64_t wanted = (request.indexed_tokens + kTileTokens - 1) / kTileTokens + 2;
  layout.tiles = std::min(layout.all_tiles, wanted);
}

}  // namespace

Policy within_windows(Policy policy, std::span<const std::int64_t> windows) {
  std::vector<int>& dense = policy.dense_layers;
  for (int layer = 0; layer < static_cast<int>(windows.size()); ++layer) {
    const auto at = std::lower_bound(dense.begin(), dense.end(), layer);
    const bool is_there = at != dense.end() && *at == layer;
    if (windows[static_cast<std::size_t>(layer)] > 0 && !is_there) dense.insert(at, layer);
  }
  return policy;
}

IndexLayout plan_index(const KvRequest& request) {
  for (const Policy& policy : request.policies) {
    validate(policy, request.shape, *request.scorers);
    require_runs(request.scorers->at(policy.select), request.on.processor);
    require_within(request.on.logits, request, policy);
    require_fits_windows(policy, request.windows);
  }
  require_compatible(request.policies, request.reports_positions);
  IndexLayout layout;
  layout.shape = request.shape;
  layout.context = request.context;
  layout.sequences = request.sequences;
  layout.batch = std::min(std::max(request.decode_batch, request.sequences), kMostBatch);
  layout.logits = request.on.logits;
  layout.digested =
      std::any_of(request.policies.begin(), request.policies.end(), [&](const Policy& policy) {
        return request.scorers->at(policy.select).digests() && digests_some_layer(request, policy);
      });
  const std::int64_t tokens =
      request.tokens > 0 ? request.tokens : request.sequences * request.context;
  layout.all_tiles = std::min(request.sequences * layout.sequence_tiles(),
                              (tokens / kPageTokens + 1) / kTilePages + 2 * request.sequences);
  layout.tiles = layout.all_tiles;
  layout.layers.resize(static_cast<std::size_t>(request.shape.layers));
  layout.selecting.resize(static_cast<std::size_t>(request.shape.layers));
  layout.attending_all.resize(static_cast<std::size_t>(request.shape.layers));
  layout.windowed.resize(static_cast<std::size_t>(request.shape.layers));
  for (std::size_t layer = 0; layer < request.windows.size(); ++layer) {
    layout.windowed[layer] = request.windows[layer] > 0;
  }
  const std::int64_t token_bytes = layout.logit_stride() * request.shape.query_heads *
                                   static_cast<std::int64_t>(size_of(request.on.logits.dtype));
  layout.wave = std::clamp<std::int64_t>(kWaveBytes / token_bytes, 1, layout.batch);
  for (const Policy& policy : request.policies) {
    include(layout, within_windows(policy, request.windows), *request.scorers);
  }
  if (layout.early) layout.slots = std::max(layout.slots, 2 * layout.batch);
  if (layout.selects() && request.reports_positions) {
    layout.reports_positions = true;
    layout.slots = layout.shape.layers * layout.batch;
  }
  park_tiles(layout, request);
  layout.arena_rows = layout.selects() ? std::min(kArenaRows, layout.selected) : 0;
  if (layout.halves_values() && !request.has_value_basis) {
    throw Error(ErrorCode::unsupported,
                "policy: components=half takes a basis from the weights of the model's value "
                "projection; give the cache its value_basis, or take "
                "compensate=values(bits=1,pages=0.95), which has about the same bytes");
  }
  return layout;
}

}  // namespace sluice
