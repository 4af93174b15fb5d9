// Layout of coded weights (lib/weight_code.h) on the device: tiles of 16 outputs and 128 inputs.
// Codes lie in the order in which the lanes of a warp hold the fragments of mma.m16n8k32, and of
// two of mma.m16n8k16, so that a lane's 16 codes of a group (kWeightGroup = 32 inputs, which share
// a scale) are one load of 8 (int4) or 16 (int8) bytes, and a tile one contiguous copy. Tiles of
// the same outputs follow each other. Outputs and inputs are padded with weights of scale 0.
//
//   scales    f16 [8 rows, 4 groups, 2]: row r, then row r + 8
//   offsets   the same, only int8
//   codes     words [4 groups, 32 lanes, 2 (int4) or 4 (int8)]
//
// A row is an output. Lane l has rows l / 4 and l / 4 + 8, and inputs 8 (l % 4) to 8 (l % 4) + 7 of
// each group: the first four in the first half of its words, the others in the second, which are
// the halves of a product of 32 inputs, or two products of 16. The order of inputs within a group
// is free, as long as activations have the same, and this one reads them together.
//
//   int4   a word has four codes of the lower row, then four of the upper one
//   int8   a word has four codes of one row; the second and the third are exchanged, because a mask
//          makes 16-bit numbers of bytes 0 and 2, or of 1 and 3
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "lib/backend/dense_ops.h"

namespace sluice::cuda {

inline constexpr int kTileOutputs = 16;
inline constexpr int kTileInputs = 128;
inline constexpr int kTileGroups = kTileInputs / static_cast<int>(kWeightGroup);

template <WeightCode kCode>
struct CodedTile {
  static constexpr bool kHasOffsets = kCode == WeightCode::int8;
  static constexpr int kBits = kCode == WeightCode::int8 ? 8 : 4;
  static constexpr int kScaleWords = kTileOutputs * kTileGroups / 2;
  static constexpr int kFirstCode = kScaleWords * (kHasOffsets ? 2 : 1);  // words before the codes
  static constexpr int kLaneWords = kBits / 2;  // of a lane's 16 codes of a group
  static constexpr int kWords = kFirstCode + kTileGroups * 32 * kLaneWords;
  static constexpr int kBytes = kWords * 4;

  // Place of a code: a word of the tile, and the lowest of its bits.
  struct Place {
    int word;
    int shift;
  };
  __host__ __device__ static constexpr Place place_of(int row, int input) {
    const int group = input / 32;
    const int lane = row % 8 * 4 + input % 32 / 8;
    const int half = input % 8 / 4;
    const int is_high = row / 8;
    const int word = kCode == WeightCode::int8 ? 2 * half + is_high : half;
    const int index = kCode == WeightCode::int8 ? exchanged(input % 4) : 4 * is_high + input % 4;
    return {kFirstCode + (group * 32 + lane) * kLaneWords + word, index * kBits};
  }

  // The inverse of place_of(): the row and the input whose code is at index `i` of a word.
  struct Weight {
    int row;
    int input;
  };
  __host__ __device__ static constexpr Weight weight_at(int word, int i) {
    const int code = word - kFirstCode;
    const int group = code / kLaneWords / 32;
    const int lane = code / kLaneWords % 32;
    const int of_lane = code % kLaneWords;
    const bool is_int8 = kCode == WeightCode::int8;
    const int half = is_int8 ? of_lane / 2 : of_lane;
    const int is_high = is_int8 ? of_lane % 2 : i / 4;
    const int of_half = is_int8 ? exchanged(i) : i % 4;
    return {lane / 4 + 8 * is_high, 32 * group + 8 * (lane % 4) + 4 * half + of_half};
  }

  // A word of the tile. `rows` has scale(row, group), offset(row, group), both as bits of an f16,
  // and code(row, input), as bits; all are 0 for padding.
  template <typename Rows>
  __host__ __device__ static std::uint32_t word_of(int word, const Rows& rows) {
    if (word < kFirstCode) {
      const int row = word % kScaleWords / kTileGroups;
      const int group = word % kTileGroups;
      if (word < kScaleWords) return rows.scale(row, group) | rows.scale(row + 8, group) << 16;
      return rows.offset(row, group) | rows.offset(row + 8, group) << 16;
    }
    std::uint32_t bits = 0;
    for (int i = 0; i < 32 / kBits; ++i) {
      const Weight at = weight_at(word, i);
      bits |= rows.code(at.row, at.input) << (i * kBits);
    }
    return bits;
  }

 private:
  // 0, 2, 1, 3.
  __host__ __device__ static constexpr int exchanged(int i) { return i % 2 * 2 + i / 2; }
};

// A coded matrix [outputs, inputs] on the device.
struct CodedMatrix {
  std::byte* tiles = nullptr;  // [tile_rows(), tile_columns()], 256-byte aligned
  WeightCode code = WeightCode::int8;
  std::int64_t outputs = 0;
  std::int64_t inputs = 0;

  std::int64_t tile_rows() const { return (outputs + kTileOutputs - 1) / kTileOutputs; }
  std::int64_t tile_columns() const { return (inputs + kTileInputs - 1) / kTileInputs; }
  std::int64_t tile_bytes() const {
    return code == WeightCode::int8 ? CodedTile<WeightCode::int8>::kBytes
                                    : CodedTile<WeightCode::int4>::kBytes;
  }
  std::uint64_t bytes() const {
    return static_cast<std::uint64_t>(tile_rows() * tile_columns() * tile_bytes());
  }
};

}  // namespace sluice::cuda
