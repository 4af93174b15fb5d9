// Ragged tables: random sequences of prompts that evict, writes, forks and cuts, against a list of
// the rows that every (sequence, set) has. A page of memory per block stands for the rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <vector>

#include "offload/tiers/block_tables.h"
#include "sluice/errors.h"
#include "tests/support/expect.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using testing::Random;

constexpr int kSets = 3;
constexpr std::int64_t kContext = 900;

BlockLimits limits_of(Random& random) {
  BlockLimits limits;
  limits.sequences = 3;
  limits.sequence_pages = (kContext + kPageTokens - 1) / kPageTokens;
  limits.blocks = random.integer(20, 3 * kSets * limits.sequence_pages);
  limits.tiles = limits.sequences * limits.sequence_pages;
  limits.resident_blocks = {random.integer(0, limits.blocks)};
  limits.pins_newest = random.integer(0, 1) == 1;
  limits.ragged_sets = kSets;
  return limits;
}

// Tables beside what they should say. A row is known by a number of its own.
class World {
 public:
  explicit World(std::uint64_t seed)
      : random_(seed),
        limits_(limits_of(random_)),
        tables_(limits_),
        memory_(static_cast<std::size_t>(limits_.blocks)) {}

  void run() {
    for (int step = 0; step < 60; ++step) {
      do_something();
      if (::testing::Test::HasFailure()) return;
      require_rows();
    }
  }

  std::int64_t evicted() const { return evicted_; }
  std::int64_t refused() const { return refused_; }

 private:
  // Rows at a length; later tokens have one each, up to the next mark.
  struct Mark {
    std::int64_t tokens = 0;
    std::array<std::int64_t, kSets> rows{};
  };
  struct Sequence {
    std::int64_t tokens = 0;
    std::vector<Mark> marks = {{}};
    std::array<std::vector<int>, kSets> rows;
    std::vector<Eviction> prompts;  // only first and end
  };

  void do_something() {
    const std::int64_t kind = random_.integer(0, 9);
    if (sequences_.empty() || (kind == 0 && sequences_.size() < 3)) {
      sequences_.emplace(tables_.open(), Sequence());
      return;
    }
    auto at = std::next(sequences_.begin(),
                        random_.integer(0, static_cast<std::int64_t>(sequences_.size()) - 1));
    if (kind == 1 && sequences_.size() < 3) {
      const Sequence copy = at->second;
      sequences_.emplace(tables_.fork(at->first), copy);
    } else if (kind == 2) {
      tables_.close(at->first);
      sequences_.erase(at);
    } else if (kind <= 4) {
      cut(at->first, at->second);
    } else if (kind <= 6) {
      prompt(at->first, at->second);
    } else {
      write(at->first, at->second);
    }
  }

  void write(std::int32_t number, Sequence& sequence) {
    const std::int64_t room = kContext - sequence.tokens;
    if (room == 0) return;
    const std::int64_t tokens = random_.integer(1, std::min<std::int64_t>(room, 200));
    try {
      apply(tables_.write(number, sequence.tokens, sequence.tokens + tokens));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::memory);
      ++refused_;
      return;
    }
    for (int set = 0; set < kSets; ++set) fill(number, sequence, set, tokens);
    sequence.tokens += tokens;
  }

  // Keeps a random share in every set; gives up where there is no room.
  void prompt(std::int32_t number, Sequence& sequence) {
    const std::int64_t room = kContext - sequence.tokens;
    if (room == 0) return;
    const Sequence before = sequence;
    const std::int64_t tokens = random_.integer(1, room);
    std::vector<std::int64_t> ends;
    try {
      for (int set = 0; set < kSets; ++set) {
        const auto row = static_cast<std::int64_t>(sequence.rows[index(set)].size());
        EXPECT_EQ(tables_.rows(number, sequence.tokens, set), row);
        const std::int64_t kept = random_.integer(1, tokens);
        apply(tables_.write_rows(number, set, row, row + kept));
        fill(number, sequence, set, kept);
        ends.push_back(row + kept);
      }
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::memory);
      ++refused_;
      sequence = before;
      return tables_.truncate(number, before.tokens);
    }
    const std::int64_t end = sequence.tokens + tokens;
    tables_.evict(number, sequence.tokens, end, ends);
    bool lost = false;
    for (int set = 0; set < kSets; ++set) {
      lost = lost || sequence.rows[index(set)].size() <
                         before.rows[index(set)].size() + static_cast<std::size_t>(tokens);
    }
    if (lost) {
      sequence.prompts.push_back({sequence.tokens, end, {}});
      ++evicted_;
    }
    EXPECT_EQ(tables_.has_evicted(number), !sequence.prompts.empty());
    sequence.tokens = end;
    if (!lost) return;
    Mark& mark = sequence.marks.emplace_back();
    mark.tokens = end;
    std::copy(ends.begin(), ends.end(), mark.rows.begin());
  }

  void cut(std::int32_t number, Sequence& sequence) {
    const std::int64_t length = random_.integer(0, sequence.tokens);
    const bool inside =
        std::any_of(sequence.prompts.begin(), sequence.prompts.end(),
                    [&](const Eviction& p) { return p.first < length && length < p.end; });
    EXPECT_EQ(tables_.evicting_prompt(number, length).has_value(), inside);
    if (inside) return;
    tables_.truncate(number, length);
    while (!sequence.prompts.empty() && sequence.prompts.back().end > length) {
      sequence.prompts.pop_back();
    }
    while (sequence.marks.back().tokens > length) sequence.marks.pop_back();
    const Mark& mark = sequence.marks.back();
    for (int set = 0; set < kSets; ++set) {
      sequence.rows[index(set)].resize(index(mark.rows[index(set)] + length - mark.tokens));
    }
    sequence.tokens = length;
  }

  void apply(const BlockTables::Writing& writing) {
    for (const BlockCopy& copy : writing.blocks) {
      if (copy.to.host == PageSlots::kNone) continue;
      for (std::int64_t row = 0; row < copy.rows; ++row) {
        page(copy.to.host)[index(row)] = page(copy.from.host)[index(row)];
      }
    }
  }

  void fill(std::int32_t number, Sequence& sequence, int set, std::int64_t count) {
    std::vector<int>& rows = sequence.rows[index(set)];
    for (std::int64_t i = 0; i < count; ++i) {
      const auto row = static_cast<std::int64_t>(rows.size());
      page(tables_.page(number, row / kPageTokens, set).host)[index(row % kPageTokens)] = ++last_;
      rows.push_back(last_);
    }
  }

  void require_rows() {
    std::set<std::int32_t> used;
    std::map<std::int32_t, std::int32_t> devices;  // slot: block
    for (const auto& [number, sequence] : sequences_) {
      for (int set = 0; set < kSets; ++set) {
        const std::vector<int>& rows = sequence.rows[index(set)];
        const auto count = static_cast<std::int64_t>(rows.size());
        ASSERT_EQ(tables_.rows(number, sequence.tokens, set), count);
        ASSERT_EQ(tables_.pages(number, set), (count + kPageTokens - 1) / kPageTokens);
        for (std::int64_t row = 0; row < count; ++row) {
          const PageSlots slots = tables_.page(number, row / kPageTokens, set);
          ASSERT_EQ(page(slots.host)[index(row % kPageTokens)], rows[index(row)]);
          used.insert(slots.host);
          if (slots.device == PageSlots::kNone) continue;
          const auto [place, added] = devices.emplace(slots.device, slots.host);
          ASSERT_EQ(place->second, slots.host) << "two blocks in one device slot";
        }
        for (std::int64_t page = 0; page < count / kPageTokens; ++page) {
          ASSERT_NO_THROW(tables_.tile(number, page / kTilePages, set));
        }
      }
    }
    ASSERT_EQ(tables_.block_slots().used(), static_cast<std::int64_t>(used.size()))
        << "blocks are the pages that are left, and nothing else";
  }

  static std::size_t index(std::int64_t number) { return static_cast<std::size_t>(number); }
  std::array<int, kPageTokens>& page(std::int32_t block) { return memory_[index(block)]; }

  Random random_;
  BlockLimits limits_;
  BlockTables tables_;
  std::vector<std::array<int, kPageTokens>> memory_;  // by block
  std::map<std::int32_t, Sequence> sequences_;
  int last_ = 0;
  std::int64_t evicted_ = 0;
  std::int64_t refused_ = 0;
};

TEST(RaggedTables, HaveTheRowsThatWereKept) {
  const std::uint64_t seed = testing::seed(1);
  std::int64_t evicted = 0;
  std::int64_t refused = 0;
  for (std::uint64_t i = 0; i < 150 && !::testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE(testing::seed_message(seed + i));
    World world(seed + i);
    world.run();
    evicted += world.evicted();
    refused += world.refused();
  }
  EXPECT_GT(evicted, 300);
  EXPECT_GT(refused, 50);
}

// The sets of a token that is decoded write to blocks of their own.
TEST(RaggedTables, CountABlockOfEverySetForABatch) {
  BlockLimits limits;
  limits.sequences = 2;
  limits.sequence_pages = 4;
  limits.blocks = 5;
  limits.ragged_sets = 2;
  BlockTables tables(limits);
  const std::int32_t a = tables.open();
  const std::int32_t b = tables.open();
  tables.write(a, 0, 128);
  tables.write(b, 0, 127);
  EXPECT_EQ(tables.block_slots().free(), 1);
  const std::array<BatchToken, 1> of_b = {{{b, 127}}};
  EXPECT_NO_THROW(tables.require_blocks(of_b));
  const std::array<BatchToken, 1> of_a = {{{a, 128}}};
  EXPECT_THROW(tables.require_blocks(of_a), Error);
  EXPECT_THROW(tables.write(a, 128, 129), Error);
  EXPECT_EQ(tables.block_slots().free(), 1) << "nothing has changed";
}

}  // namespace
}  // namespace sluice
