// Owners of CUDA's objects: move-only, nothing thrown from destructors.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

#include "kernels/runtime/error.h"

namespace sluice::cuda {

// Owns a handle that destroy() frees.
template <typename Handle, auto destroy>
class Owner {
 public:
  Owner() = default;
  explicit Owner(Handle handle) : handle_(handle) {}
  Owner(Owner&& other) noexcept : handle_(std::exchange(other.handle_, Handle())) {}
  Owner& operator=(Owner&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;
  ~Owner() {
    if (handle_ != Handle()) ignore(destroy(handle_));
  }

  Handle get() const { return handle_; }
  // Leaves the handle to the caller.
  Handle release() { return std::exchange(handle_, Handle()); }

 private:
  Handle handle_ = Handle();
};

using StreamOwner = Owner<cudaStream_t, cudaStreamDestroy>;
using EventOwner = Owner<cudaEvent_t, cudaEventDestroy>;
using GraphOwner = Owner<cudaGraph_t, cudaGraphDestroy>;
using GraphExecOwner = Owner<cudaGraphExec_t, cudaGraphExecDestroy>;
using PoolOwner = Owner<cudaMemPool_t, cudaMemPoolDestroy>;
using DeviceBlock = Owner<void*, cudaFree>;
using PinnedBlock = Owner<void*, cudaFreeHost>;

StreamOwner make_stream();
EventOwner make_event();  // without timing
DeviceBlock make_device_block(std::size_t bytes);
PinnedBlock make_pinned_block(std::size_t bytes);  // mapped: kernels reach it by the same address

}  // namespace sluice::cuda
