// What tests bring to a device.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "kernels/runtime/error.h"
#include "kernels/runtime/owners.h"

namespace sluice::cuda {

// cudaMemcpy may return as soon as it has read what is pageable, and the streams of the library do
// not wait for it.
inline void copy_in(void* to, const void* from, std::size_t bytes) {
  require(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "copying to the device");
  require(cudaDeviceSynchronize(), "copying to the device");
}

template <typename T>
DeviceBlock upload(const std::vector<T>& from) {
  constexpr std::size_t kLeast = 16;  // nothing has an address, too
  const std::size_t bytes = from.size() * sizeof(T);
  DeviceBlock block = make_device_block(bytes + kLeast);
  copy_in(block.get(), from.data(), bytes);
  return block;
}

template <typename T>
std::vector<T> download(const DeviceBlock& from, std::size_t count) {
  std::vector<T> to(count);
  require(cudaMemcpy(to.data(), from.get(), count * sizeof(T), cudaMemcpyDeviceToHost),
          "copying from the device");
  return to;
}

}  // namespace sluice::cuda
