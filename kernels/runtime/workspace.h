// A stream with the scratch memory that its kernels share.
#pragma once

#include <cstddef>

#include "kernels/runtime/launch.h"
#include "kernels/runtime/owners.h"

namespace sluice::cuda {

class Workspace {
 public:
  // On the current device. Throws Error{unsupported} if there is none that can be used.
  explicit Workspace(std::size_t scratch_bytes);

  Launch launch() const;
  const DeviceLimits& device() const { return device_; }
  // Device memory that a workspace of this much scratch takes.
  static std::size_t bytes(std::size_t scratch_bytes);

 private:
  DeviceLimits device_;
  StreamOwner stream_;
  std::size_t scratch_bytes_;
  DeviceBlock scratch_;
  DeviceBlock counters_;
};

}  // namespace sluice::cuda
