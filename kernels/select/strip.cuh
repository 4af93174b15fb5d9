// The first read of a row's strip by one warp: its sums and its sectors' maxima.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/select/chain.cuh"

namespace sluice::cuda {

constexpr int kVectors = kStrip / (8 * kWarp);  // of 8 entries, per thread and strip
constexpr float kNoNorm = -1e30f;
static_assert(kVectors == 4);

// One thread's sums of 2^(x log2(e) - norm), with a norm that makes every term at most 1.
struct Sums {
  float norm = kNoNorm;
  float all = 0.0f;
  float kept = 0.0f;  // entries always kept or in the tail
  float tail = 0.0f;

  __device__ __forceinline__ void refer_to(float other) {
    const float factor = exp2_fast(norm - other);
    norm = other;
    all *= factor;
    kept *= factor;
    tail *= factor;
  }
};

// Called by one warp: adds up the lanes' sums.
__device__ inline Sums add_up(Sums sums) {
  sums.refer_to(warp_max(sums.norm));
  sums.all = warp_sum(sums.all);
  sums.kept = warp_sum(sums.kept);
  sums.tail = warp_sum(sums.tail);
  return sums;
}

// The first entry of this thread's vector j. Two threads share a sector; a thread's neighbouring
// vectors lie in neighbouring sectors, so that two of their maxima fill a word.
__device__ __forceinline__ std::int32_t entry_of(std::int32_t strip, int j) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarp;
  return strip * kStrip + j / 2 * (kStrip / 2) + lane / 2 * (2 * kSector) + j % 2 * kSector +
         lane % 2 * 8;
}

__device__ __forceinline__ void load_strip(const __half* row, std::int32_t strip,
                                           uint4 (&v)[kVectors]) {
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    v[j] = *reinterpret_cast<const uint4*>(row + entry_of(strip, j));
  }
}

// Maxima of two vectors, in one word.
__device__ __forceinline__ __half2 maxima_of(const uint4& a, const uint4& b) {
  const auto pair_of = [](const uint4& v) {
    return __hmax2_nan(__hmax2_nan(as_half2(v.x), as_half2(v.y)),
                       __hmax2_nan(as_half2(v.z), as_half2(v.w)));
  };
  const __half2 x = pair_of(a);
  const __half2 y = pair_of(b);
  return __hmax2_nan(__lows2half2(x, y), __highs2half2(x, y));
}

// The summed weight of eight entries.
__device__ __forceinline__ float weight8(const uint4& v, float norm) {
  float even = 0.0f;
  float odd = 0.0f;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float2 x = __half22float2(as_half2(word_of(v, w)));
    even += exp2_fast(fmaf(x.x, kLog2E, -norm));
    odd += exp2_fast(fmaf(x.y, kLog2E, -norm));
  }
  return even + odd;
}

__device__ __forceinline__ void add_weights(const uint4 (&v)[kVectors], Sums& sums) {
#pragma unroll
  for (const uint4& eight : v) sums.all += weight8(eight, sums.norm);
}

// Adds the entries, of eight from i on, that are always kept or lie in the tail.
__device__ __forceinline__ void add_kept8(const Extent& extent, std::int32_t i, const uint4& v,
                                          Sums& sums) {
  const std::uint32_t kept = forced8(extent, i);
  if (kept == 0) return;
  sums.kept += weight8(masked(v, kept), sums.norm);
  const std::uint32_t tail = 0xffu << min(max(extent.emit - i, 0), 8);
  sums.tail += weight8(masked(v, tail), sums.norm);
}

// Adds a strip's entries that are always kept or in the tail, and replaces them by -Inf.
__device__ __forceinline__ void take_kept(const Extent& extent, std::int32_t strip,
                                          uint4 (&v)[kVectors], Sums& sums) {
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const std::int32_t i = entry_of(strip, j);
    add_kept8(extent, i, v[j], sums);
    v[j] = masked(v[j], ~forced8(extent, i));
  }
}

// Maxima of a thread's vectors of a strip.
struct StripMaxima {
  __half2 first;  // of the strip's first half
  __half2 second;

  __device__ __forceinline__ explicit StripMaxima(const uint4 (&v)[kVectors])
      : first(maxima_of(v[0], v[1])), second(maxima_of(v[2], v[3])) {}

  __device__ __forceinline__ __half2 both() const { return __hmax2_nan(first, second); }

  // The maxima of two neighbouring sectors: word lane / 2 of the strip's first half, or of its
  // second.
  __device__ __forceinline__ std::uint32_t sectors() const {
    const __half2 a = __hmax2_nan(first, __shfl_xor_sync(kAllLanes, first, 1));
    const __half2 b = __hmax2_nan(second, __shfl_xor_sync(kAllLanes, second, 1));
    const __half2 own = threadIdx.x % 2 == 0 ? a : b;
    return *reinterpret_cast<const std::uint32_t*>(&own);
  }
};

// A thread's partial result for a row.
struct Seen {
  Sums sums;
  __half2 most = as_half2(kMinusInfinities);

  __device__ __forceinline__ StripMaxima add(const uint4 (&v)[kVectors]) {
    const StripMaxima maxima(v);
    const __half2 both = maxima.both();
    most = __hmax2_nan(most, both);
    sums.refer_to(fmaxf(sums.norm, larger_of(both) * kLog2E));
    add_weights(v, sums);
    return maxima;
  }

  // Adds a page from a scan's digest: the maxima of its sectors, and its sum.
  __device__ __forceinline__ void add(const uint4& maxima, float sum) {
    const __half2 both = __hmax2_nan(__hmax2_nan(as_half2(maxima.x), as_half2(maxima.y)),
                                     __hmax2_nan(as_half2(maxima.z), as_half2(maxima.w)));
    most = __hmax2_nan(most, both);
    const float norm = larger_of(both) * kLog2E;
    sums.refer_to(fmaxf(sums.norm, norm));
    sums.all = fmaf(sum, exp2_fast(norm - sums.norm), sums.all);
  }
};

// Rough bins hold f16 numbers that share their upper 11 bits, ordered.
constexpr std::int32_t kFirstFinite = 32;  // rough bin of the lowest finite f16; -Inf lies below

// The lowest f16 of a rough bin.
__device__ __forceinline__ std::uint16_t rough_edge(std::int32_t bin) {
  return half_of_ordered(static_cast<std::uint32_t>(bin) << 5);
}

// Counts two sectors by their maxima, and weighs them, if `counts` and `masses` are not null.
// Masses, in units of 2^-15 of a bin's lower edge, never exceed the sectors' weights, and are
// capped so that their sum over a unit fits 32 bits.
__device__ __forceinline__ void count_sectors(std::uint32_t maxima, std::uint32_t* counts,
                                              std::uint32_t* masses) {
  const std::uint32_t numbers = ordered2(maxima);
  const std::uint32_t bins[2] = {numbers >> 5 & 0x7ffu, numbers >> 21};
  if (counts != nullptr) {
    atomicAdd(counts + bins[0], 1u);
    atomicAdd(counts + bins[1], 1u);
  }
  if (masses == nullptr) return;
  constexpr std::uint32_t kRest = 0x001f001fu;
  std::uint32_t signs;  // each sign 16 times
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(signs) : "r"(maxima));
  const std::uint32_t edges = (maxima & ~kRest) | (signs & kRest);
  const float2 above = __half22float2(__hsub2(as_half2(maxima), as_half2(edges)));
  constexpr float kMost = 16.0f;
  constexpr auto kUnit = static_cast<float>(1 << kMassBits);
  static_assert(kUnitStrips * kStripSectors * 16ull * (1 << kMassBits) < 1ull << 32);
  const float low = fminf(exp2_fast(above.x * kLog2E), kMost);
  const float high = fminf(exp2_fast(above.y * kLog2E), kMost);
  atomicAdd(masses + bins[0], static_cast<std::uint32_t>(low * kUnit));
  atomicAdd(masses + bins[1], static_cast<std::uint32_t>(high * kUnit));
}

}  // namespace sluice::cuda
