// Kernels that begin while the one before them in the stream still runs, so that a chain of short
// ones does not pay for every start. Before compute capability 9.0 they follow each other.
#pragma once

#include <type_traits>

#include "kernels/error.h"
#include "kernels/launch.h"

namespace sluice::cuda {

// The next kernel of the stream may begin as soon as all blocks of this one have said so.
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until the kernel before is over and its writes can be seen. It, too, waited for those before it.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// `kernel` waits for the kernel before it ahead of the first access to memory that kernels write.
// One that reads what older kernels wrote before it waits must follow a kernel that lets it begin
// only after waiting itself: then all before that one are over.
template <typename... Params>
void launch_early(const char* what, void (*kernel)(Params...), dim3 grid, dim3 threads,
                  std::size_t shared, const Launch& launch,
                  const std::type_identity_t<Params>&... params) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared;
  config.stream = launch.stream;
  config.attrs = &early;
  config.numAttrs = launch.device->capability >= 90 ? 1 : 0;
  require(cudaLaunchKernelEx(&config, kernel, params...), what);
}

}  // namespace sluice::cuda
