// How the key and the value of a token lie in a row, the same in every tier.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "sluice/dtype.h"

namespace sluice {

// Rows start on cache lines: misaligned rows were measured 4 to 18 times slower over PCIe.
inline constexpr std::size_t kRowAlignment = 64;

// Coded rows are smaller than rows of elements; sluice/row_code.h defines their bytes.
enum class RowCode : std::uint8_t {
  elements,  // not coded: values of a DType
  int8,      // K and V in PartCode::int8
  k8v4,      // K in PartCode::int8, V in PartCode::int4
};
inline constexpr RowCode kLastRowCode = RowCode::k8v4;

// How the channels of a key or a value are coded.
enum class PartCode : std::uint8_t {
  elements,  // not coded
  int8,      // scale * code, with one scale
  int4,      // scale * code, with a scale for each kInt4Group channels; of a value only
};

// Codes that carry a bit each of a scale, a bf16, in their lowest bits.
inline constexpr int kScaleCodes = 16;
// Channels of a value in int4 that share a scale.
inline constexpr int kInt4Group = 32;
constexpr int int4_groups(int head_dim) { return (head_dim + kInt4Group - 1) / kInt4Group; }

// What a key or a value is made of.
struct PartFormat {
  PartCode code = PartCode::elements;
  DType element = DType::bf16;  // of elements

  constexpr bool is_coded() const { return code != PartCode::elements; }
  constexpr std::size_t bytes(int head_dim) const {
    switch (code) {
      case PartCode::elements:
        return static_cast<std::size_t>(head_dim) * size_of(element);
      case PartCode::int8:
        return static_cast<std::size_t>(head_dim);
      case PartCode::int4:
        return static_cast<std::size_t>(int4_groups(head_dim)) * kInt4Group / 2;
    }
    return 0;
  }
};

// K, then V, of head_dim channels each. Code that moves rows asks for bytes() alone; code that
// reads them also asks where the value begins and what key() and value() are made of. Separate from
// DType, the element type of arrays, because no array is coded.
struct RowFormat {
  RowCode code = RowCode::elements;
  DType element = DType::bf16;  // of elements

  constexpr RowFormat() = default;
  constexpr RowFormat(DType type) : element(type) {}  // NOLINT(google-explicit-constructor)
  constexpr RowFormat(RowCode kind) : code(kind) {}   // NOLINT(google-explicit-constructor)
  constexpr bool operator==(const RowFormat&) const = default;

  constexpr bool is_coded() const { return code != RowCode::elements; }
  // Keys and values carry scales in runs of kScaleCodes codes, so head_dim is a multiple of it from
  // this on: keys of k8v4 carry two scales or more.
  constexpr int least_head_dim() const { return (code == RowCode::k8v4 ? 2 : 1) * kScaleCodes; }
  // Returns true if rows may have this head_dim.
  constexpr bool fits(int head_dim) const {
    return !is_coded() || (head_dim % kScaleCodes == 0 && head_dim >= least_head_dim());
  }

  constexpr PartFormat key() const {
    return {is_coded() ? PartCode::int8 : PartCode::elements, element};
  }
  constexpr PartFormat value() const {
    return code == RowCode::k8v4 ? PartFormat{PartCode::int4, element} : key();
  }

  // Where V begins, in bytes; K begins at 0.
  constexpr std::size_t value_offset(int head_dim) const { return key().bytes(head_dim); }
  // Bytes of K and V; the rest of a row is padding.
  constexpr std::size_t payload_bytes(int head_dim) const {
    return value_offset(head_dim) + value().bytes(head_dim);
  }
  // From one row to the next.
  constexpr std::size_t bytes(int head_dim) const {
    return (payload_bytes(head_dim) + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
  }
};

// "bf16", "int8", "k8v4", ...
std::string to_string(const RowFormat& format);

}  // namespace sluice
