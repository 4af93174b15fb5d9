#include "sluice/row_code.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "lib/check.h"
#include "sluice/row_format.h"

namespace sluice {
namespace {

constexpr std::uint16_t kNanScale = 0x7fc0;

// The largest |x| as the bits of a float, which are ordered as the numbers are, with NaN above all.
std::uint32_t largest_of(const float* x, int count) {
  std::uint32_t largest = 0;
  for (int c = 0; c < count; ++c) {
    largest = std::max(largest, std::bit_cast<std::uint32_t>(x[c]) & 0x7fffffffu);
  }
  return largest;
}

std::uint16_t scale_bits(std::uint32_t largest) {
  if (largest >= std::bit_cast<std::uint32_t>(HUGE_VALF)) return kNanScale;
  if (largest < std::bit_cast<std::uint32_t>(0x1p-100f)) return 0;
  const float scale = std::bit_cast<float>(largest) / 127.0f;
  return static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(scale) + 0xffffu) >> 16);
}

// Rounds |x| < 2^22 to the nearest integer, ties to even. A vector instruction on any processor,
// unlike std::nearbyint().
float nearest(float x) { return x + 0x1.8p23f - 0x1.8p23f; }

// The code nearest to x whose lowest bit is `bit`.
int nearest_with(float x, int bit) {
  const float rounded = nearest(x);
  int code = static_cast<int>(rounded);
  if ((code & 1) != bit) code += x >= rounded ? 1 : -1;
  return code > 127 ? code - 2 : code;
}

// A key or value in int8.
void encode_int8(const float* from, int head_dim, std::byte* codes) {
  const std::uint16_t bits = scale_bits(largest_of(from, head_dim));
  const float scale = bf16_to_float(bits);
  const auto bit = [&](int c) { return bits >> c & 1; };
  if (!(scale > 0.0f)) {
    for (int c = 0; c < head_dim; ++c) codes[c] = static_cast<std::byte>(c < 16 ? bit(c) : 0);
    return;
  }
  const float inverse = 1.0f / scale;
  for (int c = 0; c < kScaleCodes; ++c) {
    codes[c] = static_cast<std::byte>(nearest_with(from[c] * inverse, bit(c)));
  }
  for (int c = kScaleCodes; c < head_dim; ++c) {
    codes[c] = static_cast<std::byte>(static_cast<int>(nearest(from[c] * inverse)));
  }
}

}  // namespace

void encode_row(RowCode format, const float* key, const float* value, int head_dim,
                std::byte* row) {
  const RowFormat rows = format;
  check(rows.is_coded() && rows.fits(head_dim), "rows: a head_dim that the code does not fit");
  encode_int8(key, head_dim, row);
  encode_int8(value, head_dim, row + rows.value_offset(head_dim));
}

void decode_part(PartCode /*code*/, const std::byte* part, int head_dim, float* to) {
  const float scale = scale_of(part);
  for (int c = 0; c < head_dim; ++c) {
    to[c] = scale * static_cast<float>(static_cast<std::int8_t>(part[c]));
  }
}

std::string to_string(const RowFormat& format) {
  return format.code == RowCode::int8 ? "int8" : std::string(to_string(format.element));
}

}  // namespace sluice
