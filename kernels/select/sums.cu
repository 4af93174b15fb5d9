// The first read of every row, and the only one of all its entries: its sum of exponentials, and
// the maximum of every sector. The last block of a row derives from the sectors' maxima, which are
// entries too,
//   a lower bound of top_p's threshold: the maxima from there up alone hold enough weight,
//   an upper bound of the threshold: the maxima below it hold more weight than may be missing,
//   a lower bound of the lightest kept logit: at least `keep` maxima reach it.
#include <cmath>

#include "kernels/select/chain.cuh"
#include "kernels/select/strip.cuh"

namespace sluice::cuda {
namespace {

struct Shared {
  Extent extent;
  Sums sums[kWarps];
  float highests[kWarps];
  std::uint32_t bad;
  std::uint32_t part[kWarp];
  std::uint64_t long_part[kWarp];
  RowInfo info;
  RowSearch search;
  std::int32_t tops[kMostUnits];
  std::uint32_t counts[kRoughBins];
  std::uint32_t masses[kRoughBins];
};

// Returns true if the sectors' maxima are counted, which thresholds and shortlists need.
__device__ bool counts_sectors(const ChainCall& call) {
  return call.bins > 0 || call.shortlist_capacity > 0;
}

__device__ void begin(const ChainCall& call, std::int32_t row, const TokenBounds& token,
                      Shared* shared) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const auto step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + thread;
       i < call.zeroed_words; i += step) {
    call.zeroed[i] = 0;
  }
  if (thread < kWarp) {
    const Extent extent = extent_of(call.call, row / call.call.group, token);
    if (thread == 0) {
      shared->extent = extent;
      shared->bad = 0;
    }
  }
  __syncthreads();
}

// The strips of a unit. Plain ones are complete, without always kept entries.
struct Strips {
  std::int32_t first;
  std::int32_t last;
  std::int32_t first_plain;
  std::int32_t last_plain;

  __device__ Strips(const ChainCall& call, std::int32_t unit, const Extent& extent)
      : first(unit * call.unit_strips),
        last(min(first + call.unit_strips, (extent.total + kStrip - 1) / kStrip)),
        first_plain(min(max(first, (extent.low + kStrip - 1) / kStrip), last)),
        last_plain(max(first_plain, min(last, extent.high / kStrip))) {}
};

// The destinations of a warp's sector maxima and their counts.
struct SectorSink {
  std::uint32_t* maxima;
  std::int64_t strip_words;
  std::uint32_t* counts;  // [kRoughBins] or null
  std::uint32_t* masses;  // [kRoughBins] or null

  __device__ SectorSink(const ChainCall& call, std::int32_t row, Shared* shared)
      : maxima(call.strip_maxima(row, 0,
                                 static_cast<std::int32_t>(threadIdx.x) % 2 * (kWarp / 2) +
                                     static_cast<std::int32_t>(threadIdx.x) % kWarp / 2)),
        strip_words(static_cast<std::int64_t>(kStripPages * ChainCall::kPageWords) *
                    call.call.group),
        counts(call.shortlist_capacity > 0 ? shared->counts : nullptr),
        masses(call.bins > 0 ? shared->masses : nullptr) {}

  __device__ __forceinline__ void take(std::int32_t strip, const StripMaxima& found) const {
    const std::uint32_t word = found.sectors();
    maxima[strip * strip_words] = word;
    count_sectors(word, counts, masses);
  }
};

// Adds the strips that are not plain. Out of line, to keep its registers apart.
__device__ __noinline__ Seen add_special(const ChainCall& call, std::int32_t row, std::int32_t unit,
                                         Shared* shared) {
  const SelectCall& c = call.call;
  const Extent extent = shared->extent;
  const Strips strips(call, unit, extent);
  const SectorSink sink(call, row, shared);
  const int head = row / c.group;
  const __half* const logits = c.row(head, row % c.group);
  Seen seen;
  for (std::int32_t strip = strips.first + static_cast<std::int32_t>(threadIdx.x) / kWarp;
       strip < strips.last; strip += kWarps) {
    if (strip >= strips.first_plain && strip < strips.last_plain) continue;
    uint4 v[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      v[j] = load8_below(logits, extent.total, entry_of(strip, j));
    }
    seen.add(v);
    take_kept(extent, strip, v, seen.sums);
    sink.take(strip, StripMaxima(v));
  }
  return seen;
}

// Adds plain strips from a scan's digest.
__device__ __forceinline__ void add_digests(const ChainCall& call, std::int32_t row,
                                            const Strips& strips, const SectorSink& sink,
                                            Seen& seen) {
  constexpr int kAtOnce = 2;
  const int group = call.call.group;
  const auto* const maxima = reinterpret_cast<const uint4*>(call.strip_maxima(row, 0, 0));
  const float* const sums = call.call.digest.sums + row / group * call.pages * group + row % group;
  const std::int32_t last = strips.last_plain * kStripPages;
  for (std::int32_t page =
           strips.first_plain * kStripPages + static_cast<std::int32_t>(threadIdx.x);
       page < last; page += kAtOnce * kThreads) {
    uint4 words[kAtOnce];
    float sum[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const std::int32_t at = min(page + j * kThreads, last - 1);
      words[j] = maxima[at * group];
      sum[j] = sums[at * group];
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (page + j * kThreads >= last) break;
      seen.add(words[j], sum[j]);
#pragma unroll
      for (int w = 0; w < 4; ++w) count_sectors(word_of(words[j], w), sink.counts, sink.masses);
    }
  }
}

// Adds plain strips from their logits.
__device__ __forceinline__ void add_strips(const ChainCall& call, std::int32_t row,
                                           const Strips& strips, const SectorSink& sink,
                                           Seen& seen) {
  const __half* const logits = call.call.row(row / call.call.group, row % call.call.group);
  std::int32_t strip = strips.first_plain + static_cast<std::int32_t>(threadIdx.x) / kWarp;
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
}

__device__ void add_unit(const ChainCall& call, std::int32_t row, std::int32_t unit,
                         Shared* shared) {
  const auto warp = static_cast<std::int32_t>(threadIdx.x) / kWarp;
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarp;
  const Strips strips(call, unit, shared->extent);
  Seen seen;
  if (strips.last_plain - strips.first_plain < strips.last - strips.first) {
    seen = add_special(call, row, unit, shared);
  }
  const SectorSink sink(call, row, shared);
  if (call.call.digest.maxima != nullptr) {
    add_digests(call, row, strips, sink, seen);
  } else {
    add_strips(call, row, strips, sink, seen);
  }
  const float own = larger_of(seen.most);
  const bool bad = __any_sync(kAllLanes, !(own < INFINITY));
  const float highest = warp_max(own);
  const Sums sums = add_up(seen.sums);
  if (lane != 0) return;
  shared->sums[warp] = sums;
  shared->highests[warp] = highest;
  if (bad) shared->bad = 1;
}

// The rough bin of a logit.
__device__ std::int32_t rough_bin(float x) {
  const std::uint32_t number = ordered2(__half_as_ushort(__float2half_rn(x))) & 0xffffu;
  return static_cast<std::int32_t>(number >> 5);
}

// Joins and writes the results of the unit's warps.
__device__ void end_unit(const ChainCall& call, std::int32_t row, std::int32_t unit,
                         Shared* shared) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int64_t slot = static_cast<std::int64_t>(row) * call.units + unit;
  __syncthreads();
  const float highest = warp_max(shared->highests[thread % kWarps]);
  const std::int32_t top = rough_bin(highest);
  if (counts_sectors(call)) {
    uint2* const to = call.rough + slot * kRoughBins;
#pragma unroll
    for (int i = 0; i < kWrittenBins; i += kThreads) {
      const std::int32_t bin = top - i - thread;
      if (bin >= 0) to[bin] = make_uint2(shared->counts[bin], shared->masses[bin]);
    }
  }
  if (thread >= kWarp) return;
  Sums own;
  if (thread < kWarps) own = shared->sums[thread];
  const Sums sums = add_up(own);
  if (thread != 0) return;
  call.unit_heads[slot] = {sums.norm, sums.all, sums.kept, sums.tail, highest, shared->bad, top};
}

// The results of the units that one lane of the first warp has read.
struct Units {
  Sums sums;
  float share = 1.0f;
  bool bad = false;
};

// By one warp: reads the results of a row's units.
__device__ __forceinline__ Units read_units(const ChainCall& call, std::int32_t row,
                                            Shared* shared) {
  const SelectCall& c = call.call;
  const UnitHead* const heads = call.unit_heads + static_cast<std::int64_t>(row) * call.units;
  const auto lane = static_cast<std::int32_t>(threadIdx.x);
  Units units;
  units.share = share_of(c, row);
  float highest = -INFINITY;
  for (std::int32_t u = lane; u < call.units; u += kWarp) {
    const UnitHead unit = heads[u];
    highest = fmaxf(highest, unit.highest);
    units.bad = units.bad || unit.bad != 0;
    shared->tops[u] = unit.top;
    Sums& sums = units.sums;
    Sums other{unit.norm, unit.sum, unit.kept, unit.tail};
    const float norm = fmaxf(sums.norm, other.norm);
    sums.refer_to(norm);
    other.refer_to(norm);
    sums.all += other.all;
    sums.kept += other.kept;
    sums.tail += other.tail;
  }
  highest = warp_max(highest);
  const bool has_logits = shared->extent.total > 0;
  units.bad = __any_sync(kAllLanes, units.bad) || (has_logits && !(highest > -INFINITY));
  if (lane == 0) shared->search.highest = highest;
  return units;
}

// Called by the same warp: computes the row's bounds.
__device__ __forceinline__ void add_units(const ChainCall& call, const Units& units,
                                          Shared* shared) {
  const SelectCall& c = call.call;
  const Sums sums = add_up(units.sums);
  if (threadIdx.x != 0) return;
  const bool bad = units.bad;
  RowInfo info;
  if (shared->extent.total > 0) {
    info.norm = sums.norm + log2f(sums.all);
    // Corrects the rounding of the norm.
    info.scale = exp2_fast(info.norm - sums.norm) / sums.all;
    info.tail = bad ? 0.0f : sums.tail / sums.all;
    info.kept = bad ? 0.0f : sums.kept / sums.all;
  } else {
    info.tail = info.kept = 1.0f;  // without logits nothing is missing
  }
  info.share = units.share;
  info.bad = bad ? 1 : 0;
  info.threshold = kInfiniteHalf;
  RowSearch search;
  search.highest = shared->search.highest;
  search.least = static_cast<std::uint16_t>(kMinusInfinities);
  search.most = kInfiniteHalf;
  search.lowest = RowSearch::kSettled;
  search.missing = c.p - info.kept;
  if (c.is_top_p && !bad && (search.missing > 0.0f || c.p >= 1.0f)) {
    info.threshold = kLowestHalf;
    search.reaching = static_cast<std::uint32_t>(shared->extent.total);
    // Weights below (1 - p) / entries of the sum are not needed; half of that for safety.
    if (call.bins > 0) search.lowest = bin_floor(info.norm / kLog2E - c.bin_range);
  }
  shared->info = info;
  shared->search = search;
}

// Sectors of a rough bin and their mass.
struct Rough {
  std::uint32_t count = 0;
  std::uint64_t mass = 0;
};

__device__ __forceinline__ Rough add_rough(const ChainCall& call, std::int32_t row,
                                           std::int32_t bin, const Shared* shared) {
  const uint2* const rough = call.rough + static_cast<std::int64_t>(row) * call.units * kRoughBins;
  Rough sum;
#pragma unroll 16
  for (std::int32_t u = 0; u < call.units; ++u) {
    const std::int32_t below = shared->tops[u] - bin;
    const uint2 x = rough[static_cast<std::int64_t>(u) * kRoughBins + max(bin, 0)];
    const bool written = below >= 0 && below < kWrittenBins && bin >= kFirstFinite;
    sum.count += written ? x.x : 0u;
    sum.mass += written ? x.y : 0u;
  }
  return sum;
}

// Finds the bounds, from the heaviest sectors down. `rough` is this thread's bin among the first
// kThreads, which begin at `top`.
__device__ void find_bounds(const ChainCall& call, std::int32_t row, std::int32_t top, Rough rough,
                            Shared* shared) {
  const RowSearch search = shared->search;
  const RowInfo info = shared->info;
  const bool by_weight = search.lowest != RowSearch::kSettled;
  // A margin, because rounding may have added weight.
  const std::uint64_t target =
      share_units(static_cast<double>(search.missing) * (1.0 + 0x1p-12) + 0x1p-18);
  const std::uint64_t rest =
      share_units((1.0 - static_cast<double>(call.call.p)) * (1.0 + 0x1p-12) + 0x1p-16);
  const auto keep =
      static_cast<std::uint32_t>(call.shortlist_capacity > 0 ? max(shared->extent.keep, 1) : 0);
  std::uint32_t counted = 0;
  std::uint64_t weighed = 0;
  for (std::int32_t done = 0; done < kWrittenBins; done += kThreads) {
    const std::int32_t bin = top - done - static_cast<std::int32_t>(threadIdx.x);
    if (done > 0) rough = add_rough(call, row, bin, shared);
    const __half edge = __ushort_as_half(rough_edge(max(bin, kFirstFinite)));
    const double unit = static_cast<double>(weight_of(edge, info)) / (1 << kMassBits);
    const std::uint64_t share = share_units(static_cast<double>(rough.mass) * unit);
    std::uint32_t all_counted = 0;
    std::uint64_t all_weighed = 0;
    const std::uint32_t count_before =
        counted + block_exclusive(rough.count, shared->part, all_counted);
    const std::uint64_t share_before =
        weighed + block_exclusive(share, shared->long_part, all_weighed);
    if (count_before < keep && count_before + rough.count >= keep) {
      shared->search.least = __half_as_ushort(edge);
    }
    if (by_weight && share_before < target && share_before + share >= target) {
      shared->search.lowest = max(search.lowest, bin_floor(__half2float(edge)));
    }
    // Sectors of this bin and below hold more weight than may be missing, so the threshold is not
    // above this bin.
    const std::uint64_t enough = weighed + all_weighed;
    if (by_weight && share_before + rest < enough && share_before + share + rest >= enough) {
      shared->search.most = rough_edge(min(bin + 1, rough_bin(INFINITY)));
      shared->search.sure = count_before;
    }
    counted += all_counted;
    weighed += all_weighed;
    if (counted >= keep && (!by_weight || weighed >= target)) break;
    __syncthreads();
  }
  __syncthreads();
}

// Out of line, to keep its registers apart.
__device__ __noinline__ void finish_row(const ChainCall& call, std::int32_t row, Shared* shared) {
  const bool is_first_warp = threadIdx.x < kWarp;
  Units units;
  if (is_first_warp) units = read_units(call, row, shared);
  __syncthreads();
  const std::int32_t top = rough_bin(shared->search.highest);
  const bool counts = counts_sectors(call);
  Rough rough;
  if (counts) rough = add_rough(call, row, top - static_cast<std::int32_t>(threadIdx.x), shared);
  __syncthreads();
  if (is_first_warp) add_units(call, units, shared);
  __syncthreads();
  if (shared->info.bad == 0 && counts) find_bounds(call, row, top, rough, shared);
  if (threadIdx.x != 0) return;
  call.rows[row] = shared->info;
  if (shared->extent.total > 0) {
    report_lse(call.call, row, shared->info);
  } else if (call.call.lse != nullptr) {
    call.call.lse[row] = -INFINITY;
  }
  call.searches[row] = shared->search;
  const int group = call.call.group;
  if (row % group == 0) call.extents[row / group] = shared->extent;
}

__global__ void __launch_bounds__(kThreads, 4) row_sums(const __grid_constant__ ChainCall call) {
  __shared__ Shared shared;
  for (int i = static_cast<int>(threadIdx.x); i < kRoughBins; i += kThreads) {
    shared.counts[i] = shared.masses[i] = 0;
  }
  const auto block = static_cast<std::int32_t>(blockIdx.x);
  const std::int32_t rows = call.call.head_count * call.call.group;
  // The last rows were written last, and may still be in the cache.
  const std::int32_t row = rows - 1 - block / call.units;
  const std::int32_t unit = block % call.units;
  const TokenBounds token = bounds_of(call.call, row / call.call.group);
  wait_for_kernel_before();
  allow_next_kernel();
  begin(call, row, token, &shared);
  add_unit(call, row, unit, &shared);
  end_unit(call, row, unit, &shared);
  if (!is_last_of(call.tickets + row, call.units)) return;
  if (threadIdx.x == 0) call.tickets[row] = 0;
  finish_row(call, row, &shared);
}

}  // namespace

void run_row_sums(const ChainCall& call, const Launch& launch) {
  const std::int64_t rows = std::int64_t{call.call.head_count} * call.call.group;
  launch_early("row_sums", row_sums, dim3(static_cast<unsigned>(rows * call.units)), kThreads, 0,
               launch, call);
}

}  // namespace sluice::cuda
