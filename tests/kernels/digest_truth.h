// What a PageDigest says of logits by its definition.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/runtime/page_digest.h"
#include "sluice/half.h"

namespace sluice::cuda {

// Any NaN is the largest.
inline float largest_of(const float* x, std::int64_t count) {
  return *std::max_element(x, x + count,
                           [](float a, float b) { return !std::isnan(a) && !(b <= a); });
}

// Of a page's f16 numbers.
inline float digest_sum(const float* page) {
  constexpr float kLog2E = 1.4426950408889634f;
  const float norm = largest_of(page, kPageTokens) * kLog2E;
  double sum = 0.0;
  for (int i = 0; std::isfinite(norm) && i < kPageTokens; ++i) {
    sum += std::exp2(static_cast<double>(page[i]) * static_cast<double>(kLog2E) -
                     static_cast<double>(norm));
  }
  return static_cast<float>(sum);
}

// Of f16 logits [rows, stride], of which row i has pages(i) digested ones; others keep 0xff.
template <typename Pages>
void expect_digest(const PageDigest& digest, const std::uint16_t* logits, std::int64_t rows,
                   int group, std::int64_t stride, const Pages& pages) {
  for (std::int64_t i = 0; i < rows * digest.pages; ++i) {
    const std::int64_t page = i / group % digest.pages;
    const std::int64_t row = i / (group * digest.pages) * group + i % group;
    const std::uint16_t* const maxima = digest.maxima + i * kBoundsPerPage;
    if (page >= pages(row)) {
      ASSERT_EQ(maxima[0], 0xffff) << "row " << row << " page " << page;
      ASSERT_TRUE(std::isnan(digest.sums[i])) << "row " << row << " page " << page;
      continue;
    }
    std::vector<float> x;
    const std::uint16_t* const first = logits + row * stride + page * kPageTokens;
    std::transform(first, first + kPageTokens, std::back_inserter(x), f16_to_float);
    for (int s = 0; s < kBoundsPerPage; ++s) {
      ASSERT_EQ(f16_to_float(maxima[s]), largest_of(x.data() + s * kBoundTokens, kBoundTokens))
          << "row " << row << " page " << page << " part " << s;
    }
    const float sum = digest_sum(x.data());
    ASSERT_NEAR(digest.sums[i], sum, 1e-5f * sum) << "row " << row << " page " << page;
  }
}

}  // namespace sluice::cuda
