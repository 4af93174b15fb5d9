// Block and tile tables of a pool's sequences: bookkeeping only, no row memory.
//
// A block is one page of every (layer, KV head). Its slot in the host's pool is its name; while it
// is resident it has a slot on the device, too. Forked sequences share blocks and tiles until one
// of them writes. The newest block of every sequence is pinned to the device if the pool has room
// for that; besides, the first `resident_blocks` blocks stay there. Layers form one or more sets. A
// block has its own device slot, or none, in each set, because sets that gain more by it have more
// blocks on the device.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "offload/tiers/device_blocks.h"
#include "offload/tiers/slot_pool.h"
#include "sluice/batch.h"

namespace sluice {

struct BlockLimits {
  std::int64_t sequences = 1;       // at a time
  std::int64_t sequence_pages = 0;  // of one sequence
  std::int64_t blocks = 0;          // of all sequences
  std::int64_t tiles = 0;           // of all sequences; 0: no key index
  // By set of layers: blocks on the device besides the pinned ones.
  std::vector<std::int64_t> resident_blocks = {0};
  bool pins_newest = false;
  // Host memory has no copy of a block's rows, so slots that blocks lose are reported.
  bool reports_lost_slots = false;

  int sets() const { return static_cast<int>(resident_blocks.size()); }
};

// Copies that must precede a sequence's write: between slots in every (layer, KV head) of a set, or
// in every layer's index.
struct BlockCopy {
  int set = 0;
  PageSlots from;
  PageSlots to;
  std::int64_t rows = 0;  // the first of the page
};
struct TileCopy {
  std::int32_t from = 0;
  std::int32_t to = 0;
};

// A device slot that a block has lost: its rows are still there until the slot is written again.
struct LostSlot {
  int set = 0;
  std::int32_t block = 0;
  std::int32_t slot = 0;
};

class BlockTables {
 public:
  explicit BlockTables(const BlockLimits& limits);

  // A new, empty sequence. Throws Error{memory} if `limits.sequences` are open.
  std::int32_t open();
  // A sequence with the same tokens that shares all blocks. Throws what open() throws.
  std::int32_t fork(std::int32_t sequence);
  void close(std::int32_t sequence) noexcept;

  // Copies needed to write tokens [first, end) of a sequence.
  struct Writing {
    std::vector<BlockCopy> blocks;  // rows to copy, tier by tier; from host memory if only
                                    // `to.device` is a slot, and `from.device` is none
    std::vector<TileCopy> tiles;
    // [sets]: the device slot of the rows before `first` that share its page, valid until the new
    // rows of their layer are written; PageSlots::kNone if they are not resident or there are none.
    std::vector<std::int32_t> begun;
  };
  // Throws Error{memory} if write() of these tokens, each of a different sequence, would need more
  // blocks than are free.
  void require_blocks(std::span<const BatchToken> tokens) const;
  // Throws Error{memory} if write() would need more blocks or tiles than are free.
  void require_room(std::int32_t sequence, std::int64_t first, std::int64_t end) const;
  // Gives the sequence private blocks and tiles for tokens [first, end); it has [0, first) already.
  // The first blocks of a sequence are contiguous if a long enough run is free. Throws what
  // require_room() throws, and leaves the sequence as it was.
  Writing write(std::int32_t sequence, std::int64_t first, std::int64_t end);
  // Gives back blocks and tiles that only tokens from `length` on need.
  void truncate(std::int32_t sequence, std::int64_t length);

  bool is_open(std::int32_t sequence) const;
  std::int64_t pages(std::int32_t sequence) const {
    return static_cast<std::int64_t>(at(sequence).blocks.size());
  }
  std::int64_t tiles(std::int32_t sequence) const {
    return static_cast<std::int64_t>(at(sequence).tiles.size());
  }
  // Blocks that no other sequence shares.
  std::int64_t own_blocks(std::int32_t sequence) const;
  PageSlots page(std::int32_t sequence, std::int64_t number, int set = 0) const;
  std::int32_t tile(std::int32_t sequence, std::int64_t number) const;
  // Number of rows in [0, tokens) of a sequence that are on the device.
  std::int64_t resident_rows(std::int32_t sequence, std::int64_t tokens, int set = 0) const;

  // Table entries that changed since the last call, in any set, so that copies can follow.
  struct Change {
    std::int32_t sequence = 0;
    std::int64_t number = 0;  // of the page or the tile
    bool is_tile = false;
  };
  std::vector<Change> take_changes();

  // Slots lost since the last call by blocks that some sequence still has.
  std::vector<LostSlot> take_lost_slots();

  const BlockLimits& limits() const { return limits_; }
  const SlotPool& block_slots() const { return blocks_; }
  const SlotPool& tile_slots() const { return tiles_; }
  std::int64_t open_sequences() const;

 private:
  struct Sequence {
    bool is_open = false;
    std::int64_t pinned = -1;  // page; -1: none is pinned
    std::vector<std::int32_t> blocks;
    std::vector<std::int32_t> tiles;
  };
  const Sequence& at(std::int32_t sequence) const;
  Sequence& at(std::int32_t sequence);

  // Blocks that write() would take. require_blocks() throws Error{memory} if fewer are free.
  std::int64_t blocks_for_write(std::int32_t sequence, std::int64_t first, std::int64_t end) const;
  void require_blocks(std::int64_t blocks) const;
  void begin_page(std::int32_t sequence, std::int64_t page, std::int64_t rows, Writing& writing);
  void own_tiles(std::int32_t sequence, std::int64_t first, std::int64_t end, Writing& writing);
  // Adds the first free block after `after`.
  void add_block(std::int32_t sequence, std::int32_t after);
  void pin(std::int32_t sequence, std::int64_t page);
  void unpin(std::int32_t sequence);
  void drop_block(std::int32_t block);
  void changed(std::int32_t sequence, std::int64_t page) {
    changes_.push_back({sequence, page, false});
  }
  // Notes a change of a block in the tables of all sequences that share it.
  void changed_for_all(std::int32_t block, std::int64_t page);

  BlockLimits limits_;
  SlotPool blocks_;
  std::vector<DeviceBlocks> device_;  // by set
  SlotPool tiles_;
  std::vector<Sequence> sequences_;
  std::vector<Change> changes_;
  std::vector<LostSlot> lost_;
};

}  // namespace sluice
