// What `bench --check` says of a ledger that differs from what was counted.
#include "tools/bench_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace sluice::tools {
namespace {

using ::testing::HasSubstr;

std::string what_differs(const auto& call) {
  try {
    call();
  } catch (const LedgerDiffers& differs) {
    return differs.what();
  }
  return "";
}

std::vector<LedgerEntry> missed(std::uint64_t rows) {
  return {{3, Tier::host, Tier::device, Cause::miss, {rows, rows * 256}}};
}

TEST(StepCheck, NamesTheStepAndBothNumbers) {
  TrafficCounter counter;
  StepCheck check(counter, true, {});
  const auto step = [&](std::uint64_t counted, std::uint64_t recorded) {
    return what_differs([&] {
      check.begin_step();
      counter.add(Tier::host, Tier::device, Cause::miss, {counted, counted * 256});
      check.end_step(missed(recorded), false);
    });
  };
  EXPECT_EQ(step(7, 7), "");
  const std::string differs = step(7, 6);
  EXPECT_THAT(differs, HasSubstr("the ledger is wrong: step 2, miss from host to device"));
  EXPECT_THAT(differs, HasSubstr("has 6 rows, 1536 B, counted were 7 rows, 1792 B"));
  EXPECT_EQ(check.steps().steps, 1);
}

TEST(StepCheck, HoldsOneRunToTheOther) {
  TrafficCounter counter;
  StepCheck check(counter, true, {});
  for (int i = 0; i < 3; ++i) {
    check.begin_step();
    counter.add(Tier::host, Tier::device, Cause::miss, {5, 5 * 256});
    check.end_step(missed(5), i == 0);
  }
  EXPECT_EQ(what_differs([&] { check.compare(missed(10)); }), "");
  EXPECT_THAT(what_differs([&] { check.compare(missed(15)); }),
              HasSubstr("the measured steps moved other rows"));
}

}  // namespace
}  // namespace sluice::tools
