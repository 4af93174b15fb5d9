// A matrix of weights times one token: reading the weights once is all that takes time.
#pragma once

#include "kernels/launch.h"
#include "lib/backend.h"

namespace sluice::cuda {

struct GemvParams {
  Matrix x;                      // [tokens, inputs], dtype of the weights
  const void* weight = nullptr;  // [outputs, inputs]
  const float* bias = nullptr;   // [outputs] or null
  Matrix y;                      // [tokens, outputs], f32
  bool accumulate = false;
};

// Whether gemv() takes these: one token, rows in units of 16 bytes, inputs that fit a
// multiprocessor beside the weights under way.
bool gemv_supported(const GemvParams& params, const DeviceLimits& device);
void gemv(const GemvParams& params, const Launch& launch);

}  // namespace sluice::cuda
