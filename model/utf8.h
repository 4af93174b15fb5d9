// UTF-8: validation, lossy repair and the few facts about characters that the tokenizer needs.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace sluice {

// What stands at the start of some bytes: a character, the start of one that the bytes' end cuts
// off, or up to three bytes that can start no character (a "maximal subpart", Unicode 15, 3.9).
struct Utf8Unit {
  enum class Kind { character, unfinished, invalid };
  Kind kind = Kind::invalid;
  std::size_t length = 0;  // in bytes, at least 1
};

// `bytes` must not be empty.
Utf8Unit next_utf8_unit(std::string_view bytes);

// Offset of the first byte that is not part of a valid character.
std::optional<std::size_t> find_invalid_utf8(std::string_view bytes);
// Throws Error{prompt} that names it.
void require_utf8(std::string_view text);

// Every maximal subpart becomes one U+FFFD, as String::from_utf8_lossy of Rust does it.
std::string to_valid_utf8(std::string_view bytes);

// The same for a stream: takes all but an unfinished last character out of `pending`.
std::string take_valid_utf8(std::string& pending);

// The character at the start of valid UTF-8, and how to write one.
char32_t first_code_point(std::string_view text);
void append_utf8(std::string& text, char32_t code_point);

// The Unicode property White_Space.
bool is_white_space(char32_t code_point);

}  // namespace sluice
