#include "offload/tiers/slot_pool.h"

#include <utility>

#include "lib/check.h"

namespace sluice {

SlotPool::SlotPool(std::int64_t slots)
    : references_(static_cast<std::size_t>(slots)), taken_(static_cast<std::size_t>(slots)) {
  for (std::int32_t slot = 0; slot < static_cast<std::int32_t>(slots); ++slot) {
    free_.insert(free_.end(), slot);
  }
}

std::optional<std::int32_t> SlotPool::take(std::int32_t after) {
  auto found = free_.upper_bound(after);
  if (found == free_.end()) found = free_.begin();
  if (found == free_.end()) return std::nullopt;
  const std::int32_t slot = *found;
  taken_[static_cast<std::size_t>(slot)] = free_.extract(found);
  references_[static_cast<std::size_t>(slot)] = 1;
  return slot;
}

std::int32_t SlotPool::run_of(std::int64_t slots) const {
  if (free_.empty()) return 0;
  std::int32_t begin = *free_.begin();
  std::int32_t end = begin;  // end of the free slots from `begin` on
  for (const std::int32_t slot : free_) {
    if (slot != end) begin = slot;
    end = slot + 1;
    if (end - begin >= slots) return begin;
  }
  return *free_.begin();
}

void SlotPool::share(std::int32_t slot) {
  check(references(slot) > 0, "sharing a slot that is free");
  ++references_[static_cast<std::size_t>(slot)];
}

bool SlotPool::release(std::int32_t slot) {
  check(references(slot) > 0, "releasing a slot that is free");
  if (--references_[static_cast<std::size_t>(slot)] > 0) return false;
  free_.insert(std::move(taken_[static_cast<std::size_t>(slot)]));
  return true;
}

}  // namespace sluice
