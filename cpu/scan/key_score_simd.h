// The parts of key_score.h that need particular instruction sets.
#pragma once

#include <span>
#include <string_view>

#include "cpu/scan/key_score.h"

namespace sluice::cpu {

// What rounding the weights of channels to 8 bits loses is made up for as if every code were this:
// an offset that costs nothing. What is left is the part that differs from token to token.
constexpr float middle_code(int bits) { return static_cast<float>((1 << bits) - 1) / 2.0f; }

// fold_queries() and score_page() of one instruction set.
struct PageScorer {
  std::string_view name;
  void (*fold)(const float* q, std::int64_t stride, std::span<const float> factors,
               const PageScan& scan, PageQuery* folded);
  void (*score)(const PageScan& scan, std::span<const PageQuery> folded,
                std::span<float* const> logits);
};

const PageScorer& portable_scorer();
// Null if this processor lacks what they need.
const PageScorer* avx2_scorer();
const PageScorer* avx512_scorer();

}  // namespace sluice::cpu
