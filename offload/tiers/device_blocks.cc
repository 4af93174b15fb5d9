#include "offload/tiers/device_blocks.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "lib/check.h"

namespace sluice {

DeviceBlocks::DeviceBlocks(std::int64_t blocks, std::int64_t unpinned, std::int64_t pinned)
    : slots_(std::min(blocks, unpinned + pinned)),
      limit_(unpinned),
      places_(static_cast<std::size_t>(blocks)) {}

void DeviceBlocks::add(std::int32_t block, std::int32_t after) {
  if (unpinned_ == limit_) return;
  place(block, after);
  ++unpinned_;
}

bool DeviceBlocks::pin(std::int32_t block, std::int32_t after) {
  if (++at(block).pins > 1) return false;
  if (slot(block) != PageSlots::kNone) {
    --unpinned_;
    return false;
  }
  place(block, after);
  return true;
}

bool DeviceBlocks::unpin(std::int32_t block) {
  Place& pinned = at(block);
  if (--pinned.pins > 0) return false;
  if (unpinned_ < limit_) {
    ++unpinned_;
    return false;
  }
  slots_.release(pinned.slot);
  pinned.slot = PageSlots::kNone;
  return true;
}

void DeviceBlocks::drop(std::int32_t block) {
  const Place dropped = std::exchange(at(block), Place());
  check(dropped.pins == 0, "dropping a block that is pinned");
  if (dropped.slot == PageSlots::kNone) return;
  slots_.release(dropped.slot);
  --unpinned_;
}

void DeviceBlocks::place(std::int32_t block, std::int32_t after) {
  const std::optional<std::int32_t> slot = slots_.take(after);
  check(slot.has_value(), "no room on the device where there must be some");
  at(block).slot = *slot;
}

}  // namespace sluice
