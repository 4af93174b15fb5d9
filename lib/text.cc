#include "lib/text.h"

#include <utf8proc.h>

#include <array>
#include <cstdio>

#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr std::size_t kLongestLine = 2000;  // bytes
constexpr std::size_t kLongestName = 96;
constexpr std::string_view kCut = "...";

// Letters, marks, numbers, punctuation, symbols and spaces. Others can move or hide text.
bool is_shown(utf8proc_int32_t code_point) {
  switch (utf8proc_category(code_point)) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return false;
    default:
      return true;
  }
}

void append_escaped(std::string_view bytes, std::string& result) {
  for (const char c : bytes) {
    std::array<char, 8> escaped{};
    std::snprintf(escaped.data(), escaped.size(), "\\x%02x",
                  static_cast<unsigned>(static_cast<unsigned char>(c)));
    result += escaped.data();
  }
}

std::string escaped(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    utf8proc_int32_t code_point = 0;
    const utf8proc_ssize_t length =
        utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                         static_cast<utf8proc_ssize_t>(text.size()), &code_point);
    const std::string_view unit = text.substr(0, length > 0 ? static_cast<std::size_t>(length) : 1);
    if (length > 0 && is_shown(code_point)) {
      result += unit;
    } else {
      append_escaped(unit, result);
    }
    text.remove_prefix(unit.size());
  }
  return result;
}

bool continues_character(char c) { return (static_cast<unsigned char>(c) & 0xC0u) == 0x80u; }

// At most `length` bytes from the front or the back, of whole characters.
std::string_view front(std::string_view text, std::size_t length) {
  while (length > 0 && continues_character(text[length])) --length;
  return text.substr(0, length);
}
std::string_view back(std::string_view text, std::size_t length) {
  std::size_t begin = text.size() - length;
  while (begin < text.size() && continues_character(text[begin])) ++begin;
  return text.substr(begin);
}

}  // namespace

std::string one_line(std::string_view text) {
  std::string line = escaped(text);
  if (line.size() <= kLongestLine) return line;
  constexpr std::size_t kHalf = (kLongestLine - kCut.size()) / 2;
  return std::string(front(line, kHalf)) + std::string(kCut) + std::string(back(line, kHalf));
}

std::string in_quotes(std::string_view text) {
  if (text.size() <= kLongestName) return "'" + escaped(text) + "'";
  return "'" + escaped(front(text, kLongestName)) + std::string(kCut) + "'";
}

std::string alternatives(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == names.size() ? " or " : ", ") + names[i];
  }
  return text;
}

std::string_view to_string(ErrorCode code) {
  constexpr std::array<std::string_view, 10> kNames = {
      "usage",  "not_found", "corrupt", "unsupported", "tokenizer",
      "prompt", "memory",    "io",      "internal",    "numeric"};
  static_assert(kNames.size() == static_cast<std::size_t>(ErrorCode::numeric) + 1);
  return kNames[static_cast<std::size_t>(code)];
}

Error::Error(ErrorCode code, std::string_view message)
    : std::runtime_error(one_line(message)), code_(code) {}

std::string json_fault(std::size_t byte, std::size_t bytes) {
  const std::string place = "byte " + std::to_string(byte);
  return byte > bytes ? "it breaks off at " + place : "it goes wrong at " + place;
}

}  // namespace sluice
