// A stream with the scratch memory that its kernels share.
#pragma once

#include <cstddef>

#include "kernels/runtime/launch.h"
#include "kernels/runtime/owners.h"

namespace sluice::cuda {

class Workspace {
 public:
  // On the current device. `wrapped`: a stream that outlives this; null: creates a stream. Without
  // scratch there are no counters either, and kernels that need them cannot run. Throws
  // Error{unsupported} if no device can be used.
  explicit Workspace(std::size_t scratch_bytes, cudaStream_t wrapped = nullptr);

  Launch launch() const;
  const DeviceLimits& device() const { return device_; }
  // Device memory, bytes, that a workspace with this scratch takes.
  static std::size_t bytes(std::size_t scratch_bytes);

 private:
  DeviceLimits device_;
  StreamOwner own_;
  cudaStream_t stream_;
  std::size_t scratch_bytes_;
  DeviceBlock scratch_;
  DeviceBlock counters_;
};

}  // namespace sluice::cuda
