// Shared by CUDA benchmarks: random data on the device, and times of captured work.
#pragma once

#include <benchmark/benchmark.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/runtime/error.h"
#include "kernels/runtime/owners.h"
#include "kernels/runtime/workspace.h"

namespace sluice::cuda::bench {

// Two independent normal numbers from a counter (Box and Muller 1958; the counter is mixed by
// splitmix64, Steele et al. 2014).
inline __device__ float2 normal_pair(std::uint64_t counter) {
  std::uint64_t x = counter * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  x ^= x >> 31;
  const float u = (static_cast<float>(x >> 40) + 1.0f) * 0x1p-24f;
  const float v = static_cast<float>(x & 0xffffff) * 0x1p-24f;
  const float radius = sqrtf(-2.0f * logf(u));
  float sine = 0.0f;
  float cosine = 0.0f;
  sincospif(2.0f * v, &sine, &cosine);
  return {radius * cosine, radius * sine};
}

template <typename T>
__global__ void normal_kernel(T* to, std::size_t pairs, float deviation, std::uint64_t seed) {
  const std::size_t stride = std::size_t{blockDim.x} * gridDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < pairs; i += stride) {
    const float2 pair = normal_pair(i + (seed << 40));
    to[2 * i] = static_cast<T>(pair.x * deviation);
    to[2 * i + 1] = static_cast<T>(pair.y * deviation);
  }
}

// `count` normal numbers of type T, an even count.
template <typename T>
void fill_normal(void* to, std::size_t count, float deviation = 1.0f, std::uint64_t seed = 1) {
  normal_kernel<<<4096, 256>>>(static_cast<T*>(to), count / 2, deviation, seed);
  require(cudaDeviceSynchronize(), "filling memory");
}

template <typename T>
DeviceBlock normal_block(std::size_t count, float deviation = 1.0f, std::uint64_t seed = 1) {
  DeviceBlock block = make_device_block(count * sizeof(T));
  fill_normal<T>(block.get(), count, deviation, seed);
  return block;
}

template <typename T>
DeviceBlock device_copy(const std::vector<T>& values) {
  DeviceBlock block = make_device_block(values.size() * sizeof(T));
  require(cudaMemcpy(block.get(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
          "copying to the device");
  return block;
}

// Work issued to a stream, captured once and replayed, so that launches leave no gaps.
class Replay {
 public:
  Replay(cudaStream_t stream, const std::function<void()>& issue) : stream_(stream) {
    issue();  // loads kernels, which capture does not allow
    require(cudaStreamSynchronize(stream), "a first run");
    require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capturing");
    issue();
    cudaGraph_t graph = nullptr;
    require(cudaStreamEndCapture(stream, &graph), "capturing");
    graph_ = GraphOwner(graph);
    cudaGraphExec_t exec = nullptr;
    require(cudaGraphInstantiate(&exec, graph, 0), "a graph");
    exec_ = GraphExecOwner(exec);
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
    require(cudaEventCreate(&begin), "an event");
    require(cudaEventCreate(&end), "an event");
    begin_ = EventOwner(begin);
    end_ = EventOwner(end);
  }

  double seconds() {
    require(cudaEventRecord(begin_.get(), stream_), "an event");
    require(cudaGraphLaunch(exec_.get(), stream_), "a graph");
    require(cudaEventRecord(end_.get(), stream_), "an event");
    require(cudaEventSynchronize(end_.get()), "replaying");
    float milliseconds = 0.0f;
    require(cudaEventElapsedTime(&milliseconds, begin_.get(), end_.get()), "a time");
    return static_cast<double>(milliseconds) * 1e-3;
  }

 private:
  cudaStream_t stream_;
  GraphOwner graph_;
  GraphExecOwner exec_;
  EventOwner begin_;
  EventOwner end_;
};

// Runs a benchmark whose iteration is one of the `runs` in a replay, after three warm-up launches.
inline void time_replay(benchmark::State& state, Replay& replay, int runs) {
  for (int i = 0; i < 3; ++i) replay.seconds();
  for (auto _ : state) state.SetIterationTime(replay.seconds() / runs);
}

inline void count_rate(benchmark::State& state, const char* name, double amount) {
  state.counters[name] = benchmark::Counter(amount, benchmark::Counter::kIsIterationInvariantRate,
                                            benchmark::Counter::kIs1000);
}

}  // namespace sluice::cuda::bench
