// select() of every backend against its definition.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <set>
#include <vector>

#include "tests/support/backends.h"
#include "tests/support/random.h"
#include "tests/support/selection_cases.h"

namespace sluice {
namespace {

using sluice::testing::NamedBackend;
using sluice::testing::Random;
using sluice::testing::SelectAnswer;
using sluice::testing::SelectCase;

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

class Select : public ::testing::TestWithParam<NamedBackend> {
 protected:
  void SetUp() override { backend_ = testing::make_or_skip(GetParam()); }

  // Half-precision logits come with bins of weight; full ones are sorted.
  double bin() const { return backend_->info().logits.dtype == DType::f16 ? 1.0 / 64 : 0.0; }

  std::unique_ptr<Backend> backend_;
};

// fp32 weights are off by a few 2^-24 of the exponential and of the sum's parts.
constexpr double kRounding = 1e-5;

// Checks an answer of top_p or top_k for one KV head against what its own weights say.
// `bin`: how far apart, in logits, weights may be that are kept or left out together.
void expect_choice(const SelectCase& c, const SelectAnswer& answer, int head, double bin) {
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
    const double* const weights = answer.weights.data() + query_head * c.count;
    double sum = 0.0;
    double free = 0.0;
    for (std::int64_t t = 0; t < c.count; ++t) {
      const bool always = t >= c.end || forced(t);
      if (always || kept.contains(static_cast<std::int32_t>(t))) {
        sum += weights[t];
      }
      if (always) free += weights[t];
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
    std::size_t i = 0;
    for (; i < order.size() && free < static_cast<double>(c.p) + kRounding; ++i) {
      needed.insert(order[i]);
      free += weights[order[i]];
    }
    // Those that share the last one's bin come along.
    const double lightest = i > 0 ? weights[order[i - 1]] * std::exp(-bin) : INFINITY;
    for (; i < order.size() && weights[order[i]] >= lightest; ++i) needed.insert(order[i]);
  }
  for (const std::int32_t t : positions) {
    EXPECT_TRUE(forced(t) || needed.contains(t)) << "kept without need: " << t;
  }
}

// The log-sum-exp of a row follows from its heaviest logit and that one's weight.
void expect_lse(const SelectCase& c, const SelectAnswer& answer) {
  for (int head = 0; head < c.shape.query_heads; ++head) {
    const auto row = answer.weights.begin() + head * c.count;
    const auto heaviest = std::max_element(row, row + c.count);
    const auto at = static_cast<std::size_t>(heaviest - answer.weights.begin());
    const double expected = static_cast<double>(answer.logits[at]) - std::log(*heaviest);
    EXPECT_NEAR(answer.lse[static_cast<std::size_t>(head)], expected, 2e-5) << "head " << head;
  }
}

TEST_P(Select, KeepsWhatItsDefinitionSays) {
  const std::uint64_t seed = testing::seed(3);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  for (int round = 0; round < 120; ++round) {
    const SelectCase c = random_case(random, random.integer(1, round % 10 == 0 ? 5000 : 400));
    const SelectAnswer answer = testing::select(*backend_, c);
    expect_lse(c, answer);
    for (int head = 0; head < c.shape.kv_heads; ++head) {
      SCOPED_TRACE(round);
      expect_choice(c, answer, head, bin());
      if (HasFailure()) return;
    }
  }
}

TEST_P(Select, LeavesOutWhatIsNotEligible) {
  Random random(testing::seed(4));
  SelectCase c = random_case(random, 300);
  c.end = 256;
  c.prune = Pruner::top_k;
  c.k = 300;
  c.sinks = 4;
  for (int t = 0; t < 256; ++t) c.eligible.push_back(t % 3 == 0 ? 1 : 0);
  const SelectAnswer answer = testing::select(*backend_, c);
  for (const auto& positions : answer.positions) {
    EXPECT_EQ(positions.size(), 86u);
    for (const std::int32_t t : positions) EXPECT_EQ(t % 3, 0);
  }
}

TEST_P(Select, ReportsWhatIsNoNumber) {
  for (const float strange : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    SelectCase c;
    c.shape = {1, 4, 2, 64, DType::bf16};
    c.count = c.end = 100;
    c.k = 10;
    c.logits.assign(400, 0.5f);
    c.logits[3 * 100 + 77] = strange;
    const SelectAnswer answer = testing::select(*backend_, c);
    EXPECT_EQ(answer.heads[0].bad, 0);
    EXPECT_EQ(answer.heads[1].bad, 1);
    EXPECT_EQ(answer.heads[1].count, 0);
  }
}

TEST_P(Select, NeverWritesPastItsCapacity) {
  Random random(testing::seed(5));
  SelectCase c = random_case(random, 2000);
  c.prune = Pruner::top_p;
  c.p = 1.0f;
  c.cap = c.count;
  c.capacity = 100;
  const SelectAnswer answer = testing::select(*backend_, c);
  for (const HeadSelection& head : answer.heads) {
    EXPECT_EQ(head.count, 100);
    EXPECT_EQ(head.cut, 1);
  }
}

// Where the two disagree, the weights are within rounding, or a bin, of the cut.
TEST_P(Select, ChoosesWhatTheReferenceChooses) {
  const std::uint64_t seed = testing::seed(6);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  cpu::ReferenceBackend reference;
  std::size_t differing = 0;
  std::size_t positions = 0;
  for (int round = 0; round < 100; ++round) {
    SelectCase c = random_case(random, random.integer(1, 3000));
    const SelectAnswer a = testing::select(*backend_, c);
    c.logits = a.logits;
    const SelectAnswer b = testing::select(reference, c);
    const auto group = static_cast<std::size_t>(c.shape.group());
    for (std::size_t head = 0; head < a.positions.size(); ++head) {
      std::vector<std::int32_t> only;
      std::set_symmetric_difference(a.positions[head].begin(), a.positions[head].end(),
                                    b.positions[head].begin(), b.positions[head].end(),
                                    std::back_inserter(only));
      differing += only.size();
      positions += b.positions[head].size();
      for (std::size_t g = head * group; g < (head + 1) * group && only.empty(); ++g) {
        EXPECT_NEAR(a.alpha[g], b.alpha[g], 2e-4);
      }
    }
  }
  EXPECT_LE(differing, positions / (bin() > 0.0 ? 100 : 5000)) << "of " << positions;
}

INSTANTIATE_TEST_SUITE_P(Backends, Select, ::testing::ValuesIn(testing::backends_by_kind()),
                         testing::name_of);

}  // namespace
}  // namespace sluice
