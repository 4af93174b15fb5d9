// Selection by one block per KV head of several query heads, whose rows it reads from the caches.
// Shared memory holds 15 bits of every entry's grade, two entries to a word, so that the cut is
// found without the rows: count those above a middle, halve the range, and so on. The grades of
// entries with the same 15 bits as the cut, mostly a few, are then told apart by their other bits.
#include <cmath>

#include "kernels/runtime/error.h"
#include "kernels/select/large.cuh"
#include "kernels/select/masses.cuh"
#include "kernels/select/small.h"
#include "kernels/select/strip.cuh"

namespace sluice::cuda {
namespace {

constexpr int kRowsAtOnce = 4;           // summed between two barriers
constexpr std::uint32_t kListed = 1024;  // grades equal to the cut in their digits that are kept

// A row's sums relative to e^highest.
struct RowSums {
  float highest;
  float all;
  float kept;
  float tail;
};

struct alignas(16) Shared {
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

// The work of the block. What follows Shared in memory depends on the call.
struct Work {
  const SelectCall& c;
  std::int32_t head;
  Shared* shared;
  uint4* digits;        // [vectors of 8 entries], if a cut may be needed
  std::uint32_t* bins;  // of top_p
  const std::int32_t* list;
  Extent extent;
};

__device__ int thread_id() { return static_cast<int>(threadIdx.x); }
__device__ int threads() { return static_cast<int>(blockDim.x); }
__device__ int lane_of() { return thread_id() % kWarp; }
__device__ int warp_of() { return thread_id() / kWarp; }

// Eight logits of query head `g`; -Inf beyond the last.
__device__ __forceinline__ uint4 load_vector(const Work& w, int g, std::int32_t v) {
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
__device__ __forceinline__ void see_rows(const Work& w, int first, int count) {
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
__device__ __forceinline__ void join_row(const Work& w, int g, int slot) {
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
__device__ __forceinline__ std::uint16_t row_threshold(const Work& w, int g, const RowSums& sums) {
  if (w.c.p >= 1.0f) return kLowestHalf;
  const double missing =
      static_cast<double>(w.c.p) - static_cast<double>(sums.kept) / static_cast<double>(sums.all);
  const float highest = sums.highest;
  if (missing <= 0.0) return kInfiniteHalf;
  const std::int32_t top = bin_floor(highest);
  // Weights below (1 - p) / entries of the sum are not needed; half of that for safety.
  const std::int32_t floor = bin_floor(highest + logf(sums.all) - w.c.bin_range);
  const std::int32_t bins = top - floor + 1;
  for (std::int32_t i = thread_id(); i < bins; i += threads()) w.bins[i] = 0;
  __syncthreads();
  const BinMap map(highest);
  const std::uint16_t least = bin_threshold(floor);
#pragma unroll 2
  for (std::int32_t v = thread_id(); v < (w.extent.total + 7) / 8; v += threads()) {
    const uint4 x = masked(load_vector(w, g, v), ~forced8(w.extent, v * 8));
    add_masses8(x, least, map, top, w.bins);
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

// Finds the state of every row; returns false if one is bad.
__device__ __forceinline__ bool look_at_rows(const Work& w) {
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

__device__ __forceinline__ std::int32_t emitted_vectors(const Work& w) {
  return (w.extent.emit + 7) / 8;
}

// Stores the digits of all entries, and counts those with grades.
__device__ __forceinline__ void store_digits(const Work& w) {
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
                                        std::uint32_t wanted, Shared* shared, const Count& count) {
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

__device__ __forceinline__ std::uint32_t count_digits(const Work& w, std::uint32_t least) {
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
__device__ __forceinline__ void for_grades(const Work& w, std::int32_t v, std::uint32_t bits,
                                           const Body& body) {
  for (; bits != 0; bits &= bits - 1) {
    const std::int32_t e = __ffs(static_cast<int>(bits)) - 1;
    const __half* const logits = w.c.row(w.head, 0) + v * 8 + e;
    body(e, grade_of(logits, w.c.stride, w.c.group, w.shared->rows));
  }
}

// Calls body(grade) for all entries with the digit of the cut.
template <typename Body>
__device__ __forceinline__ void for_equals(const Work& w, const Body& body) {
  const std::uint32_t digit = w.shared->digit;
  for (std::int32_t v = thread_id(); v < emitted_vectors(w); v += threads()) {
    const uint4 digits = w.digits[v];
    const std::uint32_t equal = digits8_from(digits, digit) & ~digits8_from(digits, digit + 1);
    for_grades(w, v, equal, [&](std::int32_t, std::uint32_t grade) { body(grade); });
  }
}

// Among `equals` grades with the digit of the cut, finds the cut that keeps `wanted`.
__device__ __forceinline__ void split_equals(const Work& w, std::uint32_t equals,
                                             std::uint32_t wanted) {
  Shared* const shared = w.shared;
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
__device__ __forceinline__ void find_cut(const Work& w) {
  Shared* const shared = w.shared;
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
__device__ __forceinline__ void find_kept(const Work& w, const GradeCut& cut, bool by_grades,
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
__device__ __forceinline__ std::int32_t write_entries(const Work& w, bool by_grades) {
  const SelectCall& c = w.c;
  const GradeCut cut = w.shared->cut;
  std::int32_t* const to = c.positions + w.head * c.capacity;
  const std::int32_t vectors = emitted_vectors(w);
  std::int32_t at = 0;
  std::uint32_t ties = cut.ties;
  for (std::int32_t first = 0; first < vectors; first += threads()) {
    const std::int32_t v = first + thread_id();
    std::uint32_t above = 0;
    std::uint32_t equal = 0;
    if (v < vectors) find_kept(w, cut, by_grades, v, above, equal);
    const auto own = static_cast<std::uint32_t>(__popc(above) | __popc(equal) << 16);
    std::uint32_t total;
    const std::uint32_t before = block_exclusive(own, w.shared->part[0], total);
    const std::uint32_t ties_before = min(before >> 16, ties);
    const std::uint32_t ties_own =
        min((before >> 16) + static_cast<std::uint32_t>(__popc(equal)), ties) - ties_before;
    std::int32_t slot = at + static_cast<std::int32_t>((before & 0xffffu) + ties_before);
    std::uint32_t kept = above | first_bits(equal, static_cast<std::int32_t>(ties_own));
    for (; kept != 0; kept &= kept - 1) to[slot++] = v * 8 + __ffs(static_cast<int>(kept)) - 1;
    const std::uint32_t ties_used = min(total >> 16, ties);
    ties -= ties_used;
    at += static_cast<std::int32_t>((total & 0xffffu) + ties_used);
    __syncthreads();
  }
  return at;
}

// Sums the weights of the entries that were written, in an order that depends on nothing else.
__device__ __forceinline__ void sum_alphas(const Work& w, const std::int32_t* entries,
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

// Shared memory for digits, if a cut by grades may be needed.
__host__ __device__ std::size_t digit_bytes(const SelectCall& c) {
  return c.has_grades ? static_cast<std::size_t>((c.entries + 7) / 8) * sizeof(uint4) : 0;
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    select_group(const __grid_constant__ SelectCall call) {
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
      shared->equals = shared->pages = shared->bad = 0;
    }
  }
  __syncthreads();
  if (shared->extent.total == 0) return report_none(call, head, false);
  auto* const digits = reinterpret_cast<std::byte*>(shared + 1);
  const Work work{call,
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

template <int kThreads>
void launch_threads(const SelectCall& call, const Launch& launch) {
  launch_early("select_group", select_group<kThreads>, dim3(static_cast<unsigned>(call.head_count)),
               kThreads, group_bytes(call), launch, call);
}

}  // namespace

std::size_t group_bytes(const SelectCall& call) {
  std::size_t bins = 0;
  if (call.is_top_p && call.p < 1.0f) {
    bins = static_cast<std::size_t>(std::ceil(call.bin_range * kBinsPerNat)) + 3;
  }
  return sizeof(Shared) + digit_bytes(call) + bins * sizeof(std::uint32_t);
}

void run_group(const SelectCall& call, const Launch& launch) {
  const std::int64_t work = std::int64_t{call.entries} * call.group;
  // Blocks of a single round have a multiprocessor each.
  const bool is_one_round = call.head_count <= launch.device->multiprocessors;
  if (work <= 4096) return launch_threads<128>(call, launch);
  if (work <= 16384) return launch_threads<256>(call, launch);
  if (work <= 65536 && !is_one_round) return launch_threads<512>(call, launch);
  launch_threads<1024>(call, launch);
}

}  // namespace sluice::cuda
