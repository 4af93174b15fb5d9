// First look at every row: its maximum, its sum of exponentials and top_p's threshold.
//
// A block reads its unit of the row once. While the logits are at hand it also makes a histogram of
// weights, before anyone knows the row's sum: from the unit's first piece it guesses a floor, below
// which the threshold will hardly lie, and leaves out what is lighter. The last block of the row
// adds the histograms up and walks down from the heaviest bin. Units whose floor turns out to be
// too high are looked at again, which can only raise the threshold: what is found is exact to the
// bin, however good the guesses were.
#include <cmath>
#include <cstddef>

#include "kernels/error.h"
#include "kernels/select_large.cuh"
#include "kernels/select_unit.cuh"

namespace sluice::cuda {
namespace {

// Maximum and sums of the row, from its units.
__device__ void add_units(const LargeCall& call, std::int32_t row, StatsShared* shared) {
  auto* const heads = reinterpret_cast<UnitHead*>(&shared->own[0][0]);
  const auto lane = static_cast<std::int32_t>(threadIdx.x);
  for (std::int32_t u = lane; u < call.units; u += kPieceThreads) {
    heads[u] = call.unit_heads[static_cast<std::int64_t>(row) * call.units + u];
  }
  __syncthreads();
  if (threadIdx.x < kWarp) {
    float highest = -INFINITY;
    bool bad = false;
    for (std::int32_t u = lane; u < call.units; u += kWarp) {
      highest = fmaxf(highest, heads[u].highest);
      bad = bad || heads[u].bad != 0;
    }
    highest = warp_max(highest);
    bad = __any_sync(kAllLanes, bad) || !(highest > -INFINITY);
    double sums[3] = {0.0, 0.0, 0.0};
    for (std::int32_t u = lane; u < call.units; u += kWarp) {
      const UnitHead unit = heads[u];
      const bool empty = !(unit.highest > -INFINITY);
      const double scale = empty || bad ? 0.0 : static_cast<double>(expf(unit.highest - highest));
      sums[0] += scale * static_cast<double>(unit.sum);
      sums[1] += scale * static_cast<double>(unit.kept);
      sums[2] += scale * static_cast<double>(unit.tail);
      shared->tops[u] = empty ? INT32_MIN : unit.top;
      shared->floors[u] = unit.floor;
    }
#pragma unroll
    for (double& sum : sums) {
      for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    }
    if (lane == 0) {
      shared->highest = highest;
      shared->sum = sums[0];
      shared->kept = sums[1];
      set_norm(shared->info, highest, static_cast<float>(sums[0]));
      shared->info.tail = bad ? 0.0f : static_cast<float>(sums[2] / sums[0]);
      shared->info.bad = bad ? 1 : 0;
    }
  }
  __syncthreads();
}

// What the units' histograms hold in the bin `below` the row's highest. Loads go out eight at a
// time, whether they are needed or not.
__device__ __forceinline__ std::uint64_t mass_below(const LargeCall& call,
                                                    const std::uint32_t* masses, std::int32_t below,
                                                    const StatsShared* shared) {
  constexpr int kAtOnce = 8;
  std::uint64_t sum = 0;
  for (std::int32_t first = 0; first < call.units; first += kAtOnce) {
    std::uint32_t mass[kAtOnce];
    bool counts[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::int32_t u = min(first + i, call.units - 1);
      const std::int32_t at = below - shared->shifts[u];
      counts[i] = first + i < call.units && at >= 0;
      mass[i] = masses[static_cast<std::int64_t>(u) * call.bins + max(at, 0)];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) sum += counts[i] ? mass[i] : 0u;
  }
  return sum;
}

// The highest bin down to which the row's histograms hold `target`; all threads get it. Units
// without a valid histogram are passed over.
__device__ std::int32_t threshold_bin(const LargeCall& call, std::int32_t row, std::uint64_t target,
                                      StatsShared* shared) {
  const std::uint32_t* const masses =
      call.masses + static_cast<std::int64_t>(row) * call.units * call.bins;
  auto* const shares = reinterpret_cast<std::uint64_t*>(&shared->own[0][0]);
  const float highest = shared->highest;
  const std::int32_t top = bin_floor(highest);
  for (auto u = static_cast<std::int32_t>(threadIdx.x); u < call.units; u += kPieceThreads) {
    const bool valid = shared->tops[u] != INT32_MIN && shared->floors[u] != INT32_MAX;
    shared->shifts[u] = valid ? top - shared->tops[u] : INT32_MAX;
  }
  __syncthreads();
  for (auto k = static_cast<std::int32_t>(threadIdx.x); k < call.bins; k += kPieceThreads) {
    const std::uint64_t mass = mass_below(call, masses, k, shared);
    const double share = static_cast<double>(mass) / shared->sum;
    shares[k] = share_units(share * static_cast<double>(mass_unit(k, highest)));
  }
  __syncthreads();
  const auto share_of = [&](std::int32_t k) { return shares[k]; };
  find_crossing(share_of, call.bins, target, &shared->found, shared->part);
  return top - shared->found.bin;
}

__device__ std::uint16_t row_threshold(const LargeCall& call, std::int32_t row,
                                       StatsShared* shared) {
  const SelectCall& c = call.call;
  if (c.p >= 1.0f) return kLowestHalf;
  const double missing = static_cast<double>(c.p) - shared->kept / shared->sum;
  if (missing <= 0.0) return kInfiniteHalf;
  const std::uint64_t target = share_units(missing) + 1;
  const std::int32_t found = threshold_bin(call, row, target, shared);
  bool again = false;
  for (std::int32_t u = 0; u < call.units; ++u) {
    if (shared->tops[u] == INT32_MIN || shared->floors[u] <= found) continue;
    again = true;
    look_again(call, row, u, found, shared);
    if (threadIdx.x == 0) shared->floors[u] = found;
    __syncthreads();
  }
  return bin_threshold(again ? threshold_bin(call, row, target, shared) : found);
}

// Kept out of line, for its registers.
__device__ __noinline__ void finish_row(const LargeCall& call, std::int32_t row,
                                        StatsShared* shared) {
  const SelectCall& c = call.call;
  float share = 1.0f;
  if (threadIdx.x == 0 && c.share != nullptr) {
    share = *static_cast<const volatile float*>(c.share + row);
  }
  add_units(call, row, shared);
  std::uint16_t threshold = kInfiniteHalf;
  if (c.is_top_p && shared->info.bad == 0) threshold = row_threshold(call, row, shared);
  if (threadIdx.x != 0) return;
  RowInfo info = shared->info;
  info.threshold = threshold;
  info.share = share;
  call.rows[row] = info;
  if (row % c.group == 0) call.extents[row / c.group] = shared->extent;
}

__global__ void __launch_bounds__(kPieceThreads, 2)
    row_stats(const __grid_constant__ LargeCall call) {
  extern __shared__ uint4 memory[];
  auto* const shared = reinterpret_cast<StatsShared*>(memory);
  const auto block = static_cast<std::int32_t>(blockIdx.x);
  const std::int32_t rows = call.call.kv_heads * call.call.group;
  // All rows' first units, then their second: the later ones can learn from the earlier.
  const std::int32_t row = block % rows;
  const auto step = static_cast<std::int64_t>(gridDim.x) * kPieceThreads;
  for (std::int64_t i = static_cast<std::int64_t>(block) * kPieceThreads + threadIdx.x;
       i < call.zeroed_words; i += step) {
    call.zeroed[i] = 0;
  }
  if (threadIdx.x < kWarp) {
    const Extent extent = extent_of(call.call, row / call.call.group);
    if (threadIdx.x == 0) {
      shared->extent = extent;
      shared->window = Window();
      shared->light = 0.0f;
      shared->bad = 0;
      shared->overflows = 0;
    }
  }
  __syncthreads();
  allow_next_kernel();
  look_at_unit(call, row, block / rows, shared);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const std::uint32_t before = atomicAdd(call.tickets + row, 1u);
    shared->is_last = before + 1 == static_cast<std::uint32_t>(call.units) ? 1 : 0;
    if (shared->is_last != 0) call.tickets[row] = call.tickets[rows + row] = 0;
    __threadfence();
  }
  __syncthreads();
  if (shared->is_last != 0) finish_row(call, row, shared);
}

}  // namespace

void run_row_stats(const LargeCall& call, cudaStream_t stream) {
  // Without histograms, the ring is not touched.
  const std::size_t bytes = call.bins > 0 ? sizeof(StatsShared) : offsetof(StatsShared, ring);
  require(cudaFuncSetAttribute(row_stats, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(sizeof(StatsShared))),
          "row_stats");
  const auto blocks = static_cast<unsigned>(call.call.kv_heads * call.call.group * call.units);
  row_stats<<<blocks, kPieceThreads, bytes, stream>>>(call);
  require_launch("row_stats");
}

}  // namespace sluice::cuda
