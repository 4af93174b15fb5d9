// Numbers in the dtypes of rows and activations.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include "sluice/element.h"
#include "sluice/half.h"
#include "sluice/types.h"
#include "tests/support/device.h"

namespace sluice::testing {

inline std::vector<float> rounded(std::vector<float> values, DType dtype) {
  for (float& value : values) {
    if (dtype == DType::bf16) value = bf16_to_float(float_to_bf16(value));
    if (dtype == DType::f16) value = f16_to_float(float_to_f16(value));
  }
  return values;
}

// The bytes of `values` as `dtype`.
inline std::vector<std::byte> encoded(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * size_of(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint16_t half =
        dtype == DType::bf16 ? float_to_bf16(values[i]) : float_to_f16(values[i]);
    if (dtype == DType::f32) std::memcpy(&bytes[4 * i], &values[i], 4);
    if (dtype != DType::f32) std::memcpy(&bytes[2 * i], &half, 2);
  }
  return bytes;
}

inline std::vector<float> decoded(const std::vector<std::byte>& bytes, DType dtype) {
  std::vector<float> values(bytes.size() / size_of(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::uint16_t half = 0;
    if (dtype == DType::f32) std::memcpy(&values[i], &bytes[4 * i], 4);
    if (dtype != DType::f32) std::memcpy(&half, &bytes[2 * i], 2);
    if (dtype == DType::bf16) values[i] = bf16_to_float(half);
    if (dtype == DType::f16) values[i] = f16_to_float(half);
  }
  return values;
}

inline std::vector<float> values_of(Device& backend, const Buffer& buffer, DType dtype) {
  return decoded(download<std::byte>(backend, buffer), dtype);
}

// The row formats that a backend supports for this head_dim.
inline std::vector<RowFormat> row_formats(const Device& backend, int head_dim) {
  std::vector<RowFormat> all = {DType::f16, DType::bf16};
  if (backend.info().f32_rows) all.emplace_back(DType::f32);
  for (const RowFormat coded : {RowCode::int8, RowCode::k8v4}) {
    if (backend.info().takes(coded) && coded.fits(head_dim)) all.push_back(coded);
  }
  return all;
}

// The bytes of K and V, [head_dim] each, in a row, without its padding.
inline std::vector<std::byte> encoded_row(const std::vector<float>& key,
                                          const std::vector<float>& value,
                                          const RowFormat& format) {
  const auto head_dim = static_cast<int>(key.size());
  std::vector<std::byte> row;
  if (format.is_coded()) {
    row.resize(format.payload_bytes(head_dim));
    encode_row(format.code, key.data(), value.data(), head_dim, row.data());
    return row;
  }
  row = encoded(key, format.element);
  const std::vector<std::byte> rest = encoded(value, format.element);
  row.insert(row.end(), rest.begin(), rest.end());
  return row;
}

// V [head_dim] as a row has it.
inline std::vector<float> rounded_value(const std::vector<float>& value, const RowFormat& format) {
  const auto head_dim = static_cast<int>(value.size());
  const std::vector<std::byte> row = encoded_row(value, value, format);
  std::vector<float> result;
  for (int c = 0; c < head_dim; ++c) {
    result.push_back(read_element(row.data() + format.value_offset(head_dim), format.value(), c));
  }
  return result;
}

}  // namespace sluice::testing
