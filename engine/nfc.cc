#include "engine/nfc.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <vector>

#include "engine/utf8.h"
#include "lib/check.h"

namespace sluice {
namespace {

constexpr std::size_t kBlockBytes = 1 << 16;

// Below U+0300 every character is in form C already and none combines with the one before it.
bool may_change(std::string_view text) {
  return std::any_of(text.begin(), text.end(),
                     [](char c) { return static_cast<unsigned char>(c) >= 0xCC; });
}

// A block ends before an ASCII character, which combines with nothing before it.
std::size_t block_length(std::string_view text) {
  std::size_t length = std::min(text.size(), kBlockBytes);
  while (length < text.size() && static_cast<unsigned char>(text[length]) >= 0x80) ++length;
  return length;
}

void append_decomposed(char32_t code_point, std::vector<utf8proc_int32_t>& decomposed) {
  std::array<utf8proc_int32_t, 8> parts{};
  int last_class = 0;
  const utf8proc_ssize_t count = utf8proc_decompose_char(
      static_cast<utf8proc_int32_t>(code_point), parts.data(),
      static_cast<utf8proc_ssize_t>(parts.size()),
      static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE), &last_class);
  check(count >= 0 && count <= static_cast<utf8proc_ssize_t>(parts.size()),
        "a character decomposes into too many");
  decomposed.insert(decomposed.end(), parts.begin(), parts.begin() + count);
}

// Canonical ordering in our own code, because utf8proc's takes quadratic time on long runs of
// combining marks.
void order_marks(std::vector<utf8proc_int32_t>& decomposed) {
  const auto combining_class = [](utf8proc_int32_t c) {
    return utf8proc_get_property(c)->combining_class;
  };
  const auto is_mark = [&](utf8proc_int32_t c) { return combining_class(c) != 0; };
  auto run = std::find_if(decomposed.begin(), decomposed.end(), is_mark);
  while (run != decomposed.end()) {
    const auto end = std::find_if_not(run, decomposed.end(), is_mark);
    std::stable_sort(run, end, [&](utf8proc_int32_t a, utf8proc_int32_t b) {
      return combining_class(a) < combining_class(b);
    });
    run = std::find_if(end, decomposed.end(), is_mark);
  }
}

// utf8proc 2.8 takes U+11A7 for the absent last part of a Hangul syllable and drops it. Nothing
// composes with it, so it can begin a composition of its own.
void append_composed(std::vector<utf8proc_int32_t>& decomposed, std::string& text) {
  constexpr utf8proc_int32_t kNotATrailingConsonant = 0x11A7;
  auto begin = decomposed.begin();
  while (begin != decomposed.end()) {
    const auto end = std::find(begin + 1, decomposed.end(), kNotATrailingConsonant);
    const utf8proc_ssize_t length = utf8proc_normalize_utf32(
        &*begin, end - begin, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
    check(length >= 0, "valid text has no normalised form");
    std::for_each(begin, begin + length,
                  [&](utf8proc_int32_t c) { append_utf8(text, static_cast<char32_t>(c)); });
    begin = end;
  }
}

void append_normalised(std::string_view block, std::string& text) {
  std::vector<utf8proc_int32_t> decomposed;
  decomposed.reserve(block.size());
  while (!block.empty()) {
    append_decomposed(first_code_point(block), decomposed);
    block.remove_prefix(next_utf8_unit(block).length);
  }
  order_marks(decomposed);
  append_composed(decomposed, text);
}

}  // namespace

std::string to_nfc(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const std::string_view block = text.substr(0, block_length(text));
    if (may_change(block)) {
      append_normalised(block, result);
    } else {
      result += block;
    }
    text.remove_prefix(block.size());
  }
  return result;
}

}  // namespace sluice
