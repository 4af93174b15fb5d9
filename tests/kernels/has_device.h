// Whether tests of kernels can run.
#pragma once

#include <cuda_runtime.h>

namespace sluice::cuda {

inline bool has_device() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
}

}  // namespace sluice::cuda
