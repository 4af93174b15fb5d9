// Coded weights as elements that are scaled, the operands of mma.m16n8k16, rounded to the dtype of
// the inputs as those of prompts are: with many tokens scaling the sums of each group takes longer.
#pragma once

#include "kernels/dense/coded_elements.cuh"
#include "kernels/runtime/device_math.cuh"

namespace sluice::cuda {

// a b + c of pairs of elements.
__device__ __forceinline__ std::uint32_t multiply_add(__nv_bfloat16, std::uint32_t a,
                                                      std::uint32_t b, std::uint32_t c) {
  const auto pair = [](const std::uint32_t& bits) {
    return *reinterpret_cast<const __nv_bfloat162*>(&bits);
  };
  const __nv_bfloat162 sum = __hfma2(pair(a), pair(b), pair(c));
  return *reinterpret_cast<const std::uint32_t*>(&sum);
}
__device__ __forceinline__ std::uint32_t multiply_add(__half, std::uint32_t a, std::uint32_t b,
                                                      std::uint32_t c) {
  const __half2 sum = __hfma2(as_half2(a), as_half2(b), as_half2(c));
  return *reinterpret_cast<const std::uint32_t*>(&sum);
}

// A group's number in each of a lane's two rows, as pairs of elements.
template <typename T>
struct RowPairs {
  std::uint32_t of[2];

  // `line`: of the lane's rows.
  __device__ RowPairs(const std::byte* line, int group) {
    const float2 numbers =
        __half22float2(*reinterpret_cast<const __half2*>(line + group * sizeof(__half2)));
    of[0] = pack(T(), numbers.x, numbers.x);
    of[1] = pack(T(), numbers.y, numbers.y);
  }
};

// The fragments of a lane's codes of one group of int4, from the shared address of the lane's copy
// of the table of pairs.
__device__ __forceinline__ void look_up_group(const std::byte* tile, int group, int lane,
                                              std::uint32_t pairs, Fragments& to) {
  using Tile = CodedTile<WeightCode::int4>;
  const uint2 words = *reinterpret_cast<const uint2*>(
      tile + (Tile::kFirstCode + (group * kWarp + lane) * Tile::kLaneWords) * 4);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    // Byte i % 4 of a word times 128 bytes, its row of the table: one instruction.
    const std::uint32_t at = __dp4a(i < 4 ? words.x : words.y, 0x80u << (8 * (i % 4)), pairs);
    asm("ld.shared.u32 %0, [%1];\n" : "=r"(to[i / 4][i % 2 * 2 + i % 4 / 2]) : "r"(at));
  }
}

// A lane's weights of one group of a tile: scale * code + offset, where scale and offset are
// rounded first.
template <WeightCode kCode, typename T>
__device__ __forceinline__ void load_weights(const std::byte* tile, int group, std::uint32_t pairs,
                                             Fragments& to) {
  using Tile = CodedTile<kCode>;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if constexpr (kCode == WeightCode::int4) {
    look_up_group(tile, group, lane, pairs, to);
  } else {
    decode_group<kCode, T>(tile, group, lane, nullptr, to);
  }
  const std::byte* const line = tile + lane / 4 * kTileGroups * sizeof(__half2);
  const RowPairs<T> scale(line, group);
  std::uint32_t offset[2] = {0x80008000u, 0x80008000u};  // -0, which changes no number
  if constexpr (Tile::kHasOffsets) {
    const RowPairs<T> of_rows(line + Tile::kScaleWords * 4, group);
    offset[0] = of_rows.of[0];
    offset[1] = of_rows.of[1];
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    std::uint32_t& pair = to[i / 4][i % 4];
    pair = multiply_add(T(), pair, scale.of[i % 2], offset[i % 2]);
  }
}

}  // namespace sluice::cuda
