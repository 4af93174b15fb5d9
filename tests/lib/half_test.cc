#include "sluice/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace sluice {
namespace {

// The value of a 16-bit float by its definition, with `exponent_bits` and `mantissa_bits`.
double value_of(std::uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity() : std::nan("");
  }
  const double fraction = std::ldexp(mantissa, -mantissa_bits);
  return exponent == 0 ? sign * std::ldexp(fraction, 1 - bias)
                       : sign * std::ldexp(1.0 + fraction, exponent - bias);
}

void expect_same(double expected, float actual, int bits) {
  if (std::isnan(expected)) {
    EXPECT_TRUE(std::isnan(actual)) << bits;
  } else {
    EXPECT_EQ(expected, static_cast<double>(actual)) << bits;
    EXPECT_EQ(std::signbit(expected), std::signbit(actual)) << bits;
  }
}

TEST(Half, EveryBitPatternWidensExactlyAndComesBack) {
  for (int i = 0; i < 65536; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    expect_same(value_of(bits, 5, 10), f16_to_float(bits), i);
    expect_same(value_of(bits, 8, 7), bf16_to_float(bits), i);
    if (!std::isnan(f16_to_float(bits))) {
      EXPECT_EQ(float_to_f16(f16_to_float(bits)), bits);
    }
    if (!std::isnan(bf16_to_float(bits))) {
      EXPECT_EQ(float_to_bf16(bf16_to_float(bits)), bits);
    }
  }
}

// Rounding is right if no neighbouring value is nearer, and a tie goes to the even one.
TEST(Half, NarrowingRoundsToNearestEven) {
  for (int i = 0; i < 0x7bff; ++i) {
    const auto low = static_cast<std::uint16_t>(i);
    const auto high = static_cast<std::uint16_t>(i + 1);
    const float a = f16_to_float(low);
    const float b = f16_to_float(high);
    const float middle = a + (b - a) / 2;
    EXPECT_EQ(float_to_f16(middle), i % 2 == 0 ? low : high) << i;
    EXPECT_EQ(float_to_f16(std::nextafter(middle, a)), low) << i;
    EXPECT_EQ(float_to_f16(std::nextafter(middle, b)), high) << i;
    EXPECT_EQ(float_to_f16(-middle), (i % 2 == 0 ? low : high) | 0x8000) << i;
  }
  for (int i = 0x0080; i < 0x7f7f; ++i) {
    const float a = bf16_to_float(static_cast<std::uint16_t>(i));
    const float b = bf16_to_float(static_cast<std::uint16_t>(i + 1));
    const float middle = a + (b - a) / 2;
    EXPECT_EQ(float_to_bf16(middle), i % 2 == 0 ? i : i + 1) << i;
    EXPECT_EQ(float_to_bf16(std::nextafter(middle, a)), i) << i;
  }
}

TEST(Half, KeepsNanAndOverflowsToInfinity) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(nan))));
  EXPECT_TRUE(std::isnan(f16_to_float(float_to_f16(nan))));
  EXPECT_TRUE(std::isinf(f16_to_float(float_to_f16(65520.0f))));
  EXPECT_EQ(f16_to_float(float_to_f16(65519.0f)), 65504.0f);
  EXPECT_TRUE(std::isinf(bf16_to_float(float_to_bf16(std::numeric_limits<float>::max()))));
}

}  // namespace
}  // namespace sluice
