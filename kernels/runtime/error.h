// CUDA's error codes as Sluice's errors.
#pragma once

#include <cuda_runtime.h>

namespace sluice::cuda {

// Throws unless `status` is success: Error{memory} if device or host memory ran out,
// Error{unsupported} for a missing or too old device or driver, Error{internal} for the rest. Most
// of the rest are sticky: the process can no longer use the device. `what` names the operation.
void require(cudaError_t status, const char* what);

// The same for the launch that just happened.
void require_launch(const char* kernel);

// For callers that cannot throw. Without it, the next launch would report the error as its own, one
// of Sluice or of the program that it is part of.
void ignore(cudaError_t status) noexcept;

// Returns true if no further call can succeed in this process.
bool is_sticky(cudaError_t status);

}  // namespace sluice::cuda
