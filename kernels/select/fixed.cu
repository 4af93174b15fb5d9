// Keeps only the always kept tokens, because nothing was estimated. One block per head walks over
// the positions; a warp takes kWarpPages pages at a time. Tiles between the first and the newest
// tokens are skipped.
#include "kernels/runtime/early_launch.cuh"
#include "kernels/select/paths.cuh"

namespace sluice::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
constexpr int kWarpPages = 4;
constexpr int kPageVotes = kPageTokens / kWarp;
constexpr std::int64_t kTile = kWarps * kWarpPages * kPageTokens;  // positions of a block

// Bit l of vote v: position first + v * kWarp + l is kept. Called by one warp.
struct Votes {
  unsigned kept[kWarpPages * kPageVotes];

  __device__ Votes(const TokenBounds& token, std::int64_t first) {
    const std::int64_t own = first + static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int v = 0; v < kWarpPages * kPageVotes; ++v) {
      const std::int64_t at = own + v * kWarp;
      const bool is_kept = at < token.page_first && (at < token.low || at >= token.high);
      kept[v] = __ballot_sync(kAllLanes, is_kept);
    }
  }
  __device__ std::int32_t count() const {
    std::int32_t sum = 0;
#pragma unroll
    for (const unsigned vote : kept) sum += __popc(vote);
    return sum;
  }
};

// By one warp: writes the kept positions from `first` on, behind the `rank` positions before them,
// up to the capacity; returns the number of their pages.
__device__ std::int32_t write_kept(const SelectCall& c, int head, const Votes& votes,
                                   std::int64_t first, std::int64_t rank) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  std::int32_t* const to = c.positions + head * c.capacity;
  std::int32_t pages = 0;
#pragma unroll
  for (int page = 0; page < kWarpPages; ++page) {
    const std::int64_t before = rank;
#pragma unroll
    for (int v = page * kPageVotes; v < (page + 1) * kPageVotes; ++v) {
      const unsigned vote = votes.kept[v];
      const std::int64_t slot = rank + __popc(vote & ((1u << lane) - 1u));
      if ((vote >> lane & 1u) != 0 && slot < c.capacity) {
        to[slot] = static_cast<std::int32_t>(first + v * kWarp + lane);
      }
      rank += __popc(vote);
    }
    if (rank > before && before < c.capacity) ++pages;
  }
  return pages;
}

__global__ void __launch_bounds__(kThreads) select_fixed(const __grid_constant__ SelectCall c) {
  __shared__ std::int32_t counts[kWarps];
  __shared__ std::int32_t all_pages;
  const auto head = static_cast<int>(blockIdx.x);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const TokenBounds token = bounds_of(c, head);
  if (threadIdx.x == 0) all_pages = 0;
  wait_for_kernel_before();
  allow_next_kernel();
  std::int64_t kept = 0;
  std::int32_t pages = 0;
  for (std::int64_t tile = 0; tile < token.page_first; tile += kTile) {
    // Nothing is kept between `low` and `high`.
    if (tile >= token.low) tile = max(tile, token.high / kTile * kTile);
    const std::int64_t first = tile + warp * (kTile / kWarps);
    const Votes votes(token, first);
    if (lane == 0) counts[warp] = votes.count();
    __syncthreads();
    const std::int32_t own = counts[lane];
    const std::int32_t before = __reduce_add_sync(kAllLanes, lane < warp ? own : 0);
    pages += write_kept(c, head, votes, first, kept + before);
    kept += __reduce_add_sync(kAllLanes, own);
    __syncthreads();
  }
  __syncthreads();
  if (lane == 0 && pages > 0) atomicAdd(&all_pages, pages);
  for (int g = static_cast<int>(threadIdx.x); g < c.group; g += kThreads) {
    const std::int64_t row = static_cast<std::int64_t>(head) * c.group + g;
    c.alpha[row] = share_of(c, row);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  HeadSelection result;
  result.count = static_cast<std::int32_t>(min(kept, c.capacity));
  result.cut = kept > c.capacity ? 1 : 0;
  result.pages = all_pages;
  c.heads[head] = result;
}

}  // namespace

void run_fixed(const SelectCall& call, const Launch& launch) {
  launch_early("select_fixed", select_fixed, dim3(static_cast<unsigned>(call.head_count)), kThreads,
               0, launch, call);
}

}  // namespace sluice::cuda
