// Keeps only the always kept tokens, because nothing was estimated. One block per head.
#include "kernels/runtime/early_launch.cuh"
#include "kernels/select/paths.cuh"

namespace sluice::cuda {
namespace {

constexpr int kThreads = 1024;

// The pages of the first `count` kept positions: of [0, low), then of those from `high` on.
__device__ std::int32_t pages_of(const TokenBounds& token, std::int32_t count) {
  const std::int32_t rest = max(count - token.low, 0);
  const std::int32_t pages = (count - rest + kPageTokens - 1) / kPageTokens;
  if (rest == 0) return pages;
  // The first page from `high` on may be the last before.
  return pages + (token.high + rest - 1) / kPageTokens + 1 - max(token.high / kPageTokens, pages);
}

__global__ void __launch_bounds__(kThreads) select_fixed(const __grid_constant__ SelectCall c) {
  const auto head = static_cast<int>(blockIdx.x);
  const TokenBounds token = bounds_of(c, head);
  wait_for_kernel_before();
  allow_next_kernel();
  const std::int32_t kept = token.low + token.page_first - token.high;
  const auto count = static_cast<std::int32_t>(min(std::int64_t{kept}, c.capacity));
  std::int32_t* const to = c.positions + head * c.capacity;
  for (std::int64_t i = threadIdx.x; i < count; i += kThreads) {
    to[i] = static_cast<std::int32_t>(i < token.low ? i : i - token.low + token.high);
  }
  for (int g = static_cast<int>(threadIdx.x); g < c.group; g += kThreads) {
    const std::int64_t row = static_cast<std::int64_t>(head) * c.group + g;
    c.alpha[row] = share_of(c, row);
  }
  if (threadIdx.x != 0) return;
  HeadSelection result;
  result.count = count;
  result.cut = kept > count ? 1 : 0;
  result.pages = pages_of(token, count);
  c.heads[head] = result;
}

}  // namespace

void run_fixed(const SelectCall& call, const Launch& launch) {
  launch_early("select_fixed", select_fixed, dim3(static_cast<unsigned>(call.head_count)), kThreads,
               0, launch, call);
}

}  // namespace sluice::cuda
