#include <algorithm>
#include <chrono>
#include <cstdint>

#include "kernels/runtime/error.h"
#include "kernels/runtime/link.h"
#include "kernels/runtime/owners.h"

namespace sluice::cuda {
namespace {

constexpr std::size_t kBytes = std::size_t{8} << 20;
constexpr int kRuns = 3;
// Enough loads in flight to saturate PCIe 5.0.
constexpr int kReadBlocks = 32;
constexpr int kReadThreads = 512;

// Neighbouring threads read neighbouring bytes, as attention reads rows in host memory.
__global__ void __launch_bounds__(kReadThreads)
    read_kernel(const uint4* from, std::int64_t count, uint4* to) {
  const std::int64_t step = std::int64_t{gridDim.x} * kReadThreads;
#pragma unroll 4
  for (std::int64_t i = std::int64_t{blockIdx.x} * kReadThreads + threadIdx.x; i < count;
       i += step) {
    to[i] = from[i];
  }
}

// Bytes per second of the fastest of several runs, after a warm-up run.
template <typename Issue>
double rate_of(cudaStream_t stream, const Issue& issue) {
  using Clock = std::chrono::steady_clock;
  double least = 0.0;
  for (int run = 0; run <= kRuns; ++run) {
    const Clock::time_point begin = Clock::now();
    issue();
    require(cudaStreamSynchronize(stream), "measuring the bus");
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    if (run > 0) least = run == 1 ? seconds : std::min(least, seconds);
  }
  return static_cast<double>(kBytes) / least;
}

}  // namespace

LinkRates measure_link() {
  const StreamOwner stream = make_stream();
  const PinnedBlock from = make_pinned_block(kBytes);
  const DeviceBlock to = make_device_block(kBytes);
  LinkRates rates;
  rates.copied = rate_of(stream.get(), [&] {
    require(cudaMemcpyAsync(to.get(), from.get(), kBytes, cudaMemcpyHostToDevice, stream.get()),
            "measuring the bus");
  });
  rates.read = rate_of(stream.get(), [&] {
    read_kernel<<<kReadBlocks, kReadThreads, 0, stream.get()>>>(
        static_cast<const uint4*>(from.get()), static_cast<std::int64_t>(kBytes / sizeof(uint4)),
        static_cast<uint4*>(to.get()));
    require_launch("measuring the bus");
  });
  return rates;
}

}  // namespace sluice::cuda
