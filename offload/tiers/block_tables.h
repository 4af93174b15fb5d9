// Block and tile tables of a pool's sequences: bookkeeping only, no row memory.
//
// A block is one page of every (layer, KV head). Its slot in the host's pool is its name; while it
// is resident it has a slot on the device, too. Forked sequences share blocks and tiles until one
// of them writes. The newest block of every sequence is pinned to the device if the pool has room
// for that; besides, the first `resident_blocks` blocks stay there. Layers form one or more sets. A
// block has its own device slot, or none, in each set, because sets that gain more by it have more
// blocks on the device.
//
// Ragged tables: prompts that evict leave every layer rows of other tokens, and as many as it
// needs. Each layer is then a set with a table of its own, which counts rows, not tokens: those
// that are left follow each other without gaps. A block is one page of every KV head of one layer,
// and all tables take their blocks and device slots from the same pools.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "offload/tiers/device_blocks.h"
#include "offload/tiers/index_tiles.h"
#include "offload/tiers/slot_pool.h"
#include "sluice/batch.h"

namespace sluice {

struct BlockLimits {
  std::int64_t sequences = 1;       // at a time
  std::int64_t sequence_pages = 0;  // of one sequence
  std::int64_t blocks = 0;          // of all sequences
  std::int64_t tiles = 0;           // of all sequences, in each table; 0: no key index
  // By set of layers: blocks on the device besides the pinned ones.
  std::vector<std::int64_t> resident_blocks = {0};
  bool pins_newest = false;
  // Host memory has no copy of a block's rows, so slots that blocks lose are reported.
  bool reports_lost_slots = false;
  // Ragged: the number of sets, each with a table; `resident_blocks` has one entry then, for all of
  // them. 0: a sequence has one table.
  int ragged_sets = 0;
  // Slots on the device for tiles, 0: for all. With fewer the caller parks others in `tile_places`
  // in host memory, see parks_tiles(); not with ragged tables.
  std::int64_t tile_slots = 0;
  std::int64_t tile_places = 0;

  int sets() const {
    return ragged_sets > 0 ? ragged_sets : static_cast<int>(resident_blocks.size());
  }
  int tables() const { return std::max(ragged_sets, 1); }
};

// Copies that must precede a sequence's write: between slots in every (layer, KV head) of a set, or
// in the index of every layer of a table.
struct BlockCopy {
  int set = 0;
  PageSlots from;
  PageSlots to;
  std::int64_t rows = 0;  // the first of the page
};
struct TileCopy {
  int table = 0;
  std::int32_t from = 0;
  std::int32_t to = 0;
};

// A tile that moves between its slot on the device and its place in host memory.
struct ParkedTile {
  std::int32_t tile = 0;
  std::int32_t slot = 0;
  std::int32_t place = 0;
};

// A device slot that a block has lost: its rows are still there until the slot is written again.
struct LostSlot {
  int set = 0;
  std::int32_t block = 0;
  std::int32_t slot = 0;
};

// A prompt that evicted: tokens [first, end) of a sequence. By set, the tokens up to `end` that
// have no rows, those of earlier prompts included.
struct Eviction {
  std::int64_t first = 0;
  std::int64_t end = 0;
  std::vector<std::int64_t> missing;
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
  // Gives back blocks and tiles that only tokens from `length` on need. Not within a prompt that
  // evicted, see evicting_prompt().
  void truncate(std::int32_t sequence, std::int64_t length);

  // Tiles have to be on the device where a step of their sequence begins. If they do not all fit
  // (parks_tiles()), the caller copies some to host memory, and back:
  //
  //   begin_tiles(sequences of the step)
  //   for each sequence: park_tile() and unpark_tile() until
  //     parked_tiles() is empty and tile_slots().free_slots() is at least tiles_for_write()
  //   write()
  bool parks_tiles() const { return tiles_.front().parks(); }
  // Begins a step of these sequences: cold_tiles() has none of theirs until the next begins.
  void begin_tiles(std::span<const std::int32_t> sequences);
  // Throws Error{memory} if the tiles of sequences and those that write() of these tokens, each of
  // a different sequence, would take have no room on the device together; has_slots() says it.
  void require_slots(std::span<const BatchToken> tokens) const;
  // `more`: tokens that the sequences add together.
  bool has_slots(std::span<const std::int32_t> sequences, std::int64_t more) const;
  // Tiles that write() would take.
  std::int64_t tiles_for_write(std::int32_t sequence, std::int64_t first, std::int64_t end) const;
  // Numbers of the sequence's tiles that are in host memory.
  std::vector<std::int64_t> parked_tiles(std::int32_t sequence) const;
  // Up to `most` tiles on the device that no sequence of the step has, least recently used first.
  std::vector<std::int32_t> cold_tiles(std::int64_t most) const {
    return tiles_.front().coldest(most);
  }
  // Where a cold tile goes, or comes from and to: copy it, then call park_tile() or unpark_tile().
  ParkedTile next_to_park(std::int32_t tile) const;
  ParkedTile next_to_unpark(std::int32_t sequence, std::int64_t number) const;
  void park_tile(const ParkedTile& tile) { tiles_.front().park(tile.tile); }
  void unpark_tile(const ParkedTile& tile, std::int64_t number);

  // Ragged only: the same as write() for rows [first, end) of one set, in a prompt that evicts.
  // Until evict() they belong to no token.
  Writing write_rows(std::int32_t sequence, int set, std::int64_t first, std::int64_t end);
  // Ends a prompt of tokens [first, end), whose rows were written by write_rows(). `rows`: by set,
  // those of all tokens of the sequence; if they are fewer than tokens, the prompt has evicted.
  void evict(std::int32_t sequence, std::int64_t first, std::int64_t end,
             std::span<const std::int64_t> rows);
  // Rows that the first `tokens` tokens of a sequence have in a set; also, the row of a token at
  // that position after the last prompt that evicted.
  std::int64_t rows(std::int32_t sequence, std::int64_t tokens, int set = 0) const;
  bool has_evicted(std::int32_t sequence) const { return !at(sequence).evictions.empty(); }
  // The prompt that evicted within which a sequence of `length` tokens would end, if there is one.
  std::optional<Eviction> evicting_prompt(std::int32_t sequence, std::int64_t length) const;

  bool is_open(std::int32_t sequence) const;
  std::int64_t pages(std::int32_t sequence, int set = 0) const {
    return static_cast<std::int64_t>(table(sequence, set).blocks.size());
  }
  std::int64_t tiles(std::int32_t sequence, int set = 0) const {
    return static_cast<std::int64_t>(table(sequence, set).tiles.size());
  }
  // Blocks that no other sequence shares.
  std::int64_t own_blocks(std::int32_t sequence) const;
  // `number`: of a page of the set's table.
  PageSlots page(std::int32_t sequence, std::int64_t number, int set = 0) const;
  // The slot of a tile on the device, or its place in host memory; IndexTiles::kNone: it is in the
  // other.
  std::int32_t tile(std::int32_t sequence, std::int64_t number, int set = 0) const;
  std::int32_t parked_place(std::int32_t sequence, std::int64_t number) const;
  // How many of a sequence's first `rows` rows are on the device.
  std::int64_t resident_rows(std::int32_t sequence, std::int64_t rows, int set = 0) const;

  // Table entries that changed since the last call, in any set of a table, so that copies can
  // follow.
  struct Change {
    std::int32_t sequence = 0;
    int table = 0;
    std::int64_t number = 0;  // of the page or the tile
    bool is_tile = false;
  };
  std::vector<Change> take_changes();
  // Every entry counts as changed, because changes that were taken did not arrive.
  void change_all() noexcept { lacks_changes_ = true; }

  // Slots lost since the last call by blocks that some sequence still has.
  std::vector<LostSlot> take_lost_slots();

  const BlockLimits& limits() const { return limits_; }
  const SlotPool& block_slots() const { return blocks_; }
  const IndexTiles& tile_slots(int table = 0) const {
    return tiles_[static_cast<std::size_t>(table)];
  }
  // The table of a set's pages.
  int table_of(int set) const { return limits_.ragged_sets > 0 ? set : 0; }
  std::int64_t open_sequences() const;

 private:
  struct Table {
    std::int64_t pinned = -1;  // page; -1: none is pinned
    std::vector<std::int32_t> blocks;
    std::vector<std::int32_t> tiles;  // numbers in IndexTiles
  };
  struct Sequence {
    bool is_open = false;
    std::vector<Table> tables;
    std::vector<Eviction> evictions;  // in the order of their tokens
  };
  // One table of one sequence.
  struct Place {
    std::int32_t sequence = 0;
    int table = 0;
  };
  const Sequence& at(std::int32_t sequence) const;
  Sequence& at(std::int32_t sequence);
  const Table& at(const Place& place) const {
    return at(place.sequence).tables[static_cast<std::size_t>(place.table)];
  }
  Table& at(const Place& place) {
    return at(place.sequence).tables[static_cast<std::size_t>(place.table)];
  }
  const Table& table(std::int32_t sequence, int set) const {
    return at(Place{sequence, table_of(set)});
  }
  // The sets whose pages a table has.
  int first_set(int table) const { return table; }
  int end_set(int table) const { return limits_.ragged_sets > 0 ? table + 1 : limits_.sets(); }
  const DeviceBlocks& device_of(int set) const {
    return device_[limits_.ragged_sets > 0 ? 0 : static_cast<std::size_t>(set)];
  }
  std::int64_t rows_at(const Place& place, std::int64_t tokens) const {
    return rows(place.sequence, tokens, place.table);
  }

  // Blocks that writing rows [first, end) would take. require_blocks() throws Error{memory} if
  // fewer are free, require_tiles() if there are fewer tiles.
  std::int64_t blocks_for_write(const Place& place, std::int64_t first, std::int64_t end) const;
  void require_blocks(std::int64_t blocks) const;
  void require_tiles(const Place& place, std::int64_t first, std::int64_t end) const;
  std::int64_t tiles_for_write(const Place& place, std::int64_t first, std::int64_t end) const;
  // Tiles of sequences, those that they share once.
  std::int64_t distinct_tiles(std::span<const std::int32_t> sequences) const;
  void write(const Place& place, std::int64_t first, std::int64_t end, Writing& writing);
  void begin_page(const Place& place, std::int64_t page, std::int64_t rows, Writing& writing);
  void own_tiles(const Place& place, std::int64_t first, std::int64_t end, Writing& writing);
  // Adds the first free block after `after`.
  void add_block(const Place& place, std::int32_t after);
  void truncate(const Place& place, std::int64_t rows);
  void pin(const Place& place, std::int64_t page);
  void unpin(const Place& place);
  void drop_block(std::int32_t block);
  // Notes a change, of a page that ends as well, so it does not fail where memory runs out: then
  // everything counts as changed.
  void note(const Change& change) noexcept;
  void changed(const Place& place, std::int64_t page) noexcept {
    note({place.sequence, place.table, page, false});
  }
  std::vector<Change> all_places() const;
  // Notes a change of a block in the tables of all sequences that share it.
  void changed_for_all(std::int32_t block, int table, std::int64_t page);

  BlockLimits limits_;
  SlotPool blocks_;
  std::vector<DeviceBlocks> device_;  // by set, or one for all ragged sets
  std::vector<IndexTiles> tiles_;     // by table
  std::vector<Sequence> sequences_;
  std::vector<Change> changes_;
  bool lacks_changes_ = false;  // some could not be noted
  std::vector<LostSlot> lost_;  // has room for those of the sequences that end
};

}  // namespace sluice
