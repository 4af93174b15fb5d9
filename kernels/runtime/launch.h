// Arguments of every kernel launcher besides its parameters.
//
// The rest of this folder, from the host to the device:
//   cuda_backend  the operations of lib/backend.h: which launcher, on which stream
//   memory        device and pinned host memory, as their caps allow; owners, of CUDA's objects
//   limits, link  what the device can do, and the bus to it
//   workspace     a stream and what its kernels share: a Launch
//   recorder      a step as a graph, recorded once and replayed
//   copy          small pieces and single rows by kernels; cuda_backend leaves large ones to the
//                 copy engine
//   heads, dispatch   a call's host arrays as a kernel's argument, its dtypes as constants
//   early_launch  kernels that begin while the one before them still runs
//   shared_memory permission to use more than 48 KiB of it
//   paged, device_math, barriers, cluster, ticket   device code that kernels share: addresses of
//                 rows, and cooperation of warps, blocks, clusters and whole grids
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/runtime/limits.h"

namespace sluice::cuda {

// Memory that kernels of one stream share, one after the other.
struct Launch {
  cudaStream_t stream = nullptr;
  const DeviceLimits* device = nullptr;
  // kCounters words, zero before every kernel; it must leave them zero.
  std::uint32_t* counters = nullptr;
  // Scratch of the call, with arbitrary content; 256-byte aligned.
  std::byte* scratch = nullptr;
  std::size_t scratch_bytes = 0;
  // Time at which the simulated slower bus is free again: see attention/slow_bus.cuh.
  unsigned long long* bus_free_at = nullptr;

  static constexpr int kCounters = 16384;
  static constexpr int kHalfCounters = kCounters / 2;

  // This launch with half of its scratch and counters, for two kernels that may run at the same
  // time.
  Launch half(bool is_second) const {
    Launch half = *this;
    half.scratch_bytes = scratch_bytes / 2 / 256 * 256;
    if (is_second && scratch != nullptr) {
      half.scratch += half.scratch_bytes;
      half.counters += kHalfCounters;
    }
    return half;
  }
};

}  // namespace sluice::cuda
