// The CUDA backend as a library, loaded on demand: a program that does not ask for it runs without
// CUDA's code in memory, and on machines where the library is not installed.
#pragma once

#include <memory>

#include "kernels/cuda_backend.h"

namespace sluice::cuda {

// make_cuda_backend(), by a name that can be looked up.
using MakeCudaBackend = void(const CudaOptions& options, std::unique_ptr<Backend>& backend);
inline constexpr const char* kMakeCudaBackend = "sluice_make_cuda_backend";

}  // namespace sluice::cuda
