// The important tokens of a prompt: a sort of sums and a walk through it for their number, a sort
// of means, and a scan for each position's place in the list.
//
// Floating-point sums are taken in one fixed order, so the choice is the same in every run.
#include <algorithm>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#include <cuda/std/functional>
#include <limits>

#include "kernels/runtime/device_math.cuh"
#include "kernels/runtime/error.h"
#include "kernels/select/select.h"
#include "lib/check.h"
#include "sluice/errors.h"

namespace sluice::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kCountThreads = 1024;
constexpr int kCountWarps = kCountThreads / kWarp;
constexpr auto kNewest = static_cast<std::int32_t>(ChooseTokensParams::kNewest);
constexpr auto kBlock = static_cast<std::int32_t>(ChooseTokensParams::kBlock);

struct Call {
  const float* sums = nullptr;  // [end]
  std::int32_t first = 0;
  std::int32_t end = 0;
  double tau = 1.0;
  std::uint8_t* listed = nullptr;     // [end]
  std::int32_t* positions = nullptr;  // [end]
  std::int32_t* seen = nullptr;       // [end - first]
  std::int32_t* bad = nullptr;        // [1]
  // In scratch.
  std::int32_t* found_bad = nullptr;  // [1]
  std::int32_t* count = nullptr;      // [1]: important tokens except the newest
  float* scores[2]{};                 // [end - first], double buffer of the sorts
  std::int32_t* tokens[2]{};          // [end - first], double buffer
  std::int32_t* before = nullptr;     // [end]: listed positions before each
  std::byte* sort = nullptr;
  std::size_t sort_bytes = 0;
  std::int32_t probe_count = 0;
  std::int32_t probes[ChooseTokensParams::kMostProbes]{};  // ascending

  __host__ __device__ std::int32_t prompt() const { return end - first; }
};

__device__ std::int32_t this_thread() {
  return static_cast<std::int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
}

__global__ void __launch_bounds__(kThreads) copy_sums(const __grid_constant__ Call call) {
  const std::int32_t t = this_thread();
  if (t >= call.prompt()) return;
  const float sum = call.sums[call.first + t];
  call.scores[0][t] = sum;
  // A benign race, because all threads write the same value.
  if (!isfinite(sum)) *call.found_bad = 1;
}

// Divides each token's sum by the number of probes that see the token.
__global__ void __launch_bounds__(kThreads) average(const __grid_constant__ Call call) {
  const std::int32_t t = this_thread();
  if (t == 0) *call.bad = *call.found_bad;
  if (t >= call.prompt()) return;
  std::int32_t blind = 0;
  std::int32_t end = call.probe_count;
  while (blind < end) {
    const std::int32_t middle = (blind + end) / 2;
    if (call.probes[middle] < call.first + t) {
      blind = middle + 1;
    } else {
      end = middle;
    }
  }
  call.scores[0][t] =
      __fdiv_rn(call.sums[call.first + t], static_cast<float>(call.probe_count - blind));
  call.tokens[0][t] = t;
}

__device__ double warp_sum(double x) {
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// Each lane's sum over the lanes up to it.
__device__ double warp_running_sum(double x) {
  const auto lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const double before = __shfl_up_sync(kAllLanes, x, step);
    if (lane >= step) x += before;
  }
  return x;
}

// Counts how many of `sums`, in descending order, carry the share tau: one block, a run per warp.
// The warp whose run reaches the share walks it once more.
__global__ void __launch_bounds__(kCountThreads)
    count_tokens(const __grid_constant__ Call call, const float* sums) {
  __shared__ double runs[kCountWarps];
  const auto warp = static_cast<std::int32_t>(threadIdx.x) / kWarp;
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarp;
  const std::int32_t steps = (call.prompt() + kCountThreads - 1) / kCountThreads;
  const std::int32_t begin = min(call.prompt(), warp * steps * kWarp);
  const std::int32_t end = min(call.prompt(), begin + steps * kWarp);
  double own = 0.0;
  for (std::int32_t i = begin + lane; i < end; i += kWarp) own += static_cast<double>(sums[i]);
  own = warp_sum(own);
  if (lane == 0) runs[warp] = own;
  __syncthreads();
  double total = 0.0;
  double carried = 0.0;  // before this warp's run
  for (int w = 0; w < kCountWarps; ++w) {
    if (w == warp) carried = total;
    total += runs[w];
  }
  const double wanted = call.tau * total;
  if (!(carried < wanted && wanted <= carried + own)) return;
  for (std::int32_t i = begin; i < end; i += kWarp) {
    const double sum = i + lane < end ? static_cast<double>(sums[i + lane]) : 0.0;
    const double up_to = carried + warp_running_sum(sum);
    const std::uint32_t reached = __ballot_sync(kAllLanes, up_to >= wanted);
    if (reached != 0) {
      if (lane == 0) *call.count = min(end, i + __ffs(static_cast<int>(reached)));
      return;
    }
    carried = __shfl_sync(kAllLanes, up_to, kWarp - 1);
  }
  // The walk adds in another order, so the run may miss the share by a rounding error.
  if (lane == 0) *call.count = end;
}

// Lists the first tokens of `order`, the newest, and all before the prompt.
__global__ void __launch_bounds__(kThreads)
    mark(const __grid_constant__ Call call, const std::int32_t* order) {
  const std::int32_t i = this_thread();
  if (i >= call.end) return;
  if (i < call.first) {
    call.listed[i] = 1;
    return;
  }
  const std::int32_t number = i - call.first;
  const std::int32_t token = order[number];
  const std::int32_t count = call.tau < 1.0 ? *call.count : call.prompt();
  const bool is_newest = token >= call.prompt() - kNewest;
  call.listed[call.first + token] = number < count || is_newest ? 1 : 0;
}

__global__ void __launch_bounds__(kThreads) list(const __grid_constant__ Call call) {
  const std::int32_t position = this_thread();
  if (position >= call.end) return;
  if (call.listed[position] != 0) call.positions[call.before[position]] = position;
  if (position < call.first) return;
  const std::int32_t block = max(call.first, position / kBlock * kBlock);
  call.seen[position - call.first] = call.before[block];
}

unsigned blocks_for(std::int32_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

// Hands out scratch, one array at a time.
class Scratch {
 public:
  explicit Scratch(const Launch& launch) : launch_(launch) {}

  template <typename T>
  T* take(std::int64_t count) {
    constexpr std::size_t kAlignment = 256;
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    auto* const at = reinterpret_cast<T*>(launch_.scratch + used_);
    used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (used_ > launch_.scratch_bytes) {
      throw Error(
          ErrorCode::unsupported,
          "the prompt is too long for zipvl on this device: its scores do not fit the scratch "
          "memory; give it in parts or prefill densely");
    }
    return at;
  }

 private:
  const Launch& launch_;
  std::size_t used_ = 0;
};

// With `memory` null these three only set `bytes` to what they need.
void sort_scores(const Call& call, cub::DoubleBuffer<float>& scores, std::byte* memory,
                 std::size_t& bytes, cudaStream_t stream) {
  require(
      cub::DeviceRadixSort::SortKeysDescending(memory, bytes, scores, call.prompt(), 0, 32, stream),
      "sorting scores");
}

void sort_tokens(const Call& call, cub::DoubleBuffer<float>& scores,
                 cub::DoubleBuffer<std::int32_t>& tokens, std::byte* memory, std::size_t& bytes,
                 cudaStream_t stream) {
  require(cub::DeviceRadixSort::SortPairsDescending(memory, bytes, scores, tokens, call.prompt(), 0,
                                                    32, stream),
          "sorting tokens");
}

void count_listed(const Call& call, std::byte* memory, std::size_t& bytes, cudaStream_t stream) {
  require(cub::DeviceScan::ExclusiveScan(memory, bytes, call.listed, call.before,
                                         ::cuda::std::plus<>(), std::int32_t{0}, call.end, stream),
          "counting tokens");
}

Call call_of(const ChooseTokensParams& p) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() / 2;
  check(p.first >= 0 && p.first < p.end && p.end <= kMost, "choose_tokens: no prompt");
  check(!p.probes.empty() && p.probes.back() == p.end - 1 &&
            p.probes.size() <= ChooseTokensParams::kMostProbes,
        "choose_tokens: probes");
  Call call;
  call.sums = p.sums;
  call.first = static_cast<std::int32_t>(p.first);
  call.end = static_cast<std::int32_t>(p.end);
  call.tau = p.tau;
  call.listed = p.listed;
  call.positions = p.positions;
  call.seen = p.seen;
  call.bad = p.bad;
  for (const std::int64_t probe : p.probes) {
    call.probes[call.probe_count++] = static_cast<std::int32_t>(probe);
  }
  return call;
}

void take_scratch(Call& call, const Launch& launch) {
  Scratch scratch(launch);
  call.found_bad = scratch.take<std::int32_t>(2);
  call.count = call.found_bad + 1;
  for (int i = 0; i < 2; ++i) {
    call.scores[i] = scratch.take<float>(call.prompt());
    call.tokens[i] = scratch.take<std::int32_t>(call.prompt());
  }
  call.before = scratch.take<std::int32_t>(call.end);
  cub::DoubleBuffer<float> scores(call.scores[0], call.scores[1]);
  cub::DoubleBuffer<std::int32_t> tokens(call.tokens[0], call.tokens[1]);
  std::size_t bytes[3]{};
  sort_scores(call, scores, nullptr, bytes[0], launch.stream);
  sort_tokens(call, scores, tokens, nullptr, bytes[1], launch.stream);
  count_listed(call, nullptr, bytes[2], launch.stream);
  call.sort_bytes = std::max({bytes[0], bytes[1], bytes[2]});
  call.sort = scratch.take<std::byte>(static_cast<std::int64_t>(call.sort_bytes));
}

}  // namespace

void choose_tokens(const ChooseTokensParams& params, const Launch& launch) {
  Call call = call_of(params);
  take_scratch(call, launch);
  cudaStream_t const stream = launch.stream;
  const unsigned blocks = blocks_for(call.prompt());
  require(cudaMemsetAsync(call.found_bad, 0, 2 * sizeof(std::int32_t), stream), "memset");
  cub::DoubleBuffer<float> scores(call.scores[0], call.scores[1]);
  cub::DoubleBuffer<std::int32_t> tokens(call.tokens[0], call.tokens[1]);
  copy_sums<<<blocks, kThreads, 0, stream>>>(call);
  require_launch("copy_sums");
  if (call.tau < 1.0) {
    sort_scores(call, scores, call.sort, call.sort_bytes, stream);
    count_tokens<<<1, kCountThreads, 0, stream>>>(call, scores.Current());
    require_launch("count_tokens");
  }
  average<<<blocks, kThreads, 0, stream>>>(call);
  require_launch("average");
  scores = cub::DoubleBuffer<float>(call.scores[0], call.scores[1]);
  sort_tokens(call, scores, tokens, call.sort, call.sort_bytes, stream);
  mark<<<blocks_for(call.end), kThreads, 0, stream>>>(call, tokens.Current());
  require_launch("mark");
  count_listed(call, call.sort, call.sort_bytes, stream);
  list<<<blocks_for(call.end), kThreads, 0, stream>>>(call);
  require_launch("list");
}

}  // namespace sluice::cuda
