// What every kernel launcher is given besides its parameters.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace sluice::cuda {

// What launchers ask of the device they run on.
struct DeviceLimits {
  int multiprocessors = 0;
  int shared_bytes = 0;  // that one block can have
  int capability = 0;    // 90 for compute capability 9.0
};

// Work that kernels of one stream share, one after the other.
struct Launch {
  cudaStream_t stream = nullptr;
  const DeviceLimits* device = nullptr;
  // kCounters words that are zero before every kernel and that it leaves zero.
  std::uint32_t* counters = nullptr;
  // Scratch of the call, with arbitrary content; 256-byte aligned.
  std::byte* scratch = nullptr;
  std::size_t scratch_bytes = 0;

  static constexpr int kCounters = 16384;
};

}  // namespace sluice::cuda
