// Which blocks and tiles the sequences of a pool have, and where they are: bookkeeping alone, no
// memory.
//
// A block is one page of every (layer, KV head). Its home, a slot of the host's pool, is its name;
// while it is on the device it has a slot there, too. Sequences that were forked share blocks and
// tiles until one of them writes. The newest block of every sequence is pinned to the device, if
// the pool has room for that; besides, the first so many blocks stay there. Layers are of one set
// or of several, each with a slot of its own for a block, or none: sets that gain more by it have
// more blocks on the device.
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
  std::int64_t blocks = 0;          // of all
  std::int64_t tiles = 0;           // likewise; 0: there is no key index
  // Of every set of layers, on the device besides the pinned.
  std::vector<std::int64_t> resident_blocks = {0};
  bool pins_newest = false;

  int sets() const { return static_cast<int>(resident_blocks.size()); }
};

// What must be copied before a sequence can write: slots of every (layer, KV head) of a set, or of
// every layer's index.
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

class BlockTables {
 public:
  explicit BlockTables(const BlockLimits& limits);

  // A new, empty sequence. Throws Error{memory} if there are as many as may be.
  std::int32_t open();
  // A sequence of the same `length` tokens, which share all blocks. Throws what open() throws.
  std::int32_t fork(std::int32_t sequence);
  void close(std::int32_t sequence) noexcept;

  // What writing tokens [first, end) of a sequence takes.
  struct Writing {
    std::vector<BlockCopy> blocks;  // rows to copy, tier by tier; from home where `from.device` is
                                    // none and `to.device` is not
    std::vector<TileCopy> tiles;
    // [sets]: where on the device the rows before `first` are that share its page, until the new
    // ones of their layer are written; PageSlots::kNone where they are not, or there are none.
    std::vector<std::int32_t> begun;
  };
  // Throws Error{memory} if more blocks than are free would be needed for write() of these tokens,
  // each of another sequence.
  void require_blocks(std::span<const BatchToken> tokens) const;
  // Throws Error{memory} if write() would need more blocks or tiles than are free.
  void require_room(std::int32_t sequence, std::int64_t first, std::int64_t end) const;
  // Gives the sequence blocks and tiles of its own for tokens [first, end), of which [0, first) are
  // there; the first ones of a sequence follow each other where so many are free in a row. Throws
  // what require_room() throws, and leaves the sequence as it was.
  Writing write(std::int32_t sequence, std::int64_t first, std::int64_t end);
  // Gives back what only tokens from `length` on need.
  void truncate(std::int32_t sequence, std::int64_t length);

  bool is_open(std::int32_t sequence) const;
  std::int64_t pages(std::int32_t sequence) const {
    return static_cast<std::int64_t>(at(sequence).blocks.size());
  }
  std::int64_t tiles(std::int32_t sequence) const {
    return static_cast<std::int64_t>(at(sequence).tiles.size());
  }
  PageSlots page(std::int32_t sequence, std::int64_t number, int set = 0) const;
  std::int32_t tile(std::int32_t sequence, std::int64_t number) const;
  // Rows [0, tokens) of a sequence that are on the device.
  std::int64_t resident_rows(std::int32_t sequence, std::int64_t tokens, int set = 0) const;

  // Entries of the tables that changed since the last call, for whoever mirrors them: of all sets.
  struct Change {
    std::int32_t sequence = 0;
    std::int64_t number = 0;  // of the page or the tile
    bool is_tile = false;
  };
  std::vector<Change> take_changes();

  const BlockLimits& limits() const { return limits_; }
  const SlotPool& block_slots() const { return blocks_; }
  const SlotPool& tile_slots() const { return tiles_; }
  std::int64_t open_sequences() const;

 private:
  struct Sequence {
    bool is_open = false;
    std::int64_t pinned = -1;  // its page that is pinned
    std::vector<std::int32_t> blocks;
    std::vector<std::int32_t> tiles;
  };
  const Sequence& at(std::int32_t sequence) const;
  Sequence& at(std::int32_t sequence);

  // Blocks that write() would take, and Error{memory} if so many are not free.
  std::int64_t blocks_for_write(std::int32_t sequence, std::int64_t first, std::int64_t end) const;
  void require_blocks(std::int64_t blocks) const;
  void begin_page(std::int32_t sequence, std::int64_t page, std::int64_t rows, Writing& writing);
  void own_tiles(std::int32_t sequence, std::int64_t first, std::int64_t end, Writing& writing);
  // Adds the first free one after a block.
  void add_block(std::int32_t sequence, std::int32_t after);
  void pin(std::int32_t sequence, std::int64_t page);
  void unpin(std::int32_t sequence);
  void drop_block(std::int32_t block);
  void changed(std::int32_t sequence, std::int64_t page) {
    changes_.push_back({sequence, page, false});
  }
  // The entries of a block in the tables of all who share it.
  void changed_for_all(std::int32_t block, std::int64_t page);

  BlockLimits limits_;
  SlotPool blocks_;
  std::vector<DeviceBlocks> device_;  // by set
  SlotPool tiles_;
  std::vector<Sequence> sequences_;
  std::vector<Change> changes_;
};

}  // namespace sluice
