// The bytes of coded weights, and how weights become codes.
//
//   int8 row    [groups] f16 scales, [groups] f16 offsets, [inputs] codes of -128 to 127
//               weight = scale * code + offset
//   int4 row    [groups] f16 scales, [inputs / 2] bytes: weight 2i in the low half of byte i
//               weight = scale * kWeightLevels[code]
//
// Scales and offsets are those that a search over clipped ranges finds to have the least squared
// error. The 16 levels are closer together around zero, where most weights are; they are those of
// IQ4_NL in GGUF files. At 4.5 bits they lose less than uniform levels with an offset for every 64
// weights do (KL 0.108 against 0.132 with all matrices of sluice-22m).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "lib/backend/dense_ops.h"

namespace sluice {

inline constexpr std::array<std::int8_t, 16> kWeightLevels = {
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Where the parts of a coded row of `inputs` begin.
struct CodedRow {
  std::size_t groups, offsets, codes;  // offsets == codes: there are none

  CodedRow(const WeightFormat& format, std::int64_t inputs);
};

// Codes rows of elements in place, because a coded row is shorter, and returns them. A group with a
// weight that is not finite, or too large for an f16 scale, becomes NaN as a whole.
// `scratch`: floats of one row.
WeightRows encode_rows(const WeightRows& rows, const WeightFormat& to, float* scratch);

// The weights [inputs] of a coded row.
void decode_row(const std::byte* row, const WeightFormat& format, std::int64_t inputs, float* to);

}  // namespace sluice
