// Rows as floats: the only place in the CPU backend that encodes and decodes whole rows. Attention
// and scans of raw keys decode elements in registers (runtime/simd-inl.h,
// attention/attend_bf16.cc).
#pragma once

#include <cstddef>

#include "cpu/runtime/elementwise.h"
#include "sluice/row_code.h"
#include "sluice/types.h"

namespace sluice::cpu {

// `key` and `value` have head_dim floats; padding after the value is left unchanged.
inline void write_row(const KvShape& shape, const float* key, const float* value, std::byte* row) {
  if (shape.rows.is_coded()) {
    return encode_row(shape.rows.code, key, value, shape.head_dim, row);
  }
  convert(key, DType::f32, row, shape.rows.element, shape.head_dim);
  convert(value, DType::f32, row + shape.value_offset(), shape.rows.element, shape.head_dim);
}

// Reads a key or value [head_dim] that begins at `part`.
inline void read_part(const PartFormat& format, const std::byte* part, int head_dim, float* to) {
  if (format.is_coded()) return decode_part(format.code, part, head_dim, to);
  convert(part, format.element, to, DType::f32, head_dim);
}

inline void read_key(const KvShape& shape, const std::byte* row, float* key) {
  read_part(shape.rows.key(), row, shape.head_dim, key);
}

inline void read_value(const KvShape& shape, const std::byte* row, float* value) {
  read_part(shape.rows.value(), row + shape.value_offset(), shape.head_dim, value);
}

}  // namespace sluice::cpu
