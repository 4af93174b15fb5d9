// Selection by one block per KV head. A single query head's row is copied to shared memory:
// select_row() reads the logits once. Rows of several query heads stay in the caches; shared memory
// holds 15 bits of every entry's grade, two entries to a word, so that select_group() finds the cut
// without the rows: count those above a middle, halve the range, and so on. The grades of entries
// with the same 15 bits as the cut, mostly a few, are then told apart by their other bits.
#include <algorithm>
#include <cmath>

#include "kernels/runtime/error.h"
#include "kernels/select/chain.cuh"
#include "kernels/select/strip.cuh"

namespace sluice::cuda {
namespace {

__device__ int thread_id() { return static_cast<int>(threadIdx.x); }
__device__ int threads() { return static_cast<int>(blockDim.x); }
__device__ int lane_of() { return thread_id() % kWarp; }
__device__ int warp_of() { return thread_id() / kWarp; }

// A row's sums relative to e^highest.
struct RowSums {
  float highest = 0.0f;
  float all = 0.0f;
  float kept = 0.0f;
  float tail = 0.0f;
};

// The lowest f16 that top_p keeps of a row. count(map, top, least) adds the masses of the
// selectable logits from `least` on to w.bins, which count down from bin `top`.
template <typename Work, typename Count>
__device__ __forceinline__ std::uint16_t find_threshold(const Work& w, const RowSums& sums,
                                                        const Count& count) {
  if (w.c.p >= 1.0f) return kLowestHalf;
  const double missing =
      static_cast<double>(w.c.p) - static_cast<double>(sums.kept) / static_cast<double>(sums.all);
  if (missing <= 0.0) return kInfiniteHalf;
  const std::int32_t top = bin_floor(sums.highest);
  // Weights below (1 - p) / entries of the sum are not needed; half of that for safety.
  const std::int32_t floor = bin_floor(sums.highest + logf(sums.all) - w.c.bin_range);
  const std::int32_t bins = top - floor + 1;
  for (std::int32_t i = thread_id(); i < bins; i += threads()) w.bins[i] = 0;
  __syncthreads();
  count(BinMap(sums.highest), top, bin_threshold(floor));
  __syncthreads();
  const double scale = 1.0 / static_cast<double>(sums.all);
  const auto share_of = [&](std::int32_t below) {
    return share_units(static_cast<double>(w.bins[below]) * scale *
                       static_cast<double>(mass_unit(below, sums.highest)));
  };
  find_crossing(share_of, bins, share_units(missing) + 1, &w.shared->found_share,
                w.shared->long_part);
  const std::int32_t found = w.shared->found_share.bin;
  __syncthreads();
  return bin_threshold(top - found);
}

// Calls put(v, kept, slot) for every vector v of 8 entries with its kept ones, bit e for entry
// 8 v + e, and the slot of the first; returns the number of all. find(v, above, equal) gives the
// entries above the cut, which are all kept, and those equal to it: the first `ties` are kept.
template <typename Find, typename Put>
__device__ __forceinline__ std::int32_t write_kept(const Extent& extent, std::uint32_t ties,
                                                   std::uint32_t* part, const Find& find,
                                                   const Put& put) {
  const std::int32_t vectors = (extent.emit + 7) / 8;
  std::int32_t at = 0;
  for (std::int32_t first = 0; first < vectors; first += threads()) {
    const std::int32_t v = first + thread_id();
    std::uint32_t above = 0;
    std::uint32_t equal = 0;
    if (v < vectors) find(v, above, equal);
    // Both counts in one word, equal ones above.
    const auto own = static_cast<std::uint32_t>(__popc(above) | __popc(equal) << 16);
    std::uint32_t total;
    const std::uint32_t before = block_exclusive(own, part, total);
    const std::uint32_t ties_before = min(before >> 16, ties);
    const std::uint32_t ties_own =
        min((before >> 16) + static_cast<std::uint32_t>(__popc(equal)), ties) - ties_before;
    if (v < vectors) {
      put(v, above | first_bits(equal, static_cast<std::int32_t>(ties_own)),
          at + static_cast<std::int32_t>((before & 0xffffu) + ties_before));
    }
    const std::uint32_t ties_used = min(total >> 16, ties);
    ties -= ties_used;
    at += static_cast<std::int32_t>((total & 0xffffu) + ties_used);
    __syncthreads();
  }
  return at;
}

// ---- A single query head

struct alignas(16) RowShared {
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

// The work of the block. The row, the bins and the kept bits follow RowShared in memory.
struct RowWork {
  const SelectCall& c;
  std::int32_t head;
  RowShared* shared;
  std::uint32_t* bins;
  uint4* row;          // vectors of 8 entries
  std::uint8_t* kept;  // bit e of vector v is entry 8 v + e
  const std::int32_t* list;
  Extent extent;
};

__device__ __forceinline__ void load_row(const RowWork& w) {
  const __half* const row = w.c.row(w.head, 0);
#pragma unroll 4
  for (std::int32_t v = thread_id(); v < (w.extent.total + 7) / 8; v += threads()) {
    w.row[v] = load8_below(row, w.extent.total, v * 8);
  }
  __syncthreads();
}

__device__ __forceinline__ RowSums block_sums(RowSums x, RowShared* shared) {
  const int warp = thread_id() / kWarp;
  const int lane = thread_id() % kWarp;
  const bool has = lane < threads() / kWarp;
  const RowSums own{0.0f, warp_sum(x.all), warp_sum(x.kept), warp_sum(x.tail)};
  if (lane == 0) {
    shared->parts[0][warp] = own.all;
    shared->parts[1][warp] = own.kept;
    shared->parts[2][warp] = own.tail;
  }
  __syncthreads();
  const RowSums sums{0.0f, warp_sum(has ? shared->parts[0][lane] : 0.0f),
                     warp_sum(has ? shared->parts[1][lane] : 0.0f),
                     warp_sum(has ? shared->parts[2][lane] : 0.0f)};
  __syncthreads();
  return sums;
}

// The largest logit; +Inf if one is NaN.
__device__ __forceinline__ float row_maximum(const RowWork& w) {
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

__device__ __forceinline__ RowSums row_sums(const RowWork& w, float highest) {
  const float norm = highest * kLog2E;
  RowSums own;
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
  const RowSums sums = block_sums(own, w.shared);
  const float factor = shortfall(highest, norm);
  return {highest, sums.all * factor, sums.kept * factor, sums.tail * factor};
}

// The lowest f16 that top_p keeps.
__device__ __forceinline__ std::uint16_t row_threshold(const RowWork& w, const RowSums& sums) {
  return find_threshold(w, sums, [&](const BinMap& map, std::int32_t top, std::uint16_t lowest) {
    const __half2 least = twice(lowest);
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
  });
}

// Finds the state of the row; returns false if it is bad.
__device__ __forceinline__ bool look_at_row(const RowWork& w) {
  const float highest = row_maximum(w);
  if (!(highest < INFINITY) || !(highest > -INFINITY)) return false;
  const RowSums sums = row_sums(w, highest);
  const std::uint16_t threshold = w.c.is_top_p ? row_threshold(w, sums) : kInfiniteHalf;
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
__device__ __forceinline__ void grades_of(const RowWork& w, std::int32_t v,
                                          std::uint32_t (&grades)[8]) {
  const auto load = [&](int) { return w.row[v]; };
  grades8(w.c, 1, &w.shared->info, selectable8(w.extent, v * 8), load, grades);
}

// Counts grades by the digit of this round.
__device__ __forceinline__ void count_grades(const RowWork& w, int round) {
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
__device__ __forceinline__ void find_cut(const RowWork& w) {
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
__device__ __forceinline__ void find_kept(const RowWork& w, const GradeCut& cut, bool by_grades,
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

// Writes the kept positions, and notes the kept entries; returns their number.
__device__ __forceinline__ std::int32_t write_positions(const RowWork& w, bool by_grades) {
  const GradeCut cut = w.shared->cut;
  std::int32_t* const to = w.c.positions + w.head * w.c.capacity;
  return write_kept(
      w.extent, cut.ties, w.shared->part,
      [&](std::int32_t v, std::uint32_t& above, std::uint32_t& equal) {
        find_kept(w, cut, by_grades, v, above, equal);
      },
      [&](std::int32_t v, std::uint32_t kept, std::int32_t slot) {
        w.kept[v] = static_cast<std::uint8_t>(kept);
        for (; kept != 0; kept &= kept - 1) {
          const std::int32_t i = v * 8 + __ffs(static_cast<int>(kept)) - 1;
          to[slot++] = w.list != nullptr ? w.list[i] : i;
        }
      });
}

// Sums the weights of the kept entries, in an order that depends on nothing else.
__device__ __forceinline__ void sum_alpha(const RowWork& w) {
  const RowInfo info = w.shared->info;
  const auto* const row = reinterpret_cast<const __half*>(w.row);
  RowSums own;
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
  auto* const shared = reinterpret_cast<RowShared*>(memory);
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
  const RowWork work{call,
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
  return (sizeof(RowShared) + vectors * (sizeof(uint4) + 1) +
          static_cast<std::size_t>(bins_of(call)) * sizeof(std::uint32_t) + 15) /
         16 * 16;
}

template <int kThreads>
void launch_row(const SelectCall& call, const Launch& launch) {
  launch_early("select_small", select_small<kThreads>, dim3(static_cast<unsigned>(call.head_count)),
               kThreads, small_bytes(call), launch, call, bins_of(call));
}

// ---- Several query heads

constexpr int kRowsAtOnce = 4;           // summed between two barriers
constexpr std::uint32_t kListed = 1024;  // grades equal to the cut in their digits that are kept

struct alignas(16) GroupShared {
  Extent extent;
  Sums sums[kRowsAtOnce][kWarp];
  float highests[kRowsAtOnce][kWarp];
  RowSums of_rows[kRowsAtOnce];
  std::uint64_t long_part[kWarp];
  std::uint32_t part[2][kWarp];
  Crossing<std::uint64_t> found_share;
  GradeCut cut;
  std::uint32_t digit;   // of the cut
  std::uint32_t equals;  // entries with that digit whose grades have to be compared
  std::uint32_t pages;
  std::uint32_t bad;
  RowInfo rows[kMostGroup];
  std::uint32_t listed[kListed];  // grades of those of `equals`, if at most kListed
};

// The work of the block. What follows GroupShared in memory depends on the call.
struct GroupWork {
  const SelectCall& c;
  std::int32_t head;
  GroupShared* shared;
  uint4* digits;        // [vectors of 8 entries], if a cut may be needed
  std::uint32_t* bins;  // of top_p
  const std::int32_t* list;
  Extent extent;
};

// Eight logits of query head `g`; -Inf beyond the last.
__device__ __forceinline__ uint4 load_vector(const GroupWork& w, int g, std::int32_t v) {
  return load8_below(w.c.row(w.head, g), w.extent.total, v * 8);
}

// Adds eight entries from i on.
__device__ __forceinline__ void add_vector(const Extent& extent, std::int32_t i, const uint4& v,
                                           Seen& seen) {
  const __half2 pair = __hmax2_nan(__hmax2_nan(as_half2(v.x), as_half2(v.y)),
                                   __hmax2_nan(as_half2(v.z), as_half2(v.w)));
  seen.most = __hmax2_nan(seen.most, pair);
  seen.sums.refer_to(fmaxf(seen.sums.norm, larger_of(pair) * kLog2E));
  seen.sums.all += weight8(v, seen.sums.norm);
  add_kept8(extent, i, v, seen.sums);
}

// Adds up the rows of `count` query heads from `first` on, warp by warp.
__device__ __forceinline__ void see_rows(const GroupWork& w, int first, int count) {
  const std::int32_t vectors = (w.extent.total + 7) / 8;
  Seen seen[kRowsAtOnce];
  for (std::int32_t v = thread_id(); v < vectors; v += threads()) {
    uint4 x[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) x[i] = load_vector(w, first + min(i, count - 1), v);
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (i >= count) break;
      add_vector(w.extent, v * 8, x[i], seen[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kRowsAtOnce; ++i) {
    if (i >= count) break;
    const float own = larger_of(seen[i].most);
    const float highest = warp_max(own < INFINITY ? own : INFINITY);  // Inf if one is NaN
    const Sums sums = add_up(seen[i].sums);
    if (lane_of() != 0) continue;
    w.shared->sums[i][warp_of()] = sums;
    w.shared->highests[i][warp_of()] = highest;
  }
}

// Called by one warp: joins all warps' shares of a row.
__device__ __forceinline__ void join_row(const GroupWork& w, int g, int slot) {
  const bool has = lane_of() < threads() / kWarp;
  const float highest = warp_max(has ? w.shared->highests[slot][lane_of()] : -INFINITY);
  const Sums sums = add_up(has ? w.shared->sums[slot][lane_of()] : Sums());
  if (lane_of() != 0) return;
  if (!(highest < INFINITY) || !(highest > -INFINITY)) w.shared->bad = 1;
  const float factor = shortfall(highest, sums.norm);
  const RowSums of_row{highest, sums.all * factor, sums.kept * factor, sums.tail * factor};
  w.shared->of_rows[slot] = of_row;
  const std::int64_t query_head = static_cast<std::int64_t>(w.head) * w.c.group + g;
  RowInfo info;
  set_norm(info, highest, of_row.all);
  info.tail = of_row.tail / of_row.all;
  info.threshold = kInfiniteHalf;
  info.share = share_of(w.c, query_head);
  w.shared->rows[g] = info;
  if (w.shared->bad == 0) report_lse(w.c, query_head, info);
}

// The lowest f16 that top_p keeps of a row.
__device__ __forceinline__ std::uint16_t row_threshold(const GroupWork& w, int g,
                                                       const RowSums& sums) {
  return find_threshold(w, sums, [&](const BinMap& map, std::int32_t top, std::uint16_t least) {
#pragma unroll 2
    for (std::int32_t v = thread_id(); v < (w.extent.total + 7) / 8; v += threads()) {
      const uint4 x = masked(load_vector(w, g, v), ~forced8(w.extent, v * 8));
      add_masses8(x, least, map, top, w.bins);
    }
  });
}

// Finds the state of every row; returns false if one is bad.
__device__ __forceinline__ bool look_at_rows(const GroupWork& w) {
  for (int first = 0; first < w.c.group; first += kRowsAtOnce) {
    const int count = min(kRowsAtOnce, w.c.group - first);
    see_rows(w, first, count);
    __syncthreads();
    if (warp_of() < count) join_row(w, first + warp_of(), warp_of());
    __syncthreads();
    if (w.shared->bad != 0) return false;
    if (!w.c.is_top_p) continue;
    for (int i = 0; i < count; ++i) {
      const std::uint16_t threshold = row_threshold(w, first + i, w.shared->of_rows[i]);
      if (thread_id() == 0) w.shared->rows[first + i].threshold = threshold;
    }
  }
  __syncthreads();
  return true;
}

// A digit is the upper 15 bits of a grade; 0 if there is no grade, and only then. A word has two
// digits, each below a spare bit that is set, so that both are compared by one subtraction.
constexpr int kDigitShift = 17;
constexpr std::uint32_t kDigits = 1u << 15;
constexpr std::uint32_t kSpare = 0x80008000u;

__device__ __forceinline__ std::uint32_t digit_of(std::uint32_t grade) {
  return grade == 0 ? 0 : max(grade >> kDigitShift, 1u);
}

// The spare bits of a word's digits that are at least `least`, which is given twice.
__device__ __forceinline__ std::uint32_t digits_from(std::uint32_t word, std::uint32_t least) {
  return (word - least) & kSpare;
}
// The same of eight digits, as bits.
__device__ __forceinline__ std::uint32_t digits8_from(const uint4& digits, std::uint32_t least) {
  std::uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t found = digits_from(word_of(digits, i), least * 0x10001u);
    bits |= (found >> 15 & 1u) << (2 * i) | found >> 31 << (2 * i + 1);
  }
  return bits;
}

__device__ __forceinline__ std::int32_t emitted_vectors(const GroupWork& w) {
  return (w.extent.emit + 7) / 8;
}

// Stores the digits of all entries, and counts those with grades.
__device__ __forceinline__ void store_digits(const GroupWork& w) {
  std::uint32_t count = 0;
  for (std::int32_t v = thread_id(); v < emitted_vectors(w); v += threads()) {
    const auto load = [&](int g) { return load_vector(w, g, v); };
    std::uint32_t grades[8];
    grades8(w.c, w.c.group, w.shared->rows, selectable8(w.extent, v * 8), load, grades);
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = digit_of(grades[2 * i]) | digit_of(grades[2 * i + 1]) << 16 | kSpare;
      count += (grades[2 * i] != 0 ? 1u : 0u) + (grades[2 * i + 1] != 0 ? 1u : 0u);
    }
    w.digits[v] = make_uint4(words[0], words[1], words[2], words[3]);
  }
  count = __reduce_add_sync(kAllLanes, count);
  if (lane_of() == 0 && count != 0) atomicAdd(&w.shared->cut.available, count);
  __syncthreads();
}

// The sum over the block. Calls alternate between the two `parts`, so that one barrier suffices.
__device__ __forceinline__ std::uint32_t block_sum(std::uint32_t own, std::uint32_t* part) {
  own = __reduce_add_sync(kAllLanes, own);
  if (lane_of() == 0) part[warp_of()] = own;
  __syncthreads();
  return __reduce_add_sync(kAllLanes, lane_of() < threads() / kWarp ? part[lane_of()] : 0u);
}

// Halves [low, high) until one number is left: the largest that at least `wanted` reach. count(x)
// is this thread's number of those that are >= x; all reach `low`, fewer than `wanted` reach
// `high`.
struct Halved {
  std::uint32_t found;
  std::uint32_t reaching;  // it
  std::uint32_t above;     // reaching the next
};
template <typename Count>
__device__ __forceinline__ Halved halve(std::uint32_t low, std::uint32_t high, std::uint32_t all,
                                        std::uint32_t wanted, GroupShared* shared,
                                        const Count& count) {
  std::uint32_t above = 0;
  int turn = 0;
  while (high - low > 1 && all != wanted) {
    const std::uint32_t middle = low + (high - low) / 2;
    const std::uint32_t reaching = block_sum(count(middle), shared->part[turn]);
    turn ^= 1;
    if (reaching >= wanted) {
      low = middle;
      all = reaching;
    } else {
      high = middle;
      above = reaching;
    }
  }
  __syncthreads();
  return {low, all, above};
}

__device__ __forceinline__ std::uint32_t count_digits(const GroupWork& w, std::uint32_t least) {
  const std::uint32_t both = least * 0x10001u;
  std::uint32_t counts = 0;  // of the lower and of the upper digits
#pragma unroll 4
  for (std::int32_t v = thread_id(); v < emitted_vectors(w); v += threads()) {
    const uint4 digits = w.digits[v];
#pragma unroll
    for (int i = 0; i < 4; ++i) counts += digits_from(word_of(digits, i), both) >> 15;
  }
  return (counts & 0xffffu) + (counts >> 16);
}

// Calls body(grade) for the entries of vector v in `bits`.
template <typename Body>
__device__ __forceinline__ void for_grades(const GroupWork& w, std::int32_t v, std::uint32_t bits,
                                           const Body& body) {
  for (; bits != 0; bits &= bits - 1) {
    const std::int32_t e = __ffs(static_cast<int>(bits)) - 1;
    const __half* const logits = w.c.row(w.head, 0) + v * 8 + e;
    body(e, grade_of(logits, w.c.stride, w.c.group, w.shared->rows));
  }
}

// Calls body(grade) for all entries with the digit of the cut.
template <typename Body>
__device__ __forceinline__ void for_equals(const GroupWork& w, const Body& body) {
  const std::uint32_t digit = w.shared->digit;
  for (std::int32_t v = thread_id(); v < emitted_vectors(w); v += threads()) {
    const uint4 digits = w.digits[v];
    const std::uint32_t equal = digits8_from(digits, digit) & ~digits8_from(digits, digit + 1);
    for_grades(w, v, equal, [&](std::int32_t, std::uint32_t grade) { body(grade); });
  }
}

// Among `equals` grades with the digit of the cut, finds the cut that keeps `wanted`.
__device__ __forceinline__ void split_equals(const GroupWork& w, std::uint32_t equals,
                                             std::uint32_t wanted) {
  GroupShared* const shared = w.shared;
  const std::uint32_t digit = shared->digit;
  const bool fits = equals <= kListed;
  if (fits) {
    for_equals(
        w, [&](std::uint32_t grade) { shared->listed[atomicAdd(&shared->equals, 1u)] = grade; });
    __syncthreads();
  }
  const auto count = [&](std::uint32_t least) {
    std::uint32_t own = 0;
    if (fits) {
      for (auto i = static_cast<std::uint32_t>(thread_id()); i < equals; i += blockDim.x) {
        own += shared->listed[i] >= least ? 1u : 0u;
      }
    } else {
      for_equals(w, [&](std::uint32_t grade) { own += grade >= least ? 1u : 0u; });
    }
    return own;
  };
  const std::uint32_t low = digit == 1 ? 1 : digit << kDigitShift;
  const Halved found = halve(low, (digit + 1) << kDigitShift, equals, wanted, shared, count);
  if (thread_id() != 0) return;
  shared->cut.grade = found.reaching == wanted ? found.found - 1 : found.found;
  shared->cut.ties = found.reaching == wanted ? 0 : wanted - found.above;
  shared->equals = equals;
}

// Finds the cut: the lightest grade that is kept.
__device__ __forceinline__ void find_cut(const GroupWork& w) {
  GroupShared* const shared = w.shared;
  store_digits(w);
  if (thread_id() == 0) {
    begin_cut(w.c, shared->extent, shared->cut);
    shared->digit = shared->cut.grade == 0 ? 0 : kDigits - 1;
  }
  __syncthreads();
  if (shared->cut.settled != 0) return;
  const std::uint32_t wanted = shared->cut.ties;
  const Halved found = halve(1, kDigits, shared->cut.available, wanted, shared,
                             [&](std::uint32_t least) { return count_digits(w, least); });
  const bool splits = found.reaching != wanted;
  if (thread_id() == 0) {
    shared->digit = splits ? found.found : found.found - 1;
    shared->cut.ties = 0;
  }
  __syncthreads();
  if (splits) split_equals(w, found.reaching - found.above, wanted - found.above);
  __syncthreads();
}

// Finds the entries of vector v that are kept, and those equal to the cut.
__device__ __forceinline__ void find_kept(const GroupWork& w, const GradeCut& cut, bool by_grades,
                                          std::int32_t v, std::uint32_t& above,
                                          std::uint32_t& equal) {
  const std::uint32_t allowed = allowed8(w.extent, v * 8);
  equal = 0;
  if (by_grades) {
    const std::uint32_t digit = w.shared->digit;
    const uint4 digits = w.digits[v];
    above = digits8_from(digits, digit + 1);
    if (w.shared->equals != 0) {
      for_grades(w, v, digits8_from(digits, digit) & ~above,
                 [&](std::int32_t e, std::uint32_t grade) {
                   if (grade > cut.grade) above |= 1u << e;
                   if (grade == cut.grade) equal |= 1u << e;
                 });
    }
  } else {
    const auto load = [&](int g) { return load_vector(w, g, v); };
    above = reached8(w.c.group, w.shared->rows, load) & allowed;
  }
  above |= allowed & forced8(w.extent, v * 8);
}

// Writes the kept entries; returns their number.
__device__ __forceinline__ std::int32_t write_entries(const GroupWork& w, bool by_grades) {
  const GradeCut cut = w.shared->cut;
  std::int32_t* const to = w.c.positions + w.head * w.c.capacity;
  return write_kept(
      w.extent, cut.ties, w.shared->part[0],
      [&](std::int32_t v, std::uint32_t& above, std::uint32_t& equal) {
        find_kept(w, cut, by_grades, v, above, equal);
      },
      [&](std::int32_t v, std::uint32_t kept, std::int32_t slot) {
        for (; kept != 0; kept &= kept - 1) to[slot++] = v * 8 + __ffs(static_cast<int>(kept)) - 1;
      });
}

// Sums the weights of the entries that were written, in an order that depends on nothing else.
__device__ __forceinline__ void sum_alphas(const GroupWork& w, const std::int32_t* entries,
                                           std::int32_t count) {
  for (int first = 0; first < w.c.group; first += kRowsAtOnce) {
    float sums[kRowsAtOnce] = {};
#pragma unroll 2
    for (std::int32_t i = thread_id(); i < count; i += threads()) {
      const __half* const logits = w.c.row(w.head, 0) + entries[i];
#pragma unroll
      for (int k = 0; k < kRowsAtOnce; ++k) {
        const int g = min(first + k, w.c.group - 1);
        sums[k] += weight_of(logits[g * w.c.stride], w.shared->rows[g]);
      }
    }
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      const float sum = warp_sum(sums[k]);
      if (lane_of() == 0) w.shared->highests[k][warp_of()] = sum;
    }
    __syncthreads();
    const int g = first + warp_of();
    if (warp_of() < kRowsAtOnce && g < w.c.group) {
      const bool has = lane_of() < threads() / kWarp;
      const float sum = warp_sum(has ? w.shared->highests[warp_of()][lane_of()] : 0.0f);
      const RowInfo& info = w.shared->rows[g];
      if (lane_of() == 0) {
        w.c.alpha[static_cast<std::int64_t>(w.head) * w.c.group + g] =
            fminf(sum + info.tail, 1.0f) * info.share;
      }
    }
    __syncthreads();
  }
}

// Turns entries of a list into their positions.
__device__ __forceinline__ void look_up(const std::int32_t* list, std::int32_t* entries,
                                        std::int32_t count) {
  for (std::int32_t i = thread_id(); i < count; i += threads()) entries[i] = list[entries[i]];
  __syncthreads();
}

// GroupShared memory for digits, if a cut by grades may be needed.
__host__ __device__ std::size_t digit_bytes(const SelectCall& c) {
  return c.has_grades ? static_cast<std::size_t>((c.entries + 7) / 8) * sizeof(uint4) : 0;
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    select_group(const __grid_constant__ SelectCall call) {
  extern __shared__ uint4 memory[];
  auto* const shared = reinterpret_cast<GroupShared*>(memory);
  const auto head = static_cast<std::int32_t>(blockIdx.x);
  const TokenBounds token = bounds_of(call, head);
  wait_for_kernel_before();
  allow_next_kernel();
  if (thread_id() < kWarp) {
    const Extent extent = extent_of(call, head, token);
    if (thread_id() == 0) {
      shared->extent = extent;
      shared->cut = GradeCut();
      shared->equals = shared->pages = shared->bad = 0;
    }
  }
  __syncthreads();
  if (shared->extent.total == 0) return report_none(call, head, false);
  auto* const digits = reinterpret_cast<std::byte*>(shared + 1);
  const GroupWork work{call,
                       head,
                       shared,
                       reinterpret_cast<uint4*>(digits),
                       reinterpret_cast<std::uint32_t*>(digits + digit_bytes(call)),
                       call.head_list(head),
                       shared->extent};
  if (!look_at_rows(work)) return report_none(call, head, true);
  const bool by_grades =
      call.has_grades && (!call.is_top_p || shared->extent.keep < work.extent.emit);
  if (by_grades) find_cut(work);
  const std::int32_t count = write_entries(work, by_grades);
  std::int32_t* const positions = call.positions + head * call.capacity;
  sum_alphas(work, positions, count);
  if (work.list != nullptr) look_up(work.list, positions, count);
  add_pages(positions, count, &shared->pages);
  __syncthreads();
  if (thread_id() != 0) return;
  HeadSelection result;
  result.count = count;
  result.cut = shared->cut.cut != 0 ? 1 : 0;
  result.pages = static_cast<std::int32_t>(shared->pages);
  call.heads[head] = result;
}

std::size_t group_bytes(const SelectCall& call) {
  std::size_t bins = 0;
  if (call.is_top_p && call.p < 1.0f) {
    bins = static_cast<std::size_t>(std::ceil(call.bin_range * kBinsPerNat)) + 3;
  }
  return sizeof(GroupShared) + digit_bytes(call) + bins * sizeof(std::uint32_t);
}

template <int kThreads>
void launch_group(const SelectCall& call, const Launch& launch) {
  launch_early("select_group", select_group<kThreads>, dim3(static_cast<unsigned>(call.head_count)),
               kThreads, group_bytes(call), launch, call);
}

void run_group(const SelectCall& call, const Launch& launch) {
  const std::int64_t work = std::int64_t{call.entries} * call.group;
  // Blocks of a single round have a multiprocessor each.
  const bool is_one_round = call.head_count <= launch.device->multiprocessors;
  if (work <= 4096) return launch_group<128>(call, launch);
  if (work <= 16384) return launch_group<256>(call, launch);
  if (work <= 65536 && !is_one_round) return launch_group<512>(call, launch);
  launch_group<1024>(call, launch);
}

}  // namespace

bool fits_small(const SelectCall& call, const DeviceLimits& device) {
  if (call.entries > kMassedEntries) return false;
  const std::size_t bytes = call.group == 1 ? small_bytes(call) : group_bytes(call);
  if (bytes > static_cast<std::size_t>(device.shared_bytes)) return false;
  // Several blocks per multiprocessor hide each other's waits; a few long rows run faster divided
  // among blocks.
  const std::int64_t work = std::int64_t{call.entries} * call.group;
  // From there on clusters are faster, or the chain.
  const std::int64_t few = device.capability < 90 ? 65536 : 16384;
  return work <= few || call.head_count >= device.multiprocessors / 2;
}

void run_small(const SelectCall& call, const Launch& launch) {
  if (call.group > 1) return run_group(call, launch);
  if (call.entries <= 4096) return launch_row<128>(call, launch);
  if (call.entries <= 16384) return launch_row<256>(call, launch);
  launch_row<512>(call, launch);
}

}  // namespace sluice::cuda
