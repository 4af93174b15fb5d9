// How a matrix of weights is stored: in memory, and while it is written there.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sluice/dtype.h"

namespace sluice {

// The rows [inputs] of a matrix, one after the other. Code that moves rows asks for row_bytes()
// alone. Separate from DType, the element type of arrays, because weights may be stored in a form
// that no array has.
struct WeightFormat {
  DType element = DType::bf16;

  constexpr WeightFormat() = default;
  constexpr WeightFormat(DType type) : element(type) {}  // NOLINT(google-explicit-constructor)
  constexpr bool operator==(const WeightFormat&) const = default;

  constexpr std::size_t row_bytes(std::int64_t inputs) const {
    return static_cast<std::size_t>(inputs) * size_of(element);
  }
};

}  // namespace sluice
