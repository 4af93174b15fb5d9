// Elements of rows as kernels load them: bf16, f16, or codes, which become numbers in registers.
// sluice/row_code.h defines codes and scales.
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

// Two codes of PartCode::int4; an element is the scale of its group times its code.
struct Int4Pair {
  std::uint8_t both;
};

template <typename T>
inline constexpr bool kIsInt4 = std::is_same_v<T, Int4Pair>;
template <typename T>
inline constexpr bool kIsCoded = std::is_same_v<T, Int8Code> || kIsInt4<T>;

// The type that tensor cores multiply. bf16 holds a code of int8 and an element of int4 exactly,
// and queries times a scale without overflow, as f16 would not.
template <typename T>
using MathOf = std::conditional_t<kIsCoded<T>, __nv_bfloat16, T>;

// Calls body(T()) with the type of a key's channels: __nv_bfloat16, __half or Int8Code.
template <typename Body>
void dispatch_key(const PartFormat& format, const Body& body) {
  if (format.code == PartCode::int8) return body(Int8Code());
  dispatch_rows(format.element, body);
}

// The same for a value's channels, which may also be Int4Pair.
template <typename Body>
void dispatch_value(const PartFormat& format, const Body& body) {
  if (format.code == PartCode::int4) return body(Int4Pair());
  dispatch_key(format, body);
}

// The types of a row's two parts.
template <typename K, typename V>
struct RowTypes {
  using Key = K;
  using Value = V;
};

// Calls body(RowTypes<K, V>()) for a format that is coded.
template <typename Body>
void dispatch_coded_rows(const RowFormat& format, const Body& body) {
  if (format.value().code == PartCode::int4) return body(RowTypes<Int8Code, Int4Pair>());
  body(RowTypes<Int8Code, Int8Code>());
}

// Calls body(RowTypes<K, V>()).
template <typename Body>
void dispatch_rows(const RowFormat& format, const Body& body) {
  if (format.is_coded()) return dispatch_coded_rows(format, body);
  dispatch_rows(format.element,
                [&](auto part) { body(RowTypes<decltype(part), decltype(part)>()); });
}

// int4_groups() for kernels.
__host__ __device__ constexpr int groups_of(int head_dim) {
  return (head_dim + kInt4Group - 1) / kInt4Group;
}

// Bytes of a key or value.
template <typename T>
__host__ __device__ constexpr int part_bytes(int head_dim) {
  if (kIsInt4<T>) return groups_of(head_dim) * kInt4Group / 2;
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

// The bits of the scale, a bf16, of a group of the value in int4 that begins at `value`.
__device__ __forceinline__ std::uint32_t int4_scale_bits(const std::byte* value, int group) {
  return scale_bits(reinterpret_cast<const uint4*>(value)[-1 - group]);
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

// The codes of int4 in the lowest four bits of the first and third byte as two bf16: 128 + (code +
// 8), less 136.
__device__ __forceinline__ std::uint32_t int4_pair(std::uint32_t bytes) {
  const std::uint32_t raised = (bytes & 0x000f000fu) ^ 0x43084308u;
  constexpr std::uint32_t kBase = 0x43084308u;
  const __nv_bfloat162 pair = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&raised),
                                      *reinterpret_cast<const __nv_bfloat162*>(&kBase));
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

// The products of two pairs of bf16.
__device__ __forceinline__ std::uint32_t multiply_pairs(std::uint32_t a, std::uint32_t b) {
  const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                         *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const std::uint32_t*>(&product);
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

// Elements [8 i, 8 i + 8) of a key or value in int8 that begins at `part`, rounded to bf16.
__device__ __forceinline__ uint4 rounded_elements(Int8Code, const std::byte* part, int i) {
  const std::uint32_t bits = scale_bits(*reinterpret_cast<const uint4*>(part)) * 0x10001u;
  const uint4 codes = math_elements(reinterpret_cast<const uint2*>(part)[i]);
  return make_uint4(multiply_pairs(codes.x, bits), multiply_pairs(codes.y, bits),
                    multiply_pairs(codes.z, bits), multiply_pairs(codes.w, bits));
}
// The same of a value in int4, exactly.
__device__ __forceinline__ uint4 rounded_elements(Int4Pair, const std::byte* value, int i) {
  const std::uint32_t bits = int4_scale_bits(value, i / 4) * 0x10001u;
  const uint2 both = reinterpret_cast<const uint2*>(value)[i / 4 * 2 + i % 2];
  const int shift = i % 4 < 2 ? 0 : 4;
  const auto elements = [&](std::uint32_t bytes, std::uint32_t which) {
    return multiply_pairs(int4_pair(__byte_perm(bytes >> shift, 0, which)), bits);
  };
  return make_uint4(elements(both.x, 0x4140), elements(both.x, 0x4342), elements(both.y, 0x4140),
                    elements(both.y, 0x4342));
}

// The code of int4 in the lowest four bits.
__device__ __forceinline__ float int4_code(int bits) {
  return static_cast<float>(((bits & 15) ^ 8) - 8);
}

// Element `c` of a key or value that begins at `part`.
template <typename T>
__device__ __forceinline__ float element_of(const std::byte* part, int c) {
  const T* const elements = reinterpret_cast<const T*>(part);
  if constexpr (kIsInt4<T>) {
    const float scale = __uint_as_float(int4_scale_bits(part, c / kInt4Group) << 16);
    const auto both = static_cast<int>(elements[c / kInt4Group * 16 + c % 16].both);
    return scale * int4_code(both >> (c % kInt4Group / 16 * 4));
  } else if constexpr (kIsCoded<T>) {
    return scale_of(part) * static_cast<float>(elements[c].value);
  } else {
    return to_float(elements[c]);
  }
}

}  // namespace sluice::cuda
