// Products of few tokens with weights that oneDNN has packed in pairs of inputs: bf16, by the dot
// products of AVX512-BF16. oneDNN's own kernels take a third longer for one token.
#pragma once

#include <cstdint>

namespace sluice::cpu {

// y[t, o] = sum over i of x[t, i] * W[o, i] (+ bias[o]) (+ what was there). A sum's order does not
// depend on how many tokens or outputs there are.
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

// Null if this processor lacks what it needs.
using MultiplyPairs = void (*)(const PairProduct& product);
MultiplyPairs pair_multiplier();

}  // namespace sluice::cpu
