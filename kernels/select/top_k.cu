// top_k of one short row per block. The row stays in registers. The maxima of its vectors bound the
// k-th largest logit from below, few entries reach that bound, and among them it is found by
// bisection, because counting the entries that reach a number is fast in registers.
#include <cmath>

#include "kernels/select/chain.cuh"
#include "kernels/select/strip.cuh"

namespace sluice::cuda {
namespace {

constexpr int kStrips = 4;                                      // per thread
constexpr int kRowVectors = kStrips * kVectors;                 // per thread
constexpr std::int32_t kWarpEntries = kWarp * kRowVectors * 8;  // of a row, per warp
constexpr int kMostRowWarps = 4;
constexpr int kHeld = 8;                                 // listed entries that a thread holds
constexpr std::uint32_t kMinusInfinityNumber = 0x03ffu;  // as ordered numbers
constexpr std::uint32_t kInfinityNumber = 0xfc00u;

template <int kRowWarps>
struct Shared {
  Sums sums[kRowWarps];
  std::uint32_t highest[kRowWarps];  // ordered numbers: of the row, NaN and +Inf included
  std::uint32_t lowest[kRowWarps];   // of the maxima of the threads' strips
  std::uint32_t counts[3];           // of a step of the bisection, in turns
  std::uint32_t listed[kRowWarps];
  uint4 reaching[kRowWarps][kWarp];              // bit e: entry e of a warp's part
  std::uint16_t list[kRowWarps * kWarpEntries];  // entries, ascending
};

using RowPart = uint4[kStrips][kVectors];

// Entry of this thread's vector j of strip s.
__device__ __forceinline__ std::int32_t row_entry(int s, int j) {
  const auto warp = static_cast<std::int32_t>(threadIdx.x) / kWarp;
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarp;
  return warp * kWarpEntries + ((s * kVectors + j) * kWarp + lane) * 8;
}

// The larger of two ordered numbers.
__device__ __forceinline__ std::uint32_t larger_number(__half2 pair) {
  const std::uint32_t numbers = ordered2(*reinterpret_cast<const std::uint32_t*>(&pair));
  return max(numbers & 0xffffu, numbers >> 16);
}

__device__ __forceinline__ __half2 half_of(std::uint32_t number) {
  return twice(half_of_ordered(number));
}

// Bits [low, high) of a word that stands for entries from `first` on.
__device__ __forceinline__ std::uint32_t bits_between(std::int32_t first, std::int32_t low,
                                                      std::int32_t high) {
  const std::uint32_t from = low <= first ? ~0u : low - first < 32 ? ~0u << (low - first) : 0u;
  const std::uint32_t to = high <= first       ? 0u
                           : high - first < 32 ? (1u << (high - first)) - 1
                                               : ~0u;
  return from & to;
}

// Loads the thread's part of a row; -Inf replaces the entries that cannot be selected.
__device__ __forceinline__ void load_part(const SelectCall& c, const __half* row,
                                          const Extent& extent, RowPart& v) {
#pragma unroll
  for (int s = 0; s < kStrips; ++s) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const std::int32_t i = row_entry(s, j);
      v[s][j] = all_minus_infinity();
      if (i < extent.high && i + 8 > extent.low) v[s][j] = *reinterpret_cast<const uint4*>(row + i);
    }
  }
  if (extent.low % 8 == 0 && extent.high % 8 == 0) return;
#pragma unroll
  for (int s = 0; s < kStrips; ++s) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const std::int32_t i = row_entry(s, j);
      if (i < extent.low || i + 8 > extent.high) {
        v[s][j] = masked(v[s][j], bits_between(i, extent.low, extent.high));
      }
    }
  }
}

// Sums the entries that are always kept or in the tail.
__device__ __forceinline__ Sums sum_kept(const __half* row, const Extent& extent, __half2& most) {
  Sums sums;
  const std::int32_t count = extent.low + extent.total - extent.high;
  for (auto k = static_cast<std::int32_t>(threadIdx.x); k < count;
       k += static_cast<std::int32_t>(blockDim.x)) {
    const __half x = row[k < extent.low ? k : extent.high + k - extent.low];
    most = __hmax2_nan(most, __half2half2(x));
    const float logit = __half2float(x) * kLog2E;
    sums.refer_to(fmaxf(sums.norm, logit));
    sums.kept += exp2_fast(logit - sums.norm);
  }
  sums.all = sums.kept;
  return sums;
}

// The number of entries, in kCount pairs, that reach a number.
template <int kCount, typename Pair>
__device__ __forceinline__ std::uint32_t count_pairs(std::uint32_t number, const Pair& pair) {
  const __half2 least = half_of(number);
  __half2 counts[4] = {as_half2(0), as_half2(0), as_half2(0), as_half2(0)};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    counts[i % 4] = __hadd2(counts[i % 4], __hge2(pair(i), least));
  }
  const __half2 count = __hadd2(__hadd2(counts[0], counts[1]), __hadd2(counts[2], counts[3]));
  return __half2uint_rz(__hadd(__low2half(count), __high2half(count)));
}

// The range that contains the `wanted`-th largest of some entries.
struct Search {
  std::uint32_t wanted = 0;
  std::uint32_t low = kMinusInfinityNumber;  // not below this
  std::uint32_t high = 0;                    // nor above this
  std::uint32_t reaching = 0;                // entries that reach `low`
  std::uint32_t above = 0;                   // entries above `high`

  // Narrows the range until at most `enough` entries reach `low`. count(number) is called by all
  // threads.
  template <typename Count>
  __device__ __forceinline__ void narrow(std::uint32_t enough, const Count& count) {
    while (low < high && reaching > enough) {
      const std::uint32_t middle = (low + high + 1) / 2;
      const std::uint32_t found = count(middle);
      if (found >= wanted) {
        low = middle;
        reaching = found;
      } else {
        high = middle - 1;
        above = found;
      }
    }
  }
};

template <int kRowWarps>
class RowChoice {
 public:
  __device__ RowChoice(const SelectCall& c, Shared<kRowWarps>& shared, std::int32_t head,
                       const Extent& extent)
      : c_(c), shared_(shared), head_(head), extent_(extent) {}

  __device__ void run() {
    if (extent_.total == 0) return report_none(c_, head_, false);
    row_ = c_.row(head_, 0);
    RowPart v;
    load_part(c_, row_, extent_, v);
    __half2 maxima[2 * kStrips];
    __half2 most = as_half2(kMinusInfinities);
    std::uint32_t lowest = kInfinityNumber;
#pragma unroll
    for (int s = 0; s < kStrips; ++s) {
      const StripMaxima of_strip(v[s]);
      maxima[2 * s] = of_strip.first;
      maxima[2 * s + 1] = of_strip.second;
      most = __hmax2_nan(most, of_strip.both());
      lowest = min(lowest, larger_number(of_strip.both()));
    }
    lowest = __reduce_min_sync(kAllLanes, lowest);
    Sums sums = sum_kept(row_, extent_, most);
    std::uint32_t highest = __reduce_max_sync(kAllLanes, larger_number(most));
    sums.refer_to(
        fmaxf(kNoNorm, __half2float(__ushort_as_half(half_of_ordered(highest))) * kLog2E));
#pragma unroll
    for (int s = 0; s < kStrips; ++s) add_weights(v[s], sums);
    sums.all = warp_sum(sums.all);
    sums.kept = warp_sum(sums.kept);
    if (kRowWarps > 1) {
      if (lane() == 0) {
        shared_.sums[warp()] = sums;
        shared_.highest[warp()] = highest;
        shared_.lowest[warp()] = lowest;
      }
      if (threadIdx.x < 3) shared_.counts[threadIdx.x] = 0;
      __syncthreads();
      for (const std::uint32_t other : shared_.highest) highest = max(highest, other);
      for (const std::uint32_t other : shared_.lowest) lowest = min(lowest, other);
    }
    if (highest >= kInfinityNumber || highest <= kMinusInfinityNumber) {
      return report_none(c_, head_, true);
    }

    Search search;
    const std::int32_t forced = extent_.forced();
    const auto selectable = static_cast<std::uint32_t>(extent_.high - extent_.low);
    search.wanted = min(static_cast<std::uint32_t>(max(extent_.keep - forced, 0)), selectable);
    search.high = highest;
    search.reaching = selectable;
    if (search.wanted == 0) {
      search.low = kInfinityNumber;
      search.reaching = 0;
    }
    bool bounded = bound(maxima, lowest, search);
    const std::uint32_t enough = max(kHeld * kWarp - min(forced, kHeld * kWarp), search.wanted);
    std::int32_t listed = 0;
    while (true) {
      if (!bounded) search.narrow(enough, [&](std::uint32_t number) { return count(v, number); });
      listed = list(v, search);
      search.reaching = static_cast<std::uint32_t>(listed - forced);
      if (search.reaching <= enough || search.low >= search.high) break;
      bounded = false;
    }
    if (kRowWarps > 1 && warp() > 0) return;
    if (search.reaching > search.wanted && search.low < search.high) search_listed(listed, search);
    if (kRowWarps > 1) {
      sums = add_up(lane() < kRowWarps ? shared_.sums[lane()] : Sums());
    }
    finish(listed, search, sums);
  }

 private:
  __device__ static std::int32_t lane() { return static_cast<std::int32_t>(threadIdx.x) % kWarp; }
  __device__ static std::int32_t warp() { return static_cast<std::int32_t>(threadIdx.x) / kWarp; }

  // The sum over the row's threads.
  __device__ __forceinline__ std::uint32_t over_row(std::uint32_t own) {
    own = __reduce_add_sync(kAllLanes, own);
    if (kRowWarps == 1) return own;
    std::uint32_t* const count = shared_.counts + step_ % 3;
    if (lane() == 0) atomicAdd(count, own);
    if (threadIdx.x == 0) shared_.counts[(step_ + 1) % 3] = 0;
    ++step_;
    __syncthreads();
    return *count;
  }

  // Raises search.low to a number that enough vectors' maxima reach; returns false if there are too
  // few vectors.
  __device__ __forceinline__ bool bound(const __half2 (&maxima)[2 * kStrips], std::uint32_t lowest,
                                        Search& search) {
    constexpr std::uint32_t kVectorsOfRow = kRowWarps * kWarpEntries / 8;
    if (search.wanted + search.wanted / 8 >= kVectorsOfRow || search.low >= search.high)
      return false;
    Search rough = search;
    rough.reaching = kVectorsOfRow;
    // Every thread has an entry in every strip that reaches the lowest of their maxima.
    if (search.wanted <= kVectorsOfRow / kVectors) rough.low = max(rough.low, lowest);
    rough.narrow(search.wanted + search.wanted / 8, [&](std::uint32_t number) {
      return over_row(count_pairs<2 * kStrips>(number, [&](int i) { return maxima[i]; }));
    });
    search.low = rough.low;
    return true;
  }

  // The number of entries of the row that reach a number.
  __device__ __forceinline__ std::uint32_t count(const RowPart& v, std::uint32_t number) {
    return over_row(count_pairs<4 * kRowVectors>(number, [&](int i) {
      return as_half2(word_of(v[i / (4 * kVectors)][i / 4 % kVectors], i % 4));
    }));
  }

  // Lists the always kept entries and those that reach search.low; returns their number.
  __device__ __forceinline__ std::int32_t list(const RowPart& v, const Search& search) {
    const __half2 least = half_of(search.low);
    auto* const bytes = reinterpret_cast<std::uint8_t*>(shared_.reaching[warp()]);
#pragma unroll
    for (int s = 0; s < kStrips; ++s) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        bytes[(s * kVectors + j) * kWarp + lane()] =
            static_cast<std::uint8_t>(reaching(v[s][j], least));
      }
    }
    __syncwarp();
    const uint4 words = shared_.reaching[warp()][lane()];
    const std::int32_t first = warp() * kWarpEntries + lane() * 128;
    std::uint32_t bits[4];
    std::uint32_t own = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const std::int32_t at = first + w * 32;
      bits[w] = word_of(words, w) & bits_between(at, extent_.low, extent_.high);
      bits[w] |= bits_between(at, 0, extent_.low) | bits_between(at, extent_.high, extent_.emit);
      own += static_cast<std::uint32_t>(__popc(bits[w]));
    }
    const std::uint32_t inclusive = warp_inclusive(own);
    std::uint32_t slot = inclusive - own;
    std::uint32_t all = __shfl_sync(kAllLanes, inclusive, kWarp - 1);
    if (kRowWarps > 1) {
      if (lane() == 0) shared_.listed[warp()] = all;
      __syncthreads();
      all = 0;
#pragma unroll
      for (int w = 0; w < kRowWarps; ++w) {
        if (w == warp()) slot += all;
        all += shared_.listed[w];
      }
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      for (std::uint32_t left = bits[w]; left != 0; left &= left - 1) {
        shared_.list[slot++] =
            static_cast<std::uint16_t>(first + w * 32 + __ffs(static_cast<int>(left)) - 1);
      }
    }
    if (kRowWarps > 1) {
      __syncthreads();
    } else {
      __syncwarp();
    }
    return static_cast<std::int32_t>(all);
  }

  __device__ bool is_forced(std::int32_t entry) const {
    return entry < extent_.low || entry >= extent_.high;
  }

  struct Listed {
    std::int32_t entry;
    std::uint32_t number;
  };
  // Beyond the last listed entry: entry 0, which exists.
  __device__ __forceinline__ Listed listed_at(std::int32_t at, std::int32_t listed) const {
    const std::int32_t entry = at < listed ? shared_.list[at] : 0;
    return {entry, ordered2(__half_as_ushort(row_[entry])) & 0xffffu};
  }

  // Called by one warp, whose registers can hold the list: finds the wanted-th largest in it.
  __device__ __forceinline__ void search_listed(std::int32_t listed, Search& search) const {
    std::uint32_t numbers[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const std::int32_t at = i * kWarp + lane();
      const Listed own = listed_at(at, listed);
      numbers[i] = at < listed && !is_forced(own.entry) ? own.number : 0;
    }
    search.narrow(search.wanted, [&](std::uint32_t number) {
      std::uint32_t count = 0;
#pragma unroll
      for (const std::uint32_t own : numbers) count += own >= number ? 1 : 0;
      return __reduce_add_sync(kAllLanes, count);
    });
  }

  // Called by one warp: keeps the list's heaviest entries and reports them.
  __device__ __forceinline__ void finish(std::int32_t listed, const Search& search,
                                         const Sums& sums) {
    RowInfo info;
    set_norm(info, static_cast<double>(sums.norm) + static_cast<double>(log2f(sums.all)));
    const std::uint32_t before = (1u << lane()) - 1;
    // Among entries equal to the cut, the older ones are kept.
    auto ties = static_cast<std::int32_t>(
        search.reaching > search.wanted ? search.wanted - search.above : search.reaching);
    std::int32_t kept = 0;
    float weight = 0.0f;
    Listed next = listed_at(lane(), listed);
    __syncwarp();
    for (std::int32_t first = 0; first < listed; first += kWarp) {
      const Listed own = next;
      next = listed_at(first + kWarp + lane(), listed);
      const bool exists = first + lane() < listed;
      const bool forced = is_forced(own.entry);
      const bool equal = exists && !forced && own.number == search.low;
      const std::uint32_t equals = __ballot_sync(kAllLanes, equal);
      const bool wins = (equal && __popc(equals & before) < ties) ||
                        (exists && !forced && own.number > search.low);
      ties -= min(ties, __popc(equals));
      if (wins) weight += weight_of(__ushort_as_half(half_of_ordered(own.number)), info);
      const bool keep = exists && (wins || forced);
      const std::uint32_t keeps = __ballot_sync(kAllLanes, keep);
      if (keep) {
        shared_.list[kept + __popc(keeps & before)] = static_cast<std::uint16_t>(own.entry);
      }
      kept += __popc(keeps);
      __syncwarp();
    }
    weight = warp_sum(weight);
    HeadSelection result;
    result.count = kept;
    result.pages = write(kept);
    if (lane() != 0) return;
    report_lse(c_, head_, info);
    c_.alpha[head_] = fminf(sums.kept / sums.all + weight, 1.0f) * share_of(c_, head_);
    c_.heads[head_] = result;
  }

  // Writes the positions of the list; returns the number of their pages.
  __device__ __forceinline__ std::int32_t write(std::int32_t kept) const {
    const std::int32_t* const list = c_.head_list(head_);
    std::int32_t* const to = c_.positions + head_ * c_.capacity;
    const auto position = [&](std::int32_t at) -> std::int32_t {
      return list != nullptr ? list[shared_.list[at]] : shared_.list[at];
    };
    std::uint32_t pages = 0;
    for (std::int32_t at = lane(); at < kept; at += kWarp) {
      const std::int32_t own = position(at);
      to[at] = own;
      if (at == 0 || own / kPageTokens != position(at - 1) / kPageTokens) ++pages;
    }
    return static_cast<std::int32_t>(__reduce_add_sync(kAllLanes, pages));
  }

  const SelectCall& c_;
  Shared<kRowWarps>& shared_;
  std::int32_t head_;
  Extent extent_;
  const __half* row_ = nullptr;
  std::uint32_t step_ = 0;
};

template <int kRowWarps>
__global__ void __launch_bounds__(kRowWarps* kWarp, 16 / kRowWarps)
    top_k_of_row(const __grid_constant__ SelectCall c) {
  __shared__ Shared<kRowWarps> shared;
  const auto head = static_cast<std::int32_t>(blockIdx.x);
  const TokenBounds token = bounds_of(c, head);
  wait_for_kernel_before();
  allow_next_kernel();
  RowChoice<kRowWarps>(c, shared, head, extent_of(c, head, token)).run();
}

template <int kRowWarps>
void launch_rows(const SelectCall& call, const Launch& launch) {
  launch_early("top_k_of_row", top_k_of_row<kRowWarps>,
               dim3(static_cast<unsigned>(call.head_count)), kRowWarps * kWarp, 0, launch, call);
}

}  // namespace

bool fits_top_k(const SelectCall& c) {
  return !c.is_top_p && c.group == 1 && c.entries <= kMostRowWarps * kWarpEntries;
}

void run_top_k(const SelectCall& call, const Launch& launch) {
  if (call.entries <= kWarpEntries) return launch_rows<1>(call, launch);
  if (call.entries <= 2 * kWarpEntries) return launch_rows<2>(call, launch);
  launch_rows<kMostRowWarps>(call, launch);
}

}  // namespace sluice::cuda
