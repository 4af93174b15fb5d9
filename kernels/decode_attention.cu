#include <algorithm>
#include <numbers>
#include <vector>

#include "kernels/decode_attention.cuh"
#include "kernels/decode_attention.h"
#include "kernels/dispatch.h"
#include "kernels/error.h"
#include "lib/check.h"

namespace sluice::cuda {
namespace {

// What is known of the selected rows of every head before attention begins.
struct PlanParams {
  HeadSelection* heads = nullptr;           // host-visible [kv_heads], or null
  HeadCounts counts;                        // used if `heads` is null
  const std::int32_t* positions = nullptr;  // [kv_heads, capacity]
  std::int64_t capacity = 0;
  std::int64_t visible = 0;  // at most this many rows of each head
  HeadCounts resident;
  int kv_heads = 0;
  std::int32_t* listed = nullptr;        // [kv_heads]
  std::int64_t* tiles_before = nullptr;  // [kv_heads + 1]
};

constexpr int kPlanThreads = 256;

// How many of the ascending positions are below `limit`; the whole warp looks.
__device__ int count_below(const std::int32_t* positions, int count, std::int64_t limit) {
  const int lane = threadIdx.x % kWarp;
  int low = 0;
  int high = count;
  while (low < high) {
    const int step = max(1, (high - low + kWarp - 1) / kWarp);
    const int at = low + lane * step;
    const unsigned below = __ballot_sync(kAllLanes, at < high && positions[at] < limit);
    const int whole = __popc(below);
    if (whole == 0) return low;
    const int next = low + (whole - 1) * step;
    high = min(high, next + step);
    low = next + 1;
  }
  return low;
}

__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const __grid_constant__ PlanParams p) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int head = warp; head < p.kv_heads; head += kPlanThreads / kWarp) {
    int count = 0;
    if (lane == 0) {
      count = p.heads != nullptr ? p.heads[head].count : static_cast<int>(p.counts[head]);
    }
    count = __shfl_sync(kAllLanes, count, 0);
    if (p.heads != nullptr) {
      const std::int32_t* const positions = p.positions + head * p.capacity;
      const int resident = count_below(positions, count, p.resident[head]);
      if (lane == 0) p.heads[head].resident = resident;
    }
    if (lane == 0) {
      p.listed[head] = static_cast<std::int32_t>(min(static_cast<std::int64_t>(count), p.visible));
    }
  }
  __syncthreads();
  // Inclusive sums of the heads' tiles, a block's width at a time.
  __shared__ std::int64_t sums[kPlanThreads];
  std::int64_t carried = 0;
  if (threadIdx.x == 0) p.tiles_before[0] = 0;
  for (int first = 0; first < p.kv_heads; first += kPlanThreads) {
    const int head = first + static_cast<int>(threadIdx.x);
    sums[threadIdx.x] = head < p.kv_heads ? tiles_of(p.listed[head]) : 0;
    __syncthreads();
    for (int distance = 1; distance < kPlanThreads; distance *= 2) {
      const std::int64_t other =
          static_cast<int>(threadIdx.x) >= distance ? sums[threadIdx.x - distance] : 0;
      __syncthreads();
      sums[threadIdx.x] += other;
      __syncthreads();
    }
    if (head < p.kv_heads) p.tiles_before[head + 1] = carried + sums[threadIdx.x];
    carried += sums[kPlanThreads - 1];
    __syncthreads();
  }
}

template <typename T, int kHeadDim, int kStages>
void launch_stages(DecodeKernelParams& p, const Launch& launch, std::int64_t most_tiles) {
  constexpr int kShared = std::max(kDecodeWarps * kStages * DecodeShape<kHeadDim>::kStageBytes,
                                   static_cast<int>(sizeof(DecodeBlock<kHeadDim>)));
  const auto kernel = decode_kernel<T, kHeadDim, kStages>;
  require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
          "shared memory of decode attention");
  const int resident = std::max(1, launch.device->shared_bytes / kShared);
  // Two blocks on a multiprocessor keep enough rows under way; more would only be more parts to
  // merge.
  const std::int64_t slots = std::int64_t{launch.device->multiprocessors} * std::min(resident, 2);
  const int bunches = (p.group + kBunch - 1) / kBunch;
  p.workers = static_cast<int>(std::clamp<std::int64_t>(slots / bunches, 1, most_tiles));
  const std::int64_t partials = std::int64_t{bunches} * (p.workers + p.kv_heads);
  p.partial_lse = p.partials + partials * kBunch * kHeadDim;
  const auto* const scratch_end = reinterpret_cast<std::byte*>(p.partial_lse + partials * kBunch);
  check(scratch_end <= launch.scratch + launch.scratch_bytes,
        "decode attention: too little scratch memory");
  // The last block of a head weighs the parts of all others in the memory of its stages.
  check(static_cast<std::size_t>(kBunch) * (static_cast<std::size_t>(p.workers) + 1) *
                sizeof(float) <=
            kShared,
        "decode attention: too many multiprocessors");
  check(bunches * p.kv_heads <= Launch::kCounters, "decode attention: too many KV heads");
  kernel<<<dim3(static_cast<unsigned>(p.workers), static_cast<unsigned>(bunches)),
           kDecodeWarps * kWarp, kShared, launch.stream>>>(p);
  require_launch("decode attention");
}

// As many stages as shared memory has room for.
template <typename T, int kHeadDim>
void launch_shape(DecodeKernelParams& p, const Launch& launch, std::int64_t most_tiles) {
  constexpr int kStage = kDecodeWarps * DecodeShape<kHeadDim>::kStageBytes;
  constexpr int kMost = kHeadDim <= 64 ? 5 : 3;
  if (kMost * kStage <= launch.device->shared_bytes) {
    launch_stages<T, kHeadDim, kMost>(p, launch, most_tiles);
  } else {
    launch_stages<T, kHeadDim, 2>(p, launch, most_tiles);
  }
}

void run(DecodeKernelParams& p, const KvShape& shape, const Launch& launch,
         std::int64_t most_tiles) {
  dispatch_rows(shape.dtype, [&](auto element) {
    dispatch_head_dim(shape.head_dim, [&](auto head_dim) {
      launch_shape<decltype(element), head_dim()>(p, launch, most_tiles);
    });
  });
}

// Scratch begins with the plan: listed and tiles_before.
void place_plan(PlanParams& plan, DecodeKernelParams& p, const Launch& launch) {
  const auto heads = static_cast<std::size_t>(p.kv_heads);
  const std::size_t before = (heads + 1) * sizeof(std::int64_t);
  const std::size_t bytes = (before + heads * sizeof(std::int32_t) + 255) / 256 * 256;
  plan.kv_heads = p.kv_heads;
  plan.tiles_before = reinterpret_cast<std::int64_t*>(launch.scratch);
  plan.listed = reinterpret_cast<std::int32_t*>(launch.scratch + before);
  p.listed = plan.listed;
  p.tiles_before = plan.tiles_before;
  p.partials = reinterpret_cast<float*>(launch.scratch + bytes);
}

void run_plan(const PlanParams& plan, const Launch& launch) {
  plan_kernel<<<1, kPlanThreads, 0, launch.stream>>>(plan);
  require_launch("the plan of decode attention");
}

DecodeKernelParams common_params(const KvShape& shape, const float* q, float scale, float* out,
                                 float* lse, bool merge, const Launch& launch) {
  DecodeKernelParams p;
  p.q = q;
  p.kv_heads = shape.kv_heads;
  p.group = shape.group();
  p.scale = scale * std::numbers::log2e_v<float>;
  p.out = out;
  p.lse = lse;
  p.merge = merge;
  p.partials = reinterpret_cast<float*>(launch.scratch);
  p.finished = launch.counters;
  return p;
}

std::int64_t most_tiles_of(std::int64_t rows, int kv_heads) {
  return std::max<std::int64_t>(1, (rows + kTileRows - 1) / kTileRows) * kv_heads;
}

// Completes what attention over selected rows is told, and plans it.
PlanParams selected_plan(const AttendSelectedParams& a, DecodeKernelParams& p,
                         const Launch& launch) {
  std::vector<const std::byte*> resident;
  std::vector<const std::byte*> home;
  std::vector<RowSpan> counts;
  for (const RowSource& source : a.rows) {
    resident.push_back(source.resident);
    home.push_back(source.home);
    counts.push_back({nullptr, source.resident_count});
  }
  p.rows = head_rows(resident);
  p.home = head_rows(home);
  p.resident = head_counts(counts);
  p.positions = a.selected.positions;
  p.capacity = a.selected.capacity;
  PlanParams plan;
  place_plan(plan, p, launch);
  plan.heads = a.selected.heads;
  plan.positions = p.positions;
  plan.capacity = p.capacity;
  plan.visible = a.first_query + 1;
  plan.resident = p.resident;
  return plan;
}

}  // namespace

void attend_decode(const AttendParams& a, const Launch& launch) {
  check(a.tokens == 1, "attend_decode is for one token");
  DecodeKernelParams p = common_params(a.shape, a.q, a.scale, a.out, a.lse, a.merge, launch);
  p.rows = head_rows(a.rows);
  const std::int64_t visible =
      std::max<std::int64_t>(0, a.first_query_position + 1 - a.first_row_position);
  HeadCounts counts = head_counts(a.rows);
  if (!counts.is_listed) {
    p.count = std::min(counts.uniform, visible);
    return run(p, a.shape, launch, most_tiles_of(p.count, p.kv_heads));
  }
  PlanParams plan;
  place_plan(plan, p, launch);
  plan.counts = counts;
  plan.visible = visible;
  run_plan(plan, launch);
  const std::int64_t longest = *std::max_element(counts.listed, counts.listed + a.shape.kv_heads);
  run(p, a.shape, launch, most_tiles_of(longest, p.kv_heads));
}

void attend_decode_selected(const AttendSelectedParams& a, const Launch& launch) {
  check(a.tokens == 1, "attend_decode_selected is for one token");
  DecodeKernelParams p = common_params(a.shape, a.q, a.scale, a.out, a.lse, a.merge, launch);
  const PlanParams plan = selected_plan(a, p, launch);
  run_plan(plan, launch);
  run(p, a.shape, launch, most_tiles_of(a.selected.capacity, p.kv_heads));
}

void count_resident(const AttendSelectedParams& a, const Launch& launch) {
  DecodeKernelParams p = common_params(a.shape, a.q, a.scale, a.out, a.lse, a.merge, launch);
  run_plan(selected_plan(a, p, launch), launch);
}

}  // namespace sluice::cuda
