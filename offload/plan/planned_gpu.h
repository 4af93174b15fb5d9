// A GPU that need not exist: a backend that plans are made for, and that computes nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "lib/backend.h"

namespace sluice {

struct PlannedGpu {
  std::uint64_t memory_bytes = 0;
  double memory_rate = 0.0;  // bytes per second
  double bus_rate = 0.0;     // at which kernels read host memory, bytes per second
  std::optional<std::uint64_t> device_cap;
  std::optional<std::uint64_t> host_cap;
  std::optional<DType> compute;
  DType weight_dtype = DType::bf16;
};

// A GPU like that of a backend, with its cap on device memory.
PlannedGpu planned_like(Backend& real);

// A backend with the sizes of the CUDA backend on such a GPU. Memory can be charged to its
// accounts, but not taken; queues refuse all work. Both throw Error{unsupported}.
std::unique_ptr<Backend> make_planned_gpu(const PlannedGpu& gpu);

}  // namespace sluice
