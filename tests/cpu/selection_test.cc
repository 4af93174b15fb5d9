// The cuts through weights by count and by sum, and what does not depend on how many threads
// choose.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cpu/runtime/cut.h"
#include "cpu/runtime/threads.h"
#include "cpu/select/select.h"
#include "tests/support/cpu_digest.h"
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

// Positions of `k` tokens of each KV head, by digested logits.
std::vector<std::int32_t> chosen_by(const std::vector<float>& logits, std::int64_t tokens,
                                    std::int64_t k, int threads) {
  const KvShape shape{1, 6, 2, 64, DType::bf16};
  const BatchToken token = {0, static_cast<std::int32_t>(tokens)};
  std::vector<float> own = logits;
  std::vector<HeadSelection> heads(2);
  std::vector<std::int32_t> positions(static_cast<std::size_t>(2 * k));
  std::vector<float> alpha(6);
  SelectParams p;
  p.shape = shape;
  p.batch = {&token, 1, tokens + 1};
  p.logits = {reinterpret_cast<std::byte*>(own.data()), tokens + kPageTokens};
  p.prune = Pruner::top_k;
  p.k.share.tokens = k;
  p.selected = {positions.data(), k, heads.data()};
  p.alpha = alpha.data();
  const std::vector<std::byte> digest = testing::digest_pages(shape, p.batch, p.logits);
  cpu::Threads workers(threads);
  cpu::select(p, workers);
  for (const HeadSelection& head : heads) EXPECT_EQ(head.count, k);
  return positions;
}

// With more threads than KV heads they share the pages of a head, if many may have what is chosen.
TEST(Digest, MakesTheSameChoiceForAnyNumberOfThreads) {
  const std::uint64_t seed = testing::seed(8);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  for (const std::int64_t tokens : {1000, 30000}) {
    const std::vector<float> logits = random.normal(6 * (tokens + kPageTokens), 3.0f);
    const std::int64_t pages = tokens / kPageTokens;
    for (const std::int64_t k : {std::int64_t{1}, pages / 2, pages, pages + 1, 2 * pages}) {
      const auto alone = chosen_by(logits, tokens, k, 1);
      EXPECT_EQ(chosen_by(logits, tokens, k, 7), alone) << k << " of " << tokens;
    }
  }
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
