// Partials to merge, and the right results by definition, in fp64.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "tests/support/random.h"

namespace sluice::testing {

// Rows for every case: either side empty, both or none, one outweighs the other, equal weights.
struct PartialsCase {
  static constexpr float kEmpty = -std::numeric_limits<float>::infinity();

  PartialsCase(int dim, std::uint64_t seed) : head_dim(dim) {
    Random random(seed);
    from = random.normal(rows() * dim);
    old = random.normal(rows() * dim);
  }
  std::int64_t rows() const { return static_cast<std::int64_t>(old_lse.size()); }

  int head_dim;
  std::vector<float> from_lse = {1.0f, kEmpty, 300.0f, kEmpty, -5.0f, 2.0f};
  std::vector<float> old_lse = {2.0f, 3.0f, -300.0f, kEmpty, kEmpty, 2.0f};
  std::vector<float> from;  // [rows, head_dim]
  std::vector<float> old;   // [rows, head_dim], the partial merged into
};

inline void expect_merged(const PartialsCase& c, const std::vector<float>& out,
                          const std::vector<float>& lse) {
  const auto d = static_cast<std::size_t>(c.head_dim);
  for (std::size_t row = 0; row < lse.size(); ++row) {
    const double a = std::exp(static_cast<double>(c.from_lse[row]));
    const double b = std::exp(static_cast<double>(c.old_lse[row]));
    if (a + b == 0.0) {
      EXPECT_EQ(lse[row], PartialsCase::kEmpty);
      continue;
    }
    EXPECT_NEAR(static_cast<double>(lse[row]), std::log(a + b), 1e-5) << row;
    for (std::size_t i = row * d; i < (row + 1) * d; ++i) {
      const double wanted =
          (a * static_cast<double>(c.from[i]) + b * static_cast<double>(c.old[i])) / (a + b);
      EXPECT_NEAR(static_cast<double>(out[i]), wanted, 1e-6) << row;
    }
  }
}

}  // namespace sluice::testing
