// Tiles of a pool's key index: which sequences share them, and where each of them is.
//
//                 take()                    park()
//     free ─────────────────► on the device ───────► in host memory
//       ▲                       │   ▲                   │   │
//       └──────── release() ────┘   └──── unpark() ─────┘   │
//       └──────────────────────── release() ────────────────┘
//
// Bookkeeping only: the caller copies. A tile is in one place, and all sequences that share it find
// it there: parking the tiles of a prefix and bringing them back costs its forks nothing more. If
// there are as many slots on the device as tiles, nothing is ever parked, and a tile's slot is its
// number.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "offload/tiers/slot_pool.h"

namespace sluice {

class IndexTiles {
 public:
  static constexpr std::int32_t kNone = -1;

  // `tiles`: of all sequences; `slots`: on the device, up to as many; `places`: in host memory.
  IndexTiles(std::int64_t tiles, std::int64_t slots, std::int64_t places);

  // See SlotPool. A tile is taken with the first free slot behind that of `after`, kNone: of all.
  // Empty if there is no tile or no slot.
  std::optional<std::int32_t> take(std::int32_t after);
  void share(std::int32_t tile) { tiles_.share(tile); }
  bool release(std::int32_t tile);

  // Its slot on the device, or its place in host memory; kNone: it is in the other.
  std::int32_t slot(std::int32_t tile) const { return at(tile).slot; }
  std::int32_t place(std::int32_t tile) const { return at(tile).place; }

  bool parks() const { return tiles_.slots() > slots_.slots(); }
  // Until the next begin_step() tiles that are used are not parked.
  void begin_step() { ++step_; }
  void use(std::int32_t tile) { at(tile).used = step_; }
  bool is_used(std::int32_t tile) const { return at(tile).used == step_; }
  // Up to `most` tiles on the device that the step does not use, the least recently used first.
  std::vector<std::int32_t> coldest(std::int64_t most) const;

  // The place that park() takes next and the slot that unpark() takes; there has to be a free one.
  std::int32_t next_place() const { return places_.run_of(1); }
  std::int32_t next_slot() const { return slots_.run_of(1); }
  void park(std::int32_t tile);
  void unpark(std::int32_t tile);

  bool is_shared(std::int32_t tile) const { return tiles_.is_shared(tile); }
  std::int32_t references(std::int32_t tile) const { return tiles_.references(tile); }
  std::int64_t free() const { return tiles_.free(); }
  std::int64_t used() const { return tiles_.used(); }
  std::int64_t slots() const { return slots_.slots(); }
  std::int64_t free_slots() const { return slots_.free(); }
  std::int64_t parked() const { return places_.used(); }

 private:
  struct Tile {
    std::int32_t slot = kNone;
    std::int32_t place = kNone;
    std::uint64_t used = 0;  // the latest step
  };
  const Tile& at(std::int32_t tile) const { return where_[static_cast<std::size_t>(tile)]; }
  Tile& at(std::int32_t tile) { return where_[static_cast<std::size_t>(tile)]; }

  SlotPool tiles_;
  SlotPool slots_;
  SlotPool places_;
  std::vector<Tile> where_;
  std::uint64_t step_ = 1;
};

}  // namespace sluice
