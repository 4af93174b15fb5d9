// Which blocks have a place on the device, of one set of layers: those that are pinned, and of the
// others the first so many.
#pragma once

#include <cstdint>
#include <vector>

#include "offload/tiers/slot_pool.h"
#include "sluice/batch.h"

namespace sluice {

class DeviceBlocks {
 public:
  // Of `blocks` blocks `unpinned` and, besides, `pinned` may have a place.
  DeviceBlocks(std::int64_t blocks, std::int64_t unpinned, std::int64_t pinned);

  // Its slot, or PageSlots::kNone.
  std::int32_t slot(std::int32_t block) const { return at(block).slot; }

  // Gives a block a place if there is one, behind the slot `after` if it can be.
  void add(std::int32_t block, std::int32_t after);
  // Pins a block once more, or once less. Whether its slot changed.
  bool pin(std::int32_t block, std::int32_t after);
  bool unpin(std::int32_t block);
  // Of a block that nobody has any more.
  void drop(std::int32_t block);

 private:
  struct Place {
    std::int32_t slot = PageSlots::kNone;
    std::int32_t pins = 0;
  };

  const Place& at(std::int32_t block) const { return places_[static_cast<std::size_t>(block)]; }
  Place& at(std::int32_t block) { return places_[static_cast<std::size_t>(block)]; }
  void place(std::int32_t block, std::int32_t after);

  SlotPool slots_;
  std::int64_t limit_;         // of blocks that are not pinned
  std::int64_t unpinned_ = 0;  // that have a slot
  std::vector<Place> places_;  // by block
};

}  // namespace sluice
