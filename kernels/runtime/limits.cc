#include "kernels/runtime/limits.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <memory>
#include <string>

#include "kernels/runtime/error.h"
#include "sluice/errors.h"

namespace sluice::cuda {
namespace {

// The largest consumer card of each kind, and the one card of 8.0. Shared memory by NVIDIA's CUDA
// C++ Programming Guide, "Technical Specifications per Compute Capability"; the rest by its data
// sheets.
struct Model {
  std::string_view name;
  DeviceLimits limits;
};

constexpr std::array kModels = {
    Model{"8.0", {108, 163 << 10, 80, 40ULL << 30}},
    Model{"8.6", {82, 99 << 10, 86, 24ULL << 30}},
    Model{"8.9", {128, 99 << 10, 89, 24ULL << 30}},
    Model{"12.0", {170, 99 << 10, 120, 32ULL << 30}},
};
constexpr int kHasClusters = 90;

}  // namespace

DeviceLimits pretended_limits(const DeviceLimits& real, std::string_view capability) {
  const auto* model = std::find_if(kModels.begin(), kModels.end(),
                                   [&](const Model& m) { return m.name == capability; });
  if (model == kModels.end()) {
    throw Error(ErrorCode::unsupported, "SLUICE_PRETEND_GPU is '" + std::string(capability) +
                                            "'; it may be 8.0, 8.6, 8.9 or 12.0");
  }
  DeviceLimits limits = model->limits;
  if (limits.capability >= kHasClusters && real.capability < kHasClusters) {
    throw Error(ErrorCode::unsupported,
                "SLUICE_PRETEND_GPU is '12.0', which needs a GPU that has clusters (9.0)");
  }
  limits.multiprocessors = std::min(limits.multiprocessors, real.multiprocessors);
  limits.shared_bytes = std::min(limits.shared_bytes, real.shared_bytes);
  limits.memory_bytes = std::min(limits.memory_bytes, real.memory_bytes);
  return limits;
}

std::uint64_t pretended_bus(std::string_view gigabytes) {
  double number = 0.0;
  const char* const end = std::to_address(gigabytes.end());
  const auto [stopped, error] = std::from_chars(std::to_address(gigabytes.begin()), end, number);
  if (error != std::errc() || stopped != end || !(number >= 0.1 && number <= 1000.0)) {
    throw Error(ErrorCode::unsupported, "SLUICE_PRETEND_BUS is '" + std::string(gigabytes) +
                                            "'; it may be 0.1 to 1000 GB/s");
  }
  return static_cast<std::uint64_t>(number * 1e9);
}

DeviceLimits current_limits() {
  int ordinal = 0;
  require(cudaGetDevice(&ordinal), "the current device");
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    require(cudaDeviceGetAttribute(&value, which, ordinal), "an attribute of the device");
    return value;
  };
  std::size_t free = 0;
  std::size_t total = 0;
  require(cudaMemGetInfo(&free, &total), "asking for the device's memory");
  DeviceLimits limits;
  limits.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  limits.shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  limits.capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor) +
                      attribute(cudaDevAttrComputeCapabilityMinor);
  limits.memory_bytes = total;
#ifdef SLUICE_PRETEND_GPU
  const char* model = std::getenv("SLUICE_PRETEND_GPU");
  if (model != nullptr) limits = pretended_limits(limits, model);
  const char* bus = std::getenv("SLUICE_PRETEND_BUS");
  if (bus != nullptr) limits.bus_rate = pretended_bus(bus);
#endif
  return limits;
}

}  // namespace sluice::cuda
