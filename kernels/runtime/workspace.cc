#include "kernels/runtime/workspace.h"

#include "kernels/runtime/error.h"

namespace sluice::cuda {
namespace {

constexpr std::size_t kCounterBytes = Launch::kCounters * sizeof(std::uint32_t);

DeviceLimits current_limits() {
  int ordinal = 0;
  require(cudaGetDevice(&ordinal), "the current device");
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    require(cudaDeviceGetAttribute(&value, which, ordinal), "an attribute of the device");
    return value;
  };
  DeviceLimits limits;
  limits.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  limits.shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  limits.capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor) +
                      attribute(cudaDevAttrComputeCapabilityMinor);
  return limits;
}

}  // namespace

Workspace::Workspace(std::size_t scratch_bytes)
    : device_(current_limits()),
      stream_(make_stream()),
      scratch_bytes_(scratch_bytes),
      scratch_(make_device_block(scratch_bytes)),
      counters_(make_device_block(kCounterBytes)) {
  require(cudaMemsetAsync(counters_.get(), 0, kCounterBytes, stream_.get()), "memset");
  require(cudaStreamSynchronize(stream_.get()), "a new workspace");
}

Launch Workspace::launch() const {
  return {stream_.get(), &device_, static_cast<std::uint32_t*>(counters_.get()),
          static_cast<std::byte*>(scratch_.get()), scratch_bytes_};
}

std::size_t Workspace::bytes(std::size_t scratch_bytes) { return scratch_bytes + kCounterBytes; }

}  // namespace sluice::cuda
