// UTF-8: validation, lossy repair and the few character properties that the tokenizer needs.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace sluice {

// The unit at the start of some bytes: a character, a character cut off by the end of the bytes, or
// up to three bytes that cannot start a character (a "maximal subpart", Unicode 15, 3.9).
struct Utf8Unit {
  enum class Kind { character, unfinished, invalid };
  Kind kind = Kind::invalid;
  std::size_t length = 0;  // in bytes, at least 1
};

// `bytes` must not be empty.
Utf8Unit next_utf8_unit(std::string_view bytes);

// Offset of the first byte that is not part of a valid character.
std::optional<std::size_t> find_invalid_utf8(std::string_view bytes);
// Throws Error{prompt} naming the offset of the first invalid byte.
void require_utf8(std::string_view text);

// Every maximal subpart becomes one U+FFFD, as String::from_utf8_lossy of Rust does it.
std::string to_valid_utf8(std::string_view bytes);

// to_valid_utf8() for a stream: takes everything except an unfinished last character out of
// `pending`.
std::string take_valid_utf8(std::string& pending);

// Read the character at the start of valid UTF-8, and append one.
char32_t first_code_point(std::string_view text);
void append_utf8(std::string& text, char32_t code_point);

// The Unicode property White_Space.
bool is_white_space(char32_t code_point);

}  // namespace sluice
