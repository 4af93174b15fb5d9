#include "offload/key_index.h"

namespace sluice {

KeyIndex::KeyIndex(Backend& backend, const IndexLayout& layout, Tier tier)
    : backend_(&backend), layout_(layout), layers_(layout.layers.size()) {
  const auto heads = static_cast<std::size_t>(layout.shape.kv_heads);
  const auto channels = static_cast<std::size_t>(layout.shape.head_dim);
  const std::size_t pages = static_cast<std::size_t>(layout.tiles * kTilePages) * heads;
  const std::size_t flags = static_cast<std::size_t>(layout.sequences) * heads;
  bad_ = backend.allocate(tier, layers_.size() * flags * sizeof(std::int32_t));
  seen_bad_ = backend.allocate(Tier::host, bad_.bytes());
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const LayerIndex& wanted = layout.layers[i];
    Layer& layer = layers_[i];
    if (wanted.tiles) {
      layer.codes =
          backend.allocate(tier, tiles().codes_bytes(layout.shape.kv_heads, layout.shape.head_dim));
      layer.scales = backend.allocate(tier, pages * channels * 2 * sizeof(std::uint16_t));
    }
    if (wanted.bounds) {
      const PageBounds bounds;
      layer.bounds = backend.allocate(tier, pages * bounds.page_bytes(layout.shape.head_dim));
    }
    if (wanted.sums) {
      layer.sums = backend.allocate(
          tier, static_cast<std::size_t>(layout.sequences) * heads * channels * sizeof(float));
    }
    if (wanted.tiles || wanted.bounds) {
      layer.bad = reinterpret_cast<std::int32_t*>(bad_.data()) + i * flags;
    }
  }
}

KeyTiles KeyIndex::tiles() const {
  KeyTiles tiles;
  tiles.bits = layout_.bits;
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
  view.tiles = tiles();
  view.tiles.codes = at.codes.data();
  view.tiles.scales = reinterpret_cast<std::uint16_t*>(at.scales.data());
  view.bounds.bounds = reinterpret_cast<std::uint16_t*>(at.bounds.data());
  view.bounds.slots = layout_.tiles;
  view.slots = table_;
  view.table_stride = layout_.sequence_tiles();
  return view;
}

void KeyIndex::build(int layer, std::int32_t sequence, std::int64_t first_page, std::int64_t pages,
                     std::span<const RowSpan> rows) {
  const Layer& at = layers_[static_cast<std::size_t>(layer)];
  if (pages == 0 || at.bad == nullptr) return;
  backend_->build_index({layout_.shape, view(layer), sequence, first_page, pages, rows, at.bad});
}

void KeyIndex::build(int layer, const TokenBatch& batch, const PagedRows& rows) {
  const Layer& at = layers_[static_cast<std::size_t>(layer)];
  if (at.bad == nullptr) return;
  backend_->build_batch({layout_.shape, view(layer), batch, rows, at.bad});
}

void KeyIndex::add_values(int layer, std::int32_t sequence, std::span<const RowSpan> rows,
                          bool subtract) {
  float* const sums = value_sums(layer);
  if (sums == nullptr) return;
  const std::size_t offset = static_cast<std::size_t>(sequence) * sum_bytes() / sizeof(float);
  backend_->sum_values({layout_.shape, rows, sums + offset, subtract});
}

void KeyIndex::clear_values(std::int32_t sequence) {
  const std::vector<std::byte> zeros(sum_bytes());
  std::vector<CopyOp> ops;
  for (const Layer& layer : layers_) {
    if (layer.sums.data() == nullptr) continue;
    ops.push_back({layer.sums.data() + static_cast<std::size_t>(sequence) * sum_bytes(),
                   zeros.data(), sum_bytes()});
  }
  if (!ops.empty()) backend_->copy(ops, Stream::compute);
}

void KeyIndex::copy_values(std::int32_t from, std::int32_t to) {
  std::vector<CopyOp> ops;
  for (const Layer& layer : layers_) {
    if (layer.sums.data() == nullptr) continue;
    std::byte* const all = layer.sums.data();
    ops.push_back({all + static_cast<std::size_t>(to) * sum_bytes(),
                   all + static_cast<std::size_t>(from) * sum_bytes(), sum_bytes()});
  }
  if (!ops.empty()) backend_->copy(ops, Stream::compute);
}

void KeyIndex::copy_tile(std::int32_t from, std::int32_t to) {
  const auto d = static_cast<std::size_t>(layout_.shape.head_dim);
  const auto slots = static_cast<std::size_t>(layout_.tiles);
  const std::size_t scale_bytes = kTilePages * 2 * d * sizeof(std::uint16_t);
  const std::size_t bound_bytes = kTilePages * PageBounds().page_bytes(layout_.shape.head_dim);
  std::vector<CopyOp> ops;
  const auto copy = [&](const Buffer& buffer, std::size_t bytes) {
    if (buffer.data() == nullptr) return;
    for (int head = 0; head < layout_.shape.kv_heads; ++head) {
      std::byte* const own = buffer.data() + static_cast<std::size_t>(head) * slots * bytes;
      ops.push_back({own + static_cast<std::size_t>(to) * bytes,
                     own + static_cast<std::size_t>(from) * bytes, bytes});
    }
  };
  for (const Layer& layer : layers_) {
    copy(layer.codes, tiles().tile_bytes(layout_.shape.head_dim));
    copy(layer.scales, scale_bytes);
    copy(layer.bounds, bound_bytes);
  }
  if (!ops.empty()) backend_->copy(ops, Stream::compute);
}

float* KeyIndex::value_sums(int layer) const {
  const Buffer& sums = layers_[static_cast<std::size_t>(layer)].sums;
  return sums.data() == nullptr ? nullptr : sums.floats();
}

void KeyIndex::report_bad() {
  if (bad_.bytes() == 0) return;
  const CopyOp op = {seen_bad_.data(), bad_.data(), bad_.bytes()};
  backend_->copy({&op, 1}, Stream::compute);
}

KeyIndex::BadKey KeyIndex::bad_key(std::int32_t sequence) const {
  const auto heads = static_cast<std::size_t>(layout_.shape.kv_heads);
  const auto sequences = static_cast<std::size_t>(layout_.sequences);
  const auto* const seen = reinterpret_cast<const std::int32_t*>(seen_bad_.data());
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    const auto* const bad = seen + (layer * sequences + static_cast<std::size_t>(sequence)) * heads;
    for (int head = 0; head < layout_.shape.kv_heads; ++head) {
      if (bad[head] != 0) return {static_cast<int>(layer), head};
    }
  }
  return {};
}

void KeyIndex::clear_bad(std::int32_t sequence) {
  const std::size_t bytes = static_cast<std::size_t>(layout_.shape.kv_heads) * sizeof(std::int32_t);
  const std::vector<std::byte> zeros(bytes);
  std::vector<CopyOp> ops;
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    const std::size_t at =
        layer * static_cast<std::size_t>(layout_.sequences) + static_cast<std::size_t>(sequence);
    ops.push_back({bad_.data() + at * bytes, zeros.data(), bytes});
  }
  if (!ops.empty()) backend_->copy(ops, Stream::compute);
}

}  // namespace sluice
