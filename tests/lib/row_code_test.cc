// Coded rows: their size, the error of every element, and numbers that they cannot say.
#include "sluice/row_code.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "sluice/types.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using testing::Random;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A key in int8.
std::vector<std::byte> coded(const std::vector<float>& x) {
  std::vector<std::byte> row(2 * x.size());
  encode_row(RowCode::int8, x.data(), x.data(), static_cast<int>(x.size()), row.data());
  const auto half = row.begin() + static_cast<std::ptrdiff_t>(x.size());
  EXPECT_TRUE(std::equal(row.begin(), half, half)) << "the value is coded as the key is";
  row.resize(x.size());
  return row;
}

std::vector<float> decoded(const std::vector<std::byte>& codes) {
  std::vector<float> x(codes.size());
  decode_part(PartCode::int8, codes.data(), static_cast<int>(codes.size()), x.data());
  return x;
}

// A row in k8v4, with parts apart.
struct SmallRow {
  std::vector<std::byte> bytes;
  std::vector<float> key;
  std::vector<float> value;

  SmallRow(const std::vector<float>& k, const std::vector<float>& v)
      : key(k.size()), value(v.size()) {
    const auto d = static_cast<int>(k.size());
    constexpr RowFormat kRows = RowCode::k8v4;
    bytes.resize(kRows.payload_bytes(d));
    encode_row(RowCode::k8v4, k.data(), v.data(), d, bytes.data());
    decode_part(PartCode::int8, bytes.data(), d, key.data());
    decode_part(PartCode::int4, bytes.data() + d, d, value.data());
  }
};

double largest_of(const std::vector<float>& x) {
  double largest = 0.0;
  for (const float value : x) largest = std::max(largest, std::abs(static_cast<double>(value)));
  return largest;
}

// The smallest bf16 that is not below x / 127, but for the rounding of the quotient to fp32.
double scale_oracle(double largest) {
  const double wanted = static_cast<double>(static_cast<float>(largest / 127.0));
  int exponent = 0;
  std::frexp(wanted, &exponent);
  const double step = std::ldexp(1.0, exponent - 8);
  return std::ceil(wanted / step) * step;
}

TEST(RowCode, RowsAreHalfOfThoseOfBf16) {
  constexpr RowFormat kInt8 = RowCode::int8;
  constexpr RowFormat kBf16 = DType::bf16;
  for (const int d : {32, 64, 96, 128, 256}) {
    EXPECT_EQ(2 * kInt8.bytes(d), kBf16.bytes(d)) << d;
    EXPECT_EQ(kInt8.payload_bytes(d), static_cast<std::size_t>(2 * d));
    EXPECT_EQ(kInt8.value_offset(d), static_cast<std::size_t>(d));
    EXPECT_TRUE(kInt8.fits(d));
  }
  EXPECT_EQ(kInt8.bytes(16), 64u);
  EXPECT_EQ(kInt8.bytes(80), 192u);  // 160, padded to whole lines; bf16 has 320
  EXPECT_FALSE(kInt8.fits(40));
  EXPECT_TRUE(kBf16.fits(40));
  EXPECT_EQ(to_string(kInt8), "int8");
  EXPECT_EQ(to_string(kBf16), "bf16");
  const KvShape shape = {32, 32, 8, 128, RowCode::int8};
  EXPECT_EQ(shape.token_bytes(), 32u * 8u * 256u);
}

TEST(RowCode, RowsWithSmallValuesAreThreeEighthsOfThoseOfBf16) {
  constexpr RowFormat kSmall = RowCode::k8v4;
  EXPECT_EQ(kSmall.bytes(128), 192u);
  EXPECT_EQ(kSmall.bytes(256), 384u);
  EXPECT_EQ(kSmall.bytes(80), 128u);
  EXPECT_EQ(kSmall.payload_bytes(80), 128u);  // half a group takes the room of one
  EXPECT_EQ(kSmall.bytes(64), 128u);          // 96, padded: no less than int8
  EXPECT_EQ(kSmall.bytes(96), 192u);          // 144, padded
  EXPECT_EQ(kSmall.value_offset(128), 128u);
  for (const int d : {32, 48, 64, 80, 96, 128, 256}) EXPECT_TRUE(kSmall.fits(d)) << d;
  for (const int d : {16, 40, 72}) EXPECT_FALSE(kSmall.fits(d)) << d;
  EXPECT_EQ(to_string(kSmall), "k8v4");
  const KvShape shape = {32, 32, 8, 128, RowCode::k8v4};
  EXPECT_EQ(shape.token_bytes() << 20, std::size_t{48} << 30);  // of a million tokens, 8B
}

// Half a step, and a whole step for codes that carry a bit of the scale. Products with a rounded
// 1 / scale may be off by two units of fp32 at a border between codes.
TEST(RowCode, ErrorsAreWithinAStep) {
  const std::uint64_t seed = testing::seed(71);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  for (int round = 0; round < 3000; ++round) {
    const int d = 16 * static_cast<int>(random.integer(1, 16));
    std::vector<float> x =
        random.normal(d, std::ldexp(1.0f, static_cast<int>(random.integer(-80, 80))));
    // Some channels are far larger than others, as in models with biases of keys.
    for (float& value : x) value *= random.integer(0, 9) == 0 ? 60.0f : 1.0f;
    const std::vector<std::byte> codes = coded(x);
    const double scale = scale_of(codes.data());
    ASSERT_EQ(scale, scale_oracle(largest_of(x)));
    const std::vector<float> back = decoded(codes);
    for (int c = 0; c < d; ++c) {
      const auto i = static_cast<std::size_t>(c);
      const double error = std::abs(static_cast<double>(back[i]) - static_cast<double>(x[i]));
      const double bound = c < kScaleCodes ? scale : scale / 2;
      ASSERT_LE(error, bound * (1 + 0x1p-14)) << "channel " << c << " of " << d << ": " << x[i];
      ASSERT_EQ(back[i], decode_element(PartCode::int8, codes.data(), c));
    }
  }
}

// The scale of a group by its definition: the number that is farthest from 0, a positive one of
// two, divided by -8 and rounded to 5 significant bits, halves away from 0.
double int4_scale_oracle(const std::vector<float>& x, std::size_t first, std::size_t end) {
  double farthest = 0.0;
  for (std::size_t c = first; c < end; ++c) {
    const double y = x[c];
    if (std::abs(y) > std::abs(farthest) || (y == -farthest && y > 0)) farthest = y;
  }
  int exponent = 0;
  std::frexp(farthest / 8, &exponent);
  const double step = std::ldexp(1.0, exponent - 5);
  return -std::copysign(std::floor(std::abs(farthest) / 8 / step + 0.5) * step, farthest);
}

// Numbers, some far larger than others, of any size.
std::vector<float> strange_numbers(int d, Random& random) {
  std::vector<float> x =
      random.normal(d, std::ldexp(1.0f, static_cast<int>(random.integer(-80, 80))));
  for (float& value : x) value *= random.integer(0, 9) == 0 ? 60.0f : 1.0f;
  return x;
}

// Values get the nearest of 16 codes, and keys, whose last codes carry the scales of the values,
// one within a step. An element of a value has 8 significant bits at most.
TEST(RowCode, SmallValuesGetTheNearestCodes) {
  const std::uint64_t seed = testing::seed(73);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  for (int round = 0; round < 3000; ++round) {
    const int d = 16 * static_cast<int>(random.integer(2, 16));
    const std::vector<float> k = strange_numbers(d, random);
    const std::vector<float> v = strange_numbers(d, random);
    const SmallRow row(k, v);
    const double key_scale = scale_oracle(largest_of(k));
    const int carrying = d - kScaleCodes * int4_groups(d);
    for (int c = 0; c < d; ++c) {
      const auto i = static_cast<std::size_t>(c);
      SCOPED_TRACE(::testing::Message() << "channel " << c << " of " << d);
      const double bound = c < kScaleCodes || c >= carrying ? key_scale : key_scale / 2;
      ASSERT_LE(std::abs(double{row.key[i]} - double{k[i]}), bound * (1 + 0x1p-14));
      const std::size_t first = i / 32 * 32;
      const double scale = int4_scale_oracle(v, first, std::min(first + 32, v.size()));
      double least = HUGE_VAL;
      for (int code = -8; code <= 7; ++code) {
        least = std::min(least, std::abs(scale * code - double{v[i]}));
      }
      const double error = std::abs(double{row.value[i]} - double{v[i]});
      ASSERT_LE(error, least + std::abs(scale) * 0x1p-20) << v[i] << " with the scale " << scale;
      ASSERT_LE(error, 1.25 * std::abs(scale));
      ASSERT_EQ(bf16_to_float(float_to_bf16(row.value[i])), row.value[i]);
      ASSERT_EQ(row.value[i], decode_element(PartCode::int4, row.bytes.data() + d, c));
      ASSERT_EQ(row.key[i], decode_element(PartCode::int8, row.bytes.data(), c));
    }
  }
}

// What a value loses of its squares: a step is an eighth of the largest of 32 normal numbers, whose
// square is 5.71 on average, and loses a twelfth of its square.
TEST(RowCode, SmallValuesLoseTheirShare) {
  const std::uint64_t seed = testing::seed(74);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  double lost = 0.0;
  double lost_of_keys = 0.0;
  double all = 0.0;
  for (int round = 0; round < 500; ++round) {
    const std::vector<float> x = random.normal(128);
    const SmallRow row(x, x);
    for (std::size_t c = 0; c < x.size(); ++c) {
      lost += std::pow(double{row.value[c]} - double{x[c]}, 2.0);
      lost_of_keys += std::pow(double{row.key[c]} - double{x[c]}, 2.0);
      all += std::pow(double{x[c]}, 2.0);
    }
  }
  EXPECT_NEAR(lost / all, 5.71 / 64 / 12, 0.0004);
  EXPECT_LT(lost_of_keys / all, 0.00015);
}

// Elements are numbers that the code says exactly.
TEST(RowCode, SmallValuesAreCodedAgainToTheSameBits) {
  const std::uint64_t seed = testing::seed(75);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  for (int round = 0; round < 500; ++round) {
    const int d = 16 * static_cast<int>(random.integer(2, 16));
    const std::vector<float> x = strange_numbers(d, random);
    const SmallRow once(x, x);
    ASSERT_EQ(SmallRow(x, once.value).value, once.value);
  }
}

// A group is a NaN, not its neighbours, and numbers of the largest size stay finite.
TEST(RowCode, SmallValuesOfExtremeSize) {
  const std::vector<float> ones(80, 1.0f);
  for (const float bad : {kNan, -kNan, kInfinity, -kInfinity}) {
    std::vector<float> x = ones;
    x[40] = bad;
    const SmallRow row(ones, x);
    for (std::size_t c = 0; c < x.size(); ++c) {
      ASSERT_EQ(std::isnan(row.value[c]), c >= 32 && c < 64) << bad << " channel " << c;
      ASSERT_NEAR(row.key[c], 1.0f, 0.01f);
    }
  }
  constexpr float kMost = std::numeric_limits<float>::max();
  for (const float size : {kMost, -kMost, 0x1p-100f, -0x1p-100f}) {
    const SmallRow row(ones, std::vector<float>(80, size));
    for (const float value : row.value) ASSERT_NEAR(value / size, 1.0f, 0.04f) << size;
  }
  for (const float tiny : {0.0f, -0.0f, 0x1.fp-101f}) {
    const std::vector<float> x(48, tiny);
    for (const std::byte code : SmallRow(x, x).bytes) ASSERT_EQ(code, std::byte{0}) << tiny;
  }
}

// All scales that a row can have come back from the lowest bits, whatever the other bits are.
TEST(RowCode, ScalesAreInTheLowestBits) {
  for (unsigned bits = 0; bits < 0x10000; bits += 7) {
    std::vector<std::byte> codes(kScaleCodes);
    for (unsigned i = 0; i < kScaleCodes; ++i) {
      codes[i] = static_cast<std::byte>((bits >> i & 1u) | (i * 38u & 0xfeu));
    }
    const auto expected = static_cast<std::uint32_t>(bits) << 16;
    ASSERT_EQ(std::bit_cast<std::uint32_t>(scale_of(codes.data())), expected);
  }
}

// The largest channels get the outermost codes, which must not wrap around.
TEST(RowCode, ExtremesKeepTheirSigns) {
  for (const float size : {1.0f, 127.0f, 1e-20f, 3.0e38f, 0x1p-100f}) {
    for (int c = 0; c < 32; ++c) {
      for (const float sign : {1.0f, -1.0f}) {
        std::vector<float> x(32, 0.0f);
        x[static_cast<std::size_t>(c)] = sign * size;
        const std::vector<std::byte> codes = coded(x);
        const float back = decoded(codes)[static_cast<std::size_t>(c)];
        ASSERT_NEAR(back / size, sign, 1.01f / 127.0f) << size << " at " << c;
      }
    }
  }
}

TEST(RowCode, NanAndInfinityMakeThePartNan) {
  for (const float bad : {kNan, -kNan, kInfinity, -kInfinity}) {
    for (const std::size_t at : {0u, 15u, 16u, 63u}) {
      std::vector<float> x(64, 1.0f);
      x[at] = bad;
      for (const float value : decoded(coded(x)))
        ASSERT_TRUE(std::isnan(value)) << bad << ' ' << at;
    }
  }
}

TEST(RowCode, ZerosAndTinyNumbersAreZeros) {
  for (const float tiny : {0.0f, -0.0f, 0x1p-149f, 0x1.fp-101f}) {
    for (const std::byte code : coded(std::vector<float>(48, tiny))) {
      ASSERT_EQ(code, std::byte{0}) << tiny;
    }
  }
}

// A channel as large as the key biases of Qwen2 takes the resolution from all others: with a
// channel of 200 a step is 1.6, so that other channels of size 1 lose most of what they say.
TEST(RowCode, AHugeChannelCostsTheOthersTheirResolution) {
  const std::uint64_t seed = testing::seed(72);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  const auto lost_of = [&](float huge) {
    double lost = 0.0;
    double all = 0.0;
    for (int round = 0; round < 200; ++round) {
      std::vector<float> x = random.normal(128);
      x[40] = huge;
      const std::vector<float> back = decoded(coded(x));
      for (std::size_t c = 0; c < x.size(); ++c) {
        if (c == 40) continue;
        lost += std::pow(static_cast<double>(back[c]) - static_cast<double>(x[c]), 2.0);
        all += std::pow(static_cast<double>(x[c]), 2.0);
      }
    }
    return lost / all;
  };
  // A step s loses s^2 / 12, and 4 times that in the 16 of 127 channels with a bit of the scale.
  const auto expected = [](double step) { return step * step / 12 * (1 + 3 * 16.0 / 127); };
  EXPECT_NEAR(lost_of(3.0f), expected(3.0 / 127), 0.5 * expected(3.0 / 127));
  EXPECT_NEAR(lost_of(20.0f), expected(20.0 / 127), 0.1 * expected(20.0 / 127));
  const double lost = lost_of(200.0f);
  EXPECT_GT(lost, 0.2);
  EXPECT_LT(lost, 0.5);
}

}  // namespace
}  // namespace sluice
