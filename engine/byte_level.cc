#include "engine/byte_level.h"

#include <array>

#include "engine/utf8.h"

namespace sluice {
namespace {

constexpr std::size_t kHighest = 0x100 + 68;  // 68 bytes are not printable in Latin-1

constexpr bool printable(unsigned byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

struct Alphabet {
  std::array<char32_t, 256> symbols{};
  std::array<std::int16_t, kHighest> bytes{};  // by code point, -1 for none
};

constexpr Alphabet make_alphabet() {
  Alphabet alphabet;
  for (std::int16_t& byte : alphabet.bytes) byte = -1;
  char32_t next = 0x100;
  for (unsigned byte = 0; byte < 256; ++byte) {
    const char32_t symbol = printable(byte) ? byte : next++;
    alphabet.symbols[byte] = symbol;
    alphabet.bytes[symbol] = static_cast<std::int16_t>(byte);
  }
  return alphabet;
}

constexpr Alphabet kAlphabet = make_alphabet();

}  // namespace

std::string byte_symbol(std::uint8_t byte) {
  std::string symbol;
  append_utf8(symbol, kAlphabet.symbols.at(byte));
  return symbol;
}

std::optional<std::string> symbols_to_bytes(std::string_view symbols) {
  std::string bytes;
  while (!symbols.empty()) {
    const char32_t symbol = first_code_point(symbols);
    if (symbol >= kHighest || kAlphabet.bytes.at(symbol) < 0) return std::nullopt;
    bytes += static_cast<char>(kAlphabet.bytes.at(symbol));
    symbols.remove_prefix(next_utf8_unit(symbols).length);
  }
  return bytes;
}

}  // namespace sluice
