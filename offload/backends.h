// The composition root: the one place that knows which backends exist.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "lib/backend.h"

namespace sluice {

struct BackendOptions {
  std::string device = "cpu";                  // "cpu", "cuda", "cuda:N" or "reference"
  int threads = 0;                             // 0: Topology::threads
  std::optional<DType> compute;                // for matrix products; unset: fast and lossless
  DType weight_dtype = DType::bf16;            // of the checkpoint's matrices
  std::optional<std::uint64_t> device_memory;  // cap in bytes
  std::optional<std::uint64_t> host_memory;    // cap in bytes
};

// Throws Error{usage} for an unknown device name, Error{unsupported} for a device that this build
// or this machine does not have.
std::unique_ptr<Backend> make_backend(const BackendOptions& options);

// A CPU that attends to rows in host memory while a device computes, see
// offload/attention/host_attention.h. 0 `threads`: one per core, except the core of the thread that
// waits for the device.
std::unique_ptr<Backend> make_attending_cpu(int threads);

}  // namespace sluice
