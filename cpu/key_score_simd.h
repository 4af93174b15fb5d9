// The parts of key_score.h that need particular instruction sets.
#pragma once

#include "cpu/key_score.h"

namespace sluice::cpu {

// What rounding the weights of channels to 8 bits loses is made up for as if every code were this:
// an offset that costs nothing. What is left is the part that differs from token to token.
constexpr float middle_code(int bits) { return static_cast<float>((1 << bits) - 1) / 2.0f; }

// AVX-512 with VNNI, VBMI and F16C, asked of the processor.
bool vnni_available();
void fold_queries_vnni(const float* q, std::int64_t stride, std::span<const float> factors,
                       const PageScan& scan, PageQuery* folded);
void score_page_vnni(const PageScan& scan, std::span<const PageQuery> folded,
                     std::span<float* const> logits);

}  // namespace sluice::cpu
