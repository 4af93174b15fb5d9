// The bytes of coded rows, and the conversion from and to floats.
//
//   int8 row    [head_dim] codes of K, [head_dim] codes of V, each -128 to 127
//               element = scale * code
//
// The scale of K, a bf16, is stored in the lowest bits of K's first 16 codes: bit i in code i. The
// scale of V is in V's codes. So a row is half as long as one of bf16, is a multiple of cache lines
// where that is, and is complete by itself: code that moves rows does not know of scales, and a row
// read over PCIe or from a disk sector needs no second read. Scales beside the rows would cost a
// line each over PCIe; scales behind the codes, 64 bytes a row with their padding.
//
// The price is one bit of these 16 codes. With the scale s, |element - x| <= s / 2, and <= s in the
// first 16 channels, where a code is the nearest one that has the wanted lowest bit. s is max |x|
// over the head's channels, divided by 127 and rounded up to bf16.
//
// If an element is NaN or infinite, the scale is NaN, and with it all elements of that key or
// value. If all are below 2^-100, all are coded as 0.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "sluice/half.h"
#include "sluice/row_format.h"

namespace sluice {

inline constexpr int kScaleCodes = 16;

// The lowest bits of 8 bytes, that of byte i at bit i. Multiplying moves bit 8 i to bit 56 + i; no
// two terms meet at the same bit.
inline unsigned lowest_bits(const std::byte* bytes) {
  static_assert(std::endian::native == std::endian::little);
  std::uint64_t word = 0;
  std::memcpy(&word, bytes, sizeof word);
  return static_cast<unsigned>((word & 0x0101010101010101ull) * 0x0102040810204080ull >> 56);
}

// The scale of a key or value in int8, given its codes.
inline float scale_of(const std::byte* codes) {
  return bf16_to_float(
      static_cast<std::uint16_t>(lowest_bits(codes) | lowest_bits(codes + 8) << 8));
}

// Element `c` of a key or value that begins at `part` in a coded row.
inline float decode_element(PartCode /*code*/, const std::byte* part, std::int64_t c) {
  return scale_of(part) * static_cast<float>(static_cast<std::int8_t>(part[c]));
}

// Codes a key and a value [head_dim] as a row; its padding is left unchanged. `format` is coded and
// fits head_dim.
void encode_row(RowCode format, const float* key, const float* value, int head_dim, std::byte* row);
// The elements of a key or value [head_dim] that begins at `part` in a coded row.
void decode_part(PartCode code, const std::byte* part, int head_dim, float* to);

}  // namespace sluice
