// The CUDA backend as a library that is loaded when a program asks for it: one that does not runs
// without CUDA's code in memory, and where that library is not installed.
#pragma once

#include <memory>

#include "kernels/cuda_backend.h"

namespace sluice::cuda {

// make_cuda_backend(), by a name that can be looked up.
using MakeCudaBackend = void(const CudaOptions& options, std::unique_ptr<Backend>& backend);
inline constexpr const char* kMakeCudaBackend = "sluice_make_cuda_backend";

}  // namespace sluice::cuda
