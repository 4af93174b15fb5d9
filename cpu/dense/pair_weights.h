// Products of few tokens with bf16 weights that oneDNN packed in pairs of inputs, by AVX512-BF16
// dot products. oneDNN's own kernels take a third longer for one token.
#pragma once

#include <cstdint>

namespace sluice::cpu {

// y[t, o] = sum over i of x[t, i] * W[o, i] (+ bias[o]) (+ y[t, o] if `accumulate`). The order of
// summation does not depend on `tokens` or `outputs`.
struct PairProduct {
  const std::uint16_t* weights = nullptr;  // bf16 [outputs / 64, inputs / 2, 64, 2]
  std::int64_t outputs = 0;                // a multiple of 64
  std::int64_t inputs = 0;                 // even
  const std::uint16_t* x = nullptr;        // bf16 [tokens, inputs]
  std::int64_t tokens = 0;                 // a few
  const float* bias = nullptr;             // [outputs] or null
  float* y = nullptr;  // [tokens, outputs], `y_stride` floats from token to token
  std::int64_t y_stride = 0;
  bool accumulate = false;
};

// Null if this processor lacks AVX512-BF16.
using MultiplyPairs = void (*)(const PairProduct& product);
MultiplyPairs pair_multiplier();

}  // namespace sluice::cpu
