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

// Two signed bytes, at bits 0 and 16 of `bits`, as elements; its other bytes are ignored. 0x43 is
// the upper byte of the bf16 numbers 128 to 255 (0x4300 to 0x437f) and of 256 (0x4380), 0x64 that
// of the f16 numbers 1024 to 1279.
__device__ __forceinline__ std::uint32_t pair_of_bytes(__nv_bfloat16, std::uint32_t bits) {
  const std::uint32_t low = (bits & 0x007f007fu) | 0x43004300u;   // 128 + lower seven bits
  const std::uint32_t sign = (bits & 0x00800080u) | 0xc300c300u;  // -128, or -256 if negative
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

// The fragments of a lane's codes of one group, of its two products.
template <WeightCode kCode, typename T>
__device__ __forceinline__ void decode_group(const std::byte* tile, int group, int lane,
                                             const std::byte* pairs, std::uint32_t (&a)[2][4]) {
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

// A lane's view of the inputs in shared memory.
struct LaneInputs {
  const std::byte* x;  // token l / 4 of the first eight tokens, from input 8 (l % 4) on
  int tile_stride;     // bytes from eight tokens to the next
  bool has_token;      // otherwise its inputs are zero
  const float* sums;   // [groups, tokens], from the first of the lane's two columns on
  int sum_stride;
};

// acc += weights times inputs, for kTiles tiles of the same column, which is counted from the first
// whose inputs are in shared memory.
template <WeightCode kCode, typename T, int kTiles, int kTokenTiles>
__device__ __forceinline__ void multiply_stage(const std::byte* tiles, int column,
                                               const LaneInputs& in, const std::byte* pairs,
                                               float (&acc)[kTiles][kTokenTiles][4]) {
  using Tile = CodedTile<kCode>;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int of_row = lane / 4 * kTileGroups * 4;              // bytes
  constexpr int kAtOnce = kTokenTiles > 4 ? 1 : kTileGroups;  // more would spill registers
#pragma unroll kAtOnce
  for (int group = 0; group < kTileGroups; ++group) {
    std::uint32_t a[kTiles][2][4];
    float2 scale[kTiles];
    float2 offset[kTiles];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      const std::byte* const tile = tiles + m * Tile::kBytes;
      decode_group<kCode, T>(tile, group, lane, pairs, a[m]);
      const std::byte* const line = tile + of_row + group * 4;
      scale[m] = __half22float2(*reinterpret_cast<const __half2*>(line));
      if constexpr (Tile::kHasOffsets) {
        offset[m] = __half22float2(*reinterpret_cast<const __half2*>(line + Tile::kScaleWords * 4));
      }
    }
    const int input = column * kTileInputs + group * static_cast<int>(kWeightGroup);
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      uint4 b = {0, 0, 0, 0};
      if (in.has_token) b = *reinterpret_cast<const uint4*>(in.x + n * in.tile_stride + input * 2);
      float2 sum = {0.0f, 0.0f};
      if constexpr (Tile::kHasOffsets) {
        sum = *reinterpret_cast<const float2*>(
            in.sums + (input / static_cast<int>(kWeightGroup)) * in.sum_stride + n * kMmaColumns);
      }
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        float c[4] = {};
        mma(T(), c, a[m][0], b.x, b.y);
        mma(T(), c, a[m][1], b.z, b.w);
        float(&to)[4] = acc[m][n];
        to[0] = fmaf(scale[m].x, c[0], to[0]);
        to[1] = fmaf(scale[m].x, c[1], to[1]);
        to[2] = fmaf(scale[m].y, c[2], to[2]);
        to[3] = fmaf(scale[m].y, c[3], to[3]);
        if constexpr (Tile::kHasOffsets) {
          to[0] = fmaf(offset[m].x, sum.x, to[0]);
          to[1] = fmaf(offset[m].x, sum.y, to[1]);
          to[2] = fmaf(offset[m].y, sum.x, to[2]);
          to[3] = fmaf(offset[m].y, sum.y, to[3]);
        }
      }
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
