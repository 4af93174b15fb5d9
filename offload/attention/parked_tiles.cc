#include "offload/attention/parked_tiles.h"

namespace sluice {

ParkedTiles::ParkedTiles(Backend& backend, KeyIndex& index, std::int64_t places)
    : backend_(&backend),
      index_(&index),
      offsets_(static_cast<std::size_t>(index.layers()) + 1),
      places_(static_cast<std::size_t>(places)) {
  for (int layer = 0; layer < index.layers(); ++layer) {
    const auto at = static_cast<std::size_t>(layer);
    offsets_[at + 1] = offsets_[at] + index.tile_bytes(layer);
  }
}

void ParkedTiles::park(std::int32_t slot, std::int32_t place) {
  Buffer& memory = places_[static_cast<std::size_t>(place)];
  if (memory.data() == nullptr) memory = backend_->allocate(Tier::host, offsets_.back());
  index_->save_tile(slot, memory.data());
}

void ParkedTiles::bring(std::int32_t place, std::int32_t slot) {
  index_->load_tile(slot, places_[static_cast<std::size_t>(place)].data());
}

const std::byte* ParkedTiles::part(int layer, std::int32_t place) const {
  return places_[static_cast<std::size_t>(place)].data() +
         offsets_[static_cast<std::size_t>(layer)];
}

}  // namespace sluice
