#include "tools/remaining_time.h"

#include <gtest/gtest.h>

#include "tests/support/random.h"

namespace sluice::tools {
namespace {

double seconds_of(double tokens, double a, double b) { return a * tokens + b * tokens * tokens; }

TEST(RemainingTimeTest, FindsWhatAPromptTakesWhoseTokensAttendToAllBefore) {
  testing::Random random(testing::seed(20261129));
  for (int trial = 0; trial < 100; ++trial) {
    const double a = 1e-6 * static_cast<double>(random.integer(1, 10000));
    const double b = 1e-9 * static_cast<double>(random.integer(0, 1000));
    RemainingTime remaining;
    for (int tokens = 512; tokens <= 8192; tokens += 512) {
      remaining.note(tokens, seconds_of(tokens, a, b));
    }
    const double expected = seconds_of(100000, a, b) - seconds_of(8192, a, b);
    ASSERT_TRUE(remaining.until(100000));
    EXPECT_NEAR(*remaining.until(100000), expected, 1e-6 * expected);
    EXPECT_EQ(*remaining.until(8192), 0.0);
  }
}

TEST(RemainingTimeTest, SaysNothingBeforeTwoMeasurements) {
  RemainingTime remaining;
  remaining.note(0, 0.1);
  EXPECT_FALSE(remaining.until(100));
  remaining.note(10, 1);
  EXPECT_FALSE(remaining.until(100));
  remaining.note(20, 2);
  EXPECT_TRUE(remaining.until(100));
}

TEST(RemainingTimeTest, IsNeverNegativeWhereThePaceGrows) {
  RemainingTime remaining;
  remaining.note(10, 10);  // a slow first step
  remaining.note(20, 11);
  remaining.note(30, 12);
  ASSERT_TRUE(remaining.until(1000));
  EXPECT_NEAR(*remaining.until(1000), 970 * 12 / 30.0, 1e-9);
}

}  // namespace
}  // namespace sluice::tools
