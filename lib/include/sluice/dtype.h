// Element types of arrays: checkpoints, activations, and K and V in rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace sluice {

enum class DType : std::uint8_t { f32, f16, bf16 };

// Bytes of an element.
constexpr std::size_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }
std::string_view to_string(DType dtype);

}  // namespace sluice
