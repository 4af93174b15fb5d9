// Angles of the rotary embedding as fractions of a turn, in 64 bits that wrap around at a full
// turn: exact at any position, whereas a product in fp32 is off by 0.03 radians near a million.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace sluice {

// The angle per token of a frequency in radians per token, in units of 2^-64 of a turn. The error
// is less than 2^-55 of a turn: 4e-7 radians at position 2^31.
inline std::uint64_t turn_per_token(float inverse_frequency) {
  const double turns = inverse_frequency / (2.0 * std::numbers::pi);
  return static_cast<std::uint64_t>(std::ldexp(turns - std::floor(turns), 64));
}

// The angle at a position in radians, in [-pi, pi].
inline float angle_at(std::uint64_t turn_per_token, std::int64_t position) {
  constexpr auto kRadians = static_cast<float>(2.0 * std::numbers::pi * 0x1p-64);
  const std::uint64_t turns = turn_per_token * static_cast<std::uint64_t>(position);
  return static_cast<float>(static_cast<std::int64_t>(turns)) * kRadians;
}

}  // namespace sluice
