// Angles of the rotary embedding as fractions of a turn, in 64 bits that overflow where a turn
// ends: exact at any position, where a product in fp32 is off by 0.03 radians near a million.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace sluice {

// What a frequency, in radians per token, turns by from token to token, in 2^-64 of a turn. Off by
// less than 2^-55 of a turn: by 4e-7 radians at position 2^31.
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
