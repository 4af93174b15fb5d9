// Instruction-set-specific parts of key_score.h.
#pragma once

#include <span>
#include <string_view>

#include "cpu/scan/key_score.h"

namespace sluice::cpu {

// The error of rounding channel weights to 8 bits is compensated as if every code had this value,
// because that is a free constant offset. The part that differs from token to token remains.
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
// Null if this processor lacks the instructions.
const PageScorer* avx2_scorer();
const PageScorer* avx512_scorer();

}  // namespace sluice::cpu
