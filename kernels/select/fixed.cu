// Keeps only the always kept tokens, because nothing was estimated. One block per head.
#include "kernels/runtime/early_launch.cuh"
#include "kernels/select/paths.cuh"

namespace sluice::cuda {
namespace {

constexpr int kThreads = 1024;

// The pages of [0, low) and of [high, page_first), where the first may be the last before.
__device__ std::int32_t pages_of(const TokenBounds& token) {
  const std::int32_t pages = (token.low + kPageTokens - 1) / kPageTokens;
  return pages + token.page_first / kPageTokens - max(token.high / kPageTokens, pages);
}

__global__ void __launch_bounds__(kThreads) select_fixed(const __grid_constant__ SelectCall c) {
  const auto head = static_cast<int>(blockIdx.x);
  const TokenBounds token = bounds_of(c, head);
  wait_for_kernel_before();
  allow_next_kernel();
  const std::int32_t count = token.low + token.page_first - token.high;
  std::int32_t* const to = c.positions + head * c.capacity;
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < count; i += kThreads) {
    to[i] = i < token.low ? i : i - token.low + token.high;
  }
  for (int g = static_cast<int>(threadIdx.x); g < c.group; g += kThreads) {
    c.alpha[static_cast<std::int64_t>(head) * c.group + g] = 1.0f;
  }
  if (threadIdx.x != 0) return;
  HeadSelection result;
  result.count = count;
  result.pages = pages_of(token);
  c.heads[head] = result;
}

}  // namespace

void run_fixed(const SelectCall& call, const Launch& launch) {
  launch_early("select_fixed", select_fixed, dim3(static_cast<unsigned>(call.head_count)), kThreads,
               0, launch, call);
}

}  // namespace sluice::cuda
