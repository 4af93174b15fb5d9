// What one bit stands for: the means of a channel's values below and above the middle of its range.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace sluice::testing {

// `values` of one channel of a page, and what its codes stand for.
inline void expect_halves(const std::vector<double>& values, const std::vector<double>& coded) {
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  const auto [low, high] = std::minmax_element(coded.begin(), coded.end());
  const double range = *most - *least;
  const double middle = (*least + *most) / 2;
  // Zero and scale are rounded to f16.
  const double rounding = range * 2e-3 + std::fabs(middle) * 1e-3;
  for (const double level : {*low, *high}) {
    double sum = 0.0;
    double count = 0.0;
    for (std::size_t t = 0; t < values.size(); ++t) {
      ASSERT_TRUE(coded[t] == *low || coded[t] == *high) << "token " << t;
      if (coded[t] != level) continue;
      sum += values[t];
      count += 1.0;
      const double beyond = level == *low ? values[t] - middle : middle - values[t];
      ASSERT_TRUE(*low == *high || beyond <= range * 2e-3) << "token " << t;
    }
    ASSERT_NEAR(level, sum / count, rounding);
  }
}

}  // namespace sluice::testing
