// Code shared by the kernels of select(): reading logits, weights, and scans over a block.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/runtime/device_math.cuh"
#include "kernels/runtime/early_launch.cuh"
#include "kernels/select/call.cuh"

namespace sluice::cuda {

// A query head's threshold lies at a multiple of 1 / kBinsPerNat.
inline constexpr float kBinsPerNat = 128.0f;
// Weights are counted in units of 2^-15 of their bin's lower edge, so 2^16 of them fit 32 bits.
inline constexpr int kMassBits = 15;
inline constexpr std::int32_t kMassedEntries = 1 << 16;
inline constexpr std::uint32_t kMinusInfinities = 0xfc00fc00u;  // two f16
inline constexpr std::uint16_t kLowestHalf = 0xfbff;
inline constexpr std::uint16_t kInfiniteHalf = 0x7c00;

// The state of one query head. The weight of logit x is scale * 2^(x log2(e) - norm). The scale,
// close to 1, corrects the rounding of the norm, which matters for logits in the thousands.
struct RowInfo {
  float norm = 0.0f;
  float scale = 1.0f;
  float tail = 0.0f;  // weight of the tail, entries [emit, total)
  float kept = 0.0f;  // weight of the tokens that are always kept
  float share = 1.0f;
  std::uint16_t threshold = 0;  // f16: x is kept if x >= threshold
  std::uint16_t bad = 0;
};

__device__ __forceinline__ float weight_of(__half x, const RowInfo& row) {
  return row.scale * exp2_fast(fmaf(__half2float(x), kLog2E, -row.norm));
}

__device__ __forceinline__ void set_norm(RowInfo& row, double norm) {
  row.norm = static_cast<float>(norm);
  row.scale = exp2f(static_cast<float>(static_cast<double>(row.norm) - norm));
}

// Sets the norm from the row's maximum and its sum of e^(x - highest).
__device__ __forceinline__ void set_norm(RowInfo& row, float highest, float sum) {
  set_norm(row, static_cast<double>(highest) * static_cast<double>(kLog2E) +
                    static_cast<double>(log2f(sum)));
}

// Reports the log-sum-exp of a query head's row, if it is asked for. Called by one thread.
__device__ __forceinline__ void report_lse(const SelectCall& c, std::int64_t query_head,
                                           const RowInfo& row) {
  if (c.lse != nullptr) c.lse[query_head] = (row.norm - log2f(row.scale)) * kLn2;
}

// The factor that turns 2^(x log2(e) - norm) into e^(x - highest), where `norm` is highest log2(e)
// rounded to f32.
__device__ __forceinline__ float shortfall(float highest, float norm) {
  return exp2_fast(-fmaf(highest, kLog2E, -norm));
}

__device__ __forceinline__ std::uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

__device__ __forceinline__ std::uint32_t word_of_half2(__half2 pair) {
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

// Two f16 as two 16-bit integers of the same order; -0 equals 0.
__device__ __forceinline__ std::uint32_t ordered2(std::uint32_t word) {
  const std::uint32_t bits = word_of_half2(__hadd2(as_half2(word), as_half2(0)));
  std::uint32_t signs;  // each sign 16 times
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(signs) : "r"(bits));
  return bits ^ (signs | 0x80008000u);
}

// The f16 of an integer from ordered2().
__device__ __forceinline__ std::uint16_t half_of_ordered(std::uint32_t number) {
  return static_cast<std::uint16_t>(number ^ ((number & 0x8000u) != 0 ? 0x8000u : 0xffffu));
}

// Bit e: entry i + e may be emitted.
__device__ __forceinline__ std::uint32_t allowed8(const Extent& extent, std::int32_t i) {
  return (1u << min(max(extent.emit - i, 0), 8)) - 1u;
}

// Bit e: entry i + e is always kept, if it may be emitted.
__device__ __forceinline__ std::uint32_t forced8(const Extent& extent, std::int32_t i) {
  if (i >= extent.low && i + 8 <= extent.high) return 0;
  // Entries below `low` and from `high` on.
  const std::uint32_t below = (1u << min(max(extent.low - i, 0), 8)) - 1u;
  const std::uint32_t above = 0xffu << min(max(extent.high - i, 0), 8);
  return (below | above) & 0xffu;
}

// Bit e: entry i + e may be selected: it may be emitted, and is not always kept.
__device__ __forceinline__ std::uint32_t selectable8(const Extent& extent, std::int32_t i) {
  return ~forced8(extent, i) & 0xffu;
}

// Replaces each f16 whose bit is not set by -Inf.
__device__ __forceinline__ uint4 masked(uint4 v, std::uint32_t bits) {
  std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if ((bits >> (2 * w) & 1u) == 0) words[w] = (words[w] & 0xffff0000u) | 0xfc00u;
    if ((bits >> (2 * w + 1) & 1u) == 0) words[w] = (words[w] & 0xffffu) | 0xfc000000u;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ uint4 all_minus_infinity() {
  return make_uint4(kMinusInfinities, kMinusInfinities, kMinusInfinities, kMinusInfinities);
}

// Eight logits of a row from entry i on, a multiple of 8; undefined values beyond the last.
__device__ __forceinline__ uint4 load8(const __half* row, std::int32_t i) {
  return *reinterpret_cast<const uint4*>(row + i);
}

// The same, with -Inf from `total` on.
__device__ __forceinline__ uint4 load8_below(const __half* row, std::int32_t total,
                                             std::int32_t i) {
  if (i >= total) return all_minus_infinity();
  const uint4 v = load8(row, i);
  return i + 8 <= total ? v : masked(v, (1u << (total - i)) - 1u);
}

// Bit e: the e-th f16 of v is >= the threshold, which is given twice.
__device__ __forceinline__ std::uint32_t reaching(const uint4& v, __half2 threshold) {
  std::uint32_t bits = 0;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const std::uint32_t mask = __hge2_mask(as_half2(word_of(v, w)), threshold);
    bits |= mask & ((1u << (2 * w)) | (0x10000u << (2 * w + 1)));
  }
  return (bits | bits >> 16) & 0xffu;
}

__device__ __forceinline__ __half2 twice(std::uint16_t bits) {
  return as_half2(bits | static_cast<std::uint32_t>(bits) << 16);
}

// The bin at which a running sum over bins reaches a target.
template <typename T>
struct Crossing {
  std::int32_t bin = 0;  // the last bin if the target is not reached
  T before = 0;          // the sum of the bins before it
  bool reached = false;
};

// Called by all threads; calls bin_of(i) for every i in [0, bins), consecutive ones in a warp.
// `found` and `part` are in shared memory.
template <typename T, typename Bins>
__device__ inline void find_crossing(const Bins& bin_of, std::int32_t bins, T target,
                                     Crossing<T>* found, T* part) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarp;
  const auto warp = static_cast<std::int32_t>(threadIdx.x) / kWarp;
  const auto warps = static_cast<std::int32_t>(blockDim.x) / kWarp;
  const std::int32_t each = (bins + warps * kWarp - 1) / (warps * kWarp) * kWarp;
  const std::int32_t last = min(bins, (warp + 1) * each);
  T own = 0;
  for (std::int32_t i = warp * each + lane; i < last; i += kWarp) own += bin_of(i);
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) own += __shfl_xor_sync(kAllLanes, own, step);
  if (lane == 0) part[warp] = own;
  __syncthreads();
  const T scanned = warp_inclusive(lane < warps ? part[lane] : T(0));
  const unsigned reaching = __ballot_sync(kAllLanes, scanned >= target);
  const std::int32_t chosen = __ffs(static_cast<int>(reaching)) - 1;
  if (chosen < 0 && threadIdx.x == 0) *found = {bins - 1, T(0), false};
  if (warp == chosen) {
    T before = __shfl_sync(kAllLanes, scanned, max(chosen - 1, 0));
    if (chosen == 0) before = 0;
    for (std::int32_t first = warp * each; first < last; first += kWarp) {
      const T mass = first + lane < last ? bin_of(first + lane) : T(0);
      const T sum = before + warp_inclusive(mass);
      const unsigned here = __ballot_sync(kAllLanes, sum >= target);
      if (here != 0) {
        if (lane == __ffs(static_cast<int>(here)) - 1) *found = {first + lane, sum - mass, true};
        break;
      }
      before = __shfl_sync(kAllLanes, sum, kWarp - 1);
    }
  }
  __syncthreads();
}

// The bin of a logit, from 0 at logit 0, and its mass: its weight in units of 2^-15 of that at the
// bin's lower edge.
struct BinMap {
  float shift = 0.0f;  // brings (x - centre) * 128 into [2^23, 2^24), where floats are integers
  std::int32_t offset = 0;  // bin less such a float's bits

  static constexpr float kIntegers = 12582912.0f;  // 1.5 * 2^23

  __device__ explicit BinMap(float near) {
    const float centre = rintf(near);
    shift = kIntegers - centre * kBinsPerNat;
    offset = static_cast<std::int32_t>(centre * kBinsPerNat) -
             static_cast<std::int32_t>(__float_as_uint(kIntegers));
  }
  BinMap() = default;

  // Exact for |x - near| < 2^14, because rounding down to an integer floors.
  __device__ __forceinline__ std::int32_t bin(float x, std::uint32_t& mass) const {
    return bits(x, shift, mass) + offset;
  }
  __device__ __forceinline__ static std::int32_t bits(float x, float shift, std::uint32_t& mass) {
    const float floored = __fmaf_rd(x, kBinsPerNat, shift);
    const float rest = fmaf(x, kBinsPerNat, shift - floored);
    // 2^15 e^(rest / 128) by a chord of the curve; the relative error is below 2^-17.
    mass = __float_as_uint(fmaf(rest, 257.0f, 8388608.0f + 32768.0f)) & 0x7fffffu;
    return static_cast<std::int32_t>(__float_as_uint(floored));
  }
};

// Adds the masses of the logits that are >= `least` to bins, counted down from bin `top`.
__device__ __forceinline__ void add_masses8(const uint4& v, std::uint16_t least, const BinMap& map,
                                            std::int32_t top, std::uint32_t* bins) {
  const float lowest = __half2float(__ushort_as_half(least));
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float2 pair = __half22float2(as_half2(word_of(v, w)));
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float x = e == 0 ? pair.x : pair.y;
      if (!(x >= lowest)) continue;
      std::uint32_t mass;
      const std::int32_t bin = map.bin(x, mass);
      atomicAdd(bins + (top - bin), mass);
    }
  }
}

// The bin of x.
__device__ __forceinline__ std::int32_t bin_floor(float x) {
  return __float2int_rd(x * kBinsPerNat);
}

// The smallest f16 in a bin or above.
__device__ __forceinline__ std::uint16_t bin_threshold(std::int32_t bin) {
  return __half_as_ushort(__float2half_ru(static_cast<float>(bin) / kBinsPerNat));
}

// The weight of one unit of mass, `below` bins below the bin of `highest`, relative to `highest`.
__device__ __forceinline__ float mass_unit(std::int32_t below, float highest) {
  const float top = static_cast<float>(bin_floor(highest)) / kBinsPerNat - highest;
  return expf(-static_cast<float>(below) / kBinsPerNat) * expf(top) /
         static_cast<float>(1 << kMassBits);
}

// Shares of a row's weight as integers, so that sums do not depend on the order.
__device__ __forceinline__ std::uint64_t share_units(double share) {
  return static_cast<std::uint64_t>(fmax(share, 0.0) * 0x1p52);
}

// Adds the pages of ascending positions to `pages`. Called by all threads.
__device__ __forceinline__ void add_pages(const std::int32_t* positions, std::int32_t count,
                                          std::uint32_t* pages) {
  std::uint32_t own = 0;
#pragma unroll 1
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < count;
       i += static_cast<std::int32_t>(blockDim.x)) {
    if (i == 0 || positions[i] / kPageTokens != positions[i - 1] / kPageTokens) ++own;
  }
  own = __reduce_add_sync(kAllLanes, own);
  if (threadIdx.x % kWarp == 0 && own != 0) atomicAdd(pages, own);
}

}  // namespace sluice::cuda
