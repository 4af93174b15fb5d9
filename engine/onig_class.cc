#include "engine/onig_class.h"

#include <cctype>
#include <cstdint>
#include <utility>
#include <vector>

#include "engine/unicode/properties.h"
#include "engine/utf8.h"
#include "sluice/errors.h"

namespace sluice::onig {
namespace {

constexpr int kMostNested = 64;

bool is_alphanumeric(char c) {
  return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
}

char32_t hexadecimal(std::string_view digits, std::string_view construct) {
  constexpr std::size_t kMostDigits = 8;
  if (digits.empty() || digits.size() > kMostDigits) refuse(construct);
  std::uint32_t value = 0;
  for (const char digit : digits) {
    if (std::isxdigit(static_cast<unsigned char>(digit)) == 0) refuse(construct);
    const int letter = std::tolower(static_cast<unsigned char>(digit));
    value =
        value * 16 + static_cast<std::uint32_t>(letter <= '9' ? letter - '0' : letter - 'a' + 10);
  }
  if (value > CodeSet::kLast || (value >= 0xD800 && value <= 0xDFFF)) refuse(construct);
  return value;
}

// \x{41} and \u0041. Without braces \x41 is a byte and not a character.
char32_t take_hexadecimal(Cursor& cursor) {
  const std::string_view rest = cursor.rest();
  std::string_view whole = rest.substr(0, 6);
  std::string_view digits = whole.substr(2);
  if (cursor.at("\\x")) {
    const std::size_t end = rest.find('}');
    if (!cursor.at("\\x{") || end == std::string_view::npos) {
      whole = rest.substr(0, 4);
      digits = whole.substr(2);
      if (whole.size() < 4 || hexadecimal(digits, whole) > 0x7F) refuse(whole);
    } else {
      whole = rest.substr(0, end + 1);
      digits = whole.substr(3, end - 3);
    }
  } else if (whole.size() < 6) {
    refuse(whole);
  }
  const char32_t value = hexadecimal(digits, whole);
  cursor.skip(whole.size());
  return value;
}

char32_t take_escaped(Cursor& cursor) {
  constexpr std::pair<char, char32_t> kControls[] = {
      {'n', '\n'}, {'t', '\t'}, {'r', '\r'}, {'f', '\f'}, {'v', '\v'}, {'a', '\a'}, {'e', 0x1B}};
  if (cursor.rest().size() < 2) broken("it ends with '\\'");
  const char letter = cursor.rest()[1];
  if (letter == 'x' || letter == 'u') return take_hexadecimal(cursor);
  for (const auto& [name, value] : kControls) {
    if (letter != name) continue;
    cursor.skip(2);
    return value;
  }
  if (is_alphanumeric(letter)) refuse(cursor.rest().substr(0, 2));
  cursor.skip(1);
  return cursor.take_character();
}

CodeSet take_property(Cursor& cursor) {
  const std::string_view rest = cursor.rest();
  const std::size_t end = rest.find('}');
  if (!rest.substr(2).starts_with("{") || end == std::string_view::npos) refuse(rest.substr(0, 2));
  const std::string_view whole = rest.substr(0, end + 1);
  std::string_view name = whole.substr(3, end - 3);
  bool negated = rest[1] == 'P';
  if (name.starts_with("^")) {
    negated = !negated;
    name.remove_prefix(1);
  }
  std::optional<CodeSet> set = unicode::property(name);
  if (!set) refuse(whole);
  cursor.skip(whole.size());
  return negated ? ~*set : std::move(*set);
}

class ClassReader {
 public:
  explicit ClassReader(Cursor& cursor) : cursor_(cursor) {}

  struct Raw {
    CodeSet set;  // before it is negated
    bool negated = false;
  };

  Raw run(int nested) {
    if (nested > kMostNested) refuse("[[[[");
    cursor_.skip(1);
    Raw raw;
    raw.negated = cursor_.take("^");
    if (cursor_.at("]")) refuse("[]");
    std::optional<CodeSet> intersection;
    const auto intersect = [&] {
      CodeSet part(std::exchange(ranges_, {}));
      intersection = intersection ? *intersection & part : std::move(part);
    };
    while (!cursor_.take("]")) {
      if (cursor_.done()) broken("a '[' has no ']'");
      if (cursor_.take("&&")) {
        intersect();
        if (cursor_.at("-")) refuse("&&-");
      } else {
        item(nested);
      }
    }
    intersect();
    raw.set = std::move(*intersection);
    return raw;
  }

 private:
  void add(const CodeSet& set) {
    ranges_.insert(ranges_.end(), set.ranges().begin(), set.ranges().end());
    // "[\d-a]" and "[[a]-c]" are errors or have meanings of their own.
    if (cursor_.at("-") && !cursor_.at("-]")) refuse("-");
  }

  void item(int nested) {
    if (cursor_.at("[:")) refuse(cursor_.rest().substr(0, cursor_.rest().find(']')));
    if (cursor_.at("[")) {
      ClassReader inner(cursor_);
      const Raw raw = inner.run(nested + 1);
      return add(raw.negated ? ~raw.set : raw.set);
    }
    if (const std::optional<CodeSet> set = take_set_escape(cursor_, Place::brackets))
      return add(*set);
    const char32_t first = take_literal(cursor_);
    ranges_.push_back({first, first});
    if (!cursor_.at("-") || cursor_.at("-]")) return;
    cursor_.skip(1);
    if (cursor_.at("[") || cursor_.at("&&") || take_set_escape(cursor_, Place::brackets))
      refuse("-");
    if (cursor_.done()) broken("a '[' has no ']'");
    const char32_t last = take_literal(cursor_);
    if (last < first) broken("a range in brackets ends before it begins");
    ranges_.back().last = last;
    if (cursor_.at("--")) refuse("--");
  }

  Cursor& cursor_;
  std::vector<CodeRange> ranges_;
};

}  // namespace

void refuse(std::string_view construct) {
  throw Error(ErrorCode::unsupported, "the regular expression uses '" + std::string(construct) +
                                          "', which Sluice does not support");
}

void broken(const std::string& reason) {
  throw Error(ErrorCode::tokenizer, "the regular expression does not compile: " + reason);
}

bool Cursor::take(std::string_view start) {
  if (!at(start)) return false;
  skip(start.size());
  return true;
}

char32_t Cursor::take_character() {
  const char32_t character = first_code_point(rest_);
  skip(next_utf8_unit(rest_).length);
  return character;
}

char32_t take_literal(Cursor& cursor) {
  return cursor.front() == '\\' ? take_escaped(cursor) : cursor.take_character();
}

// Oniguruma looks up code points below U+0100 in a table that has superscript digits and fractions.
CodeSet word_character() {
  return unicode::word() | CodeSet{{0xB2, 0xB3}, {0xB9, 0xB9}, {0xBC, 0xBE}};
}

std::optional<CodeSet> take_set_escape(Cursor& cursor, Place place) {
  if (!cursor.at("\\") || cursor.rest().size() < 2) return std::nullopt;
  const char letter = cursor.rest()[1];
  CodeSet set;
  switch (letter) {
    case 'p':
    case 'P':
      return take_property(cursor);
    case 'd':
    case 'D':
      set = *unicode::property("Nd");
      break;
    case 'h':
    case 'H':
      set = {{'0', '9'}, {'A', 'F'}, {'a', 'f'}};
      break;
    case 's':
    case 'S':
      set = unicode::white_space();
      break;
    case 'w':
    case 'W':
      set = place == Place::brackets ? unicode::word() : word_character();
      break;
    default:
      return std::nullopt;
  }
  cursor.skip(2);
  return letter >= 'a' ? std::move(set) : ~set;
}

CodeSet take_class(Cursor& cursor, bool ignore_case) {
  const std::string_view start = cursor.rest();
  auto [set, negated] = ClassReader(cursor).run(1);
  if (ignore_case) {
    if (!negated && !(set & unicode::folds_to_several()).empty()) {
      const std::size_t length = start.size() - cursor.rest().size();
      refuse("(?i:" + std::string(start.substr(0, length)) + ")");
    }
    set = unicode::fold_closure(set);
  }
  return negated ? ~set : std::move(set);
}

}  // namespace sluice::onig
