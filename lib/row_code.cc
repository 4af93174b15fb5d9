#include "sluice/row_code.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <optional>
#include <span>

#include "lib/check.h"
#include "sluice/row_format.h"

namespace sluice {
namespace {

constexpr std::uint16_t kNanScale = 0x7fc0;
constexpr float kLeastCoded = 0x1p-100f;

// Scales of values in int4 end above 2^124 * 1.9, because 8 times a scale has to be finite.
constexpr std::uint16_t kMostInt4Scale = 0x7df8;
// Bits of a float that are not in a scale of 5 significant bits.
constexpr int kInt4ScaleShift = 19;

constexpr int kMostHeadDim = 256;
constexpr int kMostGroups = int4_groups(kMostHeadDim);

std::uint32_t size_bits(float x) { return std::bit_cast<std::uint32_t>(x) & 0x7fffffffu; }

bool is_finite(std::uint32_t size) { return size < std::bit_cast<std::uint32_t>(HUGE_VALF); }
bool is_coded(std::uint32_t size) { return size >= std::bit_cast<std::uint32_t>(kLeastCoded); }

// The largest |x| as the bits of a float, which are ordered as the numbers are, with NaN above all.
std::uint32_t largest_of(const float* x, int count) {
  std::uint32_t largest = 0;
  for (int c = 0; c < count; ++c) largest = std::max(largest, size_bits(x[c]));
  return largest;
}

std::uint16_t int8_scale(std::uint32_t largest) {
  if (!is_finite(largest)) return kNanScale;
  if (!is_coded(largest)) return 0;
  const float scale = std::bit_cast<float>(largest) / 127.0f;
  return static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(scale) + 0xffffu) >> 16);
}

// The scale of a group: x / -8 for the x of largest size, the positive one of two.
std::uint16_t int4_scale_bits(const float* from, int count) {
  // The size, then one bit for positive numbers.
  std::uint32_t farthest = 0;
  for (int c = 0; c < count; ++c) {
    const bool is_positive = !std::signbit(from[c]);
    farthest = std::max(farthest, size_bits(from[c]) << 1 | (is_positive ? 1u : 0u));
  }
  const std::uint32_t size = farthest >> 1;
  if (!is_finite(size)) return kNanScale;
  if (!is_coded(size)) return 0;
  const std::uint32_t eighth = size - (3u << 23);
  const std::uint32_t rounded =
      (eighth + (1u << (kInt4ScaleShift - 1))) >> kInt4ScaleShift << (kInt4ScaleShift - 16);
  const auto scale = static_cast<std::uint16_t>(std::min<std::uint32_t>(rounded, kMostInt4Scale));
  return static_cast<std::uint16_t>(scale | ((farthest & 1u) != 0 ? 0x8000u : 0u));
}

// Rounds |x| < 2^22 to the nearest integer, ties to even. A vector instruction on any processor,
// unlike std::nearbyint().
float nearest(float x) { return x + 0x1.8p23f - 0x1.8p23f; }

// The code nearest to x whose lowest bit is `bit`.
int nearest_with(float x, int bit) {
  const float rounded = nearest(x);
  const int code = static_cast<int>(rounded);
  const int moved = code + (x >= rounded ? 1 : -1) * ((code ^ bit) & 1);
  return moved > 127 ? moved - 2 : moved;
}

// kScaleCodes codes of int8, with the bits of `word` in their lowest if there is one.
void encode_run(const float* from, float inverse, std::optional<std::uint16_t> word,
                std::byte* codes) {
  std::array<std::int8_t, kScaleCodes> run{};
  for (int i = 0; i < kScaleCodes; ++i) {
    const float x = from[i] * inverse;
    const int code = word ? nearest_with(x, *word >> i & 1) : static_cast<int>(nearest(x));
    run[static_cast<std::size_t>(i)] = static_cast<std::int8_t>(code);
  }
  std::memcpy(codes, run.data(), run.size());
}

// A key or value in int8. Its first run carries its scale; the last ones carry `words`, word 0 the
// very last.
void encode_int8(const float* from, int head_dim, std::span<const std::uint16_t> words,
                 std::byte* codes) {
  const std::uint16_t own = int8_scale(largest_of(from, head_dim));
  const float scale = bf16_to_float(own);
  static constexpr std::array<float, kMostHeadDim> kZeros{};
  const bool is_scaled = scale > 0.0f;  // else all codes are 0, but for the bits that they carry
  const float* const x = is_scaled ? from : kZeros.data();
  const float inverse = is_scaled ? 1.0f / scale : 0.0f;
  for (int first = 0; first < head_dim; first += kScaleCodes) {
    const auto from_end = static_cast<std::size_t>((head_dim - first) / kScaleCodes - 1);
    std::optional<std::uint16_t> word;
    if (first == 0) word = own;
    if (from_end < words.size()) word = words[from_end];
    encode_run(x + first, inverse, word, codes + first);
  }
}

// A group of up to kInt4Group channels of a value in int4.
void encode_int4(const float* from, int count, std::uint16_t scale_bits, std::byte* codes) {
  const float scale = bf16_to_float(scale_bits);
  std::array<int, kInt4Group> wanted{};
  if (scale != 0.0f && !std::isnan(scale)) {
    const float inverse = 1.0f / scale;
    for (int c = 0; c < count; ++c) {
      wanted[static_cast<std::size_t>(c)] =
          static_cast<int>(std::min(std::max(nearest(from[c] * inverse), -8.0f), 7.0f));
    }
  }
  for (std::size_t i = 0; i < kInt4Group / 2; ++i) {
    codes[i] = static_cast<std::byte>((wanted[i] & 15) | (wanted[i + kInt4Group / 2] & 15) << 4);
  }
}

// A value in int4; the scales of its groups are for the key's codes to carry.
std::span<const std::uint16_t> encode_int4(const float* from, int head_dim,
                                           std::span<std::uint16_t, kMostGroups> scales,
                                           std::byte* codes) {
  for (int first = 0; first < head_dim; first += kInt4Group) {
    const int count = std::min(kInt4Group, head_dim - first);
    std::uint16_t& scale = scales[static_cast<std::size_t>(first / kInt4Group)];
    scale = int4_scale_bits(from + first, count);
    encode_int4(from + first, count, scale, codes + first / 2);
  }
  return scales.first(static_cast<std::size_t>(int4_groups(head_dim)));
}

void decode_int4(const std::byte* codes, int head_dim, float* to) {
  constexpr int kHalf = kInt4Group / 2;
  for (int first = 0; first < head_dim; first += kInt4Group) {
    const float scale = int4_scale(codes, first / kInt4Group);
    std::array<std::int8_t, kHalf> both{};
    std::memcpy(both.data(), codes + first / 2, both.size());
    std::array<float, kInt4Group> elements{};
    for (std::size_t i = 0; i < kHalf; ++i) {
      elements[i] = scale * static_cast<float>(((both[i] & 15) ^ 8) - 8);
      elements[i + kHalf] = scale * static_cast<float>(both[i] >> 4);
    }
    std::copy_n(elements.data(), std::min(kInt4Group, head_dim - first), to + first);
  }
}

}  // namespace

void encode_row(RowCode format, const float* key, const float* value, int head_dim,
                std::byte* row) {
  const RowFormat rows = format;
  check(rows.is_coded() && rows.fits(head_dim) && head_dim <= kMostHeadDim,
        "rows: a head_dim that the code does not fit");
  std::byte* const v = row + rows.value_offset(head_dim);
  if (rows.value().code == PartCode::int4) {
    std::array<std::uint16_t, kMostGroups> scales{};
    return encode_int8(key, head_dim, encode_int4(value, head_dim, scales, v), row);
  }
  encode_int8(key, head_dim, {}, row);
  encode_int8(value, head_dim, {}, v);
}

void decode_part(PartCode code, const std::byte* part, int head_dim, float* to) {
  if (code == PartCode::int4) return decode_int4(part, head_dim, to);
  const float scale = scale_of(part);
  for (int c = 0; c < head_dim; ++c) {
    to[c] = scale * static_cast<float>(static_cast<std::int8_t>(part[c]));
  }
}

std::string to_string(const RowFormat& format) {
  switch (format.code) {
    case RowCode::elements:
      return std::string(to_string(format.element));
    case RowCode::int8:
      return "int8";
    case RowCode::k8v4:
      return "k8v4";
  }
  return "unknown";
}

}  // namespace sluice
