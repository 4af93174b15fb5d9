#include "offload/attention/key_index.h"

#include <algorithm>

#include "lib/check.h"
#include "offload/attention/counted_reads.h"

namespace sluice {

KeyIndex::KeyIndex(Queue& queue, const IndexLayout& layout, const Scorers& scorers, Tier tier,
                   const ValueBasis& basis)
    : queue_(&queue),
      layout_(layout),
      scorers_(scorers),
      basis_(basis),
      layers_(layout.layers.size()) {
  check(basis.data != nullptr || !layout.halves_values(), "values in components without a basis");
  Backend& backend = queue.backend();
  bad_ = backend.allocate(tier, layout.selection_bytes().bad);
  seen_bad_ = backend.allocate(Tier::host, bad_.bytes());
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const LayerIndex& wanted = layout.layers[i];
    const LayerIndexBytes bytes = layout.layer_bytes(i);
    Layer& layer = layers_[i];
    layer.codes = backend.allocate(tier, bytes.codes);
    layer.scales = backend.allocate(tier, bytes.scales);
    layer.bounds = backend.allocate(tier, bytes.bounds);
    layer.values = backend.allocate(tier, bytes.values);
    layer.sums = backend.allocate(tier, bytes.sums);
    allocate_own(wanted, bytes, tier, layer);
    auto* const bad = reinterpret_cast<std::int32_t*>(bad_.data());
    if (wanted.bits > 0 || wanted.bounds) layer.bad = bad + i * flags();
    if (wanted.value_bits > 0) layer.bad_values = bad + (layers_.size() + i) * flags();
  }
}

std::size_t KeyIndex::flags() const {
  return static_cast<std::size_t>(layout_.sequences) *
         static_cast<std::size_t>(layout_.shape.kv_heads);
}

void KeyIndex::allocate_own(const LayerIndex& wanted, const LayerIndexBytes& bytes, Tier tier,
                            Layer& layer) {
  for (std::size_t i = 0; i < wanted.own.size(); ++i) {
    const OwnIndex& index = wanted.own[i];
    Own& own = layer.own.emplace_back();
    own.use = {layout_.shape, index.method.parameters, tiles(wanted).bits, layout_.context};
    own.scorer = &scorers_.at(index.method);
    own.index = index;
    own.pages = queue_->backend().allocate(tier, bytes.own[i].pages);
    own.sequences = queue_->backend().allocate(tier, bytes.own[i].sequences);
  }
}

ScorerCall KeyIndex::call(const Own& own, int layer) const {
  ScorerCall call;
  call.use = own.use;
  call.layer = layer;
  call.memory.pages = own.pages.data();
  call.memory.page_bytes = own.index.page_bytes;
  call.memory.slots = layout_.tiles;
  call.memory.sequences = own.sequences.data();
  call.memory.sequence_bytes = own.index.sequence_bytes;
  call.memory.table = table(layer);
  call.memory.table_stride = layout_.sequence_tiles();
  call.processor = queue_->backend().info().processor;
  call.stream = queue_->native_stream();
  return call;
}

ScorerCall KeyIndex::call(const Policy& policy, int layer) const {
  for (const Own& own : layers_[static_cast<std::size_t>(layer)].own) {
    if (own.index.method == policy.select) return call(own, layer);
  }
  Own none;
  none.use = use_of(policy, layout_.shape, layout_.context);
  return call(none, layer);
}

void KeyIndex::build_own(int layer, const WholePages& pages) {
  for (const Own& own : layers_[static_cast<std::size_t>(layer)].own) {
    own.scorer->build({call(own, layer), pages});
  }
}

void KeyIndex::truncate(int layer, std::int32_t sequence, std::int64_t from, std::int64_t length,
                        const PagedRows& rows) {
  for (const Own& own : layers_[static_cast<std::size_t>(layer)].own) {
    own.scorer->truncate({call(own, layer), sequence, from, length, rows});
  }
}

ScorerCount KeyIndex::observe(int layer, std::int32_t sequence, std::int64_t first,
                              std::int64_t count, const Queries& queries, const PagedRows& rows) {
  ScorerCount read;
  const BatchToken after{sequence, static_cast<std::int32_t>(first + count)};
  for (const Own& own : layers_[static_cast<std::size_t>(layer)].own) {
    if (!own.scorer->observes()) continue;
    RunScorer run;
    static_cast<ScorerCall&>(run) = call(own, layer);
    run.batch = {&after, 1, layout_.context + 1};
    run.rows = rows;
    const CountedReads reads(run, rows.device != nullptr ? Tier::device : Tier::host);
    const bool on_host = run.processor == Processor::host;
    own.scorer->observe(
        {run, sequence, first, count, queries.q, queries.stride, on_host ? &reads : nullptr});
    for (int head = 0; head < layout_.shape.kv_heads; ++head) read += reads.count(0, head);
  }
  return read;
}

KeyTiles KeyIndex::tiles(const LayerIndex& layer) const {
  KeyTiles tiles;
  if (layer.bits > 0) tiles.bits = layer.bits;
  tiles.rotated = layer.rotated;
  tiles.slots = layout_.tiles;
  return tiles;
}

std::size_t KeyIndex::sum_bytes() const {
  return static_cast<std::size_t>(layout_.shape.kv_heads) *
         static_cast<std::size_t>(layout_.shape.head_dim) * sizeof(float);
}

KeyIndexView KeyIndex::view(int layer) const {
  const Layer& at = layers_[static_cast<std::size_t>(layer)];
  KeyIndexView view;
  view.tiles = tiles(layout_.layers[static_cast<std::size_t>(layer)]);
  view.tiles.codes = at.codes.data();
  view.tiles.scales = reinterpret_cast<std::uint16_t*>(at.scales.data());
  view.bounds.bounds = reinterpret_cast<std::uint16_t*>(at.bounds.data());
  view.bounds.slots = layout_.tiles;
  view.slots = table(layer);
  view.table_stride = layout_.sequence_tiles();
  return view;
}

ValueTilesView KeyIndex::values(int layer) const {
  const Layer& at = layers_[static_cast<std::size_t>(layer)];
  const LayerIndex& kept = layout_.layers[static_cast<std::size_t>(layer)];
  ValueTiles tiles = {kept.value_bits, at.values.data(), layout_.tiles};
  const KvShape& shape = layout_.shape;
  if (kept.half_values) {
    tiles.basis = basis_.data + layer * shape.kv_heads * ValueTiles::basis_floats(shape.head_dim);
  }
  return {tiles, table(layer), layout_.sequence_tiles()};
}

void KeyIndex::build(int layer, std::int32_t sequence, std::int64_t first_page, std::int64_t pages,
                     std::span<const RowSpan> rows) {
  const Layer& at = layers_[static_cast<std::size_t>(layer)];
  if (pages == 0) return;
  if (!at.own.empty()) build_own(layer, run_of(sequence, first_page, pages, rows));
  if (at.bad_values != nullptr) {
    queue_->run(BuildValuesParams{layout_.shape, values(layer), sequence, first_page, pages, rows,
                                  at.bad_values});
  }
  if (at.bad == nullptr) return;
  queue_->run(
      BuildIndexParams{layout_.shape, view(layer), sequence, first_page, pages, rows, at.bad});
}

void KeyIndex::build(int layer, const TokenBatch& batch, const PagedRows& rows) {
  const Layer& at = layers_[static_cast<std::size_t>(layer)];
  if (!at.own.empty()) build_own(layer, {.count = batch.count, .batch = batch, .paged = rows});
  if (at.bad_values != nullptr) {
    queue_->run(BuildValuesBatchParams{layout_.shape, values(layer), batch, rows, at.bad_values});
  }
  if (at.bad == nullptr) return;
  queue_->run(BuildBatchParams{layout_.shape, view(layer), batch, rows, at.bad});
}

void KeyIndex::add_values(int layer, std::int32_t sequence, std::span<const RowSpan> rows,
                          bool subtract) {
  float* const sums = value_sums(layer);
  if (sums == nullptr) return;
  const std::size_t offset = static_cast<std::size_t>(sequence) * sum_bytes() / sizeof(float);
  queue_->run(SumValuesParams{layout_.shape, rows, sums + offset, subtract});
}

template <typename Visit>
void KeyIndex::for_each_of_sequences(const Visit& visit) const {
  for (const Layer& layer : layers_) {
    if (layer.sums.data() != nullptr) visit(layer.sums.data(), sum_bytes());
    for (const Own& own : layer.own) {
      if (own.index.sequence_bytes > 0) visit(own.sequences.data(), own.index.sequence_bytes);
    }
  }
}

void KeyIndex::clear_values(std::int32_t sequence) {
  std::size_t most = 0;
  for_each_of_sequences([&](std::byte*, std::size_t bytes) { most = std::max(most, bytes); });
  const std::vector<std::byte> zeros(most);
  std::vector<CopyOp> ops;
  for_each_of_sequences([&](std::byte* all, std::size_t bytes) {
    ops.push_back({all + static_cast<std::size_t>(sequence) * bytes, zeros.data(), bytes});
  });
  if (!ops.empty()) queue_->copy(ops);
}

void KeyIndex::copy_values(std::int32_t from, std::int32_t to) {
  std::vector<CopyOp> ops;
  for_each_of_sequences([&](std::byte* all, std::size_t bytes) {
    ops.push_back({all + static_cast<std::size_t>(to) * bytes,
                   all + static_cast<std::size_t>(from) * bytes, bytes});
  });
  if (!ops.empty()) queue_->copy(ops);
}

bool KeyIndex::keep_sums(std::int32_t sequence) {
  if (layout_.kept_sums() == 0) return false;
  std::vector<CopyOp> ops;
  for (const Layer& layer : layers_) {
    if (layer.sums.data() == nullptr) continue;
    ops.push_back({sums_of(layer, layout_.sequences), sums_of(layer, sequence), sum_bytes()});
  }
  if (!ops.empty()) queue_->copy(ops);
  return true;
}

void KeyIndex::restore_sums(int layer, std::int32_t sequence) {
  const Layer& at = layers_[static_cast<std::size_t>(layer)];
  const CopyOp op = {sums_of(at, sequence), sums_of(at, layout_.sequences), sum_bytes()};
  queue_->copy({&op, 1});
}

const std::int32_t* KeyIndex::table(int layer) const {
  return layout_.evicts ? table_ + layer * layout_.sequences * layout_.sequence_tiles() : table_;
}

template <typename Visit>
void KeyIndex::for_each_of_tiles(int layer, const Visit& visit) const {
  const auto d = static_cast<std::size_t>(layout_.shape.head_dim);
  const Layer& at = layers_[static_cast<std::size_t>(layer)];
  const LayerIndex& kept = layout_.layers[static_cast<std::size_t>(layer)];
  const auto one = [&](const Buffer& buffer, std::size_t bytes) {
    if (buffer.data() != nullptr) visit(buffer.data(), bytes);
  };
  one(at.codes, tiles(kept).tile_bytes(layout_.shape.head_dim));
  one(at.scales, kTilePages * 2 * d * sizeof(std::uint16_t));
  one(at.bounds, kTilePages * PageBounds().page_bytes(layout_.shape.head_dim));
  one(at.values, kTilePages * layout_.value_page_bytes(static_cast<std::size_t>(layer)));
  for (const Own& own : at.own) one(own.pages, kTilePages * own.index.page_bytes);
}

void KeyIndex::copy_tile(int layer, std::int32_t from, std::int32_t to) {
  const auto slots = static_cast<std::size_t>(layout_.tiles);
  std::vector<CopyOp> ops;
  for_each_of_tiles(layer, [&](std::byte* all, std::size_t bytes) {
    for (int head = 0; head < layout_.shape.kv_heads; ++head) {
      std::byte* const own = all + static_cast<std::size_t>(head) * slots * bytes;
      ops.push_back({own + static_cast<std::size_t>(to) * bytes,
                     own + static_cast<std::size_t>(from) * bytes, bytes});
    }
  });
  if (!ops.empty()) queue_->copy(ops);
}

std::string KeyIndex::kind() const {
  std::string text = "index 1, " + std::string(to_string(queue_->backend().info().processor)) +
                     ", " + std::to_string(layout_.shape.kv_heads) + " x " +
                     std::to_string(layout_.shape.head_dim) + " of " +
                     to_string(layout_.shape.rows);
  for (const LayerIndex& layer : layout_.layers) {
    if (!layer.own.empty()) return {};
    text += "; " + std::to_string(layer.bits) + (layer.rotated ? " rotated" : "") +
            (layer.bounds ? " bounds" : "") + (layer.sums ? " sums" : "") + " " +
            std::to_string(layer.value_bits) + (layer.half_values ? " half" : "");
  }
  if (layout_.halves_values()) text += "; basis " + std::to_string(basis_.hash);
  return text;
}

std::size_t KeyIndex::tile_bytes(int layer) const {
  std::size_t sum = 0;
  for_each_of_tiles(layer, [&](std::byte*, std::size_t bytes) { sum += bytes; });
  return sum * static_cast<std::size_t>(layout_.shape.kv_heads);
}

std::size_t KeyIndex::layer_sum_bytes(int layer) const {
  return value_sums(layer) == nullptr ? 0 : sum_bytes();
}

std::byte* KeyIndex::add_saves(int layer, std::int32_t slot, std::byte* saved,
                               std::vector<CopyOp>& ops) const {
  for_each_of_tiles(layer, [&](const std::byte* all, std::size_t bytes) {
    for (int head = 0; head < layout_.shape.kv_heads; ++head) {
      ops.push_back(
          {saved, all + static_cast<std::size_t>(head * layout_.tiles + slot) * bytes, bytes});
      saved += bytes;
    }
  });
  return saved;
}

const std::byte* KeyIndex::add_loads(int layer, std::int32_t slot, const std::byte* saved,
                                     std::vector<CopyOp>& ops) const {
  for_each_of_tiles(layer, [&](std::byte* all, std::size_t bytes) {
    for (int head = 0; head < layout_.shape.kv_heads; ++head) {
      ops.push_back(
          {all + static_cast<std::size_t>(head * layout_.tiles + slot) * bytes, saved, bytes});
      saved += bytes;
    }
  });
  return saved;
}

void KeyIndex::save_tile(int layer, std::int32_t slot, std::byte* out) {
  std::vector<CopyOp> ops;
  add_saves(layer, slot, out, ops);
  if (!ops.empty()) queue_->copy(ops);
}

void KeyIndex::load_tile(int layer, std::int32_t slot, const std::byte* saved) {
  std::vector<CopyOp> ops;
  add_loads(layer, slot, saved, ops);
  if (!ops.empty()) queue_->copy(ops);
}

void KeyIndex::save_tile(std::int32_t slot, std::byte* out) {
  std::vector<CopyOp> ops;
  for (int layer = 0; layer < layers(); ++layer) out = add_saves(layer, slot, out, ops);
  if (!ops.empty()) queue_->copy(ops);
}

void KeyIndex::load_tile(std::int32_t slot, const std::byte* saved) {
  std::vector<CopyOp> ops;
  for (int layer = 0; layer < layers(); ++layer) saved = add_loads(layer, slot, saved, ops);
  if (!ops.empty()) queue_->copy(ops);
}

bool KeyIndex::has_own_pages() const {
  return std::any_of(layers_.begin(), layers_.end(), [](const Layer& layer) {
    return std::any_of(layer.own.begin(), layer.own.end(),
                       [](const Own& own) { return own.index.page_bytes > 0; });
  });
}

void KeyIndex::save_sums(int layer, std::int32_t sequence, std::byte* out) {
  if (layer_sum_bytes(layer) == 0) return;
  const CopyOp op = {out, sums_of(layers_[static_cast<std::size_t>(layer)], sequence), sum_bytes()};
  queue_->copy({&op, 1});
}

void KeyIndex::load_sums(int layer, std::int32_t sequence, const std::byte* saved) {
  if (layer_sum_bytes(layer) == 0) return;
  const CopyOp op = {sums_of(layers_[static_cast<std::size_t>(layer)], sequence), saved,
                     sum_bytes()};
  queue_->copy({&op, 1});
}

float* KeyIndex::value_sums(int layer) const {
  const Buffer& sums = layers_[static_cast<std::size_t>(layer)].sums;
  return sums.data() == nullptr ? nullptr : sums.floats();
}

void KeyIndex::report_bad() {
  if (bad_.bytes() == 0) return;
  const CopyOp op = {seen_bad_.data(), bad_.data(), bad_.bytes()};
  queue_->copy({&op, 1});
}

KeyIndex::BadPage KeyIndex::bad_page(std::int32_t sequence) const {
  const auto heads = static_cast<std::size_t>(layout_.shape.kv_heads);
  const auto* const seen = reinterpret_cast<const std::int32_t*>(seen_bad_.data());
  const std::size_t entries = seen_bad_.bytes() / sizeof(std::int32_t) / flags();
  for (std::size_t entry = 0; entry < entries; ++entry) {
    const auto* const bad = seen + entry * flags() + static_cast<std::size_t>(sequence) * heads;
    for (int head = 0; head < layout_.shape.kv_heads; ++head) {
      if (bad[head] == 0) continue;
      return {static_cast<int>(entry % layers_.size()), head, entry >= layers_.size()};
    }
  }
  return {};
}

void KeyIndex::clear_bad(std::int32_t sequence) {
  const std::size_t bytes = static_cast<std::size_t>(layout_.shape.kv_heads) * sizeof(std::int32_t);
  const std::vector<std::byte> zeros(bytes);
  std::vector<CopyOp> ops;
  const std::size_t of_layer = flags() * sizeof(std::int32_t);
  for (std::size_t first = 0; first < bad_.bytes(); first += of_layer) {
    ops.push_back(
        {bad_.data() + first + static_cast<std::size_t>(sequence) * bytes, zeros.data(), bytes});
  }
  if (!ops.empty()) queue_->copy(ops);
}

}  // namespace sluice
