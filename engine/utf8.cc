#include "engine/utf8.h"

#include <cstdint>
#include <cstring>
#include <string>

#include "lib/check.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

std::uint8_t byte_at(std::string_view bytes, std::size_t index) {
  return static_cast<std::uint8_t>(bytes[index]);
}

// A character's length by its first byte and the range of its second byte (Unicode 15, table 3-7);
// the bytes after that are 80..BF.
struct Lead {
  std::size_t length = 0;  // 0: starts no character
  std::uint8_t low = 0x80;
  std::uint8_t high = 0xBF;
};

Lead classify(std::uint8_t byte) {
  if (byte < 0x80) return {1};
  if (byte < 0xC2) return {};
  if (byte < 0xE0) return {2};
  if (byte == 0xE0) return {3, 0xA0, 0xBF};
  if (byte == 0xED) return {3, 0x80, 0x9F};
  if (byte < 0xF0) return {3};
  if (byte == 0xF0) return {4, 0x90, 0xBF};
  if (byte < 0xF4) return {4};
  if (byte == 0xF4) return {4, 0x80, 0x8F};
  return {};
}

// Bytes below 0x80 at the start of `bytes`, counted eight at a time.
std::size_t ascii_prefix(std::string_view bytes) {
  std::size_t length = 0;
  std::uint64_t word = 0;
  while (length + sizeof word <= bytes.size()) {
    std::memcpy(&word, bytes.data() + length, sizeof word);
    if ((word & 0x8080808080808080u) != 0) break;
    length += sizeof word;
  }
  while (length < bytes.size() && byte_at(bytes, length) < 0x80) ++length;
  return length;
}

// Appends the units of `bytes` to `text` up to an unfinished last one; returns where that begins.
std::size_t append_valid(std::string_view bytes, std::string& text) {
  std::size_t at = 0;
  while (at < bytes.size()) {
    const Utf8Unit unit = next_utf8_unit(bytes.substr(at));
    if (unit.kind == Utf8Unit::Kind::unfinished) break;
    text += unit.kind == Utf8Unit::Kind::character ? bytes.substr(at, unit.length) : kReplacement;
    at += unit.length;
  }
  return at;
}

}  // namespace

Utf8Unit next_utf8_unit(std::string_view bytes) {
  const Lead lead = classify(byte_at(bytes, 0));
  if (lead.length == 0) return {Utf8Unit::Kind::invalid, 1};
  for (std::size_t i = 1; i < lead.length; ++i) {
    if (i == bytes.size()) return {Utf8Unit::Kind::unfinished, i};
    const std::uint8_t byte = byte_at(bytes, i);
    const std::uint8_t low = i == 1 ? lead.low : 0x80;
    const std::uint8_t high = i == 1 ? lead.high : 0xBF;
    if (byte < low || byte > high) return {Utf8Unit::Kind::invalid, i};
  }
  return {Utf8Unit::Kind::character, lead.length};
}

std::optional<std::size_t> find_invalid_utf8(std::string_view bytes) {
  std::size_t at = ascii_prefix(bytes);
  while (at < bytes.size()) {
    const Utf8Unit unit = next_utf8_unit(bytes.substr(at));
    if (unit.kind != Utf8Unit::Kind::character) return at;
    at += unit.length;
    at += ascii_prefix(bytes.substr(at));
  }
  return std::nullopt;
}

void require_utf8(std::string_view text) {
  if (const auto offset = find_invalid_utf8(text)) {
    throw Error(ErrorCode::prompt, "the text is not UTF-8: the byte at offset " +
                                       std::to_string(*offset) +
                                       " begins no character; convert it to UTF-8");
  }
}

std::string to_valid_utf8(std::string_view bytes) {
  std::string text;
  text.reserve(bytes.size());
  if (append_valid(bytes, text) < bytes.size()) text += kReplacement;
  return text;
}

std::string take_valid_utf8(std::string& pending) {
  std::string text;
  pending.erase(0, append_valid(pending, text));
  return text;
}

char32_t first_code_point(std::string_view text) {
  const Lead lead = classify(byte_at(text, 0));
  check(lead.length > 0 && lead.length <= text.size(), "not a whole UTF-8 character");
  if (lead.length == 1) return byte_at(text, 0);
  char32_t code_point = byte_at(text, 0) & (0x7Fu >> lead.length);
  for (std::size_t i = 1; i < lead.length; ++i) {
    code_point = (code_point << 6) | (byte_at(text, i) & 0x3Fu);
  }
  return code_point;
}

void append_utf8(std::string& text, char32_t code_point) {
  const auto tail = [&](int shift) {
    text += static_cast<char>(0x80u | ((code_point >> shift) & 0x3Fu));
  };
  if (code_point < 0x80) {
    text += static_cast<char>(code_point);
  } else if (code_point < 0x800) {
    text += static_cast<char>(0xC0u | (code_point >> 6));
    tail(0);
  } else if (code_point < 0x10000) {
    text += static_cast<char>(0xE0u | (code_point >> 12));
    tail(6);
    tail(0);
  } else {
    text += static_cast<char>(0xF0u | (code_point >> 18));
    tail(12);
    tail(6);
    tail(0);
  }
}

bool is_white_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

}  // namespace sluice
