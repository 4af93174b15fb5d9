// Blocks, tiles and places on the device of sequences that grow, fork, are cut short and end.
#include "offload/tiers/block_tables.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "sluice/errors.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

BlockLimits limits(std::int64_t sequences, std::int64_t pages, std::int64_t blocks,
                   std::vector<std::int64_t> resident, bool pins) {
  return {sequences, pages, blocks, blocks, std::move(resident), pins};
}

TEST(BlockTables, ASequenceTakesSlotsInARun) {
  BlockTables tables(limits(1, 10, 10, {4}, true));
  const std::int32_t s = tables.open();
  tables.write(s, 0, 300);
  tables.write(s, 300, 1200);
  for (std::int64_t page = 0; page < 10; ++page) EXPECT_EQ(tables.page(s, page).host, page);
  // The first four stay on the device, and the newest.
  for (std::int64_t page = 0; page < 10; ++page) {
    EXPECT_EQ(tables.page(s, page).device != PageSlots::kNone, page < 4 || page == 9) << page;
  }
  EXPECT_EQ(tables.resident_rows(s, 1200), 4 * 128 + 1200 - 9 * 128);
}

TEST(BlockTables, WhatASequenceBeginsWithFollowsEachOtherIfItCan) {
  BlockTables tables(limits(3, 10, 20, {4}, true));
  const std::int32_t first = tables.open();
  const std::int32_t second = tables.open();
  const std::int32_t third = tables.open();
  tables.write(first, 0, 4 * 128);
  tables.write(second, 0, 4 * 128);
  tables.truncate(first, 0);
  tables.write(third, 0, 6 * 128);
  for (std::int64_t page = 0; page < 6; ++page) EXPECT_EQ(tables.page(third, page).host, 8 + page);
  tables.write(first, 0, 4 * 128);
  for (std::int64_t page = 0; page < 4; ++page) EXPECT_EQ(tables.page(first, page).host, page);
  tables.truncate(second, 0);
  // Slots 4 to 7 and 14 to 19 are free.
  tables.write(second, 0, 8 * 128);
  EXPECT_EQ(tables.page(second, 0).host, 4);
  EXPECT_EQ(tables.page(second, 7).host, 17);
}

TEST(BlockTables, EverySetOfLayersHasItsOwnBlocksOnTheDevice) {
  BlockTables tables(limits(1, 10, 10, {2, 7}, true));
  const std::int32_t s = tables.open();
  tables.write(s, 0, 1200);
  for (std::int64_t page = 0; page < 10; ++page) {
    const PageSlots first = tables.page(s, page, 0);
    const PageSlots second = tables.page(s, page, 1);
    EXPECT_EQ(first.host, second.host);
    EXPECT_EQ(first.device != PageSlots::kNone, page < 2 || page == 9) << page;
    EXPECT_EQ(second.device != PageSlots::kNone, page < 7 || page == 9) << page;
  }
  EXPECT_EQ(tables.resident_rows(s, 1200, 0), 2 * 128 + 1200 - 9 * 128);
  EXPECT_EQ(tables.resident_rows(s, 1200, 1), 7 * 128 + 1200 - 9 * 128);
}

TEST(BlockTables, AForkSharesUntilItWrites) {
  BlockTables tables(limits(3, 10, 20, {20}, true));
  const std::int32_t parent = tables.open();
  tables.write(parent, 0, 300);
  const std::int64_t used = tables.block_slots().used();
  const std::int32_t child = tables.fork(parent);
  EXPECT_EQ(tables.block_slots().used(), used);
  const auto writing = tables.write(child, 300, 301);
  ASSERT_EQ(writing.blocks.size(), 1u);
  EXPECT_EQ(writing.blocks[0].rows, 300 - 256);
  EXPECT_EQ(writing.blocks[0].from.host, tables.page(parent, 2).host);
  EXPECT_EQ(writing.blocks[0].to.host, tables.page(child, 2).host);
  EXPECT_NE(tables.page(parent, 2).host, tables.page(child, 2).host);
  EXPECT_EQ(tables.page(parent, 1).host, tables.page(child, 1).host);
  EXPECT_TRUE(tables.write(parent, 300, 301).blocks.empty()) << "the parent is alone again";
  tables.close(child);
  tables.close(parent);
  EXPECT_EQ(tables.block_slots().used(), 0);
  EXPECT_EQ(tables.tile_slots().used(), 0);
}

TEST(BlockTables, ATileIsCopiedWhereItsSecondPageIsWritten) {
  BlockTables tables(limits(2, 10, 20, {20}, true));
  const std::int32_t parent = tables.open();
  tables.write(parent, 0, 130);
  const std::int32_t child = tables.fork(parent);
  EXPECT_EQ(tables.tile(child, 0), tables.tile(parent, 0));
  const auto writing = tables.write(child, 130, 256);
  ASSERT_EQ(writing.tiles.size(), 1u);
  EXPECT_EQ(writing.tiles[0].from, tables.tile(parent, 0));
  EXPECT_EQ(writing.tiles[0].to, tables.tile(child, 0));
  EXPECT_TRUE(tables.write(parent, 130, 256).tiles.empty());
}

TEST(BlockTables, APoolThatIsFullRefusesAndChangesNothing) {
  BlockTables tables(limits(2, 10, 4, {4}, true));
  const std::int32_t a = tables.open();
  const std::int32_t b = tables.open();
  EXPECT_THROW(tables.open(), Error);
  tables.write(a, 0, 300);
  try {
    tables.write(b, 0, 129);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::memory);
  }
  EXPECT_EQ(tables.pages(b), 0);
  tables.write(b, 0, 128);
  EXPECT_EQ(tables.block_slots().free(), 0);
}

// What every position of a sequence should read, kept apart for each: the oracle of copy-on-write.
class World {
 public:
  World(const BlockLimits& limits, std::uint64_t seed) : tables_(limits), random_(seed) {}

  void step() {
    switch (random_.integer(0, 9)) {
      case 0:
        return open();
      case 1:
        return fork();
      case 2:
        return end();
      case 3:
        return truncate();
      default:
        return write();
    }
  }

  void check() const {
    for (int set = 0; set < tables_.limits().sets(); ++set) check_device(set);
    std::set<std::int32_t> blocks;
    for (const auto& [sequence, rows] : truth_) {
      ASSERT_EQ(tables_.pages(sequence),
                (static_cast<std::int64_t>(rows.size()) + kPageTokens - 1) / kPageTokens);
      for (std::size_t at = 0; at < rows.size(); ++at) {
        const PageSlots place = tables_.page(sequence, static_cast<std::int64_t>(at) / kPageTokens);
        const std::int64_t offset = static_cast<std::int64_t>(at) % kPageTokens;
        ASSERT_EQ(host_.at({place.host, offset}), rows[at]) << "host of " << sequence << ", " << at;
        blocks.insert(place.host);
      }
      for (std::size_t page = 0; page < rows.size() / kPageTokens; ++page) {
        const std::int64_t number = static_cast<std::int64_t>(page) / kTilePages;
        const std::int64_t half = static_cast<std::int64_t>(page) % kTilePages;
        const std::int32_t tile = tables_.tile(sequence, number);
        const std::int32_t place = tables_.parked_place(sequence, number);
        ASSERT_NE(tile == IndexTiles::kNone, place == IndexTiles::kNone) << "in one place";
        ASSERT_EQ(tile != IndexTiles::kNone ? tile_of_.at({tile, half}) : parked_.at({place, half}),
                  rows[(page + 1) * kPageTokens - 1])
            << "tile of " << sequence << ", page " << page;
      }
    }
    ASSERT_EQ(static_cast<std::int64_t>(blocks.size()), tables_.block_slots().used());
    ASSERT_EQ(static_cast<std::int64_t>(truth_.size()), tables_.open_sequences());
  }

 private:
  // What a set of layers has on the device is what was written, and no more than may be.
  void check_device(int set) const {
    std::map<std::int32_t, std::int32_t> blocks;  // by slot
    for (const auto& [sequence, rows] : truth_) {
      for (std::size_t at = 0; at < rows.size(); ++at) {
        const PageSlots place =
            tables_.page(sequence, static_cast<std::int64_t>(at) / kPageTokens, set);
        if (place.device == PageSlots::kNone) continue;
        const std::int64_t offset = static_cast<std::int64_t>(at) % kPageTokens;
        ASSERT_EQ(device_.at({set, place.device, offset}), rows[at]) << sequence << ", " << at;
        const auto [found, is_new] = blocks.emplace(place.device, place.host);
        ASSERT_EQ(found->second, place.host) << "two blocks in one slot of the device";
      }
    }
    const BlockLimits& limits = tables_.limits();
    ASSERT_LE(static_cast<std::int64_t>(blocks.size()),
              limits.resident_blocks[static_cast<std::size_t>(set)] +
                  (limits.pins_newest ? limits.sequences : 0));
  }
  void open() {
    if (tables_.open_sequences() == tables_.limits().sequences) return;
    truth_[tables_.open()] = {};
  }
  std::int32_t any() {
    auto at = truth_.begin();
    std::advance(at, random_.integer(0, static_cast<std::int64_t>(truth_.size()) - 1));
    return at->first;
  }
  void fork() {
    if (truth_.empty() || tables_.open_sequences() == tables_.limits().sequences) return;
    const std::int32_t from = any();
    truth_[tables_.fork(from)] = truth_[from];
  }
  void end() {
    if (truth_.empty() || random_.integer(0, 2) != 0) return;
    const std::int32_t sequence = any();
    tables_.close(sequence);
    truth_.erase(sequence);
  }
  void truncate() {
    if (truth_.empty()) return;
    const std::int32_t sequence = any();
    auto& rows = truth_[sequence];
    rows.resize(
        static_cast<std::size_t>(random_.integer(0, static_cast<std::int64_t>(rows.size()))));
    tables_.truncate(sequence, static_cast<std::int64_t>(rows.size()));
  }
  void write() {
    if (truth_.empty()) return;
    const std::int32_t sequence = any();
    auto& rows = truth_[sequence];
    const auto first = static_cast<std::int64_t>(rows.size());
    const std::int64_t most = tables_.limits().sequence_pages * kPageTokens - first;
    if (most == 0) return;
    const std::int64_t end =
        first + std::min(most, random_.integer(0, 1) == 0 ? random_.integer(1, 3)
                                                          : random_.integer(1, 400));
    BlockTables::Writing writing;
    try {
      tables_.require_room(sequence, first, end);
      bring_index(sequence, first, end);
      writing = tables_.write(sequence, first, end);
    } catch (const Error&) {
      return;
    }
    apply(writing);
    // As a layer does: what the page held already is looked at before anything is written.
    for (int set = 0; set < tables_.limits().sets(); ++set) {
      const std::int32_t begun = writing.begun.at(static_cast<std::size_t>(set));
      for (std::int64_t i = 0; i < first % kPageTokens && begun != PageSlots::kNone; ++i) {
        ASSERT_EQ(device_.at({set, begun, i}),
                  rows[static_cast<std::size_t>(first - first % kPageTokens + i)]);
      }
    }
    for (std::int64_t at = first; at < end; ++at) {
      rows.push_back(++stamp_);
      for (int set = 0; set < tables_.limits().sets(); ++set) {
        put(set, tables_.page(sequence, at / kPageTokens, set), at % kPageTokens, stamp_);
      }
    }
    // The page where writing began is whole on the device if it stays there.
    for (std::int64_t page = first / kPageTokens; page < end / kPageTokens; ++page) {
      tile_of_[{tables_.tile(sequence, page / kTilePages), page % kTilePages}] =
          rows[static_cast<std::size_t>((page + 1) * kPageTokens - 1)];
    }
  }
  // As a pool does before a step.
  void bring_index(std::int32_t sequence, std::int64_t first, std::int64_t end) {
    if (!tables_.parks_tiles()) return;
    tables_.begin_tiles({&sequence, 1});
    const std::vector<std::int64_t> parked = tables_.parked_tiles(sequence);
    const std::int64_t taken = tables_.tiles_for_write(sequence, first, end);
    const auto free = [&] { return tables_.tile_slots().free_slots(); };
    const auto cold = tables_.cold_tiles(std::ssize(parked) + taken - free());
    auto next = cold.begin();
    for (const std::int64_t number : parked) {
      if (free() == 0) park(*next++);
      const ParkedTile from = tables_.next_to_unpark(sequence, number);
      move(parked_, from.place, tile_of_, from.slot);
      tables_.unpark_tile(from, number);
    }
    while (next != cold.end()) park(*next++);
  }
  void park(std::int32_t tile) {
    const ParkedTile to = tables_.next_to_park(tile);
    move(tile_of_, to.slot, parked_, to.place);
    tables_.park_tile(to);
  }
  using Halves = std::map<std::pair<std::int32_t, std::int64_t>, int>;
  // What was there is gone: nobody may read it any more.
  static void move(Halves& from, std::int32_t at, Halves& to, std::int32_t place) {
    for (std::int64_t half = 0; half < kTilePages; ++half) {
      to.erase({place, half});
      const auto found = from.find({at, half});
      if (found == from.end()) continue;
      to[{place, half}] = found->second;
      from.erase(found);
    }
  }
  void put(int set, const PageSlots& place, std::int64_t offset, int stamp) {
    host_[{place.host, offset}] = stamp;
    if (place.device != PageSlots::kNone) device_[{set, place.device, offset}] = stamp;
  }
  void apply(const BlockTables::Writing& writing) {
    for (const BlockCopy& copy : writing.blocks) {
      for (std::int64_t i = 0; i < copy.rows; ++i) {
        const int stamp = host_.at({copy.from.host, i});
        if (copy.from.device != PageSlots::kNone) {
          ASSERT_EQ(device_.at({copy.set, copy.from.device, i}), stamp);
        }
        const bool is_new = copy.to.host != PageSlots::kNone;
        put(copy.set, {copy.to.device, is_new ? copy.to.host : copy.from.host}, i, stamp);
      }
    }
    for (const TileCopy& copy : writing.tiles) {
      for (std::int64_t half = 0; half < kTilePages; ++half) {
        const auto found = tile_of_.find({copy.from, half});
        if (found != tile_of_.end()) tile_of_[{copy.to, half}] = found->second;
      }
    }
  }

  BlockTables tables_;
  testing::Random random_;
  int stamp_ = 0;
  std::map<std::int32_t, std::vector<int>> truth_;                     // [sequence][position]
  std::map<std::pair<std::int32_t, std::int64_t>, int> host_;          // [slot, row]
  std::map<std::tuple<int, std::int32_t, std::int64_t>, int> device_;  // [set, slot, row]
  std::map<std::pair<std::int32_t, std::int64_t>, int> tile_of_;       // [slot, page]: its last row
  std::map<std::pair<std::int32_t, std::int64_t>, int> parked_;        // [place, page]: the same
};

// `slots`: of a sequence and a tile that it copies.
BlockLimits parking(BlockLimits limits, std::int64_t slots) {
  limits.tiles = (limits.blocks + 1) / kTilePages + 2 * limits.sequences;
  limits.tile_slots = slots;
  limits.tile_places = limits.tiles - slots + 1;
  return limits;
}

TEST(BlockTables, ATileIsParkedWhereASequenceWasLeastRecentlyUsed) {
  BlockTables tables(parking(limits(3, 8, 24, {24}, true), 5));
  std::vector<std::int32_t> sequences;
  for (int i = 0; i < 2; ++i) {
    sequences.push_back(tables.open());
    tables.begin_tiles({&sequences.back(), 1});
    tables.write(sequences.back(), 0, 512);  // two tiles
  }
  const std::int32_t third = tables.open();
  tables.begin_tiles({&third, 1});
  EXPECT_EQ(tables.tiles_for_write(third, 0, 512), 2);
  const std::vector<std::int32_t> cold = tables.cold_tiles(1);
  ASSERT_EQ(cold.size(), 1u);
  const ParkedTile to = tables.next_to_park(cold[0]);
  EXPECT_EQ(to.slot, tables.tile(sequences[0], 1));
  tables.park_tile(to);
  EXPECT_EQ(tables.parked_tiles(sequences[0]), std::vector<std::int64_t>{1});
  EXPECT_EQ(tables.parked_place(sequences[0], 1), to.place);
  // A fork shares the parked tile, and a cut gives it back.
  tables.write(third, 0, 512);
  tables.close(third);
  const std::int32_t fork = tables.fork(sequences[0]);
  EXPECT_EQ(tables.parked_tiles(fork), std::vector<std::int64_t>{1});
  tables.truncate(sequences[0], 256);
  EXPECT_EQ(tables.tile_slots().parked(), 1);
  tables.close(fork);
  EXPECT_EQ(tables.tile_slots().parked(), 0);
  EXPECT_TRUE(tables.parked_tiles(sequences[0]).empty());
}

TEST(BlockTables, AStepNeedsTheIndexOfAllItsSequences) {
  BlockTables tables(parking(limits(3, 8, 24, {24}, true), 5));
  const std::int32_t one = tables.open();
  tables.write(one, 0, 1024);  // four tiles
  const std::int32_t fork = tables.fork(one);
  const std::int32_t two = tables.open();
  tables.begin_tiles({&two, 1});
  tables.park_tile(tables.next_to_park(tables.cold_tiles(1).front()));
  tables.write(two, 0, 512);
  const std::vector<std::int32_t> forks = {one, fork};
  const std::vector<std::int32_t> others = {one, two};
  EXPECT_FALSE(tables.has_slots(others, 0));
  const BatchToken of_forks[] = {{one, 1024}, {fork, 1024}};
  tables.require_slots(of_forks);
  const BatchToken of_others[] = {{one, 1024}, {two, 512}};
  try {
    tables.require_slots(of_others);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::memory);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("`indexed_tokens`"));
  }
}

TEST(BlockTables, EverySequenceReadsWhatItWroteWhateverTheOthersDo) {
  const std::uint64_t seed = testing::seed(11);
  SCOPED_TRACE(testing::seed_message(seed));
  for (const BlockLimits& some :
       {limits(4, 12, 30, {30}, true), limits(6, 8, 24, {5, 24}, true),
        limits(5, 9, 45, {0, 20}, true), limits(4, 12, 20, {6, 11}, false),
        limits(3, 5, 15, {0}, false), parking(limits(6, 12, 60, {60}, true), 7),
        parking(limits(4, 9, 36, {5, 24}, true), 8)}) {
    for (std::uint64_t i = 0; i < 20; ++i) {
      World world(some, seed + i);
      for (int step = 0; step < 150; ++step) {
        world.step();
        world.check();
        ASSERT_FALSE(HasFatalFailure()) << "seed " << seed + i << ", step " << step;
      }
    }
  }
}

}  // namespace
}  // namespace sluice
