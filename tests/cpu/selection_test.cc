// Choosing tokens: the cuts by themselves, and select() of every backend against its definition.
#include "cpu/selection.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <numeric>
#include <set>

#include "cpu/cpu_backend.h"
#include "cpu/reference_backend.h"
#include "tests/support/random.h"
#include "tests/support/selection_cases.h"

namespace sluice {
namespace {

using sluice::testing::Random;
using sluice::testing::SelectAnswer;
using sluice::testing::SelectCase;

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

std::unique_ptr<Backend> make(bool reference) {
  if (reference) return std::make_unique<cpu::ReferenceBackend>();
  return std::make_unique<cpu::CpuBackend>(cpu::CpuOptions{});
}

SelectCase random_case(Random& random, std::int64_t count) {
  SelectCase c;
  const auto groups = std::to_array({1, 2, 4, 8});
  const int kv_heads = static_cast<int>(random.integer(1, 3));
  const int group = groups[static_cast<std::size_t>(random.integer(0, 3))];
  c.shape = {1, kv_heads * group, kv_heads, 64, DType::bf16};
  c.count = count;
  c.end = random.integer(0, 1) == 1 ? count / kPageTokens * kPageTokens : count;
  c.logits = random.normal(c.shape.query_heads * count, 3.0f);
  for (float& logit : c.logits) {
    if (random.integer(0, 49) == 0) logit = -std::numeric_limits<float>::infinity();
  }
  // Not all of a row may be -inf.
  for (int head = 0; head < c.shape.query_heads; ++head) {
    c.logits[static_cast<std::size_t>(head * count + random.integer(0, count - 1))] = 9.0f;
  }
  c.prune = random.integer(0, 1) == 1 ? Pruner::top_p : Pruner::top_k;
  c.k = random.integer(1, count);
  c.p = static_cast<float>(random.integer(1, 100)) / 100.0f;
  if (random.integer(0, 3) == 0) c.cap = random.integer(1, count);
  if (random.integer(0, 1) == 1) c.sinks = random.integer(0, 4);
  if (random.integer(0, 1) == 1) c.recent_first = count - random.integer(1, 64);
  return c;
}

class Select : public ::testing::TestWithParam<bool> {};

// fp32 weights are off by a few 2^-24 of the exponential and of the sum's parts.
constexpr double kRounding = 1e-5;

// Checks an answer of top_p or top_k for one KV head against what its own weights say.
void expect_choice(const SelectCase& c, const SelectAnswer& answer, int head) {
  const auto& positions = answer.positions[static_cast<std::size_t>(head)];
  ASSERT_TRUE(std::is_sorted(positions.begin(), positions.end()));
  const std::set<std::int32_t> kept(positions.begin(), positions.end());
  ASSERT_EQ(kept.size(), positions.size());
  const auto forced = [&](std::int64_t t) { return t < c.sinks || t >= c.recent_first; };
  std::int64_t wanted = 0;
  for (std::int64_t t = 0; t < c.end; ++t) {
    if (!forced(t)) continue;
    ++wanted;
    EXPECT_TRUE(kept.contains(static_cast<std::int32_t>(t)) || c.prune == Pruner::top_p) << t;
  }
  for (const std::int32_t t : positions) ASSERT_TRUE(t >= 0 && t < c.end);
  if (c.prune == Pruner::top_k) {
    EXPECT_EQ(static_cast<std::int64_t>(kept.size()), std::min(c.end, std::max(c.k, wanted)));
    return;
  }
  if (answer.heads[static_cast<std::size_t>(head)].cut != 0) {
    EXPECT_EQ(static_cast<std::int64_t>(kept.size()), std::max(c.cap, std::min(wanted, c.end)));
    return;
  }
  std::set<std::int32_t> needed;  // by at least one query head
  for (int g = 0; g < c.shape.group(); ++g) {
    const int query_head = head * c.shape.group() + g;
    const float* const weights = answer.weights.data() + query_head * c.count;
    double sum = 0.0;
    double free = 0.0;
    for (std::int64_t t = 0; t < c.count; ++t) {
      const bool always = t >= c.end || forced(t);
      if (always || kept.contains(static_cast<std::int32_t>(t))) {
        sum += static_cast<double>(weights[t]);
      }
      if (always) free += static_cast<double>(weights[t]);
    }
    EXPECT_GE(sum, static_cast<double>(c.p) * (1 - kRounding));
    EXPECT_NEAR(answer.alpha[static_cast<std::size_t>(query_head)], sum, 1e-5);
    // The minimal set of this head.
    std::vector<std::int32_t> order;
    for (std::int64_t t = 0; t < c.end; ++t) {
      if (!forced(t)) order.push_back(static_cast<std::int32_t>(t));
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](auto a, auto b) { return weights[a] > weights[b]; });
    for (std::size_t i = 0; i < order.size() && free < static_cast<double>(c.p) + kRounding; ++i) {
      needed.insert(order[i]);
      free += static_cast<double>(weights[order[i]]);
    }
  }
  for (const std::int32_t t : positions) {
    EXPECT_TRUE(forced(t) || needed.contains(t)) << "kept without need: " << t;
  }
}

TEST_P(Select, KeepsWhatItsDefinitionSays) {
  const std::uint64_t seed = testing::seed(3);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  const auto backend = make(GetParam());
  for (int round = 0; round < 120; ++round) {
    const SelectCase c = random_case(random, random.integer(1, round % 10 == 0 ? 5000 : 400));
    const SelectAnswer answer = testing::select(*backend, c);
    for (int head = 0; head < c.shape.kv_heads; ++head) {
      SCOPED_TRACE(round);
      expect_choice(c, answer, head);
      if (HasFailure()) return;
    }
  }
}

TEST_P(Select, LeavesOutWhatIsNotEligible) {
  const auto backend = make(GetParam());
  Random random(testing::seed(4));
  SelectCase c = random_case(random, 300);
  c.end = 256;
  c.prune = Pruner::top_k;
  c.k = 300;
  c.sinks = 4;
  for (int t = 0; t < 256; ++t) c.eligible.push_back(t % 3 == 0 ? 1 : 0);
  const SelectAnswer answer = testing::select(*backend, c);
  for (const auto& positions : answer.positions) {
    EXPECT_EQ(positions.size(), 86u);
    for (const std::int32_t t : positions) EXPECT_EQ(t % 3, 0);
  }
}

TEST_P(Select, ReportsWhatIsNoNumber) {
  const auto backend = make(GetParam());
  for (const float strange : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    SelectCase c;
    c.shape = {1, 4, 2, 64, DType::bf16};
    c.count = c.end = 100;
    c.k = 10;
    c.logits.assign(400, 0.5f);
    c.logits[3 * 100 + 77] = strange;
    const SelectAnswer answer = testing::select(*backend, c);
    EXPECT_EQ(answer.heads[0].bad, 0);
    EXPECT_EQ(answer.heads[1].bad, 1);
    EXPECT_EQ(answer.heads[1].count, 0);
  }
}

TEST_P(Select, NeverWritesPastItsCapacity) {
  const auto backend = make(GetParam());
  Random random(testing::seed(5));
  SelectCase c = random_case(random, 2000);
  c.prune = Pruner::top_p;
  c.p = 1.0f;
  c.cap = c.count;
  c.capacity = 100;
  const SelectAnswer answer = testing::select(*backend, c);
  for (const HeadSelection& head : answer.heads) {
    EXPECT_EQ(head.count, 100);
    EXPECT_EQ(head.cut, 1);
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Select, ::testing::Bool(),
                         [](const auto& chosen) { return chosen.param ? "reference" : "cpu"; });

// Where the two disagree, the weights are within rounding of the cut.
TEST(SelectParity, SimdChoosesWhatTheReferenceChooses) {
  const std::uint64_t seed = testing::seed(6);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  const auto fast = make(false);
  const auto slow = make(true);
  std::size_t differing = 0;
  std::size_t positions = 0;
  for (int round = 0; round < 100; ++round) {
    const SelectCase c = random_case(random, random.integer(1, 3000));
    const SelectAnswer a = testing::select(*fast, c);
    const SelectAnswer b = testing::select(*slow, c);
    for (std::size_t head = 0; head < a.positions.size(); ++head) {
      std::vector<std::int32_t> only;
      std::set_symmetric_difference(a.positions[head].begin(), a.positions[head].end(),
                                    b.positions[head].begin(), b.positions[head].end(),
                                    std::back_inserter(only));
      differing += only.size();
      positions += b.positions[head].size();
    }
    for (std::size_t i = 0; i < a.alpha.size(); ++i) EXPECT_NEAR(a.alpha[i], b.alpha[i], 2e-4);
  }
  EXPECT_LE(differing, positions / 5000) << "of " << positions;
}

}  // namespace
}  // namespace sluice
