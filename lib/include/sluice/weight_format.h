// The storage format of a weight matrix, in memory and on the way there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "sluice/dtype.h"

namespace sluice {

// A coded weight is a small integer; kWeightGroup consecutive weights of a row share a scale.
// lib/weight_code.h defines the bytes.
enum class WeightCode : std::uint8_t {
  elements,  // not coded: values of a DType
  int8,      // scale * code + offset, 9 bits per weight with the group's scale and offset
  int4,      // scale * one of 16 levels, 4.5 bits per weight with the group's scale
  uint4,     // scale * code + offset, 5 bits per weight: of files only, because levels lose less
};

inline constexpr std::int64_t kWeightGroup = 32;

// Format of a matrix's rows [inputs], which are contiguous; code that moves rows needs only
// row_bytes(). Separate from DType, the element type of arrays, because no array is coded.
struct WeightFormat {
  WeightCode code = WeightCode::elements;
  DType element = DType::bf16;  // of elements

  constexpr WeightFormat() = default;
  constexpr WeightFormat(DType type) : element(type) {}    // NOLINT(google-explicit-constructor)
  constexpr WeightFormat(WeightCode kind) : code(kind) {}  // NOLINT(google-explicit-constructor)
  constexpr bool operator==(const WeightFormat&) const = default;

  constexpr bool is_coded() const { return code != WeightCode::elements; }
  // Returns true if groups have an offset besides their scale.
  constexpr bool has_offsets() const {
    return code == WeightCode::int8 || code == WeightCode::uint4;
  }
  // Returns true if rows may have this many inputs: coded rows consist of whole groups.
  constexpr bool fits(std::int64_t inputs) const {
    return !is_coded() || inputs % kWeightGroup == 0;
  }
  constexpr std::size_t row_bytes(std::int64_t inputs) const {
    const auto count = static_cast<std::size_t>(inputs);
    const std::size_t groups = count / static_cast<std::size_t>(kWeightGroup);
    if (!is_coded()) return count * size_of(element);
    return (code == WeightCode::int8 ? count : count / 2) + groups * (has_offsets() ? 4 : 2);
  }
};

std::string_view to_string(WeightCode code);
std::string to_string(const WeightFormat& format);  // of elements, their DType

}  // namespace sluice
