// Arguments of every kernel launcher besides its parameters.
//
// Launchers are called by ../cuda_queue.cc, one for each operation. The rest of this folder:
//   memory, owners    device and pinned host memory under their caps; CUDA's objects
//   limits, link      what the device can do, and the bus to it
//   workspace         a stream and what its kernels share: a Launch
//   recorder          a step as a CUDA graph, recorded once and replayed
//   copy              small pieces and single rows by kernels; large ones go to the copy engine
//   heads, dispatch   host arrays as a kernel's argument; dtypes and head_dim as constants
//   early_launch      programmatic dependent launch and clusters, and the rules for kernels
//   shared_memory     permission to use more than 48 KiB of it
//   error             CUDA's error codes as exceptions
// and device code that kernels share:
//   device_math       conversions, warp-wide sums, mma, ldmatrix, cp.async
//   barriers, cluster, ticket   mbarriers; thread-block clusters; the last block of several
//   paged             addresses of rows from block tables
//   whole_pages, hadamard   what builders of the key index and of value tiles have in common
//   page_digest, page_weights   what a scan leaves for select(), and select() for value tiles
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/runtime/limits.h"

namespace sluice::cuda {

// A stream, and memory that its kernels share one after the other (early_launch.cuh, rule 1).
struct Launch {
  cudaStream_t stream = nullptr;
  const DeviceLimits* device = nullptr;
  // kCounters words for tickets (ticket.cuh), zero before every kernel; it must leave them zero.
  std::uint32_t* counters = nullptr;
  // Scratch of one operation, with arbitrary content; 256-byte aligned.
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
