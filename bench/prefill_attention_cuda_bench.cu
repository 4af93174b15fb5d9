// Prefill attention on the GPU in FLOP/s: 4 * head_dim for each visible pair of query and row.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/runtime/device_math.cuh"
#include "kernels/runtime/error.h"
#include "kernels/runtime/owners.h"
#include "kernels/runtime/workspace.h"

namespace sluice::cuda {
namespace {

constexpr std::size_t kScratch = std::size_t{64} << 20;

// Roughly normal noise: the sum of four uniform numbers.
__device__ float noise(std::uint64_t index) {
  std::uint64_t x = index * 0x9e3779b97f4a7c15ull + 1;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  x ^= x >> 31;
  float sum = 0;
  for (int i = 0; i < 4; ++i) sum += static_cast<float>(x >> 16 * i & 0xffff) / 65536.0f - 0.5f;
  return sum * 1.7320508f;
}

template <typename T>
__global__ void fill(T* to, std::size_t count) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
    to[i] = from_float<T>(noise(i));
  }
}

template <typename T>
DeviceBlock filled(std::size_t count) {
  DeviceBlock block = make_device_block(count * sizeof(T));
  fill<<<1024, 256>>>(static_cast<T*>(block.get()), count);
  require_launch("fill");
  return block;
}

// Arguments: query tokens, rows before them, query heads, KV heads, head_dim, 1 for the kernel that
// runs on every device.
struct Problem {
  explicit Problem(const benchmark::State& state)
      : tokens(state.range(0)),
        before(state.range(1)),
        shape{1, static_cast<int>(state.range(2)), static_cast<int>(state.range(3)),
              static_cast<int>(state.range(4)), DType::bf16} {
    const auto queries = static_cast<std::size_t>(tokens * shape.query_heads);
    const auto width = static_cast<std::size_t>(shape.head_dim);
    const std::size_t row_elements = shape.row_bytes() / sizeof(__nv_bfloat16);
    const auto rows = static_cast<std::size_t>(tokens + before);
    q = filled<float>(queries * width);
    kv = filled<__nv_bfloat16>(rows * row_elements * static_cast<std::size_t>(shape.kv_heads));
    out = make_device_block(queries * width * sizeof(float));
    lse = make_device_block(queries * sizeof(float));
    for (int head = 0; head < shape.kv_heads; ++head) {
      spans.push_back({static_cast<const std::byte*>(kv.get()) +
                           static_cast<std::size_t>(head) * rows * shape.row_bytes(),
                       tokens + before});
    }
    require(cudaDeviceSynchronize(), "fill");
  }

  AttendParams params() const {
    AttendParams p;
    p.q = static_cast<const float*>(q.get());
    p.tokens = tokens;
    p.q_stride = static_cast<std::int64_t>(shape.query_heads) * shape.head_dim;
    p.first_query_position = before;
    p.shape = shape;
    p.rows = spans;
    p.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    p.out = static_cast<float*>(out.get());
    p.lse = static_cast<float*>(lse.get());
    return p;
  }
  double operations() const {
    const auto n = static_cast<double>(tokens);
    return 4.0 * shape.head_dim * shape.query_heads * (n * static_cast<double>(before) + n * n / 2);
  }

  std::int64_t tokens;
  std::int64_t before;
  KvShape shape;
  DeviceBlock q;
  DeviceBlock kv;
  DeviceBlock out;
  DeviceBlock lse;
  std::vector<RowSpan> spans;
};

EventOwner timing_event() {
  cudaEvent_t event = nullptr;
  require(cudaEventCreate(&event), "an event");
  return EventOwner(event);
}

void prefill(benchmark::State& state) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    state.SkipWithError("no CUDA device");
    return;
  }
  const Workspace workspace(kScratch);
  const Problem problem(state);
  DeviceLimits limits = workspace.device();
  if (state.range(5) != 0) limits.capability = 80;
  Launch launch = workspace.launch();
  launch.device = &limits;
  const EventOwner begin = timing_event();
  const EventOwner end = timing_event();
  for (int i = 0; i < 3; ++i) attend_prefill(problem.params(), launch);
  std::vector<double> seconds;
  for (auto _ : state) {
    require(cudaEventRecord(begin.get(), launch.stream), "an event");
    attend_prefill(problem.params(), launch);
    require(cudaEventRecord(end.get(), launch.stream), "an event");
    require(cudaEventSynchronize(end.get()), "attend_prefill");
    float milliseconds = 0;
    require(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()), "an event");
    state.SetIterationTime(milliseconds * 1e-3);
    seconds.push_back(milliseconds * 1e-3);
  }
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  state.counters["median_ms"] = median * 1e3;
  state.counters["TFLOP/s"] = problem.operations() / median * 1e-12;
}

BENCHMARK(prefill)
    ->ArgNames({"tokens", "before", "heads", "kv_heads", "head_dim", "generic"})
    ->Args({32768, 0, 32, 8, 128, 0})
    ->Args({32768, 0, 32, 32, 128, 0})
    ->Args({2048, 30720, 32, 8, 128, 0})
    ->Args({8192, 0, 32, 8, 128, 0})
    ->Args({2048, 0, 32, 8, 128, 0})
    ->Args({32768, 0, 32, 8, 64, 0})
    ->Args({2048, 30720, 32, 8, 64, 0})
    ->Args({16, 131056, 32, 8, 128, 0})
    ->Args({1, 131071, 32, 8, 128, 0})
    ->Args({32768, 0, 32, 8, 128, 1})
    ->Args({32768, 0, 32, 8, 64, 1})
    ->Args({16, 131056, 32, 8, 128, 1})
    ->Args({16384, 0, 32, 8, 80, 0})
    ->Args({16384, 0, 32, 8, 96, 0})
    ->Args({16384, 0, 16, 8, 256, 0})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace sluice::cuda

BENCHMARK_MAIN();
