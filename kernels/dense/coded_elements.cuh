// Coded weights as elements, the operands of mma.m16n8k16: sums over a group of inputs from zero,
// times the group's scale, in f32.
//
// Decoding int4 is a look-up of two neighbouring codes, because 16 unequal levels have no formula.
// The table has a copy for every lane, each in its own bank: 32 KiB.
#pragma once

#include "kernels/dense/coded_product.h"
#include "kernels/runtime/device_math.cuh"

namespace sluice::cuda {

// Fills the table of pairs of int4 codes: word [byte, lane] has the levels of the byte's low and
// high half. By all threads of the block.
template <WeightCode kCode, typename T>
__device__ __forceinline__ void build_pairs(const CodedProductParams& p, std::byte* table) {
  if constexpr (kCode == WeightCode::int4) {
    for (int i = static_cast<int>(threadIdx.x); i < 256 * kWarp;
         i += static_cast<int>(blockDim.x)) {
      const int byte = i / kWarp;
      reinterpret_cast<std::uint32_t*>(table)[i] = pack(
          T(), static_cast<float>(p.levels[byte % 16]), static_cast<float>(p.levels[byte / 16]));
    }
  }
}

// (bits & mask) | ones in one instruction, because the compiler makes two of the expression.
__device__ __forceinline__ std::uint32_t and_or(std::uint32_t bits, std::uint32_t mask,
                                                std::uint32_t ones) {
  std::uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;\n" : "=r"(result) : "r"(bits), "r"(mask), "r"(ones));
  return result;
}

// Two signed bytes, at bits 0 and 16 of `bits`, as elements; its other bytes are ignored. 0x43 is
// the upper byte of the bf16 numbers 128 to 255 (0x4300 to 0x437f) and of 256 (0x4380), 0x64 that
// of the f16 numbers 1024 to 1279.
__device__ __forceinline__ std::uint32_t pair_of_bytes(__nv_bfloat16, std::uint32_t bits) {
  const std::uint32_t low = and_or(bits, 0x007f007fu, 0x43004300u);   // 128 + lower seven bits
  const std::uint32_t sign = and_or(bits, 0x00800080u, 0xc300c300u);  // -128, or -256 if negative
  const __nv_bfloat162 one = __floats2bfloat162_rn(1.0f, 1.0f);
  const __nv_bfloat162 pair = __hfma2(*reinterpret_cast<const __nv_bfloat162*>(&low), one,
                                      *reinterpret_cast<const __nv_bfloat162*>(&sign));
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
__device__ __forceinline__ std::uint32_t pair_of_bytes(__half, std::uint32_t bits) {
  const std::uint32_t biased = (bits & 0x00ff00ffu) ^ 0x64806480u;  // 1024 + 128 + byte
  const __half2 pair = __hsub2(as_half2(biased), as_half2(0x64806480u));
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

// The fragments of two products.
using Fragments = std::uint32_t[2][4];

// The fragments of a lane's codes of one group.
template <WeightCode kCode, typename T>
__device__ __forceinline__ void decode_group(const std::byte* tile, int group, int lane,
                                             const std::byte* pairs, Fragments& a) {
  using Tile = CodedTile<kCode>;
  const std::byte* const codes =
      tile + (Tile::kFirstCode + (group * kWarp + lane) * Tile::kLaneWords) * 4;
  if constexpr (kCode == WeightCode::int4) {
    const uint2 words = *reinterpret_cast<const uint2*>(codes);
    const std::uint32_t of_product[2] = {words.x, words.y};
#pragma unroll
    for (int product = 0; product < 2; ++product) {
      const std::uint32_t word = of_product[product];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Byte i of the word, times 128 bytes for its row of the table.
        const std::uint32_t row = (i == 0 ? word << 7 : word >> (8 * i - 7)) & 0x7f80u;
        a[product][i % 2 * 2 + i / 2] = *reinterpret_cast<const std::uint32_t*>(
            pairs + (row | static_cast<unsigned>(lane) * 4));
      }
    }
  } else {
    const uint4 words = *reinterpret_cast<const uint4*>(codes);
    const std::uint32_t of_row[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      a[row / 2][row % 2] = pair_of_bytes(T(), of_row[row]);
      a[row / 2][row % 2 + 2] = pair_of_bytes(T(), of_row[row] >> 8);
    }
  }
}

// A lane's view of the inputs of up to eight tokens in shared memory.
struct LaneInputs {
  const std::byte* x;  // token l / 4, from input 8 (l % 4) on
  bool has_token;      // otherwise its inputs are zero
  const float* sums;   // [groups, tokens], from the first of the lane's two columns on
  int sum_stride;
};

// acc += a tile times the inputs of its column.
template <WeightCode kCode, typename T>
__device__ __forceinline__ void multiply_tile(const std::byte* tile, int column,
                                              const LaneInputs& in, const std::byte* pairs,
                                              float (&acc)[4]) {
  using Tile = CodedTile<kCode>;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int of_row = lane / 4 * kTileGroups * 4;  // bytes
#pragma unroll
  for (int group = 0; group < kTileGroups; ++group) {
    Fragments a;
    decode_group<kCode, T>(tile, group, lane, pairs, a);
    const std::byte* const line = tile + of_row + group * 4;
    const float2 scale = __half22float2(*reinterpret_cast<const __half2*>(line));
    const int input = column * kTileInputs + group * static_cast<int>(kWeightGroup);
    uint4 b = {0, 0, 0, 0};
    if (in.has_token) b = *reinterpret_cast<const uint4*>(in.x + input * 2);
    float c[4] = {};
    mma(T(), c, a[0], b.x, b.y);
    mma(T(), c, a[1], b.z, b.w);
    acc[0] = fmaf(scale.x, c[0], acc[0]);
    acc[1] = fmaf(scale.x, c[1], acc[1]);
    acc[2] = fmaf(scale.y, c[2], acc[2]);
    acc[3] = fmaf(scale.y, c[3], acc[3]);
    if constexpr (Tile::kHasOffsets) {
      const float2 offset =
          __half22float2(*reinterpret_cast<const __half2*>(line + Tile::kScaleWords * 4));
      const float2 sum = *reinterpret_cast<const float2*>(
          in.sums + (input / static_cast<int>(kWeightGroup)) * in.sum_stride);
      acc[0] = fmaf(offset.x, sum.x, acc[0]);
      acc[1] = fmaf(offset.x, sum.y, acc[1]);
      acc[2] = fmaf(offset.y, sum.x, acc[2]);
      acc[3] = fmaf(offset.y, sum.y, acc[3]);
    }
  }
}

// Sums of the inputs of each group, [groups, stride], by all threads of the block. `x` has rows of
// `token_bytes` with `columns` tiles' inputs.
template <typename T>
__device__ __forceinline__ void sum_groups(const std::byte* x, int token_bytes, int tokens,
                                           int columns, float* sums, int stride) {
  const int groups = columns * kTileGroups;
  for (int i = static_cast<int>(threadIdx.x); i < groups * tokens;
       i += static_cast<int>(blockDim.x)) {
    const int token = i / groups;
    const int group = i % groups;
    const auto* const from =
        reinterpret_cast<const uint4*>(x + token * token_bytes + group * kWeightGroup * 2);
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const uint4 bits = from[part];
      const auto* const values = reinterpret_cast<const T*>(&bits);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum += to_float(values[e]);
    }
    sums[group * stride + token] = sum;
  }
}

}  // namespace sluice::cuda
