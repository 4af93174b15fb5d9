#include "lib/hadamard.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "tests/support/random.h"

namespace sluice {
namespace {

TEST(Hadamard, RotatesInBlocksOfTheLargestPowerOfTwo) {
  EXPECT_EQ(Rotation::of(128).block, 128);
  EXPECT_EQ(Rotation::of(80).block, 16);
  EXPECT_EQ(Rotation::of(96).block, 32);
  EXPECT_EQ(Rotation::of(6).block, 2);
  EXPECT_EQ(Rotation::of(5).block, 1);
  for (int head_dim = 1; head_dim <= 256; ++head_dim) {
    const Rotation rotation = Rotation::of(head_dim);
    EXPECT_EQ(rotation.scale, 1.0f / std::sqrt(static_cast<float>(rotation.block)));
  }
}

// The matrix by its definition: entries of +-1 / sqrt(block), by the parity of the bits that row
// and column share.
TEST(Hadamard, MultipliesByTheMatrix) {
  const std::uint64_t seed = testing::seed(1);
  SCOPED_TRACE(testing::seed_message(seed));
  testing::Random random(seed);
  for (const int head_dim : {1, 2, 5, 6, 18, 64, 80, 96, 128, 192, 256}) {
    const Rotation rotation = Rotation::of(head_dim);
    const auto block = static_cast<std::size_t>(rotation.block);
    const std::vector<float> x = random.normal(3 * head_dim);
    std::vector<float> got = x;
    rotate(got.data(), std::ssize(got), rotation);
    for (std::size_t row = 0; row < x.size(); ++row) {
      double wanted = 0.0;
      for (std::size_t i = 0; i < block; ++i) {
        const double entry = std::popcount(row % block & i) % 2 == 0 ? 1.0 : -1.0;
        wanted += entry * static_cast<double>(x[row / block * block + i]);
      }
      wanted /= std::sqrt(static_cast<double>(block));
      // A sum of up to 8 roundings of numbers of about sqrt(block).
      ASSERT_NEAR(got[row], wanted, 1e-5) << "head_dim " << head_dim << " row " << row;
    }
  }
}

TEST(Hadamard, KeepsProductsAndIsItsOwnInverse) {
  const std::uint64_t seed = testing::seed(2);
  SCOPED_TRACE(testing::seed_message(seed));
  testing::Random random(seed);
  for (const int head_dim : {5, 80, 128}) {
    const Rotation rotation = Rotation::of(head_dim);
    const std::vector<float> a = random.normal(head_dim);
    std::vector<double> x(a.begin(), a.end());
    const std::vector<float> b = random.normal(head_dim);
    std::vector<double> y(b.begin(), b.end());
    double before = 0.0;
    for (std::size_t i = 0; i < x.size(); ++i) before += x[i] * y[i];
    rotate(x.data(), head_dim, rotation);
    rotate(y.data(), head_dim, rotation);
    double after = 0.0;
    for (std::size_t i = 0; i < x.size(); ++i) after += x[i] * y[i];
    // The scale is a float.
    EXPECT_NEAR(after, before, 1e-5);
    rotate(x.data(), head_dim, rotation);
    for (std::size_t i = 0; i < x.size(); ++i) {
      EXPECT_NEAR(x[i], static_cast<double>(a[i]), 1e-5);
    }
  }
}

}  // namespace
}  // namespace sluice
