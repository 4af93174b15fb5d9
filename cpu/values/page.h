// One page of attention over value tiles, in SIMD.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace sluice::cpu {

// x = e^(x - reference) for the logits of one page; returns their sum. These are the weights of
// add_value_page().
float weigh_page(float* logits, float reference);
// The sum of weights of one page.
float sum_page(const float* weights);

// Most query heads that read a page at once, because their sums must fit the registers.
inline constexpr int kMostPageQueries = 4;

// A page of one KV head in the layout of ValueTiles.
struct ValuePage {
  const std::byte* page = nullptr;
  int bits = 2;
  int channels = 0;
};

// Input and output of one query head for a page.
struct PageWeights {
  const float* weights = nullptr;  // [kPageTokens]
  float sum = 0.0f;                // sum of the weights, times `factor`
  float* out = nullptr;            // [channels]: factor * weights * values are added
  float factor = 1.0f;
};

void add_value_page(const ValuePage& page, std::span<const PageWeights> queries);

}  // namespace sluice::cpu
