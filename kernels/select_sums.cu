// First look at every row, and the only one at all of it: its sum of exponentials, and the maximum
// of every sector. The last block of a row derives from the sectors' maxima, which are entries too,
//   a lower bound of top_p's threshold: where these maxima alone hold enough weight,
//   a lower bound of the lightest kept logit: as many maxima are not below as are to be kept.
#include <cmath>

#include "kernels/select_large.cuh"
#include "kernels/select_strip.cuh"

namespace sluice::cuda {
namespace {

struct Shared {
  Extent extent;
  Sums sums[kWarps];
  float highests[kWarps];
  std::uint32_t bad;
  std::int32_t first;  // rough bins in use
  std::int32_t last;
  std::uint64_t part[kWarp];
  Crossing<std::uint32_t> found_count;
  Crossing<std::uint64_t> found_share;
  RowInfo info;
  RowSearch search;
  std::uint16_t firsts[kMostUnits];
  std::uint16_t lasts[kMostUnits];
  std::uint32_t counts[kRoughBins];
  union {
    std::uint32_t masses[kRoughBins];
    std::uint64_t shares[kRoughBins];
  };
};

// What a call needs to know of its sectors.
__device__ bool counts_sectors(const LargeCall& call) {
  return call.bins > 0 || call.list_capacity > 0;
}

__device__ void begin(const LargeCall& call, std::int32_t row, Shared* shared) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const auto step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + thread;
       i < call.zeroed_words; i += step) {
    call.zeroed[i] = 0;
  }
  for (std::int32_t i = thread; i < kRoughBins; i += kThreads) {
    shared->counts[i] = shared->masses[i] = 0;
  }
  if (thread < kWarp) {
    const Extent extent = extent_of(call.call, row / call.call.group);
    if (thread == 0) {
      shared->extent = extent;
      shared->bad = 0;
      shared->first = kRoughBins;
      shared->last = -1;
    }
  }
  __syncthreads();
}

// The strips of a unit, and those of them that have all their entries and nothing special.
struct Strips {
  std::int32_t first;
  std::int32_t last;
  std::int32_t first_plain;
  std::int32_t last_plain;

  __device__ Strips(const LargeCall& call, std::int32_t unit, const Extent& extent)
      : first(unit * call.unit_strips),
        last(min(first + call.unit_strips, (extent.total + kStrip - 1) / kStrip)),
        first_plain(last),
        last_plain(last) {
    if (!call.call.is_aligned || call.call.eligible != nullptr) return;
    first_plain = min(max(first, (extent.low + kStrip - 1) / kStrip), last);
    last_plain = max(first_plain, min(last, extent.high / kStrip));
  }
};

// Where a warp writes the maxima of a row's sectors, and counts them.
struct SectorSink {
  std::uint32_t* maxima;
  std::uint32_t* counts;  // null: does not
  std::uint32_t* masses;
  bool weighs;

  __device__ SectorSink(const LargeCall& call, std::int32_t row, Shared* shared)
      : maxima(call.maxima + static_cast<std::int64_t>(row) * call.strips * (kStripSectors / 2) +
               threadIdx.x % 2 * (kStripSectors / 4) + threadIdx.x % kWarp / 2),
        counts(counts_sectors(call) ? shared->counts : nullptr),
        masses(shared->masses),
        weighs(call.bins > 0) {}

  __device__ __forceinline__ void take(std::int32_t strip, const StripMaxima& found) const {
    const std::uint32_t word = found.sectors();
    maxima[strip * (kStripSectors / 2)] = word;
    if (counts != nullptr) count_sectors(word, weighs, counts, masses);
  }
};

// The strips that are not plain. Out of line, for its registers.
__device__ __noinline__ Seen add_special(const LargeCall& call, std::int32_t row, std::int32_t unit,
                                         Shared* shared) {
  const SelectCall& c = call.call;
  const Extent extent = shared->extent;
  const Strips strips(call, unit, extent);
  const SectorSink sink(call, row, shared);
  const int head = row / c.group;
  const __half* const logits = c.row(head, row % c.group);
  const std::int32_t* const list = c.head_list(head);
  Seen seen;
  for (std::int32_t strip = strips.first + static_cast<std::int32_t>(threadIdx.x) / kWarp;
       strip < strips.last; strip += kWarps) {
    if (strip >= strips.first_plain && strip < strips.last_plain) continue;
    uint4 v[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      v[j] = load8(c, logits, list, extent, entry_of(strip, j));
    }
    seen.add(v);
    take_kept(extent, strip, v, seen.sums);
    sink.take(strip, StripMaxima(v));
  }
  return seen;
}

__device__ void add_unit(const LargeCall& call, std::int32_t row, std::int32_t unit,
                         Shared* shared) {
  const auto warp = static_cast<std::int32_t>(threadIdx.x) / kWarp;
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarp;
  const Strips strips(call, unit, shared->extent);
  Seen seen;
  if (strips.last_plain - strips.first_plain < strips.last - strips.first) {
    seen = add_special(call, row, unit, shared);
  }
  const SectorSink sink(call, row, shared);
  const __half* const logits = call.call.row(row / call.call.group, row % call.call.group);
  std::int32_t strip = strips.first_plain + warp;
  uint4 v[kVectors];
  if (strip < strips.last_plain) load_strip(logits, strip, v);
  while (strip < strips.last_plain) {
    uint4 next[kVectors];
    if (strip + kWarps < strips.last_plain) load_strip(logits, strip + kWarps, next);
    sink.take(strip, seen.add(v));
#pragma unroll
    for (int j = 0; j < kVectors; ++j) v[j] = next[j];
    strip += kWarps;
  }
  Sums& sums = seen.sums;
  const float own = larger_of(seen.most);
  const bool bad = __any_sync(kAllLanes, !(own < INFINITY));
  const float highest = warp_max(own);
  sums.refer_to(warp_max(sums.norm));
  sums.all = warp_sum(sums.all);
  sums.kept = warp_sum(sums.kept);
  sums.tail = warp_sum(sums.tail);
  if (lane != 0) return;
  shared->sums[warp] = sums;
  shared->highests[warp] = highest;
  if (bad) shared->bad = 1;
}

// Writes what the unit's warps have found.
__device__ void end_unit(const LargeCall& call, std::int32_t row, std::int32_t unit,
                         Shared* shared) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  constexpr int kEach = kRoughBins / kThreads;
  const std::int64_t slot = static_cast<std::int64_t>(row) * call.units + unit;
  __syncthreads();
  if (counts_sectors(call)) {
    std::int32_t first = kRoughBins;
    std::int32_t last = -1;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const std::int32_t bin = thread * kEach + i;
      if (shared->counts[bin] == 0) continue;
      first = min(first, bin);
      last = bin;
    }
    first = __reduce_min_sync(kAllLanes, first);
    last = __reduce_max_sync(kAllLanes, last);
    if (thread % kWarp == 0) {
      atomicMin(&shared->first, first);
      atomicMax(&shared->last, last);
    }
    __syncthreads();
    uint2* const to = call.rough + slot * kRoughBins;
    for (std::int32_t bin = shared->first + thread; bin <= shared->last; bin += kThreads) {
      to[bin] = make_uint2(shared->counts[bin], shared->masses[bin]);
    }
  }
  if (thread != 0) return;
  Sums sums = shared->sums[0];
  float highest = shared->highests[0];
  for (int w = 1; w < kWarps; ++w) {
    Sums other = shared->sums[w];
    const float norm = fmaxf(sums.norm, other.norm);
    sums.refer_to(norm);
    other.refer_to(norm);
    sums.all += other.all;
    sums.kept += other.kept;
    sums.tail += other.tail;
    highest = fmaxf(highest, shared->highests[w]);
  }
  call.unit_heads[slot] = {sums.norm, sums.all,    sums.kept,     sums.tail,
                           highest,   shared->bad, shared->first, shared->last};
}

// By one warp: sums of the row, from its units.
__device__ void add_units(const LargeCall& call, std::int32_t row, Shared* shared) {
  const UnitHead* const heads = call.unit_heads + static_cast<std::int64_t>(row) * call.units;
  const auto lane = static_cast<std::int32_t>(threadIdx.x);
  float norm = kNoNorm;
  float highest = -INFINITY;
  bool bad = false;
  std::int32_t first = kRoughBins;
  std::int32_t last = -1;
  for (std::int32_t u = lane; u < call.units; u += kWarp) {
    const UnitHead unit = heads[u];
    norm = fmaxf(norm, unit.norm);
    highest = fmaxf(highest, unit.highest);
    bad = bad || unit.bad != 0;
    first = min(first, unit.first);
    last = max(last, unit.last);
    shared->firsts[u] = static_cast<std::uint16_t>(unit.first);
    shared->lasts[u] = static_cast<std::uint16_t>(max(unit.last, 0));
  }
  norm = warp_max(norm);
  highest = warp_max(highest);
  bad = __any_sync(kAllLanes, bad) || !(highest > -INFINITY);
  double sums[3] = {0.0, 0.0, 0.0};
  for (std::int32_t u = lane; u < call.units; u += kWarp) {
    const UnitHead unit = heads[u];
    const auto scale = static_cast<double>(exp2f(unit.norm - norm));
    sums[0] += scale * static_cast<double>(unit.sum);
    sums[1] += scale * static_cast<double>(unit.kept);
    sums[2] += scale * static_cast<double>(unit.tail);
  }
#pragma unroll
  for (double& sum : sums) {
    for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  }
  first = __reduce_min_sync(kAllLanes, first);
  last = __reduce_max_sync(kAllLanes, last);
  if (lane != 0) return;
  RowInfo info;
  const double exact =
      static_cast<double>(norm) + static_cast<double>(log2f(static_cast<float>(sums[0])));
  info.norm = static_cast<float>(exact);
  info.scale = exp2f(static_cast<float>(static_cast<double>(info.norm) - exact));
  info.tail = bad ? 0.0f : static_cast<float>(sums[2] / sums[0]);
  info.bad = bad ? 1 : 0;
  RowSearch search;
  search.missing = static_cast<double>(call.call.p) - sums[1] / sums[0];
  search.highest = highest;
  shared->info = info;
  shared->search = search;
  shared->first = first;
  shared->last = last;
}

// The units' sectors by rough bins: how many, and at least what share of the row they hold.
__device__ void add_sectors(const LargeCall& call, std::int32_t row, Shared* shared) {
  const uint2* const rough = call.rough + static_cast<std::int64_t>(row) * call.units * kRoughBins;
  const RowInfo info = shared->info;
#pragma unroll 1
  for (auto bin = static_cast<std::int32_t>(threadIdx.x); bin < kRoughBins; bin += kThreads) {
    std::uint32_t count = 0;
    std::uint64_t mass = 0;
    if (bin >= max(shared->first, kFirstFinite) && bin <= shared->last) {
#pragma unroll 8
      for (std::int32_t u = 0; u < call.units; ++u) {
        const uint2 x = rough[static_cast<std::int64_t>(u) * kRoughBins + bin];
        const bool written = bin >= shared->firsts[u] && bin <= shared->lasts[u];
        count += written ? x.x : 0u;
        mass += written ? x.y : 0u;
      }
    }
    const float edge = weight_of(__ushort_as_half(rough_edge(bin)), info);
    const double share = static_cast<double>(mass) * static_cast<double>(edge);
    shared->counts[bin] = count;
    shared->shares[bin] = mass == 0 ? 0 : share_units(share / (1 << kMassBits));
  }
  __syncthreads();
}

// Looks for the bounds, from the heaviest sectors down.
__device__ void find_bounds(const LargeCall& call, bool by_weight, Shared* shared) {
  const std::int32_t last = kRoughBins - 1;
  if (call.list_capacity > 0) {
    const auto count_of = [&](std::int32_t i) { return shared->counts[last - i]; };
    find_crossing(count_of, kRoughBins, static_cast<std::uint32_t>(max(call.call.keep, 1)),
                  &shared->found_count, reinterpret_cast<std::uint32_t*>(shared->part));
    if (threadIdx.x == 0 && shared->found_count.reached) {
      shared->search.least = rough_edge(last - shared->found_count.bin);
    }
    __syncthreads();
  }
  if (!by_weight) return;
  // A little more, for what rounding may have added.
  const double target = shared->search.missing * (1.0 + 0x1p-12) + 0x1p-20;
  const auto share_of = [&](std::int32_t i) { return shared->shares[last - i]; };
  find_crossing(share_of, kRoughBins, share_units(target), &shared->found_share, shared->part);
  if (threadIdx.x == 0 && shared->found_share.reached) {
    const float edge = __half2float(__ushort_as_half(rough_edge(last - shared->found_share.bin)));
    shared->search.lowest = max(shared->search.lowest, bin_floor(edge));
  }
}

// Kept out of line, for its registers.
__device__ __noinline__ void finish_row(const LargeCall& call, std::int32_t row, Shared* shared) {
  const SelectCall& c = call.call;
  float share = 1.0f;
  if (threadIdx.x == 0 && c.share != nullptr) {
    share = *static_cast<const volatile float*>(c.share + row);
  }
  if (threadIdx.x < kWarp) add_units(call, row, shared);
  __syncthreads();
  if (threadIdx.x == 0) {
    RowInfo& info = shared->info;
    RowSearch& search = shared->search;
    info.share = share;
    info.threshold = kInfiniteHalf;
    search.least = static_cast<std::uint16_t>(kMinusInfinities);
    search.lowest = RowSearch::kSettled;
    search.reaching = 0;
    if (c.is_top_p && info.bad == 0 && (search.missing > 0.0 || c.p >= 1.0f)) {
      info.threshold = kLowestHalf;
      search.reaching = static_cast<std::uint32_t>(shared->extent.total);
      // What weighs less than (1 - p) / entries of the sum is not needed; half of that for safety.
      if (call.bins > 0) search.lowest = bin_floor(info.norm / kLog2E - c.bin_range);
    }
  }
  __syncthreads();
  const bool by_weight = shared->search.lowest != RowSearch::kSettled;
  if (shared->info.bad == 0 && (by_weight || call.list_capacity > 0)) {
    add_sectors(call, row, shared);
    find_bounds(call, by_weight, shared);
  }
  if (threadIdx.x != 0) return;
  call.rows[row] = shared->info;
  call.searches[row] = shared->search;
  if (row % c.group == 0) call.extents[row / c.group] = shared->extent;
}

__global__ void __launch_bounds__(kThreads, 4) row_sums(const __grid_constant__ LargeCall call) {
  __shared__ Shared shared;
  wait_for_kernel_before();
  allow_next_kernel();
  const auto block = static_cast<std::int32_t>(blockIdx.x);
  const std::int32_t rows = call.call.kv_heads * call.call.group;
  // The last rows were written last, and may still be in the cache.
  const std::int32_t row = rows - 1 - block / call.units;
  const std::int32_t unit = block % call.units;
  begin(call, row, &shared);
  add_unit(call, row, unit, &shared);
  end_unit(call, row, unit, &shared);
  if (!is_last_of(call.tickets + row, call.units)) return;
  if (threadIdx.x == 0) call.tickets[row] = 0;
  finish_row(call, row, &shared);
}

}  // namespace

void run_row_sums(const LargeCall& call, cudaStream_t stream) {
  const std::int64_t rows = std::int64_t{call.call.kv_heads} * call.call.group;
  launch_select(row_sums, "row_sums", rows * call.units, kThreads, 0, stream, call);
}

}  // namespace sluice::cuda
