// The noise that tokens are drawn by.
#include "lib/gumbel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace sluice {
namespace {

using Counter = std::array<std::uint32_t, 4>;

// Known answers of Random123 1.14, the generator's authors' library: tests/kat_vectors,
// "philox4x32 10".
TEST(Philox, GivesTheAnswersOfItsAuthors) {
  constexpr std::uint32_t kOnes = 0xffffffffu;
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}),
            (Counter{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  EXPECT_EQ(philox({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Counter{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
  EXPECT_EQ(
      philox({0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}, {0xa4093822u, 0x299f31d0u}),
      (Counter{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}));
}

TEST(Gumbel, WordsAreOfSeedPositionAndGroup) {
  const auto own = noise_words(1, 2, 3);
  EXPECT_EQ(own, philox({3, 2, 0, 0}, {1, 0}));
  EXPECT_EQ(noise_words(1ull << 32, 1ull << 33, 0), philox({0, 0, 2, 0}, {0, 1}));
}

// Against long double, where log(u) loses nothing: u = 1 - 2^-33 fits its 64 bits.
TEST(Gumbel, IsExactToAFewUnits) {
  const auto expected = [](std::uint32_t word) {
    const long double u = 1.0L - (static_cast<long double>(word) + 0.5L) * 0x1p-32L;
    return -std::log(-std::log(u));
  };
  static_assert(std::numeric_limits<long double>::digits >= 64);
  for (std::uint64_t word = 0; word <= 0xffffffffu; word += word < 1000 ? 1 : word / 97) {
    const auto bits = static_cast<std::uint32_t>(word);
    EXPECT_NEAR(gumbel(bits), static_cast<double>(expected(bits)), 1e-14) << word;
  }
  EXPECT_NEAR(gumbel(0), 22.87, 0.01);
  EXPECT_NEAR(gumbel(0xffffffffu), -3.13, 0.01);
}

TEST(Gumbel, IsBelowItsBound) {
  for (int zeros = 0; zeros <= 32; ++zeros) {
    // The least word with so many has the most noise.
    const std::uint32_t least = zeros == 32 ? 0 : 0x80000000u >> zeros;
    ASSERT_EQ(std::countl_zero(least), zeros);
    EXPECT_LT(gumbel(least), gumbel_bound(zeros));
    EXPECT_GT(gumbel(least), gumbel_bound(zeros) - 1.1) << "of no use";
  }
}

std::vector<double> noise_of(std::uint64_t seed, std::uint64_t position, std::uint32_t groups) {
  std::vector<double> noise;
  for (std::uint32_t group = 0; group < groups; ++group) {
    for (const std::uint32_t word : noise_words(seed, position, group)) {
      noise.push_back(gumbel(word));
    }
  }
  return noise;
}

// Kolmogorov and Smirnov: sqrt(n) times the largest distance is above 1.95 once in a thousand
// times; seeds are fixed.
TEST(Gumbel, HasTheGumbelDistribution) {
  for (const std::uint64_t seed : {0u, 1u, 2u, 3u}) {
    std::vector<double> noise = noise_of(seed, 5, 25000);
    std::sort(noise.begin(), noise.end());
    double distance = 0.0;
    const auto count = static_cast<double>(noise.size());
    for (std::size_t i = 0; i < noise.size(); ++i) {
      const double share = std::exp(-std::exp(-noise[i]));
      distance = std::max({distance, std::abs(share - static_cast<double>(i) / count),
                           std::abs(share - static_cast<double>(i + 1) / count)});
    }
    EXPECT_LT(std::sqrt(count) * distance, 1.95) << seed;
  }
}

double correlation(const std::vector<double>& a, const std::vector<double>& b) {
  const auto count = static_cast<double>(a.size());
  double sum_a = 0.0, sum_b = 0.0, squares_a = 0.0, squares_b = 0.0, products = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    sum_a += a[i];
    sum_b += b[i];
    squares_a += a[i] * a[i];
    squares_b += b[i] * b[i];
    products += a[i] * b[i];
  }
  const auto spread = [&](double sum, double squares) { return squares - sum * sum / count; };
  return (products - sum_a * sum_b / count) /
         std::sqrt(spread(sum_a, squares_a) * spread(sum_b, squares_b));
}

// Neighbours in every direction; a correlation of 100,000 pairs has a deviation of 0.0032.
TEST(Gumbel, NeighboursAreIndependent) {
  constexpr std::uint32_t kGroups = 25000;
  const std::vector<double> own = noise_of(7, 100, kGroups);
  for (const std::uint64_t seed : {6ull, 8ull, 7ull ^ (1ull << 31), 7ull ^ (1ull << 32)}) {
    EXPECT_LT(std::abs(correlation(own, noise_of(seed, 100, kGroups))), 0.015) << "seed " << seed;
  }
  for (const std::uint64_t position : {99ull, 101ull, 100ull ^ (1ull << 32)}) {
    EXPECT_LT(std::abs(correlation(own, noise_of(7, position, kGroups))), 0.015)
        << "position " << position;
  }
  for (const std::ptrdiff_t distance : {1, 2, 3, 4}) {
    const std::vector<double> shifted(own.begin() + distance, own.end());
    EXPECT_LT(std::abs(correlation({own.begin(), own.end() - distance}, shifted)), 0.015)
        << "ids " << distance << " apart";
  }
  EXPECT_GT(correlation(own, own), 0.999);
}

}  // namespace
}  // namespace sluice
