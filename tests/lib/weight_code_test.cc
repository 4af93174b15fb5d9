// Coded weights lose what their codes cannot say and no more, and less than plain rounding loses.
#include "lib/weight_code.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "sluice/half.h"
#include "tests/support/elements.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using testing::encoded;
using testing::Random;
using testing::rounded;

constexpr WeightFormat kInt8 = WeightCode::int8;
constexpr WeightFormat kInt4 = WeightCode::int4;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Codes rows [., inputs] that are stored as `dtype`, and decodes them again.
std::vector<float> coded(const std::vector<float>& weights, std::int64_t inputs,
                         const WeightFormat& format, DType dtype = DType::f32) {
  std::vector<std::byte> bytes = encoded(weights, dtype);
  const std::int64_t rows = std::ssize(weights) / inputs;
  std::vector<float> scratch(static_cast<std::size_t>(inputs));
  const WeightRows to = encode_rows({bytes.data(), dtype, rows, inputs}, format, scratch.data());
  EXPECT_EQ(to.data, bytes.data());
  EXPECT_EQ(to.format, format);
  EXPECT_EQ(to.bytes(), static_cast<std::size_t>(rows) * format.row_bytes(inputs));
  std::vector<float> values(weights.size());
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::size_t at = static_cast<std::size_t>(row) * format.row_bytes(inputs);
    decode_row(bytes.data() + at, format, inputs, values.data() + row * inputs);
  }
  return values;
}

double squared_error(const std::vector<float>& a, const std::vector<float>& b) {
  double error = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) error += std::pow(double{a[i]} - double{b[i]}, 2.0);
  return error;
}

// Rounds to the nearest of 2 * steps + 1 levels up to the largest weight, the simplest code.
std::vector<float> plainly_rounded(std::vector<float> weights, float steps) {
  constexpr auto kGroup = static_cast<std::size_t>(kWeightGroup);
  for (std::size_t first = 0; first < weights.size(); first += kGroup) {
    float largest = 0.0f;
    for (std::size_t i = 0; i < kGroup; ++i) {
      largest = std::max(largest, std::abs(weights[first + i]));
    }
    const float scale = largest / steps;
    for (std::size_t i = 0; i < kGroup; ++i) {
      weights[first + i] = scale * std::nearbyint(weights[first + i] / scale);
    }
  }
  return weights;
}

TEST(WeightCode, RowsHaveTheBytesThatTheFormatSays) {
  EXPECT_EQ(WeightFormat(DType::bf16).row_bytes(100), 200u);
  EXPECT_EQ(WeightFormat(DType::f32).row_bytes(100), 400u);
  EXPECT_EQ(kInt8.row_bytes(64), 64u + 2 * 4);  // 9 bits per weight
  EXPECT_EQ(kInt4.row_bytes(64), 32u + 2 * 2);  // 4.5
  EXPECT_TRUE(WeightFormat(DType::f16).fits(33));
  EXPECT_TRUE(kInt4.fits(96));
  EXPECT_FALSE(kInt4.fits(100));
  EXPECT_FALSE(kInt8.fits(31));
  EXPECT_EQ(to_string(kInt8), "int8");
  EXPECT_EQ(to_string(kInt4), "int4");
  EXPECT_EQ(to_string(WeightFormat(DType::f16)), "f16");
}

TEST(WeightCode, LosesLessThanPlainRounding) {
  const std::uint64_t seed = testing::seed(41);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  const std::vector<float> weights = random.normal(256 * 128, 0.02f);
  EXPECT_LT(squared_error(coded(weights, 128, kInt4), weights),
            0.65 * squared_error(plainly_rounded(weights, 7.0f), weights));
  EXPECT_LT(squared_error(coded(weights, 128, kInt8), weights),
            0.75 * squared_error(plainly_rounded(weights, 127.0f), weights));
}

// A uniform error of half a step has a mean square of a twelfth; f16 offsets add to that. A range
// may be clipped by two steps on either side.
TEST(WeightCode, Int8IsALineThrough256Steps) {
  const std::uint64_t seed = testing::seed(42);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  for (int round = 0; round < 200; ++round) {
    std::vector<float> weights = random.normal(kWeightGroup, 1.0f);
    const auto middle = static_cast<float>(random.integer(-3, 3));
    for (float& w : weights) w += middle;
    const auto [low, high] = std::minmax_element(weights.begin(), weights.end());
    const float step = (*high - *low) / 255.0f;
    const std::vector<float> values = coded(weights, kWeightGroup, kInt8);
    for (std::size_t i = 0; i < weights.size(); ++i) {
      EXPECT_NEAR(values[i], weights[i], 2.5f * step) << i;
    }
    EXPECT_LT(squared_error(values, weights) / kWeightGroup, step * step / 8) << round;
  }
}

TEST(WeightCode, WhatCodesCanSayIsKept) {
  for (const float scale : {0.25f, -0.5f, 0x1p-10f}) {
    std::vector<float> levels;
    for (std::size_t i = 0; i < 2 * kWeightLevels.size(); ++i) {
      levels.push_back(scale * kWeightLevels[i * 7 % kWeightLevels.size()]);
    }
    EXPECT_EQ(coded(levels, kWeightGroup, kInt4), levels) << scale;
  }
  std::vector<float> line;
  for (int i = 0; i < kWeightGroup; ++i) line.push_back(0.125f * static_cast<float>(i) - 1.0f);
  const std::vector<float> values = coded(line, kWeightGroup, kInt8);
  for (std::size_t i = 0; i < line.size(); ++i) EXPECT_NEAR(values[i], line[i], 0.009) << i;
  for (const float same : {0.0f, 0.5f, -3.0f}) {
    const std::vector<float> constant(kWeightGroup, same);
    EXPECT_EQ(coded(constant, kWeightGroup, kInt8), constant);
  }
  const std::vector<float> zeros(kWeightGroup, 0.0f);
  EXPECT_EQ(coded(zeros, kWeightGroup, kInt4), zeros);
}

// Rows are coded in place, so one must not overwrite another before it is read.
TEST(WeightCode, EveryDtypeGivesTheCodesOfItsNumbers) {
  const std::uint64_t seed = testing::seed(43);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const std::vector<float> weights = rounded(random.normal(7 * 96), dtype);
    for (const WeightFormat& format : {kInt8, kInt4}) {
      EXPECT_EQ(coded(weights, 96, format, dtype), coded(weights, 96, format)) << to_string(dtype);
      const std::vector<float> last(weights.end() - 96, weights.end());
      const std::vector<float> all = coded(weights, 96, format, dtype);
      EXPECT_EQ(coded(last, 96, format), std::vector<float>(all.end() - 96, all.end()));
    }
  }
}

// Groups with codes of a file, in their own code and in int8, which has all others' codes.
TEST(WeightCode, GroupsOfFilesAreTheirWeights) {
  constexpr std::int64_t kInputs = 96;
  const std::uint64_t seed = testing::seed(5);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  for (const WeightCode code : {WeightCode::int8, WeightCode::int4, WeightCode::uint4}) {
    for (const WeightFormat& format : {WeightFormat(code), kInt8}) {
      SCOPED_TRACE(std::string(to_string(code)) + " as " + to_string(format));
      std::vector<std::byte> row(format.row_bytes(kInputs));
      const CodedRow at(format, kInputs);
      std::vector<float> expected;
      for (std::size_t index = 0; index < at.groups; ++index) {
        CodedGroup group = {code, {}, 0.25f * static_cast<float>(index + 1), 0.0f};
        if (code != WeightCode::int4) group.offset = -1.5f;
        for (std::uint8_t& one : group.codes) {
          one = static_cast<std::uint8_t>(random.integer(0, code == WeightCode::int8 ? 255 : 15));
          const int value = code == WeightCode::int8   ? static_cast<std::int8_t>(one)
                            : code == WeightCode::int4 ? kWeightLevels[one]
                                                       : one;
          expected.push_back(group.scale * static_cast<float>(value) + group.offset);
        }
        put_group(group, index, format, at, row.data());
      }
      std::vector<float> actual(kInputs);
      decode_row(row.data(), format, kInputs, actual.data());
      EXPECT_EQ(actual, expected);
    }
  }
}

TEST(WeightCode, AGroupThatCannotBeCodedBecomesNan) {
  for (const float bad : {kNan, HUGE_VALF, -HUGE_VALF, 1e30f}) {
    for (const WeightFormat& format : {kInt8, kInt4}) {
      std::vector<float> weights(3 * kWeightGroup, 0.5f);
      weights[kWeightGroup + 5] = bad;
      const std::vector<float> values = coded(weights, 3 * kWeightGroup, format);
      for (std::size_t i = 0; i < values.size(); ++i) {
        const bool is_bad = i / kWeightGroup == 1;
        EXPECT_EQ(std::isnan(values[i]), is_bad) << to_string(format) << ' ' << bad << ' ' << i;
      }
    }
  }
}

}  // namespace
}  // namespace sluice
