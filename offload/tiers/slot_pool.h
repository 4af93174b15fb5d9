// Slots of a tier's pool, shared by reference.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <vector>

namespace sluice {

// Numbers [0, slots) of places for pages or tiles. A slot is taken with one reference and is free
// again when the last one is released.
class SlotPool {
 public:
  explicit SlotPool(std::int64_t slots);

  // Takes the first free slot after `after`, or the first of all if there is none behind it, so
  // that the slots of a sequence form runs in address order. Empty if no slot is free.
  std::optional<std::int32_t> take(std::int32_t after = -1);
  // The begin of the first run of `slots` free slots; if there is none, the first free slot.
  std::int32_t run_of(std::int64_t slots) const;
  void share(std::int32_t slot);
  // Returns true if the slot is free now. Allocates nothing, since it is part of ending a session.
  bool release(std::int32_t slot);

  bool is_shared(std::int32_t slot) const { return references(slot) > 1; }
  std::int32_t references(std::int32_t slot) const {
    return references_[static_cast<std::size_t>(slot)];
  }
  std::int64_t slots() const { return static_cast<std::int64_t>(references_.size()); }
  std::int64_t free() const { return static_cast<std::int64_t>(free_.size()); }
  std::int64_t used() const { return slots() - free(); }

 private:
  using Slots = std::set<std::int32_t>;

  std::vector<std::int32_t> references_;
  Slots free_;
  std::vector<Slots::node_type> taken_;  // by slot: its node while it is not free
};

}  // namespace sluice
