// Programmatic dependent launch (PDL): kernels that begin while the one before them in the stream
// still runs, so that a chain of short ones does not pay for every start. Before compute capability
// 9.0 they follow each other. Source: CUDA C++ Programming Guide 12, "Programmatic Dependent Launch
// and Synchronization".
//
// Rules for a kernel started by launch_early():
//   1. It waits before its first access to memory that kernels write, the scratch and counters of a
//      Launch included.
//   2. At least one block waits on every path, even with nothing to do. Then the grid ends after
//      the one before it, and waiting for one kernel is waiting for all before it.
//   3. Without waiting it may read what stays the same during a step: the batch's tokens and gaps,
//      block tables, weights. Copies, which write the first three, never let the next kernel begin
//      early (copy.cu); weights have to be synchronized before their first product.
//   4. Without waiting it may read results of older kernels, and write what the kernel before does
//      not touch, only if that kernel waits first and allows then: all kernels before that one are
//      over. take_turn() allows first.
#pragma once

#include <type_traits>

#include "kernels/runtime/error.h"
#include "kernels/runtime/launch.h"
#include "kernels/runtime/shared_memory.h"

namespace sluice::cuda {

// Lets the next kernel of the stream begin as soon as all blocks of this one have called it.
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernel before is over and its writes are visible; by rule 2, so are all others.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Both, for a short kernel if the next one makes no use of rule 4. Called after the work that does
// not depend on the kernel before.
__device__ __forceinline__ void take_turn() {
  allow_next_kernel();
  wait_for_kernel_before();
}

// Launches `kernel`, which keeps the rules above, in clusters of `cluster_blocks` blocks. More than
// one block needs compute capability 9.0.
template <typename... Params>
void launch_early_clusters(const char* what, void (*kernel)(Params...), dim3 grid, dim3 threads,
                           std::size_t shared, int cluster_blocks, const Launch& launch,
                           const std::type_identity_t<Params>&... params) {
  if (shared > 0) allow_shared_memory(what, kernel, shared, *launch.device);
  if (cluster_blocks > 1) {
    require(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), what);
  }
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster_blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared;
  config.stream = launch.stream;
  config.attrs = attributes;
  config.numAttrs = launch.device->capability < 90 ? 0 : cluster_blocks > 1 ? 2 : 1;
  require(cudaLaunchKernelEx(&config, kernel, params...), what);
}

// The same without clusters.
template <typename... Params>
void launch_early(const char* what, void (*kernel)(Params...), dim3 grid, dim3 threads,
                  std::size_t shared, const Launch& launch,
                  const std::type_identity_t<Params>&... params) {
  launch_early_clusters(what, kernel, grid, threads, shared, 1, launch, params...);
}

}  // namespace sluice::cuda
