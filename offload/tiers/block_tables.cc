#include "offload/tiers/block_tables.h"

#include <algorithm>
#include <map>
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
  for (const std::int64_t resident : limits.resident_blocks) {
    sets.emplace_back(limits.blocks, resident, limits.pins_newest ? limits.sequences : 0);
  }
  return sets;
}

}  // namespace

BlockTables::BlockTables(const BlockLimits& limits)
    : limits_(limits),
      blocks_(limits.blocks),
      device_(device_blocks(limits)),
      tiles_(limits.tiles),
      sequences_(static_cast<std::size_t>(limits.sequences)) {}

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
  *found = Sequence();
  found->is_open = true;
  return static_cast<std::int32_t>(found - sequences_.begin());
}

std::int32_t BlockTables::fork(std::int32_t sequence) {
  const std::int32_t child = open();
  const Sequence& from = at(sequence);
  Sequence& to = at(child);
  to = from;
  for (const std::int32_t block : to.blocks) blocks_.share(block);
  for (const std::int32_t tile : to.tiles) tiles_.share(tile);
  if (to.pinned >= 0) pin(child, to.pinned);
  for (std::int64_t page = 0; page < pages(child); ++page) changed(child, page);
  for (std::size_t tile = 0; tile < to.tiles.size(); ++tile) {
    changes_.push_back({child, static_cast<std::int64_t>(tile), true});
  }
  return child;
}

void BlockTables::close(std::int32_t sequence) noexcept {
  truncate(sequence, 0);
  at(sequence).is_open = false;
}

void BlockTables::truncate(std::int32_t sequence, std::int64_t length) {
  Sequence& s = at(sequence);
  const auto pages = static_cast<std::size_t>(pages_of(length));
  const auto tiles = static_cast<std::size_t>(tiles_of(length / kPageTokens));
  if (s.pinned >= static_cast<std::int64_t>(pages)) unpin(sequence);
  for (; s.blocks.size() > pages; s.blocks.pop_back()) drop_block(s.blocks.back());
  for (; s.tiles.size() > tiles; s.tiles.pop_back()) tiles_.release(s.tiles.back());
}

BlockTables::Writing BlockTables::write(std::int32_t sequence, std::int64_t first,
                                        std::int64_t end) {
  Sequence& s = at(sequence);
  check(first < end && pages_of(end) <= limits_.sequence_pages, "tokens beyond what was planned");
  check(pages_of(first) == pages(sequence), "tokens that do not follow those that there are");
  require_room(sequence, first, end);
  Writing writing;
  writing.begun.assign(device_.size(), PageSlots::kNone);
  if (first % kPageTokens != 0) {
    begin_page(sequence, first / kPageTokens, first % kPageTokens, writing);
  }
  const std::int64_t last = pages_of(end) - 1;
  if (limits_.pins_newest && s.pinned >= 0 && s.pinned != last) unpin(sequence);
  while (pages(sequence) <= last) {
    add_block(sequence, s.blocks.empty() ? blocks_.run_of(last + 1) - 1 : s.blocks.back());
  }
  if (limits_.pins_newest && s.pinned < 0) pin(sequence, last);
  own_tiles(sequence, first, end, writing);
  return writing;
}

std::int64_t BlockTables::own_blocks(std::int32_t sequence) const {
  const std::vector<std::int32_t>& blocks = at(sequence).blocks;
  return std::count_if(blocks.begin(), blocks.end(),
                       [&](std::int32_t block) { return !blocks_.is_shared(block); });
}

std::int64_t BlockTables::blocks_for_write(std::int32_t sequence, std::int64_t first,
                                           std::int64_t end) const {
  const Sequence& s = at(sequence);
  const auto page = static_cast<std::size_t>(first / kPageTokens);
  const bool copies = first % kPageTokens != 0 && blocks_.is_shared(s.blocks[page]);
  return pages_of(end) - static_cast<std::int64_t>(s.blocks.size()) + (copies ? 1 : 0);
}

void BlockTables::require_blocks(std::span<const BatchToken> tokens) const {
  std::int64_t blocks = 0;
  std::map<std::int32_t, std::int32_t> writers;  // of a block
  for (const BatchToken& token : tokens) {
    blocks += blocks_for_write(token.sequence, token.position, token.position + 1);
    if (token.position % kPageTokens == 0) continue;
    const auto page = static_cast<std::size_t>(token.position / kPageTokens);
    const std::int32_t block = at(token.sequence).blocks[page];
    // If all sharers of a block write to it, the last one keeps it and needs no copy.
    if (blocks_.is_shared(block) && ++writers[block] == blocks_.references(block)) --blocks;
  }
  require_blocks(blocks);
}

void BlockTables::require_blocks(std::int64_t blocks) const {
  if (blocks <= blocks_.free()) return;
  throw Error(ErrorCode::memory,
              "of " + std::to_string(limits_.blocks) + " blocks of " + std::to_string(kPageTokens) +
                  " tokens that were planned for all sequences " + std::to_string(blocks_.free()) +
                  " are free, and " + std::to_string(blocks) +
                  " are needed; end a sequence or plan for more tokens");
}

void BlockTables::require_room(std::int32_t sequence, std::int64_t first, std::int64_t end) const {
  require_blocks(blocks_for_write(sequence, first, end));
  const std::int64_t page = first / kPageTokens;
  if (limits_.tiles == 0 || end / kPageTokens == page) return;
  const Sequence& s = at(sequence);
  std::int64_t tiles = tiles_of(end / kPageTokens) - static_cast<std::int64_t>(s.tiles.size());
  if (page % kTilePages != 0 && tiles_.is_shared(s.tiles.back())) ++tiles;
  if (tiles <= tiles_.free()) return;
  throw Error(ErrorCode::memory, "the key index has room for " + std::to_string(limits_.tiles) +
                                     " tiles of all sequences, of which " +
                                     std::to_string(tiles_.free()) +
                                     " are free; end a sequence or plan for more tokens");
}

// Makes the page in which writing continues at row `rows` private to the sequence, and resident if
// the newest page is pinned.
void BlockTables::begin_page(std::int32_t sequence, std::int64_t page, std::int64_t rows,
                             Writing& writing) {
  Sequence& s = at(sequence);
  std::int32_t& block = s.blocks[static_cast<std::size_t>(page)];
  std::vector<PageSlots> before;
  for (int set = 0; set < limits_.sets(); ++set) before.push_back(this->page(sequence, page, set));
  if (blocks_.is_shared(block)) {
    // Taken before the old block is released, which keeps its device slot if others have it pinned.
    const std::optional<std::int32_t> own = blocks_.take(block);
    const std::int32_t old = block;
    if (s.pinned == page) unpin(sequence);
    blocks_.release(old);
    block = *own;
    changed(sequence, page);
    if (limits_.pins_newest) pin(sequence, page);
    for (std::size_t set = 0; set < device_.size() && !limits_.pins_newest; ++set) {
      device_[set].add(block, before[set].device);
    }
  } else if (limits_.pins_newest && s.pinned != page) {
    if (s.pinned >= 0) unpin(sequence);
    pin(sequence, page);
  }
  for (int set = 0; set < limits_.sets(); ++set) {
    const PageSlots& from = before[static_cast<std::size_t>(set)];
    PageSlots to = this->page(sequence, page, set);
    writing.begun[static_cast<std::size_t>(set)] = to.device;
    if (to.host == from.host && to.device == from.device) continue;
    // A block that keeps its host slot is copied from there.
    if (to.host == from.host) to.host = PageSlots::kNone;
    writing.blocks.push_back({set, from, to, rows});
  }
}

// Gives the sequence private tiles for the pages that become whole.
void BlockTables::own_tiles(std::int32_t sequence, std::int64_t first, std::int64_t end,
                            Writing& writing) {
  if (limits_.tiles == 0) return;
  Sequence& s = at(sequence);
  for (std::int64_t page = first / kPageTokens; page < end / kPageTokens; ++page) {
    const auto number = static_cast<std::size_t>(page / kTilePages);
    if (number < s.tiles.size() && !tiles_.is_shared(s.tiles[number])) continue;
    const std::optional<std::int32_t> own = tiles_.take(s.tiles.empty() ? -1 : s.tiles.back());
    check(own.has_value(), "no tile where there must be one");
    if (number < s.tiles.size()) {
      writing.tiles.push_back({s.tiles[number], *own});
      tiles_.release(s.tiles[number]);
      s.tiles[number] = *own;
    } else {
      s.tiles.push_back(*own);
    }
    changes_.push_back({sequence, static_cast<std::int64_t>(number), true});
  }
}

void BlockTables::add_block(std::int32_t sequence, std::int32_t after) {
  Sequence& s = at(sequence);
  const std::optional<std::int32_t> block = blocks_.take(after);
  check(block.has_value(), "no block where there must be one");
  for (DeviceBlocks& set : device_) set.add(*block, s.blocks.empty() ? -1 : set.slot(after));
  s.blocks.push_back(*block);
  changed(sequence, pages(sequence) - 1);
}

void BlockTables::pin(std::int32_t sequence, std::int64_t page) {
  Sequence& s = at(sequence);
  const std::int32_t block = s.blocks[static_cast<std::size_t>(page)];
  const std::int32_t before = page > 0 ? s.blocks[static_cast<std::size_t>(page) - 1] : -1;
  s.pinned = page;
  bool moved = false;
  for (DeviceBlocks& set : device_) {
    moved = set.pin(block, before < 0 ? -1 : set.slot(before)) || moved;
  }
  if (moved) changed_for_all(block, page);
}

void BlockTables::unpin(std::int32_t sequence) {
  Sequence& s = at(sequence);
  const std::int64_t page = std::exchange(s.pinned, -1);
  if (page < 0) return;
  const std::int32_t block = s.blocks[static_cast<std::size_t>(page)];
  bool moved = false;
  for (std::size_t set = 0; set < device_.size(); ++set) {
    const std::int32_t slot = device_[set].slot(block);
    if (!device_[set].unpin(block)) continue;
    moved = true;
    if (limits_.reports_lost_slots) lost_.push_back({static_cast<int>(set), block, slot});
  }
  if (moved) changed_for_all(block, page);
}

void BlockTables::drop_block(std::int32_t block) {
  if (!blocks_.release(block)) return;
  for (DeviceBlocks& set : device_) set.drop(block);
}

void BlockTables::changed_for_all(std::int32_t block, std::int64_t page) {
  for (std::int32_t i = 0; i < limits_.sequences; ++i) {
    const Sequence& s = sequences_[static_cast<std::size_t>(i)];
    const auto number = static_cast<std::size_t>(page);
    if (s.is_open && number < s.blocks.size() && s.blocks[number] == block) changed(i, page);
  }
}

PageSlots BlockTables::page(std::int32_t sequence, std::int64_t number, int set) const {
  const std::int32_t block = at(sequence).blocks[static_cast<std::size_t>(number)];
  return {device_[static_cast<std::size_t>(set)].slot(block), block};
}

std::int32_t BlockTables::tile(std::int32_t sequence, std::int64_t number) const {
  return at(sequence).tiles[static_cast<std::size_t>(number)];
}

std::int64_t BlockTables::resident_rows(std::int32_t sequence, std::int64_t tokens, int set) const {
  std::int64_t rows = 0;
  for (std::int64_t page = 0; page < pages_of(tokens); ++page) {
    if (this->page(sequence, page, set).device == PageSlots::kNone) continue;
    rows += std::min<std::int64_t>(kPageTokens, tokens - page * kPageTokens);
  }
  return rows;
}

std::vector<LostSlot> BlockTables::take_lost_slots() {
  std::vector<LostSlot> lost = std::exchange(lost_, {});
  std::erase_if(lost, [&](const LostSlot& at) { return blocks_.references(at.block) == 0; });
  return lost;
}

std::vector<BlockTables::Change> BlockTables::take_changes() { return std::exchange(changes_, {}); }

}  // namespace sluice
