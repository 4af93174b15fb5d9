// Single elements of any dtype. Loops over many elements, where time matters, are in cpu/ and
// kernels/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "sluice/half.h"
#include "sluice/row_code.h"
#include "sluice/types.h"

namespace sluice {

inline float read_element(const std::byte* data, DType dtype) {
  if (dtype == DType::f32) {
    float value = 0.0f;
    std::memcpy(&value, data, sizeof value);
    return value;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, data, sizeof bits);
  return dtype == DType::bf16 ? bf16_to_float(bits) : f16_to_float(bits);
}

// Channel `c` of the key or value that begins at `part` in a row.
inline float read_element(const std::byte* part, const PartFormat& format, std::int64_t c) {
  if (format.is_coded()) return decode_element(format.code, part, c);
  return read_element(part + static_cast<std::size_t>(c) * size_of(format.element), format.element);
}

// Rounds to nearest.
inline void write_element(std::byte* data, DType dtype, float value) {
  if (dtype == DType::f32) {
    std::memcpy(data, &value, sizeof value);
    return;
  }
  const std::uint16_t bits = dtype == DType::bf16 ? float_to_bf16(value) : float_to_f16(value);
  std::memcpy(data, &bits, sizeof bits);
}

}  // namespace sluice
