// The key index of every backend: what its tiles and bounds hold, and what is estimated from them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <tuple>
#include <vector>

#include "lib/half.h"
#include "tests/support/backends.h"
#include "tests/support/random.h"
#include "tests/support/selection_cases.h"

namespace sluice {
namespace {

using sluice::testing::AttentionCase;
using sluice::testing::IndexedCase;
using sluice::testing::NamedBackend;
using sluice::testing::Random;

AttentionCase random_keys(Random& random, const KvShape& shape, std::int64_t tokens) {
  const std::vector<std::int64_t> counts(static_cast<std::size_t>(shape.kv_heads), tokens);
  return testing::random_case(random, shape, 1, counts);
}

double key_at(const AttentionCase& c, int head, std::int64_t token, int channel) {
  return testing::row_element(c, head, token, channel);
}

using Shape = std::tuple<DType, int, int, int>;  // dtype, head_dim, group, bits
using Param = std::tuple<NamedBackend, Shape>;

class KeyIndexParity : public ::testing::TestWithParam<Param> {
 protected:
  KvShape shape() const {
    const auto [dtype, head_dim, group, bits] = std::get<Shape>(GetParam());
    return {1, 2 * group, 2, head_dim, dtype};
  }
  int bits() const { return std::get<3>(std::get<Shape>(GetParam())); }
  void SetUp() override {
    backend_ = testing::make_or_skip(std::get<NamedBackend>(GetParam()));
    if (backend_ != nullptr && shape().dtype == DType::f32 && !backend_->info().f32_rows) {
      GTEST_SKIP() << "no rows of f32";
    }
  }
  bool half_logits() const { return backend_->info().logits.dtype == DType::f16; }

  std::unique_ptr<Backend> backend_;
};

TEST_P(KeyIndexParity, BuildsWhatTheReferenceBuilds) {
  const std::uint64_t seed = testing::seed(11);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  const AttentionCase c = random_keys(random, shape(), 3 * kPageTokens + 40);
  cpu::ReferenceBackend slow;
  IndexedCase a(*backend_, c, bits());
  IndexedCase b(slow, c, bits());
  EXPECT_EQ(a.codes(), b.codes());
  EXPECT_EQ(a.scales(), b.scales());
  EXPECT_EQ(a.bounds(), b.bounds());
  EXPECT_EQ(a.bad(), (std::vector<std::int32_t>{0, 0}));
}

TEST_P(KeyIndexParity, BoundsHoldEveryKeyTightly) {
  Random random(testing::seed(12));
  const AttentionCase c = random_keys(random, shape(), 2 * kPageTokens);
  IndexedCase index(*backend_, c, bits());
  const std::vector<std::uint16_t> bounds = index.bounds();
  const int d = shape().head_dim;
  for (std::int64_t part = 0; part < 2 * kBoundsPerPage; ++part) {
    for (int channel = 0; channel < d; ++channel) {
      double low = INFINITY;
      double high = -INFINITY;
      for (std::int64_t t = 0; t < kBoundTokens; ++t) {
        const double key = key_at(c, 0, part * kBoundTokens + t, channel);
        low = std::min(low, key);
        high = std::max(high, key);
      }
      const auto at = static_cast<std::size_t>(part * 2 * d + channel);
      const double below = f16_to_float(bounds[at]);
      const double above = f16_to_float(bounds[at + static_cast<std::size_t>(d)]);
      ASSERT_LE(below, low);
      ASSERT_GE(above, high);
      ASSERT_LE(low - below, std::abs(low) * 0x1p-10 + 1e-7);
      ASSERT_LE(above - high, std::abs(high) * 0x1p-10 + 1e-7);
    }
  }
}

// The 8-bit weights of a folded query are off by up to half a step of 1/127 of the largest
// |q * scale|, each multiplied by a code: independent errors, so seven deviations of their sum.
double fold_rounding(const AttentionCase& c, int query_head, int bits, int channels) {
  const int d = c.shape.head_dim;
  const int head = query_head / c.shape.group();
  const double levels = (1 << bits) - 1;
  double largest = 0.0;
  for (int channel = 0; channel < d; ++channel) {
    double low = INFINITY;
    double high = -INFINITY;
    for (std::int64_t t = 0; t < c.count(head); ++t) {
      low = std::min(low, key_at(c, head, t, channel));
      high = std::max(high, key_at(c, head, t, channel));
    }
    const double q = c.q[static_cast<std::size_t>(query_head) * static_cast<std::size_t>(d) +
                         static_cast<std::size_t>(channel)];
    largest = std::max(largest, std::abs(q) * (high - low) / levels);
  }
  return 7.0 * largest / 127.0 / std::sqrt(12.0) * levels *
         std::sqrt(static_cast<double>(channels));
}

TEST_P(KeyIndexParity, EstimatesWhatTheReferenceEstimates) {
  const std::uint64_t seed = testing::seed(13);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  const AttentionCase c = random_keys(random, shape(), 2 * kPageTokens + 75);
  const int d = shape().head_dim;
  cpu::ReferenceBackend slow;
  IndexedCase a(*backend_, c, bits());
  IndexedCase b(slow, c, bits());
  const std::int64_t tokens = c.count(0);
  for (const auto& [method, channels] :
       {std::tuple{Selector::int4, d}, std::tuple{Selector::sparq, d / 4},
        std::tuple{Selector::sparq, d - 1}, std::tuple{Selector::sparq, 1},
        std::tuple{Selector::quest, d}, std::tuple{Selector::exact, d}}) {
    const std::vector<float> x = a.estimate(method, channels);
    const std::vector<float> y = b.estimate(method, channels);
    for (int head = 0; head < shape().query_heads; ++head) {
      const bool tiles = method == Selector::int4 || method == Selector::sparq;
      // 1 / temperature is at most 1 / sqrt(head_dim) * sqrt(|q|_1 / |q of the channels|_1).
      const double factor = method == Selector::sparq ? 1.0 : 1.0 / std::sqrt(d);
      const double rounding = tiles ? fold_rounding(c, head, bits(), channels) * factor : 0.0;
      for (std::int64_t t = 0; t < tokens; ++t) {
        const auto i = static_cast<std::size_t>(head * tokens + t);
        const bool indexed = t < a.pages() * kPageTokens;
        // Queries and results in f16: 2^-11 of each, the terms' errors independent.
        const double half =
            half_logits() ? 0x1p-11 * (std::abs(y[i]) + 7 * factor * std::sqrt(d)) : 0.0;
        ASSERT_NEAR(x[i], y[i], 2e-5 + half + (indexed ? rounding : 0.0))
            << "head " << head << " token " << t << " method " << static_cast<int>(method);
      }
    }
  }
}

TEST_P(KeyIndexParity, TilesEstimateTheLogits) {
  Random random(testing::seed(14));
  const AttentionCase c = random_keys(random, shape(), 2 * kPageTokens);
  IndexedCase index(*backend_, c, bits());
  const std::vector<float> estimate = index.estimate(Selector::int4, shape().head_dim);
  const std::vector<float> exact = index.estimate(Selector::exact, shape().head_dim);
  // Keys of deviation 1 range over about 5.4 in 128 tokens; a code is off by up to half a step.
  const double step = 5.4 / ((1 << bits()) - 1);
  double squares = 0.0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    squares += std::pow(static_cast<double>(estimate[i]) - static_cast<double>(exact[i]), 2);
  }
  const double deviation = std::sqrt(squares / static_cast<double>(exact.size()));
  EXPECT_LT(deviation, 1.3 * step / std::sqrt(12.0));
  EXPECT_GT(deviation, 0.0);
}

std::string name_of(const ::testing::TestParamInfo<Param>& info) {
  const auto [dtype, head_dim, group, bits] = std::get<Shape>(info.param);
  return std::get<NamedBackend>(info.param).name + "_" + std::string(to_string(dtype)) + "_d" +
         std::to_string(head_dim) + "_g" + std::to_string(group) + "_int" + std::to_string(bits);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, KeyIndexParity,
    ::testing::Combine(::testing::ValuesIn(testing::backends_by_kind()),
                       ::testing::Values(Shape{DType::bf16, 64, 4, 4},
                                         Shape{DType::bf16, 128, 8, 4},
                                         Shape{DType::bf16, 80, 1, 4}, Shape{DType::f16, 32, 2, 2},
                                         Shape{DType::f32, 64, 5, 2}, Shape{DType::bf16, 256, 1, 2},
                                         Shape{DType::f16, 256, 4, 4}, Shape{DType::f32, 18, 3, 4},
                                         Shape{DType::f16, 18, 3, 4},
                                         Shape{DType::bf16, 128, 16, 4})),
    name_of);

class BuildIndex : public ::testing::TestWithParam<NamedBackend> {};

TEST_P(BuildIndex, NamesTheHeadOfAKeyThatIsNoNumber) {
  const std::unique_ptr<Backend> backend = testing::make_or_skip(GetParam());
  if (backend == nullptr) return;
  Random random(testing::seed(16));
  for (const float strange : {std::nanf(""), -std::numeric_limits<float>::infinity()}) {
    AttentionCase c = random_keys(random, {1, 4, 2, 64, DType::bf16}, 2 * kPageTokens);
    testing::set_row_element(c, 1, 200, 63, strange);
    EXPECT_EQ(IndexedCase(*backend, c, 4).bad(), (std::vector<std::int32_t>{0, 1}));
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, BuildIndex, ::testing::ValuesIn(testing::backends_by_kind()),
                         testing::name_of);

}  // namespace
}  // namespace sluice
