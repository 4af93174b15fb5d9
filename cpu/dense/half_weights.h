// Products in fp32 with weights that stay in 16 bits, as a checkpoint has them: half the memory,
// and half of what a decode step reads, for processors that do not multiply bf16.
#pragma once

#include <cstdint>

#include "sluice/types.h"

namespace sluice::cpu {

// From so many tokens on, widening a block of rows for a matrix product is faster.
inline constexpr std::int64_t kFewTokens = 16;

// y[t, o] = sum over i of x[t, i] * W[o, i] (+ bias[o]) (+ what was there). A sum's order does
// not depend on how many tokens or outputs there are.
struct FewProduct {
  const std::uint16_t* weights = nullptr;  // [outputs, inputs]
  DType dtype = DType::bf16;               // of these, or f16
  std::int64_t outputs = 0;
  std::int64_t inputs = 0;
  const float* x = nullptr;     // [tokens, inputs]
  std::int64_t tokens = 0;      // a few
  const float* bias = nullptr;  // [outputs] or null
  float* y = nullptr;           // [tokens, outputs], `y_stride` floats from token to token
  std::int64_t y_stride = 0;
  bool accumulate = false;
};
void multiply_few(const FewProduct& product);

}  // namespace sluice::cpu
