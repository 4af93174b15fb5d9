// Random text for property tests.
#pragma once

#include <random>
#include <string>
#include <string_view>

#include "engine/utf8.h"

namespace sluice::testing {

// Valid UTF-8 of up to `characters` characters: any code point, but often those that tokenizers
// treat in a special way.
inline std::string random_text(std::mt19937_64& random, std::size_t characters) {
  constexpr std::u32string_view kSpecial =
      U"  \n\r\t'sS0123<>|\u00a0\u0085\u00e9\u0301\u0323\u3000\u1100\u1161\u11a8\u4e00\U0001f600";
  const auto below = [&](std::uint64_t limit) { return random() % limit; };
  std::string text;
  for (std::size_t i = below(characters + 1); i > 0; --i) {
    char32_t code_point = kSpecial[below(kSpecial.size())];
    if (below(2) == 0) code_point = static_cast<char32_t>('!' + below(94));
    if (below(8) == 0) code_point = static_cast<char32_t>(below(0x110000));
    if (code_point >= 0xD800 && code_point < 0xE000) code_point = U'\uFFFD';
    append_utf8(text, code_point);
  }
  return text;
}

// Any bytes, but often ones that begin or continue a character.
inline std::string random_bytes(std::mt19937_64& random, std::size_t length) {
  constexpr std::string_view kSpecial = "a\x80\xBF\xC2\xC3\xE0\xED\xE2\x82\xAC\xF0\x9F\x98\xF4\xFF";
  std::string bytes;
  for (std::size_t i = random() % (length + 1); i > 0; --i) {
    bytes += random() % 4 == 0 ? static_cast<char>(random() % 256)
                               : kSpecial[random() % kSpecial.size()];
  }
  return bytes;
}

}  // namespace sluice::testing
