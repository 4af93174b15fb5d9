// The cuts through weights by count and by sum.
#include "cpu/selection.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/support/random.h"

namespace sluice {
namespace {

using sluice::testing::Random;

std::vector<float> kept_by(const std::vector<float>& weights, cpu::Cut cut) {
  std::vector<float> kept;
  for (const float w : weights) {
    if (w > cut.weight || (w == cut.weight && cut.ties-- > 0)) kept.push_back(w);
  }
  std::sort(kept.begin(), kept.end(), std::greater<>());
  return kept;
}

// Softmax weights of normal logits; some are equal, some are zero.
std::vector<float> random_weights(Random& random, std::int64_t count) {
  const float spread = static_cast<float>(random.integer(0, 60)) / 10.0f;
  std::vector<float> w = random.normal(count, spread);
  const bool ties = random.integer(0, 1) == 1;
  float sum = 0.0f;
  for (float& x : w) {
    if (ties) x = std::round(x);
    x = std::exp(x - 20.0f);
    if (random.integer(0, 19) == 0) x = 0.0f;
    sum += x;
  }
  if (sum == 0.0f) w[0] = sum = 1.0f;
  for (float& x : w) x /= sum;
  return w;
}

class Lengths : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(Lengths, CutByCountKeepsTheHeaviest) {
  const std::uint64_t seed = testing::seed(1);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  for (int round = 0; round < (GetParam() > 100000 ? 3 : 40); ++round) {
    const std::vector<float> weights = random_weights(random, GetParam());
    const std::int64_t count = random.integer(0, GetParam() + 1);
    std::vector<float> expected = weights;
    std::sort(expected.begin(), expected.end(), std::greater<>());
    expected.resize(static_cast<std::size_t>(std::min(count, GetParam())));
    EXPECT_EQ(kept_by(weights, cpu::cut_by_count(weights, count)), expected);
  }
}

TEST_P(Lengths, CutByWeightReachesItsTargetAndIsMinimal) {
  const std::uint64_t seed = testing::seed(2);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  for (int round = 0; round < (GetParam() > 100000 ? 3 : 40); ++round) {
    std::vector<float> weights = random_weights(random, GetParam());
    // The heaviest anywhere in the row, the first slot above all.
    std::swap(weights[static_cast<std::size_t>(random.integer(0, GetParam() - 1))],
              *std::max_element(weights.begin(), weights.end()));
    const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
    const double target = all * static_cast<double>(random.integer(1, 1000)) / 1000.0;
    const std::vector<float> kept = kept_by(weights, cpu::cut_by_weight(weights, target));
    const double sum = std::accumulate(kept.begin(), kept.end(), 0.0);
    ASSERT_FALSE(kept.empty());
    EXPECT_GE(sum, target * (1 - 1e-12));
    EXPECT_LT(sum - static_cast<double>(kept.back()), target * (1 + 1e-12));
  }
}

INSTANTIATE_TEST_SUITE_P(Cut, Lengths, ::testing::Values(1, 2, 5, 127, 128, 3000, 131072, 1048576));

TEST(Cut, KeepsEverythingForWhatCannotBeReached) {
  const std::vector<float> weights = {0.25f, 0.0f, 0.25f};
  EXPECT_EQ(kept_by(weights, cpu::cut_by_weight(weights, 1.0)).size(), 3u);
  EXPECT_EQ(kept_by(weights, cpu::cut_by_count(weights, 7)).size(), 3u);
  EXPECT_TRUE(kept_by(weights, cpu::cut_by_weight(weights, 0.0)).empty());
}

TEST(Quota, IsTheLargerOfItsBudgetsAndWhatIsExtra) {
  EXPECT_EQ(Quota().of(77), 77);
  EXPECT_EQ((Quota{{256, 0}, {}, 0}.of(1000)), 256);
  EXPECT_EQ((Quota{{256, 0}, {}, 0}.of(100)), 100);
  EXPECT_EQ((Quota{{0, 16}, {}, 0}.of(1000)), 63);
  EXPECT_EQ((Quota{{0, 16}, {}, 5}.of(1000)), 68);
  EXPECT_EQ((Quota{{0, 16}, {100, 0}, 5}.of(1000)), 205);
  EXPECT_EQ((Quota{{0, 16}, {0, 4}, 0}.of(1000)), 500);
  EXPECT_EQ((Quota{{0, 16}, {100, 0}, 5}.of(150)), 150);
  EXPECT_EQ((Quota{{0, 1}, {0, 1}, 5}.of(std::int64_t{1} << 31)), std::int64_t{1} << 31);
}

}  // namespace
}  // namespace sluice
