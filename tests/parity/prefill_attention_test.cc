// Attention of chunks of a prompt by `attend`, partials that are merged, and numbers that
// are hard to add up, these in decode steps as well: every implementation against the same fp64
// oracle.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "sluice/half.h"
#include "tests/support/attention_suite.h"

namespace sluice {
namespace {

using testing::AttentionCase;
using testing::AttentionParity;
using testing::AttentionParityOfShapes;
using testing::AttentionRun;
using testing::BatchRun;
using testing::Partial;
using testing::Random;
using testing::random_case;

TEST_P(AttentionParityOfShapes, PrefillsChunksUnderACausalMask) {
  for (const int group : {1, 2, 4, 8, 16, 5}) {
    const std::int64_t tokens = random_.integer(2, 300 / group);
    const std::int64_t before = random_.integer(0, 200);
    SCOPED_TRACE(::testing::Message()
                 << "group " << group << " tokens " << tokens << " rows before " << before);
    AttentionCase c = random_case(random_, shape(2, group), tokens, before + tokens);
    c.first_row_position = random_.integer(0, 1 << 20);
    c.first_query_position = c.first_row_position + before;
    check(c);
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttentionParityOfShapes, SeesThroughAWindow) {
  if (!backend_->info().windows) return;
  for (const int group : {1, 4, 5}) {
    for (const std::int64_t tokens : {std::int64_t{3}, random_.integer(30, 200 / group)}) {
      const std::int64_t before = random_.integer(0, 250);
      for (const std::int64_t window : {random_.integer(1, 60), random_.integer(61, 200)}) {
        SCOPED_TRACE(::testing::Message() << "group " << group << " tokens " << tokens
                                          << " rows before " << before << " window " << window);
        const std::int64_t count = before + tokens;
        AttentionCase c = random_case(random_, shape(1, group), tokens, count);
        c.first_row_position = random_.integer(0, 1 << 20);
        c.first_query_position = c.first_row_position + before;
        c.window = window;
        check(c);
        if (HasFatalFailure()) return;
        // Attends in parts, because the window may hide a whole one.
        AttentionRun run(*backend_, c);
        run.attend({before, count}, false);
        run.attend({0, before / 3}, true);
        run.attend({before / 3, before}, true);
        testing::expect_parity(c, run.result(), rounding());
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Numbers that grow by any steps, from none of the rows to more than there are.
std::vector<std::int32_t> random_steps(Random& random, std::int64_t tokens, std::int64_t most) {
  std::vector<std::int32_t> seen;
  std::int64_t now = random.integer(-5, 20);
  while (static_cast<std::int64_t>(seen.size()) < tokens) {
    const std::int64_t run = random.integer(1, std::max<std::int64_t>(1, tokens / 2));
    for (std::int64_t i = 0; i < run && static_cast<std::int64_t>(seen.size()) < tokens; ++i) {
      seen.push_back(static_cast<std::int32_t>(std::max<std::int64_t>(0, now)));
    }
    now += random.integer(0, most);
  }
  return seen;
}

TEST_P(AttentionParityOfShapes, TokensSeeWhatTheyAreSaidToSee) {
  for (const int group : {1, 4, 5}) {
    for (const std::int64_t tokens : {std::int64_t{2}, random_.integer(30, 500 / group)}) {
      SCOPED_TRACE(::testing::Message() << "group " << group << " tokens " << tokens);
      AttentionCase c = random_case(random_, shape(2, group), tokens, 400);
      c.seen = random_steps(random_, tokens, 300);
      check(c);
      AttentionRun run(*backend_, c);
      run.attend({0, 130}, false);
      run.attend({130, 256}, true);
      run.attend({256, 400}, true);
      testing::expect_parity(c, run.result(), rounding());
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(AttentionParityOfShapes, MergedPartialsEqualTheWhole) {
  for (const std::int64_t tokens : {1, 40}) {
    AttentionCase c = random_case(random_, shape(2, 4), tokens, 900);
    c.first_query_position = 870;
    AttentionRun run(*backend_, c);
    std::int64_t begin = 0;
    while (begin < 900) {
      const std::int64_t end = begin + random_.integer(1, 400);
      run.attend({begin, end}, begin > 0);
      begin = end;
    }
    testing::expect_parity(c, run.result(), rounding());
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(, AttentionParityOfShapes, ::testing::ValuesIn(testing::all_shapes()),
                         testing::parameter_name);

TEST_P(AttentionParity, LongContextOfAChunk) {
  AttentionCase c = random_case(random_, shape(1, 4), 9, 5000);
  c.first_query_position = 4991;
  check(c);
}

TEST_P(AttentionParity, LongContextInSteps) {
  AttentionCase c = random_case(random_, shape(1, 4), 70, 5000);
  for (int t = 0; t < 70; ++t) c.seen.push_back(t < 20 ? 0 : t < 45 ? 1033 : 4990);
  check(c);
}

TEST_P(AttentionParity, EmptyPartialIsZeroWithNoWeight) {
  AttentionCase c = random_case(random_, shape(2, 2), 3, 5);
  c.first_row_position = 2;  // the first two tokens see nothing
  AttentionRun run(*backend_, c);
  run.attend();
  const Partial partial = run.result();
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(partial.lse[i], -std::numeric_limits<float>::infinity()) << i;
  }
  for (std::size_t i = 0; i < 8 * static_cast<std::size_t>(c.shape.head_dim); ++i) {
    ASSERT_EQ(partial.out[i], 0.0f) << i;
  }
  testing::expect_parity(c, partial, rounding());
}

TEST_P(AttentionParity, MergingNothingChangesNothing) {
  for (const std::int64_t tokens : {1, 30}) {
    AttentionCase c = random_case(random_, shape(1, 4), tokens, 200);
    c.first_query_position = 200;
    AttentionRun run(*backend_, c);
    run.attend();
    const Partial before = run.result();
    run.attend({200, 200}, true);
    const Partial after = run.result();
    EXPECT_EQ(before.out, after.out);
    EXPECT_EQ(before.lse, after.lse);
  }
}

TEST_P(AttentionParity, MergesIntoAnEmptyPartial) {
  for (const std::int64_t tokens : {1, 30}) {
    AttentionCase c = random_case(random_, shape(1, 4), tokens, 300);
    c.first_query_position = 300;
    AttentionRun run(*backend_, c);
    run.attend({0, 0});
    run.attend({0, 300}, true);
    testing::expect_parity(c, run.result(), rounding());
  }
}

TEST_P(AttentionParity, HugeLogitsDoNotOverflow) {
  for (const std::int64_t tokens : {1, 40}) {
    AttentionCase c = random_case(random_, shape(2, 4), tokens, 400);
    // Exact in bf16, so that a logit of 10,000 is not off by more than its own rounding.
    for (float& value : c.q) value = bf16_to_float(float_to_bf16(value * 3000));
    c.first_query_position = 380;
    AttentionRun run(*backend_, c);
    run.attend();
    if (rounds_codes()) {
      // A logit of 10,000 is off by the rounding of its key, which is several nats.
      testing::expect_near_lse(c, run.result(), 2 * testing::kBf16Step);
    } else {
      testing::expect_parity(c, run.result(), {0, rounding().weights});
    }
    if (HasFatalFailure()) return;
    c.first_query_position = 400 - tokens;
    if (tokens == 1) {
      check_results({c}, BatchRun(*backend_, random_, {c}).attend(), {0, batch_rounding().weights});
    }
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttentionParity, EnormousKeysDoNotHideOthers) {
  for (const std::int64_t tokens : {1, 40}) {
    AttentionCase c = random_case(random_, shape(2, 4), tokens, 300);
    for (float& value : c.q) value = std::abs(value) + 0.5f;
    c.first_query_position = 300;
    // The most negative key there is: logits of about -10^38 (-10^4 in f16), or -inf once summed.
    const float lowest = GetParam().format == DType::f16 ? -65504.0f : -0x1.fep127f;
    for (std::int64_t row = 0; row < 290; ++row) set_row_element(c, 0, row, 3, lowest);
    for (std::int64_t row = 10; row < 300; ++row) set_row_element(c, 1, row, 0, lowest);
    check(c);
    if (HasFatalFailure()) return;
    if (tokens == 1) check_in_batch(c);
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttentionParity, NaNStaysNaNAndStaysInItsHead) {
  for (const std::int64_t tokens : {1, 40}) {
    AttentionCase c = random_case(random_, shape(2, 4), tokens, 300);
    c.first_query_position = 300;
    set_row_element(c, 0, 150, 7, std::numeric_limits<float>::quiet_NaN());
    check(c);
    if (HasFatalFailure()) return;
    if (tokens == 1) check_in_batch(c);
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(, AttentionParity, ::testing::ValuesIn(testing::common_shapes()),
                         testing::parameter_name);

}  // namespace
}  // namespace sluice
