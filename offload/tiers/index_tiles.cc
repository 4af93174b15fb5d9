#include "offload/tiers/index_tiles.h"

#include <algorithm>

#include "lib/check.h"

namespace sluice {

IndexTiles::IndexTiles(std::int64_t tiles, std::int64_t slots, std::int64_t places)
    : tiles_(tiles), slots_(slots), places_(places), where_(static_cast<std::size_t>(tiles)) {}

std::optional<std::int32_t> IndexTiles::take(std::int32_t after) {
  if (slots_.free() == 0) return std::nullopt;
  const std::optional<std::int32_t> tile = tiles_.take(after);
  if (!tile) return std::nullopt;
  // Numbers and slots are taken and released alike unless tiles are parked, so they are the same.
  at(*tile) = {*slots_.take(after == kNone ? kNone : at(after).slot), kNone, step_};
  return tile;
}

bool IndexTiles::release(std::int32_t tile) {
  if (!tiles_.release(tile)) return false;
  if (at(tile).slot != kNone) slots_.release(at(tile).slot);
  if (at(tile).place != kNone) places_.release(at(tile).place);
  at(tile) = {};
  return true;
}

std::vector<std::int32_t> IndexTiles::coldest(std::int64_t most) const {
  std::vector<std::int32_t> cold;
  if (most <= 0) return cold;
  for (std::int32_t tile = 0; tile < static_cast<std::int32_t>(where_.size()); ++tile) {
    if (slot(tile) != kNone && !is_used(tile)) cold.push_back(tile);
  }
  // Of tiles used by the same step the last go first, because the first are those of prefixes.
  const auto before = [&](std::int32_t a, std::int32_t b) {
    return at(a).used != at(b).used ? at(a).used < at(b).used : a > b;
  };
  const auto end = cold.begin() + std::min<std::int64_t>(most, std::ssize(cold));
  std::partial_sort(cold.begin(), end, cold.end(), before);
  cold.erase(end, cold.end());
  return cold;
}

void IndexTiles::park(std::int32_t tile) {
  check(slot(tile) != kNone && places_.free() > 0, "a tile that cannot be parked");
  const std::int32_t place = *places_.take();
  slots_.release(slot(tile));
  at(tile).slot = kNone;
  at(tile).place = place;
}

void IndexTiles::unpark(std::int32_t tile) {
  check(place(tile) != kNone && slots_.free() > 0, "a tile that cannot be brought back");
  const std::int32_t slot = *slots_.take();
  places_.release(place(tile));
  at(tile).slot = slot;
  at(tile).place = kNone;
}

}  // namespace sluice
