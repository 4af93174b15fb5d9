#include "cpu/runtime/elementwise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cpu/dense/rope_table.h"
#include "sluice/half.h"
#include "tests/support/random.h"

namespace sluice::cpu {
namespace {

using sluice::testing::Random;

// Lengths around every vector width.
constexpr std::int64_t kLengths[] = {1, 3, 4, 7, 8, 15, 16, 17, 31, 33, 64, 100, 1025};

TEST(Elementwise, ConversionsEqualTheScalarOnes) {
  Random random(5);
  for (const std::int64_t n : kLengths) {
    std::vector<float> x = random.normal(n, 100.0f);
    x[0] = std::numeric_limits<float>::quiet_NaN();
    if (n > 2) x[2] = -std::numeric_limits<float>::infinity();
    std::vector<std::uint16_t> bf16(x.size());
    std::vector<std::uint16_t> f16(x.size());
    convert(x.data(), DType::f32, bf16.data(), DType::bf16, n);
    convert(x.data(), DType::f32, f16.data(), DType::f16, n);
    std::vector<float> back(x.size());
    convert(bf16.data(), DType::bf16, back.data(), DType::f32, n);
    EXPECT_TRUE(std::isnan(back[0]));
    for (std::size_t i = 1; i < x.size(); ++i) {
      ASSERT_EQ(bf16[i], float_to_bf16(x[i]));
      ASSERT_EQ(f16[i], float_to_f16(x[i]));
      ASSERT_EQ(back[i], bf16_to_float(bf16[i]));
    }
  }
}

// All that there are, in vectors and one by one.
TEST(Elementwise, HalvesBecomeTheSameNumbers) {
  std::vector<std::uint16_t> halves(1 << 16);
  for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
  for (const std::int64_t count : {std::int64_t{1} << 16, std::int64_t{13}}) {
    std::vector<float> floats(static_cast<std::size_t>(count));
    const std::size_t first = halves.size() - floats.size();
    convert(halves.data() + first, DType::f16, floats.data(), DType::f32, count);
    for (std::size_t i = 0; i < floats.size(); ++i) {
      const float expected = f16_to_float(halves[first + i]);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(floats[i])) << first + i;
      } else {
        ASSERT_EQ(floats[i], expected) << first + i;
      }
    }
  }
}

TEST(Elementwise, RmsNormAgreesWithFp64) {
  Random random(6);
  for (const std::int64_t n : kLengths) {
    const std::vector<float> x = random.normal(n, 3.0f);
    const std::vector<float> w = random.normal(n);
    std::vector<float> y(x.size());
    rms_norm_row(x.data(), w.data(), 1e-5f, n, y.data());
    double squares = 0.0;
    for (const float v : x) squares += double{v} * v;
    const double factor = 1.0 / std::sqrt(squares / static_cast<double>(n) + 1e-5);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double expected = x[i] * factor * w[i];
      ASSERT_NEAR(y[i], expected, 1e-5 * std::abs(expected) + 1e-6) << n;
    }
  }
}

TEST(Elementwise, SwigluAgreesWithFp64AlsoWhereTheExponentialOverflows) {
  Random random(7);
  for (const std::int64_t n : kLengths) {
    std::vector<float> gate = random.normal(n, 5.0f);
    gate[0] = -200.0f;
    gate.back() = n > 1 ? 200.0f : gate.back();
    const std::vector<float> up = random.normal(n);
    std::vector<float> y(gate.size());
    swiglu_row(gate.data(), up.data(), n, y.data());
    for (std::size_t i = 0; i < y.size(); ++i) {
      const double expected = gate[i] / (1.0 + std::exp(-double{gate[i]})) * up[i];
      ASSERT_NEAR(y[i], expected, 1e-5 * std::abs(expected) + 1e-6) << gate[i];
    }
  }
}

TEST(Elementwise, RopeRotatesPairsOfHalves) {
  Random random(8);
  for (const std::int64_t dim : {32, 64, 80, 128, 256}) {
    std::vector<float> frequencies;
    for (std::int64_t i = 0; i < dim / 2; ++i) {
      frequencies.push_back(static_cast<float>(
          std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(dim))));
    }
    RopeTable table;
    RopeParams p;
    p.head_dim = static_cast<int>(dim);
    p.inverse_frequency = frequencies.data();
    p.first_position = 1000;
    p.tokens = 5;
    table.update(p);
    p.tokens = 3;  // a prefix of what is there
    table.update(p);
    const std::vector<float> before = random.normal(dim);
    std::vector<float> x = before;
    rope_head(x.data(), table.cosines(2), table.sines(2), dim);
    const auto half = static_cast<std::size_t>(dim / 2);
    for (std::size_t i = 0; i < half; ++i) {
      const double angle = 1002.0 * frequencies[i];
      const double a = before[i];
      const double b = before[i + half];
      ASSERT_NEAR(x[i], a * std::cos(angle) - b * std::sin(angle), 1e-5);
      ASSERT_NEAR(x[i + half], b * std::cos(angle) + a * std::sin(angle), 1e-5);
    }
    // As many tokens, in a batch.
    const BatchToken batch[] = {{0, 7}, {1, 1001}, {2, 5}};
    p.batch = {batch, 3, 2000};
    table.update(p);
    for (const std::int64_t token : {0, 1, 2}) {
      const double angle = static_cast<double>(batch[token].position) * frequencies[1];
      ASSERT_NEAR(table.cosines(token)[1], std::cos(angle), 1e-6);
    }
    frequencies[1] *= 2.0f;
    table.update(p);
    ASSERT_NEAR(table.cosines(2)[1], std::cos(5.0 * frequencies[1]), 1e-6);
  }
}

}  // namespace
}  // namespace sluice::cpu
