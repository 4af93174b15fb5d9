// Layout of coded weights, and the conversion from and to elements.
//
//   int8 row    [groups] f16 scales, [groups] f16 offsets, [inputs] codes of -128 to 127
//               weight = scale * code + offset
//   int4 row    [groups] f16 scales, [inputs / 2] bytes: weight 2i in the low half of byte i
//               weight = scale * kWeightLevels[code]
//   uint4 row   [groups] f16 scales, [groups] f16 offsets, [inputs / 2] bytes as of int4
//               weight = scale * code + offset
//
// Scales and offsets minimise the squared error over a search of clipped ranges. The 16 levels,
// those of IQ4_NL in GGUF files, are denser around zero, because most weights are there; at the
// same 4.5 bits they lose less than uniform levels with an offset for every 64 weights.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "lib/backend/dense_ops.h"

namespace sluice {

inline constexpr std::array<std::int8_t, 16> kWeightLevels = {
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// What the 16 codes of int4 and uint4 stand for before they are scaled.
constexpr std::array<std::int8_t, 16> four_bit_values(WeightCode code) {
  if (code == WeightCode::int4) return kWeightLevels;
  return {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}

// Byte offsets of the parts of a coded row of `inputs` weights.
struct CodedRow {
  std::size_t groups, offsets, codes;  // offsets == codes: the format has no offsets

  CodedRow(const WeightFormat& format, std::int64_t inputs);
};

// Codes rows of elements in place, because a coded row is shorter, and returns them. A group
// becomes NaN if one of its weights is NaN, infinite or too large for an f16 scale. `scratch`:
// [inputs].
WeightRows encode_rows(const WeightRows& rows, const WeightFormat& to, float* scratch);

// A group of weights with codes from a file.
struct CodedGroup {
  WeightCode code = WeightCode::elements;
  std::array<std::uint8_t, kWeightGroup> codes = {};  // of int8 in two's complement
  float scale = 0.0f;
  float offset = 0.0f;
};

// Writes group `index` of a coded row [inputs] in `format`: in the group's own code, or in int8,
// which holds the codes and levels of all. Scale and offset are rounded to f16.
void put_group(const CodedGroup& group, std::size_t index, const WeightFormat& format,
               const CodedRow& at, std::byte* row);

// The weights [inputs] of a coded row.
void decode_row(const std::byte* row, const WeightFormat& format, std::int64_t inputs, float* to);

}  // namespace sluice
