// That the reference backend reports what it reads: every row once, and no other.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <vector>

#include "cpu/reference/backend.h"
#include "cpu/reference/reads.h"
#include "tests/support/paged_cases.h"
#include "tests/support/watched_device.h"

namespace sluice::cpu {
namespace {

using testing::AttentionCase;
using testing::newest_case;

constexpr KvShape kShape{1, 4, 2, 32, DType::bf16};

class ReadsOfRows : public ReferenceQueue {
 public:
  using ReferenceQueue::ReferenceQueue;

  void on_read(const std::byte* row, std::size_t bytes) override {
    ++reads[row];
    sizes_agree = sizes_agree && bytes == kShape.row_bytes();
  }

  std::map<const std::byte*, int> reads;
  bool sizes_agree = true;
};

class RowReads : public ::testing::Test {
 protected:
  // One read of each row that the sequence's tokens from `first` to before `end` have.
  static void expect(std::map<const std::byte*, int>& reads,
                     const testing::PagedSequences& sequences, std::size_t number,
                     std::int64_t first, std::int64_t end) {
    const PagedRows rows = sequences.rows();
    for (int head = 0; head < kShape.kv_heads; ++head) {
      for (std::int64_t at = first; at < end; ++at) {
        ++reads[rows.row(sequences.sequence(number), head, at,
                         static_cast<std::int64_t>(kShape.row_bytes()))];
      }
    }
  }

  const std::uint64_t seed_ = testing::seed(5);
  testing::Random random_{seed_};
  testing::WatchedDevice<ReadsOfRows> backend_;
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};
};

TEST_F(RowReads, ABatchReadsWhatEachTokenSees) {
  const std::vector<AttentionCase> cases = {newest_case(random_, kShape, 300),
                                            newest_case(random_, kShape, 130, 2)};
  testing::BatchRun run(backend_, random_, cases);
  run.attend();
  std::map<const std::byte*, int> expected;
  expect(expected, run.sequences(), 0, 0, 300);
  expect(expected, run.sequences(), 1, 0, 129);
  expect(expected, run.sequences(), 1, 0, 130);
  EXPECT_EQ(backend_.watch().reads, expected);
  EXPECT_TRUE(backend_.watch().sizes_agree);
}

TEST_F(RowReads, AChunkReadsWhatItsLastTokenSees) {
  AttentionCase c = newest_case(random_, kShape, 200, 40);
  c.first_query_position -= 10;
  testing::AttentionRun run(backend_, c);
  run.attend();
  EXPECT_EQ(backend_.watch().reads.size(), std::size_t{2 * 190});
  EXPECT_TRUE(std::all_of(backend_.watch().reads.begin(), backend_.watch().reads.end(),
                          [](const auto& read) { return read.second == 1; }));
}

// Positions 3, 140 and 141 of the first KV head, 3 of the second.
class RowReadsOfChosen : public RowReads {
 protected:
  static void expect_chosen(std::map<const std::byte*, int>& reads,
                            const testing::PagedSequences& sequences) {
    for (const auto& [head, at] : {std::pair{0, 3}, {0, 140}, {0, 141}, {1, 3}}) {
      ++reads[sequences.rows().row(sequences.sequence(0), head, at,
                                   static_cast<std::int64_t>(kShape.row_bytes()))];
    }
  }

  const std::vector<AttentionCase> cases_ = {newest_case(random_, kShape, 300)};
  testing::PagedSequences sequences_{backend_, random_, cases_, testing::Places::either};
  std::vector<std::int32_t> positions_ = {3, 140, 141, 3, -1, -1};
};

TEST_F(RowReadsOfChosen, SelectedRowsAndTheNewest) {
  const testing::BatchQueries queries(backend_, cases_);
  std::vector<HeadSelection> heads = {{.count = 3}, {.count = 1}};
  AttendSelectedParams p;
  queries.put(p);
  p.batch = sequences_.batch();
  p.rows = sequences_.rows();
  p.selected = {positions_.data(), 3, heads.data()};
  p.scale = 1.0f;
  backend_.queue->run(p);
  std::map<const std::byte*, int> expected;
  expect_chosen(expected, sequences_);
  expect(expected, sequences_, 0, 256, 300);
  EXPECT_EQ(backend_.watch().reads, expected);
  EXPECT_TRUE(backend_.watch().sizes_agree);
}

TEST_F(RowReadsOfChosen, GatheredRows) {
  std::vector<std::byte> to(2 * 3 * kShape.row_bytes());
  GatherParams p;
  p.shape = kShape;
  p.rows = sequences_.rows();
  p.sequence = sequences_.sequence(0);
  p.positions = positions_.data();
  p.count = 3;
  p.to = to.data();
  p.to_rows = 3;
  backend_.queue->run(p);
  std::map<const std::byte*, int> expected;
  for (const int head : {0, 1}) {
    for (const int at : {3, 140, 141}) {
      ++expected[p.rows.row(p.sequence, head, at, static_cast<std::int64_t>(kShape.row_bytes()))];
    }
  }
  EXPECT_EQ(backend_.watch().reads, expected);
}

}  // namespace
}  // namespace sluice::cpu
