// Layout of coded weights, and the conversion from and to elements.
//
//   int8 row    [groups] f16 scales, [groups] f16 offsets, [inputs] codes of -128 to 127
//               weight = scale * code + offset
//   int4 row    [groups] f16 scales, [inputs / 2] bytes: weight 2i in the low half of byte i
//               weight = scale * kWeightLevels[code]
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

// Byte offsets of the parts of a coded row of `inputs` weights.
struct CodedRow {
  std::size_t groups, offsets, codes;  // offsets == codes: the format has no offsets

  CodedRow(const WeightFormat& format, std::int64_t inputs);
};

// Codes rows of elements in place, because a coded row is shorter, and returns them. A group
// becomes NaN if one of its weights is NaN, infinite or too large for an f16 scale. `scratch`:
// [inputs].
WeightRows encode_rows(const WeightRows& rows, const WeightFormat& to, float* scratch);

// The weights [inputs] of a coded row.
void decode_row(const std::byte* row, const WeightFormat& format, std::int64_t inputs, float* to);

}  // namespace sluice
