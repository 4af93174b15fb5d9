#include "offload/key_index.h"

#include <string>

#include "sluice/errors.h"

namespace sluice {

KeyIndex::KeyIndex(Backend& backend, const IndexLayout& layout, Tier tier)
    : backend_(&backend), layout_(layout), layers_(layout.layers.size()) {
  const auto heads = static_cast<std::size_t>(layout.shape.kv_heads);
  const auto channels = static_cast<std::size_t>(layout.shape.head_dim);
  const std::size_t pages = static_cast<std::size_t>(layout.pages()) * heads;
  KeyTiles tiles;
  tiles.bits = layout.bits;
  tiles.capacity = layout.pages();
  bad_ = backend.allocate(tier, layers_.size() * heads * sizeof(std::int32_t));
  seen_bad_ = backend.allocate(Tier::host, bad_.bytes());
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const LayerIndex& wanted = layout.layers[i];
    Layer& layer = layers_[i];
    if (wanted.tiles) {
      layer.codes =
          backend.allocate(tier, tiles.codes_bytes(layout.shape.kv_heads, layout.shape.head_dim));
      layer.scales = backend.allocate(tier, pages * channels * 2 * sizeof(std::uint16_t));
    }
    if (wanted.bounds) {
      const PageBounds bounds;
      layer.bounds = backend.allocate(tier, pages * bounds.page_bytes(layout.shape.head_dim));
    }
    if (wanted.sums) layer.sums = backend.allocate(tier, heads * channels * sizeof(float));
    if (wanted.tiles || wanted.bounds) {
      layer.bad = reinterpret_cast<std::int32_t*>(bad_.data()) + i * heads;
    }
  }
}

KeyIndexView KeyIndex::view(int layer) const {
  const Layer& at = layers_[static_cast<std::size_t>(layer)];
  KeyIndexView view;
  view.tiles = {layout_.bits, at.codes.data(), reinterpret_cast<std::uint16_t*>(at.scales.data()),
                layout_.pages()};
  view.bounds = {reinterpret_cast<std::uint16_t*>(at.bounds.data()), layout_.pages()};
  return view;
}

void KeyIndex::build(int layer, std::int64_t first_page, std::int64_t pages,
                     std::span<const RowSpan> rows) {
  const Layer& at = layers_[static_cast<std::size_t>(layer)];
  if (pages == 0 || at.bad == nullptr) return;
  backend_->build_index({layout_.shape, view(layer), first_page, pages, rows, at.bad});
}

void KeyIndex::add_values(int layer, std::span<const RowSpan> rows, bool subtract) {
  const Layer& at = layers_[static_cast<std::size_t>(layer)];
  if (at.sums.data() == nullptr) return;
  backend_->sum_values({layout_.shape, rows, at.sums.floats(), subtract});
}

const float* KeyIndex::value_sums(int layer) const {
  const Buffer& sums = layers_[static_cast<std::size_t>(layer)].sums;
  return sums.data() == nullptr ? nullptr : sums.floats();
}

void KeyIndex::check_keys() {
  const CopyOp op = {seen_bad_.data(), bad_.data(), bad_.bytes()};
  backend_->copy({&op, 1}, Stream::compute);
  backend_->synchronize();
  const auto heads = static_cast<std::size_t>(layout_.shape.kv_heads);
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    const auto* const bad = reinterpret_cast<const std::int32_t*>(seen_bad_.data()) + layer * heads;
    for (int head = 0; head < layout_.shape.kv_heads; ++head) {
      if (bad[head] == 0) continue;
      throw Error(ErrorCode::numeric, "a key of layer " + std::to_string(layer) + ", KV head " +
                                          std::to_string(head) +
                                          " is NaN or infinite; the checkpoint's weights or the "
                                          "caller's keys are damaged");
    }
  }
}

}  // namespace sluice
