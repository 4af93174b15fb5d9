#include "engine/constrain/pattern.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/utf8.h"
#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice::constrain {
namespace {

constexpr int kMostPatternDepth = 100;
constexpr std::size_t kMostPatternBytes = 64 << 10;

CodeSet one(char32_t code) { return {{code, code}}; }

const CodeSet& digits() {
  static const CodeSet kDigits = {{'0', '9'}};
  return kDigits;
}
const CodeSet& word() {
  static const CodeSet kWord = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
  return kWord;
}
// WhiteSpace and LineTerminator of ECMA 262.
const CodeSet& white_space() {
  static const CodeSet kSpace = {
      {'\t', '\r'},     {' ', ' '},       {0xA0, 0xA0},     {0x1680, 0x1680}, {0x2000, 0x200A},
      {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
  return kSpace;
}
const CodeSet& line_ends() {
  static const CodeSet kEnds = {{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};
  return kEnds;
}

bool is_punctuation(char c) {
  return std::string_view("^$\\.*+?()[]{}|/-!\"#%&',:;<=>@_`~ ").find(c) != std::string_view::npos;
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

class Parser {
 public:
  Parser(std::string_view pattern, Match match, const WriteCharacter& write, Grammar& grammar)
      : pattern_(pattern), rest_(pattern), match_(match), write_(&write), grammar_(&grammar) {}

  NodeId parse() {
    const NodeId node = alternatives(0);
    if (!rest_.empty()) broken("there is a `)` too many");
    return node;
  }

 private:
  [[noreturn]] void fail(ErrorCode code, const std::string& what) const {
    throw Error(code, "pattern " + in_quotes(pattern_) + ": " + what);
  }
  [[noreturn]] void broken(const std::string& what) const { fail(ErrorCode::usage, what); }
  [[noreturn]] void refuse(const std::string& what) const {
    fail(ErrorCode::unsupported, what + " cannot be used here");
  }

  bool at(std::string_view start) const { return rest_.starts_with(start); }
  bool take(std::string_view start) {
    if (!at(start)) return false;
    rest_.remove_prefix(start.size());
    return true;
  }
  char take_byte() {
    const char byte = rest_.front();
    rest_.remove_prefix(1);
    return byte;
  }
  char32_t take_character() {
    const char32_t code = first_code_point(rest_);
    rest_.remove_prefix(next_utf8_unit(rest_).length);
    return code;
  }

  NodeId alternatives(int depth) {
    if (depth > kMostPatternDepth) broken("groups are nested more than 100 deep");
    std::vector<NodeId> all;
    do {
      all.push_back(alternative(depth));
    } while (take("|"));
    return all.size() == 1 ? all.front() : grammar_->choice(all);
  }

  NodeId alternative(int depth) {
    std::vector<NodeId> parts;
    const bool is_outer = depth == 0;
    const bool begins = is_outer && take("^");
    bool ends = false;
    while (!rest_.empty() && !at("|") && !at(")")) {
      if (is_outer && take("$")) {
        ends = true;
        if (!rest_.empty() && !at("|")) refuse("`$` in the middle");
        break;
      }
      parts.push_back(quantified(depth));
    }
    if (is_outer && match_ == Match::part) {
      if (!begins) parts.insert(parts.begin(), anything());
      if (!ends) parts.push_back(anything());
    }
    return grammar_->sequence(parts);
  }

  NodeId anything() { return grammar_->repeat((*write_)(CodeSet::all()), 0); }

  NodeId quantified(int depth) {
    NodeId node = atom(depth);
    if (const auto range = quantifier()) {
      node = grammar_->repeat(node, range->first, range->second);
      take("?");  // lazy: the same texts
      if (at("+")) refuse("a possessive quantifier");
      if (at("*") || at("?") || quantifier()) broken("nothing stands before a quantifier");
    }
    return node;
  }

  std::optional<std::pair<std::int32_t, std::int32_t>> quantifier() {
    if (take("*")) return std::pair(0, kUnbounded);
    if (take("+")) return std::pair(1, kUnbounded);
    if (take("?")) return std::pair(0, 1);
    if (!at("{")) return std::nullopt;
    rest_.remove_prefix(1);
    const std::optional<std::int32_t> least = count();
    if (!least) broken("`{` must begin a quantifier such as {2,5}, or be written \\{");
    std::int32_t most = *least;
    if (take(",")) most = count().value_or(kUnbounded);
    if (!take("}")) broken("`{` must begin a quantifier such as {2,5}, or be written \\{");
    if (most < *least) broken("a quantifier's most is below its least");
    return std::pair(*least, most);
  }

  std::optional<std::int32_t> count() {
    std::optional<std::int32_t> value;
    while (!rest_.empty() && rest_.front() >= '0' && rest_.front() <= '9') {
      value = value.value_or(0) * 10 + (take_byte() - '0');
      if (*value > kMostRepeats) broken("a quantifier is above " + std::to_string(kMostRepeats));
    }
    return value;
  }

  NodeId atom(int depth) {
    if (take("(")) return group(depth);
    if (at("*") || at("+") || at("?") || at("{")) broken("nothing stands before a quantifier");
    if (at("^") || at("$")) refuse("`^` or `$` in the middle");
    if (take(".")) return (*write_)(~line_ends());
    if (take("[")) return (*write_)(bracketed());
    if (take("\\")) return (*write_)(escape());
    return (*write_)(one(take_character()));
  }

  NodeId group(int depth) {
    if (at("?=") || at("?!") || at("?<=") || at("?<!")) refuse("look-around");
    if (take("?<")) {
      while (!rest_.empty() && !at(">")) take_character();
      if (!take(">")) broken("a group's name has no end");
    } else if (at("?") && !take("?:")) {
      refuse("a group with flags");
    }
    const NodeId node = alternatives(depth + 1);
    if (!take(")")) broken("a `)` is missing");
    return node;
  }

  // The set of an escape behind its backslash.
  CodeSet escape() {
    if (rest_.empty()) broken("it ends with a backslash");
    if (static_cast<unsigned char>(rest_.front()) >= 0x80) broken("an unknown escape");
    const char c = take_byte();
    switch (c) {
      case 'd':
        return digits();
      case 'D':
        return ~digits();
      case 'w':
        return word();
      case 'W':
        return ~word();
      case 's':
        return white_space();
      case 'S':
        return ~white_space();
      case 'n':
        return one('\n');
      case 'r':
        return one('\r');
      case 't':
        return one('\t');
      case 'f':
        return one('\f');
      case 'v':
        return one('\v');
      case 'x':
        return one(hex(2));
      case 'u':
        return one(unicode());
      default:
        break;
    }
    const bool is_null = c == '0' && (rest_.empty() || hex_digit(rest_.front()) < 0);
    if (is_null) return one(0);
    if (c >= '0' && c <= '9') refuse("a back reference");
    if (is_punctuation(c)) return one(static_cast<char32_t>(c));
    refuse("the escape " + in_quotes(std::string("\\") + c));
  }

  char32_t hex(int length) {
    char32_t code = 0;
    for (int i = 0; i < length; ++i) {
      const int digit = rest_.empty() ? -1 : hex_digit(take_byte());
      if (digit < 0) broken("an escape lacks hexadecimal digits");
      code = code * 16 + static_cast<char32_t>(digit);
    }
    return code;
  }

  char32_t unicode() {
    char32_t code = 0;
    if (take("{")) {
      if (at("}")) broken("an escape lacks hexadecimal digits");
      while (!take("}")) {
        code = code * 16 + hex(1);
        if (code > CodeSet::kLast) broken("an escape is above U+10FFFF");
      }
    } else {
      code = hex(4);
      const bool is_high = code >= 0xD800 && code <= 0xDBFF;
      if (is_high && take("\\u")) {
        const char32_t low = hex(4);
        if (low < 0xDC00 || low > 0xDFFF) broken("half of a surrogate pair");
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
      }
    }
    if (code >= 0xD800 && code <= 0xDFFF) broken("half of a surrogate pair");
    return code;
  }

  CodeSet bracketed() {
    const bool is_negative = take("^");
    CodeSet all;
    while (!take("]")) {
      if (rest_.empty()) broken("a `]` is missing");
      const CodeSet first = class_atom();
      const bool is_range = at("-") && !at("-]");
      if (!is_range) {
        all = all | first;
        continue;
      }
      take("-");
      if (rest_.empty()) broken("a `]` is missing");
      const CodeSet last = class_atom();
      if (!is_single(first) || !is_single(last)) broken("a range of classes");
      const CodeRange range = {first.ranges()[0].first, last.ranges()[0].first};
      if (range.first > range.last) broken("a range ends before it begins");
      all = all | CodeSet{range};
    }
    return is_negative ? ~all : all;
  }

  static bool is_single(const CodeSet& set) {
    return set.ranges().size() == 1 && set.ranges()[0].first == set.ranges()[0].last;
  }

  CodeSet class_atom() {
    if (!take("\\")) return one(take_character());
    if (take("b")) return one('\b');
    return escape();
  }

  std::string_view pattern_;
  std::string_view rest_;
  Match match_;
  const WriteCharacter* write_;
  Grammar* grammar_;
};

}  // namespace

NodeId compile_pattern(std::string_view pattern, Match match, const WriteCharacter& write,
                       Grammar& grammar) {
  if (pattern.size() > kMostPatternBytes) {
    throw Error(ErrorCode::usage, "a pattern has more than 65536 bytes");
  }
  if (find_invalid_utf8(pattern)) throw Error(ErrorCode::usage, "a pattern is not valid UTF-8");
  return Parser(pattern, match, write, grammar).parse();
}

}  // namespace sluice::constrain
