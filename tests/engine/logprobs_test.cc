#include "sluice/logprobs.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "tests/support/expect.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using testing::expect_error;

TEST(Logprobs, EqualASoftmaxInFp64) {
  testing::Random random(7);
  const std::vector<float> logits = random.normal(50, 3.0f);
  double sum = 0.0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
  const ScoredToken scored = score_token(logits, 11, 50);
  EXPECT_NEAR(scored.logprob, std::log(std::exp(static_cast<double>(logits[11])) / sum), 1e-6);
  double total = 0.0;
  for (const TokenLogprob& one : scored.top) total += std::exp(static_cast<double>(one.logprob));
  EXPECT_NEAR(total, 1.0, 1e-6);
}

TEST(Logprobs, ListTheLikeliestFirst) {
  const std::vector<float> logits = {1.0f, 5.0f, 3.0f, 5.0f, -2.0f};
  const ScoredToken scored = score_token(logits, 4, 3);
  ASSERT_EQ(scored.top.size(), 3u);
  EXPECT_EQ(scored.top[0].token, 1);  // of two that are equal the lower id
  EXPECT_EQ(scored.top[1].token, 3);
  EXPECT_EQ(scored.top[2].token, 2);
  EXPECT_TRUE(score_token(logits, 4, 0).top.empty());
  EXPECT_EQ(score_token(logits, 4, 99).top.size(), 5u);
}

TEST(Logprobs, OfLargeLogitsDoNotOverflow) {
  EXPECT_NEAR(score_token(std::vector<float>{3e38f, 3e38f}, 0, 0).logprob, std::log(0.5), 1e-6);
}

TEST(Logprobs, OfAForbiddenTokenAreMinusInfinity) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  EXPECT_EQ(score_token(std::vector<float>{0.0f, kNone}, 1, 0).logprob, kNone);
}

TEST(Logprobs, RefuseNaN) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  for (const std::vector<float>& logits :
       {std::vector<float>{nan, 0.0f}, {0.0f, nan}, {inf, 0.0f}, {-inf, -inf}}) {
    expect_error(ErrorCode::numeric, "NaN", [&] { score_token(logits, 0, 1); });
  }
}

}  // namespace
}  // namespace sluice
