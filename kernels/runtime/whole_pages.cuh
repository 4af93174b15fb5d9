// Shared by the kernels that build key tiles, bounds and value tiles: the pages that blocks build,
// and pairs of neighbouring channels, which are quantised by their range.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "kernels/runtime/heads.h"
#include "kernels/runtime/paged.cuh"
#include "kernels/runtime/rows.cuh"

namespace sluice::cuda {

// A page of one KV head that a block builds.
struct WholePage {
  const std::byte* rows;  // [kPageTokens, row_bytes]
  std::int64_t sequence;
  int number;  // among the pages of the sequence
};

// Pages of one sequence from consecutive rows, one block per page.
struct PageRun {
  HeadRows rows;
  std::int64_t sequence;
  std::int64_t first;

  __device__ __forceinline__ bool find(int head, std::int64_t row_bytes, WholePage& page) const {
    const std::int64_t i = blockIdx.x;
    page = {rows[head] + i * kPageTokens * row_bytes, sequence, static_cast<int>(first + i)};
    return true;
  }
};

// Pages that end with a token of the batch, one block per token.
struct PagesOfBatch {
  const BatchToken* tokens;
  PagedRows rows;

  __device__ __forceinline__ bool find(int head, std::int64_t row_bytes, WholePage& page) const {
    const BatchToken token = tokens[blockIdx.x];
    if (place_in_page(token.position) != kPageTokens - 1) return false;
    const int number = page_of(token.position);
    const PageSlots slots = page_table_of(rows, token.sequence)[number];
    page = {page_rows(rows, head, slots, row_bytes), token.sequence, number};
    return true;
  }
};

__device__ __forceinline__ __half2 as_pair(__half, std::uint32_t bits) { return as_half2(bits); }
__device__ __forceinline__ __nv_bfloat162 as_pair(__nv_bfloat16, std::uint32_t bits) {
  return *reinterpret_cast<const __nv_bfloat162*>(&bits);
}
__device__ __forceinline__ float2 floats_of(__half2 pair) { return __half22float2(pair); }
__device__ __forceinline__ float2 floats_of(__nv_bfloat162 pair) {
  return __bfloat1622float2(pair);
}
__device__ __forceinline__ float2 floats_of(float2 pair) { return pair; }

// Channels 2 * pair and the next of a key or value that begins at `part`; of a coded one as floats,
// so that indexes are those that the CPU builds.
template <typename T>
__device__ __forceinline__ auto load_pair(T, const std::byte* part, int pair) {
  return as_pair(T(), reinterpret_cast<const std::uint32_t*>(part)[pair]);
}
__device__ __forceinline__ float2 load_pair(Int8Code, const std::byte* part, int pair) {
  const char2 codes = reinterpret_cast<const char2*>(part)[pair];
  const float scale = scale_of(part);
  return make_float2(scale * codes.x, scale * codes.y);
}
__device__ __forceinline__ float2 load_pair(Int4Pair, const std::byte* part, int pair) {
  const int c = 2 * pair;
  const auto two = *reinterpret_cast<const std::uint16_t*>(part + c / kInt4Group * 16 + c % 16);
  const float scale = __uint_as_float(int4_scale_bits(part, c / kInt4Group) << 16);
  const int codes = two >> (c % kInt4Group / 16 * 4);
  return make_float2(scale * int4_code(codes), scale * int4_code(codes >> 8));
}
template <typename T>
using PairOf = decltype(load_pair(T(), nullptr, 0));

// Makes `strange` NaN if an element is NaN or Inf, whose product with zero is NaN. `strange` starts
// as zeros; is_strange() reads it.
template <typename Pair>
__device__ __forceinline__ void note_strange(Pair pair, Pair zeros, Pair& strange) {
  strange = __hfma2(pair, zeros, strange);
}
__device__ __forceinline__ void note_strange(float2 pair, float2 zeros, float2& strange) {
  strange.x = fmaf(pair.x, zeros.x, strange.x);
  strange.y = fmaf(pair.y, zeros.y, strange.y);
}
template <typename Pair>
__device__ __forceinline__ bool is_strange(Pair strange) {
  return (*reinterpret_cast<const std::uint32_t*>(&strange) & 0x7fff7fffu) != 0;
}

__device__ __forceinline__ bool is_strange(float2 strange) {
  return strange.x != 0.0f || strange.y != 0.0f;
}

// The smallest and largest element of two channels.
template <typename Pair>
struct PairRange {
  Pair low;
  Pair high;

  __device__ void include(const PairRange& other) {
    low = __hmin2(low, other.low);
    high = __hmax2(high, other.high);
  }
};

template <>
struct PairRange<float2> {
  float2 low;
  float2 high;

  __device__ void include(const PairRange& other) {
    low = make_float2(fminf(low.x, other.low.x), fminf(low.y, other.low.y));
    high = make_float2(fmaxf(high.x, other.high.x), fmaxf(high.y, other.high.y));
  }
};

// Clamps to the finite range of f16.
__device__ __forceinline__ float clamp_to_half(float x) {
  constexpr float kLargestHalf = 65504.0f;
  return fminf(fmaxf(x, -kLargestHalf), kLargestHalf);
}

// The code of an element in the lowest bits, rounded to nearest even; the caller must remove the
// bits above it. Rounded at every step, like the CPU's.
__device__ __forceinline__ std::uint32_t code_of(float x, float zero, float inverse_step,
                                                 float largest) {
  // Adding it to a float in [0, 2^22) leaves the rounded integer in the lowest bits.
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23
  const float exact = __fmul_rn(__fsub_rn(x, zero), inverse_step);
  return __float_as_uint(__fadd_rn(fminf(fmaxf(exact, 0.0f), largest), kRounder));
}

}  // namespace sluice::cuda
