// How the key and the value of a token lie in a row, the same in every tier.
#pragma once

#include <cstddef>

#include "sluice/dtype.h"

namespace sluice {

// Rows start on cache lines: misaligned rows were measured 4 to 18 times slower over PCIe.
inline constexpr std::size_t kRowAlignment = 64;

// K, then V, head_dim elements each. Code that moves rows asks for bytes() alone; code that reads
// them also asks where the value begins and what it is made of. Separate from DType, the element
// type of arrays, because a row may be stored in a form that no array has.
struct RowFormat {
  DType element = DType::bf16;

  constexpr RowFormat() = default;
  constexpr RowFormat(DType type) : element(type) {}  // NOLINT(google-explicit-constructor)
  constexpr bool operator==(const RowFormat&) const = default;

  // Where V begins, in bytes; K begins at 0.
  constexpr std::size_t value_offset(int head_dim) const {
    return static_cast<std::size_t>(head_dim) * size_of(element);
  }
  // Bytes of K and V; the rest of a row is padding.
  constexpr std::size_t payload_bytes(int head_dim) const { return 2 * value_offset(head_dim); }
  // From one row to the next.
  constexpr std::size_t bytes(int head_dim) const {
    return (payload_bytes(head_dim) + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
  }
};

}  // namespace sluice
