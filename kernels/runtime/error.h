// CUDA's error codes as Sluice's errors.
#pragma once

#include <cuda_runtime.h>

namespace sluice::cuda {

// Throws unless `status` is success: Error{memory} if the device or the host has no more,
// Error{unsupported} for a missing or too old device or driver, Error{internal} for the rest, of
// which most are sticky: the process can no longer use the device. `what` names the operation.
void require(cudaError_t status, const char* what);

// The same for the launch that just happened.
void require_launch(const char* kernel);

// Whether no further call can succeed in this process.
bool is_sticky(cudaError_t status);

}  // namespace sluice::cuda
