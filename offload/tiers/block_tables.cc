#include "offload/tiers/block_tables.h"

#include <algorithm>
#include <map>
#include <new>
#include <string>
#include <utility>

#include "lib/check.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

std::int64_t pages_of(std::int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

// Tiles that hold this many whole pages.
std::int64_t tiles_of(std::int64_t pages) { return (pages + kTilePages - 1) / kTilePages; }

std::vector<DeviceBlocks> device_blocks(const BlockLimits& limits) {
  std::vector<DeviceBlocks> sets;
  const std::int64_t pinned = limits.pins_newest ? limits.sequences * limits.tables() : 0;
  for (const std::int64_t resident : limits.resident_blocks) {
    sets.emplace_back(limits.blocks, resident, pinned);
  }
  return sets;
}

std::vector<IndexTiles> index_tiles(const BlockLimits& limits) {
  const std::int64_t slots = limits.tile_slots > 0 ? limits.tile_slots : limits.tiles;
  std::vector<IndexTiles> tables;
  for (int table = 0; table < limits.tables(); ++table) {
    tables.emplace_back(limits.tiles, slots, limits.tile_places);
  }
  return tables;
}

}  // namespace

BlockTables::BlockTables(const BlockLimits& limits)
    : limits_(limits),
      blocks_(limits.blocks),
      device_(device_blocks(limits)),
      tiles_(index_tiles(limits)),
      sequences_(static_cast<std::size_t>(limits.sequences)) {
  check(limits.ragged_sets == 0 || limits.resident_blocks.size() == 1,
        "ragged tables share one pool of device slots");
  check(limits.ragged_sets == 0 || !parks_tiles(), "ragged tables park no tiles");
}

const BlockTables::Sequence& BlockTables::at(std::int32_t sequence) const {
  check(is_open(sequence), "a sequence that there is not");
  return sequences_[static_cast<std::size_t>(sequence)];
}

BlockTables::Sequence& BlockTables::at(std::int32_t sequence) {
  return const_cast<Sequence&>(std::as_const(*this).at(sequence));
}

bool BlockTables::is_open(std::int32_t sequence) const {
  return sequence >= 0 && sequence < limits_.sequences &&
         sequences_[static_cast<std::size_t>(sequence)].is_open;
}

std::int64_t BlockTables::open_sequences() const {
  return std::count_if(sequences_.begin(), sequences_.end(),
                       [](const Sequence& s) { return s.is_open; });
}

std::int32_t BlockTables::open() {
  const auto found = std::find_if(sequences_.begin(), sequences_.end(),
                                  [](const Sequence& s) { return !s.is_open; });
  if (found == sequences_.end()) {
    throw Error(ErrorCode::memory, "all " + std::to_string(limits_.sequences) +
                                       " sequences that were planned for are in use; end one of "
                                       "them or plan for more");
  }
  lost_.reserve(lost_.size() +
                static_cast<std::size_t>(limits_.sequences * limits_.tables()) * device_.size());
  *found = Sequence();
  found->tables.resize(static_cast<std::size_t>(limits_.tables()));
  found->is_open = true;
  return static_cast<std::int32_t>(found - sequences_.begin());
}

std::int32_t BlockTables::fork(std::int32_t sequence) {
  Sequence copy = at(sequence);
  const std::int32_t child = open();
  at(child) = std::move(copy);  // from here on nothing fails
  for (int table = 0; table < limits_.tables(); ++table) {
    const Place place = {child, table};
    const Table& to = at(place);
    for (const std::int32_t block : to.blocks) blocks_.share(block);
    for (const std::int32_t tile : to.tiles) tiles_[static_cast<std::size_t>(table)].share(tile);
    if (to.pinned >= 0) pin(place, to.pinned);
    for (std::size_t page = 0; page < to.blocks.size(); ++page) {
      changed(place, static_cast<std::int64_t>(page));
    }
    for (std::size_t tile = 0; tile < to.tiles.size(); ++tile) {
      note({child, table, static_cast<std::int64_t>(tile), true});
    }
  }
  return child;
}

void BlockTables::close(std::int32_t sequence) noexcept {
  truncate(sequence, 0);
  at(sequence).is_open = false;
}

void BlockTables::truncate(std::int32_t sequence, std::int64_t length) {
  check(!evicting_prompt(sequence, length), "a cut within a prompt that evicted");
  std::vector<Eviction>& evictions = at(sequence).evictions;
  while (!evictions.empty() && evictions.back().end > length) evictions.pop_back();
  for (int table = 0; table < limits_.tables(); ++table) {
    truncate({sequence, table}, rows(sequence, length, table));
  }
}

void BlockTables::truncate(const Place& place, std::int64_t rows) {
  Table& t = at(place);
  IndexTiles& index = tiles_[static_cast<std::size_t>(place.table)];
  const auto pages = static_cast<std::size_t>(pages_of(rows));
  const auto tiles = static_cast<std::size_t>(tiles_of(rows / kPageTokens));
  if (t.pinned >= static_cast<std::int64_t>(pages)) unpin(place);
  for (; t.blocks.size() > pages; t.blocks.pop_back()) drop_block(t.blocks.back());
  for (; t.tiles.size() > tiles; t.tiles.pop_back()) index.release(t.tiles.back());
}

std::int64_t BlockTables::rows(std::int32_t sequence, std::int64_t tokens, int set) const {
  const std::vector<Eviction>& evictions = at(sequence).evictions;
  const auto before = std::find_if(evictions.rbegin(), evictions.rend(),
                                   [&](const Eviction& prompt) { return prompt.end <= tokens; });
  if (before == evictions.rend()) return tokens;
  return tokens - before->missing[static_cast<std::size_t>(set)];
}

std::optional<Eviction> BlockTables::evicting_prompt(std::int32_t sequence,
                                                     std::int64_t length) const {
  for (const Eviction& prompt : at(sequence).evictions) {
    if (prompt.first < length && length < prompt.end) return prompt;
  }
  return std::nullopt;
}

void BlockTables::evict(std::int32_t sequence, std::int64_t first, std::int64_t end,
                        std::span<const std::int64_t> rows) {
  Eviction prompt = {first, end, {}};
  bool lost = false;
  for (std::size_t set = 0; set < rows.size(); ++set) {
    lost = lost || rows[set] < this->rows(sequence, first, static_cast<int>(set)) + end - first;
    prompt.missing.push_back(end - rows[set]);
  }
  if (lost) at(sequence).evictions.push_back(std::move(prompt));
}

BlockTables::Writing BlockTables::write(std::int32_t sequence, std::int64_t first,
                                        std::int64_t end) {
  check(first < end && pages_of(end) <= limits_.sequence_pages, "tokens beyond what was planned");
  require_room(sequence, first, end);
  Writing writing;
  writing.begun.assign(static_cast<std::size_t>(limits_.sets()), PageSlots::kNone);
  for (int table = 0; table < limits_.tables(); ++table) {
    const std::int64_t row = rows(sequence, first, table);
    write({sequence, table}, row, row + end - first, writing);
  }
  return writing;
}

BlockTables::Writing BlockTables::write_rows(std::int32_t sequence, int set, std::int64_t first,
                                             std::int64_t end) {
  check(limits_.ragged_sets > 0, "rows of one set, where sets share their table");
  check(first < end && pages_of(end) <= limits_.sequence_pages, "rows beyond what was planned");
  const Place place = {sequence, set};
  require_blocks(blocks_for_write(place, first, end));
  require_tiles(place, first, end);
  Writing writing;
  writing.begun.assign(static_cast<std::size_t>(limits_.sets()), PageSlots::kNone);
  write(place, first, end, writing);
  return writing;
}

void BlockTables::write(const Place& place, std::int64_t first, std::int64_t end,
                        Writing& writing) {
  Table& t = at(place);
  const auto pages = [&] { return static_cast<std::int64_t>(t.blocks.size()); };
  check(pages_of(first) == pages(), "rows that do not follow those that there are");
  if (first % kPageTokens != 0) {
    begin_page(place, first / kPageTokens, first % kPageTokens, writing);
  }
  const std::int64_t last = pages_of(end) - 1;
  if (limits_.pins_newest && t.pinned >= 0 && t.pinned != last) unpin(place);
  while (pages() <= last) {
    add_block(place, t.blocks.empty() ? blocks_.run_of(last + 1) - 1 : t.blocks.back());
  }
  if (limits_.pins_newest && t.pinned < 0) pin(place, last);
  own_tiles(place, first, end, writing);
}

std::int64_t BlockTables::own_blocks(std::int32_t sequence) const {
  std::int64_t own = 0;
  for (const Table& table : at(sequence).tables) {
    own += std::count_if(table.blocks.begin(), table.blocks.end(),
                         [&](std::int32_t block) { return !blocks_.is_shared(block); });
  }
  return own;
}

std::int64_t BlockTables::blocks_for_write(const Place& place, std::int64_t first,
                                           std::int64_t end) const {
  const Table& t = at(place);
  const auto page = static_cast<std::size_t>(first / kPageTokens);
  const bool copies = first % kPageTokens != 0 && blocks_.is_shared(t.blocks[page]);
  return pages_of(end) - static_cast<std::int64_t>(t.blocks.size()) + (copies ? 1 : 0);
}

void BlockTables::require_blocks(std::span<const BatchToken> tokens) const {
  std::int64_t blocks = 0;
  std::map<std::int32_t, std::int32_t> writers;  // of a block
  for (const BatchToken& token : tokens) {
    for (int table = 0; table < limits_.tables(); ++table) {
      const Place place = {token.sequence, table};
      const std::int64_t row = rows_at(place, token.position);
      blocks += blocks_for_write(place, row, row + 1);
      if (row % kPageTokens == 0) continue;
      const std::int32_t block = at(place).blocks[static_cast<std::size_t>(row / kPageTokens)];
      // If all sharers of a block write to it, the last one keeps it and needs no copy.
      if (blocks_.is_shared(block) && ++writers[block] == blocks_.references(block)) --blocks;
    }
  }
  require_blocks(blocks);
}

void BlockTables::require_blocks(std::int64_t blocks) const {
  if (blocks <= blocks_.free()) return;
  const std::string what = " blocks of " + std::to_string(kPageTokens) +
                           (limits_.ragged_sets > 0 ? " tokens of one layer" : " tokens");
  throw Error(ErrorCode::memory, "of " + std::to_string(limits_.blocks) + what +
                                     " that were planned for all sequences " +
                                     std::to_string(blocks_.free()) + " are free, and " +
                                     std::to_string(blocks) +
                                     " are needed; end a sequence or plan for more tokens");
}

void BlockTables::require_room(std::int32_t sequence, std::int64_t first, std::int64_t end) const {
  std::int64_t blocks = 0;
  for (int table = 0; table < limits_.tables(); ++table) {
    const Place place = {sequence, table};
    const std::int64_t row = rows_at(place, first);
    blocks += blocks_for_write(place, row, row + end - first);
    require_tiles(place, row, row + end - first);
  }
  require_blocks(blocks);
}

std::int64_t BlockTables::tiles_for_write(const Place& place, std::int64_t first,
                                          std::int64_t end) const {
  const std::int64_t page = first / kPageTokens;
  if (limits_.tiles == 0 || end / kPageTokens == page) return 0;
  const Table& t = at(place);
  const bool copies = page % kTilePages != 0 && tile_slots(place.table).is_shared(t.tiles.back());
  return tiles_of(end / kPageTokens) - static_cast<std::int64_t>(t.tiles.size()) + (copies ? 1 : 0);
}

void BlockTables::require_tiles(const Place& place, std::int64_t first, std::int64_t end) const {
  const std::int64_t free = tile_slots(place.table).free();
  if (tiles_for_write(place, first, end) <= free) return;
  throw Error(ErrorCode::memory, "the key index has room for " + std::to_string(limits_.tiles) +
                                     " tiles of all sequences, of which " + std::to_string(free) +
                                     " are free; end a sequence or plan for more tokens");
}

void BlockTables::begin_tiles(std::span<const std::int32_t> sequences) {
  if (!parks_tiles()) return;
  IndexTiles& index = tiles_.front();
  index.begin_step();
  for (const std::int32_t sequence : sequences) {
    for (const std::int32_t tile : at(Place{sequence, 0}).tiles) index.use(tile);
  }
}

std::int64_t BlockTables::tiles_for_write(std::int32_t sequence, std::int64_t first,
                                          std::int64_t end) const {
  return tiles_for_write(Place{sequence, 0}, first, end);
}

std::int64_t BlockTables::distinct_tiles(std::span<const std::int32_t> sequences) const {
  std::vector<bool> seen(static_cast<std::size_t>(limits_.tiles));
  for (const std::int32_t sequence : sequences) {
    for (const std::int32_t tile : at(Place{sequence, 0}).tiles) {
      seen[static_cast<std::size_t>(tile)] = true;
    }
  }
  return std::count(seen.begin(), seen.end(), true);
}

void BlockTables::require_slots(std::span<const BatchToken> tokens) const {
  if (!parks_tiles()) return;
  std::vector<std::int32_t> sequences;
  std::int64_t taken = 0;
  for (const BatchToken& token : tokens) {
    sequences.push_back(token.sequence);
    taken += tiles_for_write(token.sequence, token.position, token.count());
  }
  const std::int64_t needed = distinct_tiles(sequences) + taken;
  const std::int64_t slots = tiles_.front().slots();
  if (needed <= slots) return;
  constexpr std::int64_t kTileTokens = std::int64_t{kTilePages} * kPageTokens;
  throw Error(ErrorCode::memory, "the key index of the step's sequences is that of " +
                                     std::to_string(needed * kTileTokens) +
                                     " tokens, and the device has room for " +
                                     std::to_string(slots * kTileTokens) +
                                     "; let fewer of them step together or raise `indexed_tokens`");
}

// Every sequence may share a tile that it has to copy, and begin one.
bool BlockTables::has_slots(std::span<const std::int32_t> sequences, std::int64_t more) const {
  if (!parks_tiles()) return true;
  const std::int64_t taken = tiles_of(pages_of(more)) + std::ssize(sequences);
  return distinct_tiles(sequences) + taken <= tiles_.front().slots();
}

std::vector<std::int64_t> BlockTables::parked_tiles(std::int32_t sequence) const {
  std::vector<std::int64_t> numbers;
  for (std::int64_t number = 0; number < tiles(sequence); ++number) {
    if (tile(sequence, number) == IndexTiles::kNone) numbers.push_back(number);
  }
  return numbers;
}

ParkedTile BlockTables::next_to_park(std::int32_t tile) const {
  const IndexTiles& index = tiles_.front();
  return {tile, index.slot(tile), index.next_place()};
}

ParkedTile BlockTables::next_to_unpark(std::int32_t sequence, std::int64_t number) const {
  const IndexTiles& index = tiles_.front();
  const std::int32_t tile = at(Place{sequence, 0}).tiles[static_cast<std::size_t>(number)];
  return {tile, index.next_slot(), index.place(tile)};
}

// Entries of a parked tile need no note, because no step reads them.
void BlockTables::unpark_tile(const ParkedTile& tile, std::int64_t number) {
  tiles_.front().unpark(tile.tile);
  for (std::int32_t sequence = 0; sequence < limits_.sequences; ++sequence) {
    if (!is_open(sequence) || number >= tiles(sequence)) continue;
    if (at(Place{sequence, 0}).tiles[static_cast<std::size_t>(number)] != tile.tile) continue;
    note({sequence, 0, number, true});
  }
}

// Makes the page in which writing continues at row `rows` private to the sequence, and resident if
// the newest page is pinned.
void BlockTables::begin_page(const Place& place, std::int64_t page, std::int64_t rows,
                             Writing& writing) {
  Table& t = at(place);
  std::int32_t& block = t.blocks[static_cast<std::size_t>(page)];
  const int first_set = this->first_set(place.table);
  std::vector<PageSlots> before;  // in the table's sets
  for (int set = first_set; set < end_set(place.table); ++set) {
    before.push_back(this->page(place.sequence, page, set));
  }
  if (blocks_.is_shared(block)) {
    // Taken before the old block is released, which keeps its device slot if others have it pinned.
    const std::optional<std::int32_t> own = blocks_.take(block);
    const std::int32_t old = block;
    if (t.pinned == page) unpin(place);
    blocks_.release(old);
    block = *own;
    changed(place, page);
    if (limits_.pins_newest) pin(place, page);
    for (std::size_t i = 0; i < device_.size() && !limits_.pins_newest; ++i) {
      device_[i].add(block, before[i].device);
    }
  } else if (limits_.pins_newest && t.pinned != page) {
    if (t.pinned >= 0) unpin(place);
    pin(place, page);
  }
  for (int set = first_set; set < end_set(place.table); ++set) {
    const PageSlots& from = before[static_cast<std::size_t>(set - first_set)];
    PageSlots to = this->page(place.sequence, page, set);
    writing.begun[static_cast<std::size_t>(set)] = to.device;
    if (to.host == from.host && to.device == from.device) continue;
    // A block that keeps its host slot is copied from there.
    if (to.host == from.host) to.host = PageSlots::kNone;
    writing.blocks.push_back({set, from, to, rows});
  }
}

// Gives the sequence private tiles for the pages that become whole.
void BlockTables::own_tiles(const Place& place, std::int64_t first, std::int64_t end,
                            Writing& writing) {
  if (limits_.tiles == 0) return;
  Table& t = at(place);
  IndexTiles& index = tiles_[static_cast<std::size_t>(place.table)];
  for (std::int64_t page = first / kPageTokens; page < end / kPageTokens; ++page) {
    const auto number = static_cast<std::size_t>(page / kTilePages);
    if (number < t.tiles.size() && !index.is_shared(t.tiles[number])) continue;
    const std::optional<std::int32_t> own =
        index.take(t.tiles.empty() ? IndexTiles::kNone : t.tiles.back());
    check(own.has_value(), "no tile where there must be one");
    if (number < t.tiles.size()) {
      writing.tiles.push_back({place.table, index.slot(t.tiles[number]), index.slot(*own)});
      index.release(t.tiles[number]);
      t.tiles[number] = *own;
    } else {
      t.tiles.push_back(*own);
    }
    note({place.sequence, place.table, static_cast<std::int64_t>(number), true});
  }
}

void BlockTables::add_block(const Place& place, std::int32_t after) {
  Table& t = at(place);
  const std::optional<std::int32_t> block = blocks_.take(after);
  check(block.has_value(), "no block where there must be one");
  for (DeviceBlocks& set : device_) set.add(*block, t.blocks.empty() ? -1 : set.slot(after));
  t.blocks.push_back(*block);
  changed(place, static_cast<std::int64_t>(t.blocks.size()) - 1);
}

void BlockTables::pin(const Place& place, std::int64_t page) {
  Table& t = at(place);
  const std::int32_t block = t.blocks[static_cast<std::size_t>(page)];
  const std::int32_t before = page > 0 ? t.blocks[static_cast<std::size_t>(page) - 1] : -1;
  t.pinned = page;
  bool moved = false;
  for (DeviceBlocks& set : device_) {
    moved = set.pin(block, before < 0 ? -1 : set.slot(before)) || moved;
  }
  if (moved) changed_for_all(block, place.table, page);
}

void BlockTables::unpin(const Place& place) {
  Table& t = at(place);
  const std::int64_t page = std::exchange(t.pinned, -1);
  if (page < 0) return;
  const std::int32_t block = t.blocks[static_cast<std::size_t>(page)];
  bool moved = false;
  for (std::size_t set = 0; set < device_.size(); ++set) {
    const std::int32_t slot = device_[set].slot(block);
    if (!device_[set].unpin(block)) continue;
    moved = true;
    if (limits_.reports_lost_slots) lost_.push_back({static_cast<int>(set), block, slot});
  }
  if (moved) changed_for_all(block, place.table, page);
}

void BlockTables::drop_block(std::int32_t block) {
  if (!blocks_.release(block)) return;
  for (DeviceBlocks& set : device_) set.drop(block);
}

void BlockTables::changed_for_all(std::int32_t block, int table, std::int64_t page) {
  for (std::int32_t i = 0; i < limits_.sequences; ++i) {
    if (!is_open(i)) continue;
    const std::vector<std::int32_t>& blocks = at(Place{i, table}).blocks;
    const auto number = static_cast<std::size_t>(page);
    if (number < blocks.size() && blocks[number] == block) changed({i, table}, page);
  }
}

PageSlots BlockTables::page(std::int32_t sequence, std::int64_t number, int set) const {
  const std::int32_t block = table(sequence, set).blocks[static_cast<std::size_t>(number)];
  return {device_of(set).slot(block), block};
}

std::int32_t BlockTables::tile(std::int32_t sequence, std::int64_t number, int set) const {
  const Place place = {sequence, table_of(set)};
  return tile_slots(place.table).slot(at(place).tiles[static_cast<std::size_t>(number)]);
}

std::int32_t BlockTables::parked_place(std::int32_t sequence, std::int64_t number) const {
  return tiles_.front().place(at(Place{sequence, 0}).tiles[static_cast<std::size_t>(number)]);
}

std::int64_t BlockTables::resident_rows(std::int32_t sequence, std::int64_t rows, int set) const {
  std::int64_t resident = 0;
  for (std::int64_t page = 0; page < pages_of(rows); ++page) {
    if (this->page(sequence, page, set).device == PageSlots::kNone) continue;
    resident += std::min<std::int64_t>(kPageTokens, rows - page * kPageTokens);
  }
  return resident;
}

std::vector<LostSlot> BlockTables::take_lost_slots() {
  std::vector<LostSlot> lost = lost_;
  lost_.clear();
  std::erase_if(lost, [&](const LostSlot& at) { return blocks_.references(at.block) == 0; });
  return lost;
}

std::vector<BlockTables::Change> BlockTables::take_changes() {
  if (!lacks_changes_) return std::exchange(changes_, {});
  std::vector<Change> changes = all_places();
  changes_.clear();
  lacks_changes_ = false;
  return changes;
}

void BlockTables::note(const Change& change) noexcept {
  try {
    changes_.push_back(change);
  } catch (const std::bad_alloc&) {
    lacks_changes_ = true;
  }
}

std::vector<BlockTables::Change> BlockTables::all_places() const {
  std::vector<Change> places;
  for (std::int32_t sequence = 0; sequence < limits_.sequences; ++sequence) {
    if (!is_open(sequence)) continue;
    for (int table = 0; table < limits_.tables(); ++table) {
      const Table& of = at(Place{sequence, table});
      for (std::size_t page = 0; page < of.blocks.size(); ++page) {
        places.push_back({sequence, table, static_cast<std::int64_t>(page), false});
      }
      for (std::size_t tile = 0; tile < of.tiles.size(); ++tile) {
        places.push_back({sequence, table, static_cast<std::int64_t>(tile), true});
      }
    }
  }
  return places;
}

}  // namespace sluice
