// Shared memory beyond 48 KiB, which kernels have to be allowed.
#pragma once

#include <cstddef>

#include "kernels/runtime/limits.h"

namespace sluice::cuda {

// Lets `kernel` be launched with `bytes` beside what the kernel itself declares. Where that has to
// be allowed, all that the device gives a block is, always the same: the attribute is the kernel's
// in the whole process, so that threads would take what each launch needs from each other.
void allow_shared_memory(const char* what, const void* kernel, std::size_t bytes,
                         const DeviceLimits& device);

template <typename... Params>
void allow_shared_memory(const char* what, void (*kernel)(Params...), std::size_t bytes,
                         const DeviceLimits& device) {
  allow_shared_memory(what, reinterpret_cast<const void*>(kernel), bytes, device);
}

}  // namespace sluice::cuda
