// Rows as floats: the only place in the CPU backend that encodes and decodes whole rows. Attention
// and scans of raw keys decode elements in registers (attention/tile.h, scan/key_score.h).
#pragma once

#include <cstddef>

#include "cpu/runtime/elementwise.h"
#include "sluice/types.h"

namespace sluice::cpu {

// `key` and `value` have head_dim floats; padding after the value is left unchanged.
inline void write_row(const KvShape& shape, const float* key, const float* value, std::byte* row) {
  convert(key, DType::f32, row, shape.rows.element, shape.head_dim);
  convert(value, DType::f32, row + shape.value_offset(), shape.rows.element, shape.head_dim);
}

inline void read_key(const KvShape& shape, const std::byte* row, float* key) {
  convert(row, shape.rows.element, key, DType::f32, shape.head_dim);
}

inline void read_value(const KvShape& shape, const std::byte* row, float* value) {
  convert(row + shape.value_offset(), shape.rows.element, value, DType::f32, shape.head_dim);
}

}  // namespace sluice::cpu
