// Products with coded weights (lib/weight_code.h). Weights are decoded in registers, because a
// decode step is bound by the bytes of its weights.
//
// Outputs are interleaved in blocks of 16, so that a vector holds one weight of each output, the
// group's scales are a vector, too, and no sum runs across lanes. Layout of a block:
//
//   scales    f16 [groups, 16]
//   offsets   f16 [groups, 16], not of int4
//   codes     int8: bytes [inputs, 16]; int4 and uint4: words of 8 weights [inputs / 8, 16]
#pragma once

#include <cstddef>
#include <cstdint>

#include "sluice/weight_format.h"

namespace sluice::cpu {

inline constexpr std::int64_t kCodedBlock = 16;  // outputs

// A coded matrix [outputs, inputs]; the last block is padded.
struct CodedMatrix {
  std::byte* blocks = nullptr;
  WeightFormat format;
  std::int64_t outputs = 0;
  std::int64_t inputs = 0;

  static std::uint64_t bytes(const WeightFormat& format, std::int64_t outputs,
                             std::int64_t inputs) {
    const std::int64_t blocks = (outputs + kCodedBlock - 1) / kCodedBlock;
    return static_cast<std::uint64_t>(blocks * kCodedBlock) * format.row_bytes(inputs);
  }
  // The block of `output`, a multiple of kCodedBlock.
  std::byte* block(std::int64_t output) const {
    return blocks + static_cast<std::size_t>(output) * format.row_bytes(inputs);
  }
};

// Stores coded rows [count, inputs] as the outputs from `first` on, a multiple of kCodedBlock.
void pack_rows(const CodedMatrix& to, std::int64_t first, std::int64_t count,
               const std::byte* rows);

// The weights [inputs] of one output.
void unpack_row(const CodedMatrix& weights, std::int64_t output, float* to);

// y[t, o] = sum_i x[t, i] * W[o, i] (+ bias[o]) (+ y[t, o] if `accumulate`), for outputs
// [first, first + outputs). The order of a sum does not depend on `outputs`.
struct CodedProduct {
  CodedMatrix weights;
  std::int64_t first = 0;  // a multiple of kCodedBlock
  std::int64_t outputs = 0;
  const float* x = nullptr;     // [tokens, inputs]
  const float* sums = nullptr;  // [tokens, inputs / kWeightGroup]: sum of x over each group
  std::int64_t tokens = 0;
  const float* bias = nullptr;  // [outputs] or null
  float* y = nullptr;           // [tokens, outputs], `y_stride` floats from token to token
  std::int64_t y_stride = 0;
  bool accumulate = false;
};
void multiply_coded(const CodedProduct& product);

// Decodes outputs [first, first + outputs), `first` a multiple of kCodedBlock, into columns of f32
// or bf16 [inputs, outputs].
void widen_columns(const CodedMatrix& weights, std::int64_t first, std::int64_t outputs,
                   DType dtype, std::byte* to);

}  // namespace sluice::cpu
