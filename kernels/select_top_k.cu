// top_k of one short row per block: the row stays in registers, and the k-th largest logit is found
// by bisection, for comparing and counting is what registers are good at.
#include <algorithm>
#include <cmath>

#include "kernels/select_large.cuh"
#include "kernels/select_strip.cuh"

namespace sluice::cuda {
namespace {

constexpr int kMostWarps = 16;
constexpr std::uint32_t kNotANumber = 0x7fffu;
// As ordered numbers:
constexpr std::uint32_t kMinusInfinityNumber = 0x03ffu;
constexpr std::uint32_t kInfinityNumber = 0xfc00u;

struct Shared {
  Extent extent;
  Sums sums[kMostWarps];
  std::uint32_t highest;  // ordered numbers: of the row, NaN and +Inf included
  std::uint32_t lowest;   // of the maxima of what can be selected of all threads
  std::uint32_t forced;   // entries
  std::uint32_t selectable;
  std::uint32_t counts[3];                            // of a step of the bisection, in turns
  std::uint32_t parts[2][kVectors / 2 * kMostWarps];  // above and equal, of two vectors each
  float alphas[kMostWarps];
  std::uint32_t pages;
};

// Entry of this thread's vector j.
template <int kBlock>
__device__ __forceinline__ std::int32_t row_entry(int j) {
  return (j * kBlock + static_cast<std::int32_t>(threadIdx.x)) * 8;
}

// The f16 that an ordered number stands for, twice.
__device__ __forceinline__ __half2 half_of(std::uint32_t number) {
  return twice(half_of_ordered(number));
}

// The larger of two ordered numbers.
__device__ __forceinline__ std::uint32_t larger_number(__half2 pair) {
  const std::uint32_t numbers = ordered2(*reinterpret_cast<const std::uint32_t*>(&pair));
  return max(numbers & 0xffffu, numbers >> 16);
}

// Replaces the f16 whose bits are set by what compares with nothing.
__device__ __forceinline__ uint4 without(uint4 v, std::uint32_t bits) {
  std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if ((bits >> (2 * w) & 1u) != 0) words[w] |= kNotANumber;
    if ((bits >> (2 * w + 1) & 1u) != 0) words[w] |= kNotANumber << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// How many of the thread's entries are not below a number.
__device__ __forceinline__ std::uint32_t count_from(const uint4 (&v)[kVectors],
                                                    std::uint32_t number) {
  const __half2 least = half_of(number);
  __half2 count = as_half2(0);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      count = __hadd2(count, __hge2(as_half2(word_of(v[j], w)), least));
    }
  }
  return __half2uint_rz(__hadd(__low2half(count), __high2half(count)));
}

// Loads the thread's part of the row and adds it up; what cannot be selected is taken out, and
// counted if it is always kept.
template <int kBlock>
__device__ __forceinline__ void load_row(const SelectCall& c, std::int32_t head,
                                         uint4 (&v)[kVectors], std::uint32_t (&forced)[kVectors],
                                         Shared* shared) {
  const Extent extent = shared->extent;
  const __half* const row = c.row(head, 0);
  const std::int32_t* const list = c.head_list(head);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) v[j] = load8(c, row, list, extent, row_entry<kBlock>(j));
  const __half2 most = StripMaxima(v).both();
  Sums sums;
  sums.refer_to(fmaxf(sums.norm, larger_of(most) * kLog2E));
  add_weights(v, sums);
  std::uint32_t selectable = 0;
  std::uint32_t always = 0;
  std::uint32_t least = larger_number(most);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const std::int32_t i = row_entry<kBlock>(j);
    const std::uint32_t allowed = allowed8(c, list, extent, i);
    const std::uint32_t free = free8(extent, i);
    forced[j] = allowed & free;
    selectable += static_cast<std::uint32_t>(__popc(allowed & ~free));
    always += static_cast<std::uint32_t>(__popc(forced[j]));
    if ((allowed & ~free) == 0xffu) continue;
    add_kept8(extent, i, v[j], sums);
    v[j] = without(v[j], ~allowed | free);
    // Now not every thread may have an entry this large.
    least = 0;
  }
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarp;
  const auto warp = static_cast<std::int32_t>(threadIdx.x) / kWarp;
  const std::uint32_t highest = __reduce_max_sync(kAllLanes, larger_number(most));
  least = __reduce_min_sync(kAllLanes, least);
  selectable = __reduce_add_sync(kAllLanes, selectable);
  always = __reduce_add_sync(kAllLanes, always);
  sums = add_up(sums);
  if (lane != 0) return;
  shared->sums[warp] = sums;
  atomicMax(&shared->highest, highest);
  atomicMin(&shared->lowest, least);
  atomicAdd(&shared->selectable, selectable);
  if (always != 0) atomicAdd(&shared->forced, always);
}

// The number of the `wanted`-th largest entry, of which there are more. All threads get it.
template <int kBlock>
__device__ __forceinline__ std::uint32_t find_number(const uint4 (&v)[kVectors],
                                                     std::uint32_t wanted, Shared* shared) {
  // Every thread has an entry that is not below the lowest of their maxima.
  std::uint32_t low = wanted <= kBlock ? shared->lowest : 0;
  low = max(low, kMinusInfinityNumber);
  std::uint32_t high = shared->highest;
  for (int step = 0; low < high; ++step) {
    const std::uint32_t middle = (low + high + 1) / 2;
    const std::uint32_t own = __reduce_add_sync(kAllLanes, count_from(v, middle));
    std::uint32_t* const count = shared->counts + step % 3;
    if (threadIdx.x % kWarp == 0) atomicAdd(count, own);
    if (threadIdx.x == 0) shared->counts[(step + 1) % 3] = 0;
    __syncthreads();
    const std::uint32_t all = *count;
    if (all >= wanted) {
      low = middle;
      if (all == wanted) break;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// What the thread keeps, by vectors, and before which slot it goes.
struct Kept {
  std::uint32_t bits[kVectors];
  std::uint32_t slots[kVectors];
};

// `ties` of the entries equal to the number are kept, the older ones, and all above it.
template <int kBlock>
__device__ __forceinline__ Kept place_kept(const uint4 (&v)[kVectors],
                                           const std::uint32_t (&forced)[kVectors], __half2 number,
                                           std::uint32_t wanted, Shared* shared) {
  constexpr int kRowWarps = kBlock / kWarp;
  constexpr int kPairs = kVectors / 2;
  static_assert(kPairs * kRowWarps <= kWarp);
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarp;
  const auto warp = static_cast<std::int32_t>(threadIdx.x) / kWarp;
  std::uint32_t above[kVectors];
  std::uint32_t equal[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    equal[j] = reaching(v[j], number);
    above[j] = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const std::uint32_t mask = __hgt2_mask(as_half2(word_of(v[j], w)), number);
      above[j] |= mask & ((1u << (2 * w)) | (0x10000u << (2 * w + 1)));
    }
    above[j] = (above[j] | above[j] >> 16) & 0xffu;
    equal[j] &= ~above[j];
    above[j] |= forced[j];
  }
  // Counts of two vectors in a word: a row has 2^14 entries.
  std::uint32_t within[2][kPairs];
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    const auto both = [&](const std::uint32_t(&bits)[kVectors]) {
      return static_cast<std::uint32_t>(__popc(bits[2 * k]) | __popc(bits[2 * k + 1]) << 16);
    };
    const std::uint32_t own[2] = {both(above), both(equal)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t inclusive = warp_inclusive(own[i]);
      within[i][k] = inclusive - own[i];
      if (lane == kWarp - 1) shared->parts[i][k * kRowWarps + warp] = inclusive;
    }
  }
  __syncthreads();
  // Vectors lie one after the other over all warps.
  std::uint32_t before[2][kVectors];
  std::uint32_t total[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    total[i] = 0;
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      const std::uint32_t part = lane < kRowWarps ? shared->parts[i][k * kRowWarps + lane] : 0;
      const std::uint32_t scanned = warp_inclusive(part);
      const std::uint32_t own = __shfl_sync(kAllLanes, scanned - part, warp) + within[i][k];
      const std::uint32_t sum = __shfl_sync(kAllLanes, scanned, kWarp - 1);
      before[i][2 * k] = total[i] + (own & 0xffffu);
      before[i][2 * k + 1] = total[i] + (sum & 0xffffu) + (own >> 16);
      total[i] += (sum & 0xffffu) + (sum >> 16);
    }
  }
  const std::uint32_t ties = wanted > total[0] ? wanted - total[0] : 0;
  Kept kept;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const std::uint32_t first = min(before[1][j], ties);
    const std::uint32_t last =
        min(before[1][j] + static_cast<std::uint32_t>(__popc(equal[j])), ties);
    kept.bits[j] = above[j] | first_bits(equal[j], static_cast<std::int32_t>(last - first));
    kept.slots[j] = before[0][j] + first;
  }
  return kept;
}

// Adds up the warps' sums. `kept`: the share of what is always kept, and of the tail.
__device__ RowInfo info_of(int warps, float& kept, const Shared* shared) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarp;
  Sums sums;
  if (lane < warps) sums = shared->sums[lane];
  sums = add_up(sums);
  kept = sums.kept / sums.all;
  RowInfo info;
  set_norm(info, static_cast<double>(sums.norm) + static_cast<double>(log2f(sums.all)));
  return info;
}

// Writes the thread's positions and adds up the weights of what is not always kept.
template <int kBlock>
__device__ __forceinline__ void write_kept(const SelectCall& c, std::int32_t head, const Kept& kept,
                                           const std::uint32_t (&forced)[kVectors],
                                           const RowInfo& info, Shared* shared) {
  const __half* const row = c.row(head, 0);
  const std::int32_t* const list = c.head_list(head);
  std::int32_t* const to = c.positions + head * c.capacity;
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    std::uint32_t slot = kept.slots[j];
    for (std::uint32_t bits = kept.bits[j]; bits != 0; bits &= bits - 1) {
      const int e = __ffs(static_cast<int>(bits)) - 1;
      const std::int32_t i = row_entry<kBlock>(j) + e;
      to[slot++] = list != nullptr ? list[i] : i;
      if ((forced[j] >> e & 1u) == 0) sum += weight_of(row[i], info);
    }
  }
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) shared->alphas[threadIdx.x / kWarp] = sum;
}

template <int kBlock>
__global__ void __launch_bounds__(kBlock, 1280 / kBlock)
    top_k_of_row(const __grid_constant__ SelectCall c) {
  wait_for_kernel_before();
  allow_next_kernel();
  __shared__ Shared shared;
  const auto head = static_cast<std::int32_t>(blockIdx.x);
  if (threadIdx.x < kWarp) {
    const Extent extent = extent_of(c, head);
    if (threadIdx.x == 0) {
      shared.extent = extent;
      shared.lowest = 0xffffu;
      shared.highest = shared.forced = shared.selectable = shared.counts[0] = shared.pages = 0;
    }
  }
  __syncthreads();
  uint4 v[kVectors];
  std::uint32_t forced[kVectors];
  load_row<kBlock>(c, head, v, forced, &shared);
  __syncthreads();
  HeadSelection result;
  if (shared.highest >= kInfinityNumber || shared.highest <= kMinusInfinityNumber) {
    result.bad = 1;
    if (threadIdx.x == 0) {
      c.alpha[head] = 0.0f;
      c.heads[head] = result;
    }
    return;
  }
  const auto keep = static_cast<std::uint32_t>(c.keep);
  const std::uint32_t selectable = shared.selectable;
  const std::uint32_t wanted = min(keep - min(keep, shared.forced), selectable);
  std::uint32_t number = kInfinityNumber;
  if (wanted == selectable) {
    number = kMinusInfinityNumber;
  } else if (wanted > 0) {
    number = find_number<kBlock>(v, wanted, &shared);
  }
  const std::uint32_t count = shared.forced + wanted;
  const Kept kept = place_kept<kBlock>(v, forced, half_of(number), count, &shared);
  float share = 0.0f;
  const RowInfo info = info_of(kBlock / kWarp, share, &shared);
  write_kept<kBlock>(c, head, kept, forced, info, &shared);
  __syncthreads();
  result.count = static_cast<std::int32_t>(count);
  add_pages(c.positions + head * c.capacity, result.count, &shared.pages);
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 0; warp < kBlock / kWarp; ++warp) share += shared.alphas[warp];
  const float of_all =
      c.share == nullptr ? 1.0f : *static_cast<const volatile float*>(c.share + head);
  c.alpha[head] = fminf(share, 1.0f) * of_all;
  result.pages = static_cast<std::int32_t>(shared.pages);
  c.heads[head] = result;
}

template <int kBlock>
void launch_block(const SelectCall& call, const Launch& launch) {
  launch_early("top_k_of_row", top_k_of_row<kBlock>, dim3(static_cast<unsigned>(call.kv_heads)),
               kBlock, 0, launch, call);
}

constexpr std::int32_t kEach = 8 * kVectors;  // entries of a thread

}  // namespace

bool fits_top_k(const SelectCall& c) {
  // Nothing is cut by the capacity: what is always kept fits.
  const std::int64_t forced = std::int64_t{c.sinks} + std::max(c.end - c.recent_first, 0);
  return !c.is_top_p && c.group == 1 && c.entries <= kMostWarps * kWarp * kEach &&
         c.capacity >= std::max<std::int64_t>(c.keep, forced);
}

void run_top_k(const SelectCall& call, const Launch& launch) {
  if (call.entries <= 128 * kEach) return launch_block<128>(call, launch);
  if (call.entries <= 256 * kEach) return launch_block<256>(call, launch);
  launch_block<512>(call, launch);
}

}  // namespace sluice::cuda
