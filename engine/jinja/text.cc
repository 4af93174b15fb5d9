#include "engine/jinja/text.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>

#include "engine/jinja/value.h"
#include "engine/utf8.h"

namespace sluice::jinja {
namespace {

bool is_first_byte(char c) { return (static_cast<unsigned char>(c) & 0xC0u) != 0x80u; }

std::size_t character_at(const std::string& bytes, std::size_t at) {
  return next_utf8_unit(std::string_view(bytes).substr(at)).length;
}

std::size_t character_before(const std::string& bytes, std::size_t at) {
  do {
    --at;
  } while (!is_first_byte(bytes[at]));
  return at;
}

// A set of characters: given ones, or white space.
class Members {
 public:
  explicit Members(const std::optional<std::string>& what) : spaces_(!what) {
    std::string_view rest = what ? std::string_view(*what) : std::string_view();
    while (!rest.empty()) {
      members_.push_back(first_code_point(rest));
      rest.remove_prefix(next_utf8_unit(rest).length);
    }
    std::sort(members_.begin(), members_.end());
  }

  bool contain(std::string_view at) const {
    const char32_t c = first_code_point(at);
    return spaces_ ? is_space(c) : std::binary_search(members_.begin(), members_.end(), c);
  }

 private:
  bool spaces_;
  std::vector<char32_t> members_;
};

// The next word, without white space, from `at` on.
struct Word {
  std::size_t begin = 0;
  std::size_t end = 0;  // equal to the start: there is none
};

Word next_word(const std::string& bytes, std::size_t at) {
  const Members spaces{std::nullopt};
  const std::string_view all(bytes);
  while (at < all.size() && spaces.contain(all.substr(at))) at += character_at(bytes, at);
  Word word{at, at};
  while (word.end < all.size() && !spaces.contain(all.substr(word.end))) {
    word.end += character_at(bytes, word.end);
  }
  return word;
}

Word last_word(const std::string& bytes, std::size_t at) {
  const Members spaces{std::nullopt};
  const auto before = [&](std::size_t end) {
    return std::string_view(bytes).substr(character_before(bytes, end));
  };
  while (at > 0 && spaces.contain(before(at))) at = character_before(bytes, at);
  Word word{at, at};
  while (word.begin > 0 && !spaces.contain(before(word.begin))) {
    word.begin = character_before(bytes, word.begin);
  }
  return word;
}

std::vector<Text> split_at_spaces(const Text& text, std::int64_t most) {
  std::vector<Text> parts;
  Word word = next_word(text.bytes(), 0);
  while (word.begin < word.end) {
    if (static_cast<std::int64_t>(parts.size()) == most) {
      parts.push_back(text.slice(word.begin, text.size()));
      break;
    }
    parts.push_back(text.slice(word.begin, word.end));
    word = next_word(text.bytes(), word.end);
  }
  return parts;
}

std::vector<Text> split_at_last_spaces(const Text& text, std::int64_t most) {
  std::vector<Text> parts;
  Word word = last_word(text.bytes(), text.size());
  while (word.begin < word.end) {
    if (static_cast<std::int64_t>(parts.size()) == most) {
      parts.push_back(text.slice(0, word.end));
      break;
    }
    parts.push_back(text.slice(word.begin, word.end));
    word = last_word(text.bytes(), word.begin);
  }
  std::reverse(parts.begin(), parts.end());
  return parts;
}

// Offsets of `separator` without overlaps, in order from the end that is split first.
std::vector<std::size_t> places(const std::string& bytes, const std::string& separator,
                                std::int64_t most, bool from_right) {
  std::vector<std::size_t> found;
  const auto is_enough = [&] { return static_cast<std::int64_t>(found.size()) == most; };
  if (!from_right) {
    for (std::size_t at = find_part(bytes, separator); at != std::string::npos && !is_enough();
         at = find_part(bytes, separator, at + separator.size())) {
      found.push_back(at);
    }
    return found;
  }
  // Searches from the right by searching the reversed text from the left.
  const std::string turned(bytes.rbegin(), bytes.rend());
  const std::string turned_separator(separator.rbegin(), separator.rend());
  for (std::size_t at = find_part(turned, turned_separator);
       at != std::string::npos && !is_enough();
       at = find_part(turned, turned_separator, at + separator.size())) {
    found.push_back(bytes.size() - at - separator.size());
  }
  std::reverse(found.begin(), found.end());
  return found;
}

// Line breaks of str.splitlines(); "\r\n" counts as one.
bool ends_line(char32_t c) {
  return (c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 ||
         c == 0x2029;
}

}  // namespace

void Text::append(const Text& other, std::size_t begin, std::size_t end) {
  const auto at = [](std::size_t i) { return static_cast<std::ptrdiff_t>(i); };
  bytes_.append(other.bytes_, begin, end - begin);
  origins_.insert(origins_.end(), other.origins_.begin() + at(begin),
                  other.origins_.begin() + at(end));
}

void Text::append(char32_t character, Origin origin) {
  append_utf8(bytes_, character);
  origins_.resize(bytes_.size(), origin);
}

Text Text::slice(std::size_t begin, std::size_t end) const {
  Text part;
  part.append(*this, begin, end);
  return part;
}

bool is_space(char32_t c) { return is_white_space(c) || (c >= 0x1C && c <= 0x1F); }

std::size_t length(const Text& text) {
  return static_cast<std::size_t>(
      std::count_if(text.bytes().begin(), text.bytes().end(), is_first_byte));
}

std::size_t offset_of(const Text& text, std::size_t index) {
  std::size_t at = 0;
  for (; index > 0 && at < text.size(); --index) at += character_at(text.bytes(), at);
  return at;
}

std::size_t find_part(std::string_view text, std::string_view part, std::size_t from) {
  if (from > text.size()) return std::string_view::npos;
  // memmem takes linear time on every input, unlike std::string_view::find.
  const void* const found =
      ::memmem(text.data() + from, text.size() - from, part.data(), part.size());
  if (found == nullptr) return std::string_view::npos;
  return static_cast<std::size_t>(static_cast<const char*>(found) - text.data());
}

Text strip(const Text& text, Side side, const std::optional<std::string>& what) {
  const Members members(what);
  const std::string_view bytes(text.bytes());
  std::size_t begin = 0;
  std::size_t end = bytes.size();
  while (side != Side::right && begin < end && members.contain(bytes.substr(begin))) {
    begin += character_at(text.bytes(), begin);
  }
  while (side != Side::left && begin < end) {
    const std::size_t last = character_before(text.bytes(), end);
    if (!members.contain(bytes.substr(last))) break;
    end = last;
  }
  return text.slice(begin, end);
}

std::vector<Text> split(const Text& text, const std::optional<std::string>& separator,
                        std::int64_t most, bool from_right) {
  if (!separator) {
    return from_right ? split_at_last_spaces(text, most) : split_at_spaces(text, most);
  }
  std::vector<Text> parts;
  std::size_t begin = 0;
  for (const std::size_t at : places(text.bytes(), *separator, most, from_right)) {
    parts.push_back(text.slice(begin, at));
    begin = at + separator->size();
  }
  parts.push_back(text.slice(begin, text.size()));
  return parts;
}

std::vector<Text> split_lines(const Text& text) {
  std::vector<Text> lines;
  std::size_t begin = 0;
  for (std::size_t at = 0; at < text.size();) {
    const char32_t c = first_code_point(std::string_view(text.bytes()).substr(at));
    std::size_t next = at + character_at(text.bytes(), at);
    if (ends_line(c)) {
      lines.push_back(text.slice(begin, at));
      if (c == '\r' && next < text.size() && text.bytes()[next] == '\n') ++next;
      begin = next;
    }
    at = next;
  }
  if (begin < text.size()) lines.push_back(text.slice(begin, text.size()));
  return lines;
}

Text replace(const Text& text, std::string_view from, const Text& to, std::int64_t most) {
  Text result;
  std::size_t begin = 0;
  for (const std::size_t at : places(text.bytes(), std::string(from), most, false)) {
    result.append(text, begin, at);
    result.append(to);
    begin = at + from.size();
  }
  result.append(text, begin, text.size());
  return result;
}

namespace {

char32_t to_lower(char32_t c) {
  return static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c)));
}
char32_t to_upper(char32_t c) {
  return static_cast<char32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(c)));
}
char32_t to_title(char32_t c) {
  return static_cast<char32_t>(utf8proc_totitle(static_cast<utf8proc_int32_t>(c)));
}

// Python maps some characters to several, and a sigma by what follows it. Those that fold to
// several are all of the former (Unicode's SpecialCasing and CaseFolding).
void require_simple_case(char32_t c) {
  constexpr char32_t kSigma = 0x3A3;
  if (c < 0x80) return;
  std::array<utf8proc_int32_t, 8> folded{};
  int boundary = 0;
  const utf8proc_ssize_t count = utf8proc_decompose_char(
      static_cast<utf8proc_int32_t>(c), folded.data(), folded.size(), UTF8PROC_CASEFOLD, &boundary);
  if (count <= 1 && c != kSigma) return;
  std::array<char, 16> name{};
  std::snprintf(name.data(), name.size(), "U+%04X", static_cast<unsigned>(c));
  refuse("changes the case of a text with " + std::string(name.data()));
}

template <typename Mapped>
Text map_characters(const Text& text, Mapped mapped) {
  Text result;
  for (std::size_t at = 0; at < text.size(); at += character_at(text.bytes(), at)) {
    const char32_t c = first_code_point(std::string_view(text.bytes()).substr(at));
    require_simple_case(c);
    result.append(mapped(c, at == 0), text.origins()[at]);
  }
  return result;
}

}  // namespace

Text lower(const Text& text) {
  return map_characters(text, [](char32_t c, bool) { return to_lower(c); });
}

Text upper(const Text& text) {
  return map_characters(text, [](char32_t c, bool) { return to_upper(c); });
}

Text capitalize(const Text& text) {
  return map_characters(text,
                        [](char32_t c, bool first) { return first ? to_title(c) : to_lower(c); });
}

Text title(const Text& text) {
  bool in_word = false;
  return map_characters(text, [&in_word](char32_t c, bool) {
    const char32_t mapped = in_word ? to_lower(c) : to_title(c);
    in_word = to_lower(c) != to_upper(c);
    return mapped;
  });
}

}  // namespace sluice::jinja
