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
    encode_elements(key, shape.head_dim, row);
    return encode_elements(value, shape.head_dim, row + shape.value_offset());
  }
  convert(key, DType::f32, row, shape.rows.element, shape.head_dim);
  convert(value, DType::f32, row + shape.value_offset(), shape.rows.element, shape.head_dim);
}

// Reads a key or value that begins at `from`.
inline void read_elements(const KvShape& shape, const std::byte* from, float* to) {
  if (shape.rows.is_coded()) return decode_elements(from, shape.head_dim, to);
  convert(from, shape.rows.element, to, DType::f32, shape.head_dim);
}

inline void read_key(const KvShape& shape, const std::byte* row, float* key) {
  read_elements(shape, row, key);
}

inline void read_value(const KvShape& shape, const std::byte* row, float* value) {
  read_elements(shape, row + shape.value_offset(), value);
}

}  // namespace sluice::cpu
