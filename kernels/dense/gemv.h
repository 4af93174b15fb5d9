// A matrix of weights times one token: reading the weights once is all that takes time.
#pragma once

#include "kernels/runtime/launch.h"
#include "lib/backend.h"

namespace sluice::cuda {

// Whether gemv() takes this chain: one token, rows in units of 16 bytes, inputs that fit a
// multiprocessor beside the weights under way.
bool gemv_supported(const LinearChain& chain, const DeviceLimits& device);
// The whole chain. `weight` [outputs, inputs], in the dtype of the product's inputs, stands for the
// chain's own.
void gemv(const LinearChain& chain, const void* weight, const Launch& launch);

}  // namespace sluice::cuda
