// fp32 products with weights kept in the checkpoint's 16 bits, for processors without bf16
// multiply: half the memory, and a decode step reads half the bytes.
#pragma once

#include <cstdint>

#include "sluice/types.h"

namespace sluice::cpu {

// From this many tokens on, widening a block of rows for a matrix product is faster.
inline constexpr std::int64_t kFewTokens = 16;

// y[t, o] = sum over i of x[t, i] * W[o, i] (+ bias[o]) (+ y[t, o] if `accumulate`). The order of
// summation does not depend on `tokens` or `outputs`.
struct FewProduct {
  const std::uint16_t* weights = nullptr;  // [outputs, inputs]
  DType dtype = DType::bf16;               // of the weights: bf16 or f16
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
