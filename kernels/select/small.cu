// Selection by one block per KV head of a single query head, whose row fits the block's shared
// memory: one kernel, one read. small_group.cu has it for several.
#include <algorithm>
#include <cmath>

#include "kernels/runtime/error.h"
#include "kernels/select/large.cuh"
#include "kernels/select/small.h"

namespace sluice::cuda {
namespace {

struct alignas(16) Shared {
  Extent extent;
  float parts[3][kWarp];
  std::uint64_t long_part[kWarp];
  std::uint32_t part[kWarp];
  Crossing<std::uint64_t> found_share;
  Crossing<std::uint32_t> found_grade;
  GradeCut cut;
  std::uint32_t pages;
  RowInfo info;
};

// The work of the block. The row, the bins and the kept bits follow Shared in memory.
struct Work {
  const SelectCall& c;
  std::int32_t head;
  Shared* shared;
  std::uint32_t* bins;
  uint4* row;          // vectors of 8 entries
  std::uint8_t* kept;  // bit e of vector v is entry 8 v + e
  const std::int32_t* list;
  Extent extent;
};

__device__ int thread_id() { return static_cast<int>(threadIdx.x); }
__device__ int threads() { return static_cast<int>(blockDim.x); }

__device__ __forceinline__ void load_row(const Work& w) {
  const __half* const row = w.c.row(w.head, 0);
#pragma unroll 4
  for (std::int32_t v = thread_id(); v < (w.extent.total + 7) / 8; v += threads()) {
    w.row[v] = load8_below(row, w.extent.total, v * 8);
  }
  __syncthreads();
}

struct Sums {
  float all = 0.0f;
  float kept = 0.0f;
  float tail = 0.0f;
};

__device__ __forceinline__ Sums block_sums(Sums x, Shared* shared) {
  const int warp = thread_id() / kWarp;
  const int lane = thread_id() % kWarp;
  const bool has = lane < threads() / kWarp;
  const Sums own{warp_sum(x.all), warp_sum(x.kept), warp_sum(x.tail)};
  if (lane == 0) {
    shared->parts[0][warp] = own.all;
    shared->parts[1][warp] = own.kept;
    shared->parts[2][warp] = own.tail;
  }
  __syncthreads();
  const Sums sums{warp_sum(has ? shared->parts[0][lane] : 0.0f),
                  warp_sum(has ? shared->parts[1][lane] : 0.0f),
                  warp_sum(has ? shared->parts[2][lane] : 0.0f)};
  __syncthreads();
  return sums;
}

// The largest logit; +Inf if one is NaN.
__device__ __forceinline__ float row_maximum(const Work& w) {
  __half2 most = as_half2(kMinusInfinities);
  for (std::int32_t v = thread_id(); v < (w.extent.total + 7) / 8; v += threads()) {
    const uint4 x = w.row[v];
#pragma unroll
    for (int i = 0; i < 4; ++i) most = __hmax2_nan(most, as_half2(word_of(x, i)));
  }
  float own = __half2float(__hmax_nan(__low2half(most), __high2half(most)));
  if (!(own < INFINITY)) own = INFINITY;
  own = warp_max(own);
  const int lane = thread_id() % kWarp;
  if (lane == 0) w.shared->parts[0][thread_id() / kWarp] = own;
  __syncthreads();
  const float highest = warp_max(lane < threads() / kWarp ? w.shared->parts[0][lane] : -INFINITY);
  __syncthreads();
  return highest;
}

__device__ __forceinline__ Sums row_sums(const Work& w, float highest) {
  const float norm = highest * kLog2E;
  Sums own;
  for (std::int32_t v = thread_id(); v < (w.extent.total + 7) / 8; v += threads()) {
    const uint4 x = w.row[v];
    const std::uint32_t forced = forced8(w.extent, v * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(as_half2(word_of(x, i)));
      const float low = exp2_fast(fmaf(pair.x, kLog2E, -norm));
      const float high = exp2_fast(fmaf(pair.y, kLog2E, -norm));
      own.all += low + high;
      if (forced == 0) continue;
      const std::int32_t at = v * 8 + 2 * i;
      if ((forced >> (2 * i) & 1u) != 0) own.kept += low;
      if ((forced >> (2 * i + 1) & 1u) != 0) own.kept += high;
      if (at >= w.extent.emit) own.tail += low;
      if (at + 1 >= w.extent.emit) own.tail += high;
    }
  }
  Sums sums = block_sums(own, w.shared);
  const float factor = shortfall(highest, norm);
  sums.all *= factor;
  sums.kept *= factor;
  sums.tail *= factor;
  return sums;
}

// The lowest f16 that top_p keeps.
__device__ __forceinline__ std::uint16_t row_threshold(const Work& w, float highest,
                                                       const Sums& sums) {
  if (w.c.p >= 1.0f) return kLowestHalf;
  const double missing =
      static_cast<double>(w.c.p) - static_cast<double>(sums.kept) / static_cast<double>(sums.all);
  if (missing <= 0.0) return kInfiniteHalf;
  const std::int32_t top = bin_floor(highest);
  // Weights below (1 - p) / entries of the sum are not needed; half of that for safety.
  const std::int32_t floor = bin_floor(highest + logf(sums.all) - w.c.bin_range);
  const std::int32_t bins = top - floor + 1;
  for (std::int32_t i = thread_id(); i < bins; i += threads()) w.bins[i] = 0;
  __syncthreads();
  const BinMap map(highest);
  const __half2 least = twice(bin_threshold(floor));
  for (std::int32_t v = thread_id(); v < (w.extent.total + 7) / 8; v += threads()) {
    const uint4 x = w.row[v];
    std::uint32_t bits = reaching(x, least) & ~forced8(w.extent, v * 8);
    const auto* const halves = reinterpret_cast<const __half*>(w.row + v);
    for (; bits != 0; bits &= bits - 1) {
      std::uint32_t mass;
      const std::int32_t bin =
          map.bin(__half2float(halves[__ffs(static_cast<int>(bits)) - 1]), mass);
      atomicAdd(w.bins + (top - bin), mass);
    }
  }
  __syncthreads();
  const double scale = 1.0 / static_cast<double>(sums.all);
  const auto share_of = [&](std::int32_t below) {
    return share_units(static_cast<double>(w.bins[below]) * scale *
                       static_cast<double>(mass_unit(below, highest)));
  };
  find_crossing(share_of, bins, share_units(missing) + 1, &w.shared->found_share,
                w.shared->long_part);
  const std::int32_t found = w.shared->found_share.bin;
  __syncthreads();
  return bin_threshold(top - found);
}

// Finds the state of the row; returns false if it is bad.
__device__ __forceinline__ bool look_at_row(const Work& w) {
  const float highest = row_maximum(w);
  if (!(highest < INFINITY) || !(highest > -INFINITY)) return false;
  const Sums sums = row_sums(w, highest);
  const std::uint16_t threshold = w.c.is_top_p ? row_threshold(w, highest, sums) : kInfiniteHalf;
  if (thread_id() == 0) {
    RowInfo info;
    set_norm(info, highest, sums.all);
    info.tail = sums.tail / sums.all;
    info.threshold = threshold;
    info.share = share_of(w.c, w.head);
    w.shared->info = info;
    report_lse(w.c, w.head, info);
  }
  __syncthreads();
  return true;
}

// The grades of the eight entries of vector v; 0 for those always kept.
__device__ __forceinline__ void grades_of(const Work& w, std::int32_t v,
                                          std::uint32_t (&grades)[8]) {
  const auto load = [&](int) { return w.row[v]; };
  grades8(w.c, 1, &w.shared->info, selectable8(w.extent, v * 8), load, grades);
}

// Counts grades by the digit of this round.
__device__ __forceinline__ void count_grades(const Work& w, int round) {
  const GradeRound view(1, round, w.shared->cut);
  const int bins = grade_bins(1, round);
  auto* const quads = reinterpret_cast<uint4*>(w.bins);
  for (std::int32_t i = thread_id(); i < bins / 4; i += threads()) {
    quads[i] = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();
  std::uint32_t count = 0;
  for (std::int32_t v = thread_id(); v < (w.extent.emit + 7) / 8; v += threads()) {
    std::uint32_t grades[8];
    grades_of(w, v, grades);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (!view.concerns(grades[e])) continue;
      ++count;
      atomicAdd(w.bins + view.bin(grades[e]), 1u);
    }
  }
  if (round == 0) {
    count = __reduce_add_sync(kAllLanes, count);
    if (thread_id() % kWarp == 0 && count != 0) atomicAdd(&w.shared->cut.available, count);
  }
  __syncthreads();
}

// Finds the cut: the lightest grade that is kept.
__device__ __forceinline__ void find_cut(const Work& w) {
  for (int round = 0; round < grade_rounds(1); ++round) {
    count_grades(w, round);
    if (thread_id() == 0 && round == 0) begin_cut(w.c, w.shared->extent, w.shared->cut);
    __syncthreads();
    if (w.shared->cut.settled != 0) return;
    const int last = grade_bins(1, round) - 1;
    const auto bin_of = [&](std::int32_t i) { return w.bins[last - i]; };
    const std::uint32_t target = w.shared->cut.ties;
    find_crossing(bin_of, last + 1, target, &w.shared->found_grade, w.shared->part);
    if (thread_id() == 0) {
      advance_cut(w.shared->cut, 1, round, w.shared->found_grade,
                  bin_of(w.shared->found_grade.bin));
    }
    __syncthreads();
    if (w.shared->cut.settled != 0) return;
  }
}

// Finds the entries of vector v that are kept, and those equal to the cut.
__device__ __forceinline__ void find_kept(const Work& w, const GradeCut& cut, bool by_grades,
                                          std::int32_t v, std::uint32_t& above,
                                          std::uint32_t& equal) {
  const uint4 x = w.row[v];
  std::uint32_t others = selectable8(w.extent, v * 8);
  if (w.c.is_top_p) others &= reaching(x, twice(w.shared->info.threshold));
  above = others;
  equal = 0;
  if (by_grades) LogitCut(cut).compare8(x, others, above, equal);
  above |= allowed8(w.extent, v * 8) & forced8(w.extent, v * 8);
}

// Writes the kept positions; returns their number.
__device__ __forceinline__ std::int32_t write_positions(const Work& w, bool by_grades) {
  const SelectCall& c = w.c;
  const GradeCut cut = w.shared->cut;
  std::int32_t* const to = c.positions + w.head * c.capacity;
  const std::int32_t vectors = (w.extent.emit + 7) / 8;
  std::int32_t at = 0;
  std::uint32_t ties = cut.ties;
  for (std::int32_t first = 0; first < vectors; first += threads()) {
    const std::int32_t v = first + thread_id();
    std::uint32_t above = 0;
    std::uint32_t equal = 0;
    if (v < vectors) find_kept(w, cut, by_grades, v, above, equal);
    const auto own = static_cast<std::uint32_t>(__popc(above) | __popc(equal) << 16);
    std::uint32_t total;
    const std::uint32_t before = block_exclusive(own, w.shared->part, total);
    const std::uint32_t ties_before = min(before >> 16, ties);
    const std::uint32_t ties_own =
        min((before >> 16) + static_cast<std::uint32_t>(__popc(equal)), ties) - ties_before;
    std::int32_t slot = at + static_cast<std::int32_t>((before & 0xffffu) + ties_before);
    std::uint32_t kept = above | first_bits(equal, static_cast<std::int32_t>(ties_own));
    if (v < vectors) w.kept[v] = static_cast<std::uint8_t>(kept);
    for (; kept != 0; kept &= kept - 1) {
      const std::int32_t i = v * 8 + __ffs(static_cast<int>(kept)) - 1;
      to[slot++] = w.list != nullptr ? w.list[i] : i;
    }
    const std::uint32_t ties_used = min(total >> 16, ties);
    ties -= ties_used;
    at += static_cast<std::int32_t>((total & 0xffffu) + ties_used);
    __syncthreads();
  }
  return at;
}

// Sums the weights of the kept entries, in an order that depends on nothing else.
__device__ __forceinline__ void sum_alpha(const Work& w) {
  const RowInfo info = w.shared->info;
  const auto* const row = reinterpret_cast<const __half*>(w.row);
  Sums own;
  for (std::int32_t v = thread_id(); v < (w.extent.emit + 7) / 8; v += threads()) {
    for (std::uint32_t kept = w.kept[v]; kept != 0; kept &= kept - 1) {
      own.all += weight_of(row[v * 8 + __ffs(static_cast<int>(kept)) - 1], info);
    }
  }
  const float sum = block_sums(own, w.shared).all;
  if (thread_id() == 0) w.c.alpha[w.head] = fminf(sum + info.tail, 1.0f) * info.share;
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1536 / kThreads)
    select_small(const __grid_constant__ SelectCall call, std::int32_t bins) {
  extern __shared__ uint4 memory[];
  auto* const shared = reinterpret_cast<Shared*>(memory);
  const auto head = static_cast<std::int32_t>(blockIdx.x);
  const TokenBounds token = bounds_of(call, head);
  wait_for_kernel_before();
  allow_next_kernel();
  if (thread_id() < kWarp) {
    const Extent extent = extent_of(call, head, token);
    if (thread_id() == 0) {
      shared->extent = extent;
      shared->cut = GradeCut();
      shared->pages = 0;
    }
  }
  __syncthreads();
  if (shared->extent.total == 0) return report_none(call, head, false);
  auto* const row = reinterpret_cast<uint4*>(shared + 1);
  auto* const bin_words = reinterpret_cast<std::uint32_t*>(row + (call.entries + 7) / 8);
  const Work work{call,
                  head,
                  shared,
                  bin_words,
                  row,
                  reinterpret_cast<std::uint8_t*>(bin_words + bins),
                  call.head_list(head),
                  shared->extent};
  load_row(work);
  if (!look_at_row(work)) return report_none(call, head, true);
  const bool by_grades =
      call.has_grades && (!call.is_top_p || shared->extent.keep < work.extent.emit);
  if (by_grades) find_cut(work);
  const std::int32_t count = write_positions(work, by_grades);
  add_pages(call.positions + head * call.capacity, count, &shared->pages);
  sum_alpha(work);
  __syncthreads();
  if (thread_id() != 0) return;
  HeadSelection result;
  result.count = count;
  result.cut = shared->cut.cut != 0 ? 1 : 0;
  result.pages = static_cast<std::int32_t>(shared->pages);
  call.heads[head] = result;
}

std::int32_t bins_of(const SelectCall& call) {
  std::int32_t bins = 0;
  if (call.is_top_p && call.p < 1.0f) {
    bins = static_cast<std::int32_t>(std::ceil(call.bin_range * kBinsPerNat)) + 3;
  }
  if (call.has_grades) bins = std::max(bins, kMostGradeBins);
  return (bins + 3) / 4 * 4;
}

std::size_t small_bytes(const SelectCall& call) {
  const auto vectors = static_cast<std::size_t>((call.entries + 7) / 8);
  return (sizeof(Shared) + vectors * (sizeof(uint4) + 1) +
          static_cast<std::size_t>(bins_of(call)) * sizeof(std::uint32_t) + 15) /
         16 * 16;
}

template <int kThreads>
void launch_threads(const SelectCall& call, const Launch& launch) {
  launch_early("select_small", select_small<kThreads>, dim3(static_cast<unsigned>(call.head_count)),
               kThreads, small_bytes(call), launch, call, bins_of(call));
}

}  // namespace

bool fits_small(const SelectCall& call, const DeviceLimits& device) {
  if (call.entries > kMassedEntries) return false;
  const std::size_t bytes = call.group == 1 ? small_bytes(call) : group_bytes(call);
  if (bytes > static_cast<std::size_t>(device.shared_bytes)) return false;
  // Several blocks per multiprocessor hide each other's waits; a few long rows run faster divided
  // among blocks.
  const std::int64_t work = std::int64_t{call.entries} * call.group;
  return work <= 16384 || call.head_count >= device.multiprocessors / 2;
}

void run_small(const SelectCall& call, const Launch& launch) {
  if (call.group > 1) return run_group(call, launch);
  if (call.entries <= 4096) return launch_threads<128>(call, launch);
  if (call.entries <= 16384) return launch_threads<256>(call, launch);
  launch_threads<512>(call, launch);
}

}  // namespace sluice::cuda
