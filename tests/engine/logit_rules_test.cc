#include "sluice/logit_rules.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "tests/support/expect.h"

namespace sluice {
namespace {

using testing::expect_error;

TEST(LogitRules, PenaliseByPresenceAndCount) {
  LogitRules rules;
  rules.presence_penalty = 0.5;
  rules.frequency_penalty = 0.25;
  std::vector<float> logits(4, 1.0f);
  rules.apply(std::vector<TokenId>{1, 2, 2, 2}, logits);
  EXPECT_EQ(logits, (std::vector<float>{1.0f, 0.25f, -0.25f, 1.0f}));
}

TEST(LogitRules, AddBiasAndCallTheMaskLast) {
  LogitRules rules;
  rules.bias = {{0, 100.0}, {2, -1.5}};
  rules.mask = [](std::span<const TokenId> answer, std::span<float> logits) {
    EXPECT_EQ(answer.size(), 1u);
    EXPECT_EQ(logits[0], 101.0f);
    logits[3] = -7.0f;
  };
  std::vector<float> logits(4, 1.0f);
  rules.apply(std::vector<TokenId>{1}, logits);
  EXPECT_EQ(logits, (std::vector<float>{101.0f, 1.0f, -0.5f, -7.0f}));
}

TEST(LogitRules, AreEmptyOnlyWithoutEffect) {
  EXPECT_TRUE(LogitRules().empty());
  LogitRules rules;
  rules.bias = {{0, 1.0}};
  EXPECT_FALSE(rules.empty());
}

TEST(LogitRules, RefuseWhatIsOutOfRange) {
  const auto expect_refused = [](const char* name, const LogitRules& rules) {
    expect_error(ErrorCode::usage, name, [&] { rules.validate(10); });
  };
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  LogitRules rules;
  for (const double bad : {-2.1, 2.1, kNaN}) {
    rules.presence_penalty = bad;
    expect_refused("`presence_penalty`", rules);
    rules.presence_penalty = 0.0;
    rules.frequency_penalty = bad;
    expect_refused("`frequency_penalty`", rules);
    rules.frequency_penalty = 0.0;
  }
  for (const LogitBias bad : {LogitBias{-1, 0.0}, {10, 0.0}, {3, 100.5}, {3, kNaN}}) {
    rules.bias = {bad};
    expect_refused("`logit_bias`", rules);
  }
  rules.bias = {{9, -100.0}};
  rules.validate(10);
}

}  // namespace
}  // namespace sluice
