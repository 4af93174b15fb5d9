// Host memory for tiles of the key index of sequences that do not step. It grows with use and is
// kept, because pinning memory for a GPU takes longer than copying to it.
#pragma once

#include <cstdint>
#include <vector>

#include "offload/attention/key_index.h"

namespace sluice {

class ParkedTiles {
 public:
  // Room for `places` tiles of all layers.
  ParkedTiles(Backend& backend, KeyIndex& index, std::int64_t places);

  // Copies a tile to a place, or back, in the order of the index's queue. park() throws
  // Error{memory} if the place needs memory that there is not; nothing is copied then.
  void park(std::int32_t slot, std::int32_t place);
  void bring(std::int32_t place, std::int32_t slot);
  // A layer's part of a parked tile, [KeyIndex::tile_bytes()], once the queue has copied it.
  const std::byte* part(int layer, std::int32_t place) const;

 private:
  Backend* backend_;
  KeyIndex* index_;
  std::vector<std::size_t> offsets_;  // by layer, of its part; the last: bytes of a tile
  std::vector<Buffer> places_;        // empty until they are used
};

}  // namespace sluice
