// The CUDA backend: weights, index and attention on one NVIDIA GPU, rows in pinned host memory.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "lib/backend.h"

namespace sluice::cuda {

struct CudaOptions {
  int ordinal = 0;
  std::optional<DType> compute;             // of matrix products; unset: the weights' dtype
  DType weight_dtype = DType::bf16;         // of the checkpoint's matrices
  std::optional<std::uint64_t> device_cap;  // bytes; unset: all free memory except a reserve
  std::uint64_t host_cap = MemoryAccount::kNoCap;
};

// Device memory that a queue takes for itself if it computes and records: scratch of its kernels,
// and recordings.
std::uint64_t queue_bytes();

// Throws Error{unsupported} if the device does not exist, its driver is too old or this build has
// no kernels for it.
std::unique_ptr<Backend> make_cuda_backend(const CudaOptions& options);

}  // namespace sluice::cuda
