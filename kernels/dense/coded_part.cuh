// Coded rows on their way into tiles: a block has the codes of kTileOutputs rows, blockIdx.x, and
// of kInputs inputs, blockIdx.y, in shared memory.
#pragma once

#include "kernels/dense/coded_tile.h"
#include "kernels/runtime/device_math.cuh"

namespace sluice::cuda {

template <WeightCode kCode, int kInputs>
struct PartRows {
  static constexpr int kGroups = kInputs / static_cast<int>(kWeightGroup);
  static constexpr int kCodeBytes = kInputs * CodedTile<kCode>::kBits / 8;

  std::uint16_t scales[kTileOutputs][kGroups];
  std::uint16_t offsets[kTileOutputs][kGroups];
  alignas(16) std::uint8_t codes[kTileOutputs][kCodeBytes];
};

// One tile of them.
template <WeightCode kCode, int kInputs>
struct TileRows {
  const PartRows<kCode, kInputs>& part;
  int column;

  __device__ std::uint32_t scale(int row, int group) const {
    return part.scales[row][column * kTileGroups + group];
  }
  __device__ std::uint32_t offset(int row, int group) const {
    return part.offsets[row][column * kTileGroups + group];
  }
  __device__ std::uint32_t code(int row, int input) const {
    const int i = column * kTileInputs + input;
    if constexpr (kCode == WeightCode::int8) return part.codes[row][i];
    return part.codes[row][i / 2] >> (i % 2 * 4) & 15u;
  }
};

// Writes the part's tiles, by all threads of the block. `tiles` [rows of tiles, columns].
template <WeightCode kCode, int kInputs>
__device__ __forceinline__ void write_part(const PartRows<kCode, kInputs>& part, std::byte* tiles,
                                           std::int64_t columns) {
  using Tile = CodedTile<kCode>;
  constexpr int kColumns = kInputs / kTileInputs;
  const std::int64_t column = std::int64_t{blockIdx.y} * kColumns;
  const auto count = static_cast<int>(min(columns - column, std::int64_t{kColumns}));
  auto* const to = reinterpret_cast<std::uint32_t*>(
      tiles + (std::int64_t{blockIdx.x} * columns + column) * Tile::kBytes);
  for (int i = static_cast<int>(threadIdx.x); i < count * Tile::kWords;
       i += static_cast<int>(blockDim.x)) {
    to[i] = Tile::word_of(i % Tile::kWords, TileRows<kCode, kInputs>{part, i / Tile::kWords});
  }
}

}  // namespace sluice::cuda
