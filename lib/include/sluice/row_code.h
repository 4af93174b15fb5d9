// The bytes of coded rows, and the conversion from and to floats.
//
//   int8 row    [head_dim] codes of K, [head_dim] codes of V, each -128 to 127
//   k8v4 row    [head_dim] codes of K, then V in groups of 32 channels, 16 bytes each: byte i has
//               channel i of the group in its lower four bits and channel 16 + i in the upper ones,
//               each -8 to 7. The upper bits of half a group are 0
//               element = scale * code
//
// The scale of K, a bf16, is stored in the lowest bits of K's first 16 codes: bit i in code i. The
// scale of V in int8 is in V's codes. So such a row is half as long as one of bf16, is a multiple
// of cache lines where that is, and is complete by itself: code that moves rows does not know of
// scales, and a row read over PCIe or from a disk sector needs no second read. Scales beside the
// rows would cost a line each over PCIe; scales behind the codes, 64 bytes a row with their
// padding.
//
// A code of four bits has none to spare, so the scales of V in int4 are in K's codes, too: that of
// group g in the 16 codes that begin 16 (g + 1) bytes before V. Of a head_dim of 128, 80 codes of K
// carry a bit. K has bits to spare: nearly all of the loss of such rows is V's.
//
// The price is one bit of a code that carries one. With the scale s of int8, |element - x| <= s /
// 2, and <= s in channels that carry a bit, where a code is the nearest one that has the wanted
// lowest bit. s is max |x| over the head's channels, divided by 127 and rounded up to bf16.
//
// In int4 the channel of a group that is farthest from 0, x, gets the code -8, so the scale is x /
// -8, of either sign; with codes of -7 to 7 alone a step would be an eighth longer. The scale is
// rounded to 5 significant bits, because an element then has at most 8: it is exact in bf16, and
// tensor cores can multiply it. |element - x| <= |s| / 2, and <= 1.25 |s| on the side of 0 that has
// no code 8, for an x beyond 7.5 |s|.
//
// If an element is NaN or infinite, the scale is NaN, and with it all elements of that key, value
// or group. If all are below 2^-100, all are coded as 0.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "sluice/half.h"
#include "sluice/row_format.h"

namespace sluice {

// The lowest bits of 8 bytes, that of byte i at bit i. Multiplying moves bit 8 i to bit 56 + i; no
// two terms meet at the same bit.
inline unsigned lowest_bits(const std::byte* bytes) {
  static_assert(std::endian::native == std::endian::little);
  std::uint64_t word = 0;
  std::memcpy(&word, bytes, sizeof word);
  return static_cast<unsigned>((word & 0x0101010101010101ull) * 0x0102040810204080ull >> 56);
}

// The scale in the lowest bits of 16 codes: of a key or value in int8, given its first.
inline float scale_of(const std::byte* codes) {
  return bf16_to_float(
      static_cast<std::uint16_t>(lowest_bits(codes) | lowest_bits(codes + 8) << 8));
}
// The scale of a group of the value in int4 that begins at `value` in a row.
inline float int4_scale(const std::byte* value, std::int64_t group) {
  return scale_of(value - kScaleCodes * (group + 1));
}

// Element `c` of a key or value that begins at `part` in a coded row.
inline float decode_element(PartCode code, const std::byte* part, std::int64_t c) {
  if (code == PartCode::int8) {
    return scale_of(part) * static_cast<float>(static_cast<std::int8_t>(part[c]));
  }
  const std::int64_t group = c / kInt4Group;
  const std::int64_t place = c % kInt4Group;
  const auto both = static_cast<unsigned>(part[group * kInt4Group / 2 + place % 16]);
  const unsigned bits = place < 16 ? both & 15u : both >> 4;
  return int4_scale(part, group) * static_cast<float>(static_cast<int>(bits ^ 8u) - 8);
}

// Codes a key and a value [head_dim] as a row; its padding is left unchanged. `format` is coded and
// fits head_dim.
void encode_row(RowCode format, const float* key, const float* value, int head_dim, std::byte* row);
// The elements of a key or value [head_dim] that begins at `part` in a coded row.
void decode_part(PartCode code, const std::byte* part, int head_dim, float* to);

}  // namespace sluice
