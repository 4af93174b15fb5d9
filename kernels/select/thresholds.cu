// top_p's threshold of every row, exact to a bin: from a histogram of the weights in the sectors
// whose maximum reaches the lower bound that row_sums has found.
#include "kernels/select/chain.cuh"
#include "kernels/select/sectors.cuh"

namespace sluice::cuda {
namespace {

constexpr int kWarpStrips = kUnitStrips / kWarps;
constexpr int kVectors = 4;  // of 8 entries, per thread and step
constexpr int kHalfWarp = kWarp / 2;

struct Shared {
  std::uint16_t queues[kWarps][kWarpStrips * kStripSectors];
  std::uint64_t part[kWarp];
  std::int32_t found;
};

// A row, and its bins from that of its maximum down.
struct Row {
  const __half* logits;
  Extent extent;
  BinMap map;
  std::int32_t top;
  std::uint16_t least;  // f16 of the lowest bin
};

// Eight logits; -Inf for entries that are always kept.
__device__ __forceinline__ uint4 load_selectable8(const Row& row, std::int32_t i) {
  if (i >= row.extent.low && i + 8 <= row.extent.high) return load8(row.logits, i);
  return masked(load8_below(row.logits, row.extent.total, i), ~forced8(row.extent, i));
}

// Called by one warp: counts its strips of the unit.
__device__ void add_strips(const ChainCall& call, const Row& row, std::int32_t number,
                           std::int32_t first, std::int32_t last, std::uint16_t* queue,
                           std::uint32_t* bins) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarp;
  const std::uint32_t* const maxima = call.strip_maxima(number, first, lane);
  const std::int32_t words_apart = kStripPages * ChainCall::kPageWords * call.call.group;
  std::uint32_t words[kWarpStrips];
#pragma unroll
  for (int s = 0; s < kWarpStrips; ++s) {
    words[s] = first + s < last ? maxima[s * words_apart] : kMinusInfinities;
  }
  const __half2 least = twice(row.least);
  int count = 0;
#pragma unroll
  for (int s = 0; s < kWarpStrips; ++s) {
    const std::uint32_t reaches = __hge2_mask(as_half2(words[s]), least);
    count += queue_sectors((reaches & 0xffffu) != 0, reaches >> 16 != 0,
                           static_cast<std::uint16_t>(s * kStripSectors), queue + count);
  }
  __syncwarp();
  for (int at = lane / 2; at < count + lane / 2; at += kVectors * kHalfWarp) {
    uint4 v[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int slot = at + j * kHalfWarp;
      v[j] = all_minus_infinity();
      if (slot < count) {
        const std::int32_t i = first * kStrip + queue[slot] * kSector + lane % 2 * 8;
        v[j] = load_selectable8(row, i);
      }
    }
#pragma unroll
    for (int j = 0; j < kVectors; ++j) add_masses8(v[j], row.least, row.map, row.top, bins);
  }
}

// Called by the last block of a row; `shares` is shared memory for all bins.
__device__ __noinline__ void finish_row(const ChainCall& call, std::int32_t row, std::int32_t top,
                                        std::int32_t bins, const RowSearch& search,
                                        std::uint64_t* shares, Shared* shared) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const RowInfo info = call.rows[row];
  const std::uint64_t* const masses = call.masses + static_cast<std::int64_t>(row) * call.bins;
  const std::uint64_t target = share_units(static_cast<double>(search.missing)) + 1;
  if (thread == 0) shared->found = bins - 1;
#pragma unroll 4
  for (std::int32_t i = thread; i < bins; i += kThreads) {
    const auto mass = static_cast<double>(__ldcg(masses + i));
    const float edge = static_cast<float>(top - i) / kBinsPerNat;
    const float unit = info.scale * exp2_fast(fmaf(edge, kLog2E, -info.norm));
    shares[i] = share_units(mass * static_cast<double>(unit) / (1 << kMassBits));
  }
  __syncthreads();
  // Every thread has consecutive bins.
  const std::int32_t each = (bins + kThreads - 1) / kThreads;
  const std::int32_t last = min((thread + 1) * each, bins);
  std::uint64_t own = 0;
  for (std::int32_t i = thread * each; i < last; ++i) own += shares[i];
  std::uint64_t all = 0;
  std::uint64_t before = block_exclusive(own, shared->part, all);
  if (before < target && before + own >= target) {
    std::int32_t i = thread * each;
    while ((before += shares[i]) < target) ++i;
    shared->found = i;
  }
  __syncthreads();
  const std::int32_t found = shared->found;
  std::uint64_t reaching = 0;
  if (call.shortlist_capacity > 0) {
#pragma unroll 4
    for (std::int32_t i = thread; i <= found; i += kThreads) {
      reaching += __ldcg(masses + i) >> kMassBits;
    }
    block_exclusive(reaching, shared->part, all);
  }
  if (thread != 0) return;
  call.rows[row].threshold = bin_threshold(top - found);
  call.searches[row].reaching = static_cast<std::uint32_t>(all);
}

__global__ void __launch_bounds__(kThreads, 4)
    row_thresholds(const __grid_constant__ ChainCall call) {
  extern __shared__ uint4 memory[];
  __shared__ Shared shared;
  auto* const bins = reinterpret_cast<std::uint32_t*>(memory);
  const SelectCall& c = call.call;
  const auto block = static_cast<std::int32_t>(blockIdx.x);
  const std::int32_t number = block / call.units;
  const int head = number / c.group;
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < call.bins; i += kThreads) bins[i] = 0;
  // Allows first, because the next kernel makes no use of rule 4 (early_launch.cuh), and often
  // nothing is left to do here.
  allow_next_kernel();
  wait_for_kernel_before();
  if (call.shortlist_capacity > 0 && call.settled[head] != 0) return;
  const RowSearch search = call.searches[number];
  if (search.lowest == RowSearch::kSettled) return;
  const Row row{c.row(head, number % c.group), call.extents[head], BinMap(search.highest),
                bin_floor(search.highest), bin_threshold(search.lowest)};
  const std::int32_t count = min(row.top - search.lowest + 1, call.bins);
  const std::int32_t each = call.unit_strips / kWarps;
  const std::int32_t first =
      block % call.units * call.unit_strips + static_cast<std::int32_t>(threadIdx.x) / kWarp * each;
  const std::int32_t last = min(first + each, (row.extent.emit + kStrip - 1) / kStrip);
  __syncthreads();
  add_strips(call, row, number, first, last, shared.queues[threadIdx.x / kWarp], bins);
  __syncthreads();
  std::uint64_t* const masses = call.masses + static_cast<std::int64_t>(number) * call.bins;
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < count; i += kThreads) {
    if (bins[i] != 0) atomicAdd(reinterpret_cast<unsigned long long*>(masses + i), bins[i]);
  }
  if (is_last_of(call.rows_done + number, call.units)) {
    finish_row(call, number, row.top, count, search, reinterpret_cast<std::uint64_t*>(memory),
               &shared);
  }
}

}  // namespace

void run_row_thresholds(const ChainCall& call, const Launch& launch) {
  const std::int64_t rows = std::int64_t{call.call.head_count} * call.call.group;
  const auto bytes = static_cast<std::size_t>(call.bins) * sizeof(std::uint64_t);
  launch_early("row_thresholds", row_thresholds, dim3(static_cast<unsigned>(rows * call.units)),
               kThreads, bytes, launch, call);
}

}  // namespace sluice::cuda
