// The alphabet of byte-level BPE: every byte has a printable character that stands for it in
// tokenizer.json (Radford et al. 2019, GPT-2).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace sluice {

// The character of a byte, in UTF-8: "A" for 0x41, "Ġ" for 0x20.
std::string byte_symbol(std::uint8_t byte);

// The bytes that the symbols, valid UTF-8, stand for; nothing if a character is not in the
// alphabet.
std::optional<std::string> symbols_to_bytes(std::string_view symbols);

// Returns true if the byte occurs in UTF-8. 13 bytes do not, so no text needs a token for them.
constexpr bool occurs_in_utf8(std::uint8_t byte) {
  return byte != 0xC0 && byte != 0xC1 && byte < 0xF5;
}

}  // namespace sluice
