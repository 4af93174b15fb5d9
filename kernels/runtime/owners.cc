#include "kernels/runtime/owners.h"

#include "kernels/runtime/error.h"

namespace sluice::cuda {

StreamOwner make_stream() {
  cudaStream_t stream = nullptr;
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
  return StreamOwner(stream);
}

EventOwner make_event() {
  cudaEvent_t event = nullptr;
  require(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event");
  return EventOwner(event);
}

DeviceBlock make_device_block(std::size_t bytes) {
  void* data = nullptr;
  require(cudaMalloc(&data, bytes), "device memory");
  return DeviceBlock(data);
}

PinnedBlock make_pinned_block(std::size_t bytes) {
  void* data = nullptr;
  require(cudaHostAlloc(&data, bytes, cudaHostAllocMapped | cudaHostAllocPortable),
          "pinned host memory");
  return PinnedBlock(data);
}

}  // namespace sluice::cuda
