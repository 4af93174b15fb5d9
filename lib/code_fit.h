// The zero and the scale that fit given codes best.
//
// Codes are chosen by the ends of a channel's range. One bit then says which half of the range a
// value is in, and the best two numbers for it are the means of the halves, not its ends. In
// general they are the line zero + scale * code through (code, value) by least squares, which also
// keeps the mean of the channel, so that errors do not add up over a page.
#pragma once

namespace sluice {

// Sums over the tokens of one channel of a page. In fp64 those of bf16 values are exact, so every
// backend, whatever its order, gets the same.
struct CodeFit {
  double values = 0.0;
  double products = 0.0;  // of values and codes
  int codes = 0;
  int squares = 0;  // of codes

  constexpr void add(float value, int code) {
    values += static_cast<double>(value);
    products += static_cast<double>(value) * code;
    codes += code;
    squares += code * code;
  }
  // 0 if all codes are alike.
  constexpr double scale(int tokens) const {
    const int spread = tokens * squares - codes * codes;
    return spread == 0 ? 0.0 : (tokens * products - values * codes) / spread;
  }
  // For a scale as it is stored.
  constexpr double zero(int tokens, double scale) const {
    return (values - scale * codes) / tokens;
  }
};

}  // namespace sluice
