// Blocks of one set of layers that are resident on the device: the pinned ones, and a limited
// number of the others, first come first served.
#pragma once

#include <cstdint>
#include <vector>

#include "offload/tiers/slot_pool.h"
#include "sluice/batch.h"

namespace sluice {

class DeviceBlocks {
 public:
  // Out of `blocks` blocks, up to `unpinned` unpinned ones plus `pinned` pinned ones have a slot.
  DeviceBlocks(std::int64_t blocks, std::int64_t unpinned, std::int64_t pinned);

  // The block's slot, or PageSlots::kNone.
  std::int32_t slot(std::int32_t block) const { return at(block).slot; }

  // Gives a block a slot if the limit allows it, behind the slot `after` if possible.
  void add(std::int32_t block, std::int32_t after);
  // Adds or removes one pin of a block. Returns true if its slot changed.
  bool pin(std::int32_t block, std::int32_t after);
  bool unpin(std::int32_t block);
  // Frees the slot of a block that no sequence has any more.
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
  std::int64_t limit_;         // of unpinned blocks with a slot
  std::int64_t unpinned_ = 0;  // blocks that have a slot and no pin
  std::vector<Place> places_;  // by block
};

}  // namespace sluice
