// Matrices of weights times few tokens: reading the weights once is all that takes time.
#pragma once

#include <cuda_runtime.h>

#include "lib/backend.h"

namespace sluice::cuda {

struct GemvParams {
  Matrix x;                      // [tokens, inputs], dtype of the weights
  const void* weight = nullptr;  // [outputs, inputs]
  const float* bias = nullptr;   // [outputs] or null
  Matrix y;                      // [tokens, outputs], f32
  bool accumulate = false;
};

// Whether gemv() takes these: few tokens, rows in units of 16 bytes.
bool gemv_supported(const GemvParams& params);
void gemv(const GemvParams& params, cudaStream_t stream);

}  // namespace sluice::cuda
