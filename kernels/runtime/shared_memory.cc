#include "kernels/runtime/shared_memory.h"

#include <cuda_runtime.h>

#include "kernels/runtime/error.h"

namespace sluice::cuda {
namespace {

constexpr std::size_t kAlways = std::size_t{48} << 10;
constexpr std::size_t kAlignment = 128;  // of a launch's dynamic shared memory, at most

}  // namespace

void allow_shared_memory(const char* what, const void* kernel, std::size_t bytes,
                         const DeviceLimits& device) {
  cudaFuncAttributes attributes{};
  require(cudaFuncGetAttributes(&attributes, kernel), what);
  const std::size_t declared =
      (attributes.sharedSizeBytes + kAlignment - 1) / kAlignment * kAlignment;
  if (declared + bytes <= kAlways) return;
  require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               device.shared_bytes - static_cast<int>(declared)),
          what);
}

}  // namespace sluice::cuda
