// Elements of rows as kernels load them: bf16, f16, or the codes of int8 rows, which become numbers
// in registers. sluice/row_code.h defines codes and scales.
#pragma once

#include <cstddef>
#include <type_traits>

#include "kernels/runtime/device_math.cuh"
#include "kernels/runtime/dispatch.h"
#include "sluice/row_format.h"

namespace sluice::cuda {

// A code of PartCode::int8; the element is scale * code.
struct Int8Code {
  std::int8_t value;
};

template <typename T>
inline constexpr bool kIsCoded = std::is_same_v<T, Int8Code>;

// The type that tensor cores multiply. bf16 holds a code exactly, and queries times a scale without
// overflow, as f16 would not.
template <typename T>
using MathOf = std::conditional_t<kIsCoded<T>, __nv_bfloat16, T>;

// Calls body(T()) with the type of a key's channels: __nv_bfloat16, __half or Int8Code.
template <typename Body>
void dispatch_key(const PartFormat& format, const Body& body) {
  if (format.code == PartCode::int8) return body(Int8Code());
  dispatch_rows(format.element, body);
}

// The same for a value's channels.
template <typename Body>
void dispatch_value(const PartFormat& format, const Body& body) {
  dispatch_key(format, body);
}

// The types of a row's two parts.
template <typename K, typename V>
struct RowTypes {
  using Key = K;
  using Value = V;
};

// Calls body(RowTypes<K, V>()).
template <typename Body>
void dispatch_rows(const RowFormat& format, const Body& body) {
  dispatch_key(format.key(), [&](auto part) { body(RowTypes<decltype(part), decltype(part)>()); });
}

// Bytes of a key or value.
template <typename T>
__host__ __device__ constexpr int part_bytes(int head_dim) {
  return head_dim * static_cast<int>(sizeof(T));
}

// The lowest bits of four codes, that of byte i at bit i: see lowest_bits() in sluice/row_code.h.
__device__ __forceinline__ std::uint32_t lowest_bits(std::uint32_t codes) {
  return (codes & 0x01010101u) * 0x01020408u >> 24;
}

// The bits of the scale, a bf16, of a key or value whose first codes these are.
__device__ __forceinline__ std::uint32_t scale_bits(const uint4& codes) {
  return lowest_bits(codes.x) | lowest_bits(codes.y) << 4 | lowest_bits(codes.z) << 8 |
         lowest_bits(codes.w) << 12;
}

// The scale of a key or value that begins at `part`, aligned to 16 bytes.
__device__ __forceinline__ float scale_of(const std::byte* part) {
  return __uint_as_float(scale_bits(*reinterpret_cast<const uint4*>(part)) << 16);
}

// The codes in the first and third byte as two bf16: 128 + (code & 127), less 256 if the code is
// negative, else 128.
__device__ __forceinline__ std::uint32_t code_pair(std::uint32_t bytes) {
  const std::uint32_t low = (bytes & 0x007f007fu) | 0x43004300u;
  const std::uint32_t base = (bytes & 0x00800080u) | 0x43004300u;
  const __nv_bfloat162 pair = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&low),
                                      *reinterpret_cast<const __nv_bfloat162*>(&base));
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

// Four codes in a row as bf16: the first two, the others.
__device__ __forceinline__ uint2 code_pairs(std::uint32_t codes) {
  return make_uint2(code_pair(__byte_perm(codes, 0, 0x1100)),
                    code_pair(__byte_perm(codes, 0, 0x3322)));
}

// Eight elements as tensor cores multiply them; without the scale where they are codes.
__device__ __forceinline__ const uint4& math_elements(const uint4& elements) { return elements; }
__device__ __forceinline__ uint4 math_elements(const uint2& codes) {
  const uint2 first = code_pairs(codes.x);
  const uint2 second = code_pairs(codes.y);
  return make_uint4(first.x, first.y, second.x, second.y);
}

// Elements [8 i, 8 i + 8) of a coded key or value that begins at `part`, rounded to bf16.
__device__ __forceinline__ uint4 rounded_elements(const std::byte* part, int i) {
  const std::uint32_t bits = scale_bits(*reinterpret_cast<const uint4*>(part)) * 0x10001u;
  const auto scaled = [&](std::uint32_t pair) {
    const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair),
                                           *reinterpret_cast<const __nv_bfloat162*>(&bits));
    return *reinterpret_cast<const std::uint32_t*>(&product);
  };
  const uint4 codes = math_elements(reinterpret_cast<const uint2*>(part)[i]);
  return make_uint4(scaled(codes.x), scaled(codes.y), scaled(codes.z), scaled(codes.w));
}

// Element `c` of a key or value that begins at `part`.
template <typename T>
__device__ __forceinline__ float element_of(const std::byte* part, int c) {
  const T* const elements = reinterpret_cast<const T*>(part);
  if constexpr (kIsCoded<T>) {
    return scale_of(part) * static_cast<float>(elements[c].value);
  } else {
    return to_float(elements[c]);
  }
}

}  // namespace sluice::cuda
