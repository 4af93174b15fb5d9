// Attention of newest tokens, by `attend_batch` and, one token at a time, by attend(): every
// implementation against the same fp64 oracle.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tests/support/attention_suite.h"

namespace sluice {
namespace {

using testing::around;
using testing::AttentionCase;
using testing::AttentionParity;
using testing::AttentionParityOfShapes;
using testing::BatchRun;
using testing::newest_case;
using testing::only;
using testing::Partial;
using testing::Places;
using testing::Random;
using testing::random_case;

TEST_P(AttentionParityOfShapes, DecodesBatches) {
  for (const int group : {1, 3, 4, 8, 17}) {
    SCOPED_TRACE(::testing::Message() << "group " << group);
    std::vector<AttentionCase> cases;
    for (const std::int64_t count : {1, 127, 128, 129, 64}) {
      cases.push_back(newest_case(random_, shape(2, group), count));
    }
    cases.push_back(newest_case(random_, shape(2, group), random_.integer(130, 1000)));
    // Two tokens on either side of a page's border, and three at the beginning of a sequence.
    cases.push_back(newest_case(random_, shape(2, group), 257, 2));
    cases.push_back(newest_case(random_, shape(2, group), 3, 3));
    std::shuffle(cases.begin(), cases.end(), random_.engine());
    check_batch(cases);
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttentionParityOfShapes, DecodesFromAnyTier) {
  for (const Places places : {Places::device, Places::host, Places::both, Places::either}) {
    // None, part of a page, and whole pages.
    for (const std::int64_t arena_rows : {0, 50, 300}) {
      SCOPED_TRACE(::testing::Message()
                   << "places " << static_cast<int>(places) << " arena " << arena_rows);
      check_batch({newest_case(random_, shape(2, 2), random_.integer(400, 700)),
                   newest_case(random_, shape(2, 2), random_.integer(1, 300))},
                  places, arena_rows);
      if (HasFatalFailure()) return;
    }
  }
}

// A gap of whole pages before a token's own: none, some, or all of them.
PositionGap random_gap(Random& random, std::int64_t position) {
  const std::int64_t pages = position / kPageTokens;
  const std::int64_t first = random.integer(0, 3) == 0 ? 0 : random.integer(0, pages);
  const std::int64_t end = random.integer(0, 3) == 0 ? pages : random.integer(first, pages);
  return {static_cast<std::int32_t>(first * kPageTokens),
          static_cast<std::int32_t>(end * kPageTokens)};
}

TEST_P(AttentionParityOfShapes, LeavesGapsToOthers) {
  for (const bool batch : {true, false}) {
    for (const int group : {1, 4, 9}) {
      SCOPED_TRACE(::testing::Message() << "group " << group);
      std::vector<AttentionCase> cases, outside, inside;
      std::vector<PositionGap> gaps;
      for (const std::int64_t count : {random_.integer(700, 3000), random_.integer(1, 500),
                                       std::int64_t{128}, std::int64_t{257}}) {
        cases.push_back(newest_case(random_, shape(2, group), count));
        gaps.push_back(random_gap(random_, count - 1));
        outside.push_back(around(cases.back(), gaps.back()));
        inside.push_back(only(cases.back(), gaps.back().first, gaps.back().end));
        if (!batch) break;
      }
      if (!GetParam().implementation.batches) return;
      BatchRun run(*backend_, random_, cases);
      check_results(outside, run.attend_around(gaps), batch_rounding());
      if (HasFatalFailure()) return;
      if (backend_->info().compute_tier == Tier::device) continue;
      check_results(inside, run.attend_within(gaps), batch_rounding());
      if (HasFatalFailure()) return;
    }
  }
}

// Windows that end in the middle of a page, at its border, and before the sequence's start.
TEST_P(AttentionParityOfShapes, DecodesThroughAWindow) {
  if (!backend_->info().windows) return;
  for (const std::int64_t window :
       {std::int64_t{1}, random_.integer(2, 127), std::int64_t{128}, std::int64_t{129},
        random_.integer(130, 900), std::int64_t{5000}}) {
    const int group = static_cast<int>(random_.integer(1, 9));
    SCOPED_TRACE(::testing::Message() << "window " << window << " group " << group);
    std::vector<AttentionCase> cases;
    for (const std::int64_t count : {std::int64_t{1}, std::int64_t{128}, std::int64_t{129}, window,
                                     window + 1, random_.integer(1100, 1500)}) {
      cases.push_back(newest_case(random_, shape(2, group), count));
    }
    cases.push_back(newest_case(random_, shape(2, group), 700, 3));
    for (AttentionCase& c : cases) c.window = window;
    check_batch(cases);
    if (HasFatalFailure()) return;
    check_batch(cases, Places::either, 256);
    if (HasFatalFailure()) return;
  }
}

// As many rows are left of all sequences, and then not.
TEST_P(AttentionParityOfShapes, GapsMayMakeLengthsEqual) {
  const std::vector<AttentionCase> cases = {newest_case(random_, shape(2, 4), 900),
                                            newest_case(random_, shape(2, 4), 900 - 256),
                                            newest_case(random_, shape(2, 4), 900 - 256)};
  if (!GetParam().implementation.batches) return;
  BatchRun run(*backend_, random_, cases);
  for (const PositionGap& last : {PositionGap{0, 0}, PositionGap{256, 512}}) {
    const std::vector<PositionGap> gaps = {{128, 384}, {0, 0}, last};
    std::vector<AttentionCase> outside;
    for (std::size_t i = 0; i < cases.size(); ++i) outside.push_back(around(cases[i], gaps[i]));
    check_results(outside, run.attend_around(gaps), batch_rounding());
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttentionParityOfShapes, AttendsForOneTokenOfAnyGroupAndLength) {
  for (const int group : {1, 2, 3, 4, 7, 8, 16}) {
    for (const std::int64_t count : {std::int64_t{1}, std::int64_t{127}, std::int64_t{128},
                                     std::int64_t{129}, random_.integer(2, 1000)}) {
      SCOPED_TRACE(::testing::Message() << "group " << group << " rows " << count);
      AttentionCase c = random_case(random_, shape(2, group), 1, count);
      show_all(c);
      check(c);
      if (HasFatalFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, AttentionParityOfShapes, ::testing::ValuesIn(testing::all_shapes()),
                         testing::parameter_name);

TEST_P(AttentionParity, LongContext) {
  AttentionCase c = random_case(random_, shape(2, 8), 1, 20000);
  // Logits with a deviation of 4, so that few rows dominate and partials differ in weight.
  for (float& value : c.q) value *= 4;
  show_all(c);
  check(c);
}

TEST_P(AttentionParity, LongContextInABatch) {
  std::vector<AttentionCase> cases;
  for (const std::int64_t count : {12000, 1, 4097, 128}) {
    cases.push_back(newest_case(random_, shape(2, 8), count));
    for (float& value : cases.back().q) value *= 4;
  }
  check_batch(cases);
  if (HasFatalFailure()) return;
  check_batch({cases.front()});
}

// The division of work follows the positions, not the room that a launch has for them.
TEST_P(AttentionParity, CapacityChangesNothing) {
  BatchRun run(*backend_, random_,
               {newest_case(random_, shape(2, 4), 700), newest_case(random_, shape(2, 4), 300)});
  const std::vector<Partial> tight = run.attend();
  const std::vector<Partial> wide = run.attend(run.sequences().batch(std::int64_t{1} << 30), 0);
  for (std::size_t i = 0; i < tight.size(); ++i) {
    EXPECT_EQ(tight[i].out, wide[i].out);
    EXPECT_EQ(tight[i].lse, wide[i].lse);
  }
}

TEST_P(AttentionParity, AttendsForOneTokenOfManyHeads) {
  constexpr int kHeads = 50;
  AttentionCase c = random_case(random_, shape(kHeads, 2), 1, random_.integer(260, 400));
  show_all(c);
  check(c);
}

// More tiles than a GPU has workers, most of which serve parts of several heads.
TEST_P(AttentionParity, DecodesManyHeads) {
  constexpr int kHeads = 50;
  const std::int64_t count = random_.integer(260, 400);
  check_batch({newest_case(random_, shape(kHeads, 2), count)});
  if (HasFatalFailure()) return;
  // As many for all, and others.
  check_batch({newest_case(random_, shape(kHeads, 2), count),
               newest_case(random_, shape(kHeads, 2), count)});
  if (HasFatalFailure()) return;
  std::vector<AttentionCase> cases;
  for (int i = 0; i < 12; ++i) {
    const std::int64_t others = random_.integer(0, 2) * random_.integer(1, 250);
    cases.push_back(newest_case(random_, shape(kHeads / 5, 2), 1 + others));
  }
  check_batch(cases);
}

INSTANTIATE_TEST_SUITE_P(, AttentionParity, ::testing::ValuesIn(testing::common_shapes()),
                         testing::parameter_name);

}  // namespace
}  // namespace sluice
