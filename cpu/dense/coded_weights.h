// Products with coded weights (lib/weight_code.h), which are decoded in registers: fewer bytes per
// weight are all that a decode step gains by.
//
// Outputs lie in blocks of 16, side by side, so that a vector has a weight of each, the group's
// scales are a vector too, and no sum runs across lanes. Of a block:
//
//   scales    f16 [groups, 16]
//   offsets   f16 [groups, 16], int8 alone
//   codes     int8: bytes [inputs, 16]; int4: words of 8 weights [inputs / 8, 16]
#pragma once

#include <cstddef>
#include <cstdint>

#include "sluice/weight_format.h"

namespace sluice::cpu {

inline constexpr std::int64_t kCodedBlock = 16;  // outputs

// Of [outputs, inputs]; the last block may have fewer outputs than it has room for.
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
  // `output` is a multiple of kCodedBlock.
  std::byte* block(std::int64_t output) const {
    return blocks + static_cast<std::size_t>(output) * format.row_bytes(inputs);
  }
};

// Stores coded rows [count, inputs] as the outputs from `first` on, a multiple of kCodedBlock.
void pack_rows(const CodedMatrix& to, std::int64_t first, std::int64_t count,
               const std::byte* rows);

// The weights [inputs] of one output.
void unpack_row(const CodedMatrix& weights, std::int64_t output, float* to);

// y[t, o] = sum over i of x[t, i] * W[o, i] (+ bias[o]) (+ what was there), for the outputs from
// `first` on. A sum's order does not depend on how many outputs there are.
struct CodedProduct {
  CodedMatrix weights;
  std::int64_t first = 0;  // a multiple of kCodedBlock
  std::int64_t outputs = 0;
  const float* x = nullptr;     // [tokens, inputs]
  const float* sums = nullptr;  // [tokens, inputs / kWeightGroup]: of the groups' x
  std::int64_t tokens = 0;      // a few
  const float* bias = nullptr;  // [outputs] or null
  float* y = nullptr;           // [tokens, outputs], `y_stride` floats from token to token
  std::int64_t y_stride = 0;
  bool accumulate = false;
};
void multiply_coded(const CodedProduct& product);

// The weights of `outputs` from `first` on, a multiple of kCodedBlock, as columns: f32 or bf16
// [inputs, outputs].
void widen_columns(const CodedMatrix& weights, std::int64_t first, std::int64_t outputs,
                   DType dtype, std::byte* to);

}  // namespace sluice::cpu
