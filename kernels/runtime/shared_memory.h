// Shared memory beyond 48 KiB, which each kernel must be allowed to use.
#pragma once

#include <cstddef>

#include "kernels/runtime/limits.h"

namespace sluice::cuda {

// Lets `kernel` be launched with `bytes` beside the memory that it declares. Where that needs
// permission, it always allows the device's maximum per block: the attribute belongs to the kernel
// in the whole process, so threads that set it per launch would lower it under each other.
void allow_shared_memory(const char* what, const void* kernel, std::size_t bytes,
                         const DeviceLimits& device);

template <typename... Params>
void allow_shared_memory(const char* what, void (*kernel)(Params...), std::size_t bytes,
                         const DeviceLimits& device) {
  allow_shared_memory(what, reinterpret_cast<const void*>(kernel), bytes, device);
}

}  // namespace sluice::cuda
