#include "engine/jinja/lexer.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "engine/jinja/text.h"
#include "engine/jinja/value.h"
#include "engine/utf8.h"
#include "lib/text.h"

namespace sluice::jinja {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool begins_name(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool continues_name(char c) { return begins_name(c) || is_digit(c); }

// Line breaks are '\n', and one at the end is dropped.
std::string normalised(std::string_view source) {
  std::string text;
  text.reserve(source.size());
  for (std::size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      if (i + 1 == source.size() || source[i + 1] != '\n') text += '\n';
    } else {
      text += source[i];
    }
  }
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

// Bytes of white space at the start of `text`.
std::size_t leading_space(std::string_view text) {
  std::size_t length = 0;
  while (length < text.size() && is_space(first_code_point(text.substr(length)))) {
    length += next_utf8_unit(text.substr(length)).length;
  }
  return length;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(normalised(source)) {}

  std::vector<Token> run() {
    while (at_ < source_.size()) {
      const std::size_t tag = next_tag();
      add_data(tag);
      if (tag == source_.size()) break;
      advance(tag);
      if (source_[at_ + 1] == '#') {
        skip_comment();
      } else {
        read_tag();
      }
    }
    add(Token::Kind::end_of_file, {});
    return std::move(tokens_);
  }

 private:
  std::string_view rest() const { return std::string_view(source_).substr(at_); }

  void advance(std::size_t to) {
    const auto at = [this](std::size_t i) {
      return source_.begin() + static_cast<std::ptrdiff_t>(i);
    };
    line_ += static_cast<std::size_t>(std::count(at(at_), at(to), '\n'));
    at_ = to;
  }

  void add(Token::Kind kind, std::string text) {
    tokens_.push_back({kind, std::move(text), line_});
  }

  [[noreturn]] void fail(const std::string& does) const {
    refuse(does + " in line " + std::to_string(line_));
  }

  std::size_t next_tag() const {
    for (std::size_t i = at_; i + 1 < source_.size(); ++i) {
      const char next = source_[i + 1];
      if (source_[i] == '{' && (next == '{' || next == '%' || next == '#')) return i;
    }
    return source_.size();
  }

  // Adds the text up to a tag, without the white space that the tag strips.
  void add_data(std::size_t tag) {
    Text data(std::string_view(source_).substr(at_, tag - at_));
    const char sign = tag + 2 < source_.size() ? source_[tag + 2] : '\0';
    const bool is_output = tag < source_.size() && source_[tag + 1] == '{';
    if (tag < source_.size() && sign == '-') {
      data = strip(data, Side::right);
    } else if (tag < source_.size() && sign != '+' && !is_output) {
      const std::size_t line = data.bytes().rfind('\n') + 1;  // 0 if there is no line break
      const bool begins_line = line > 0 || at_ == 0 || source_[at_ - 1] == '\n';
      const std::string_view indent = std::string_view(data.bytes()).substr(line);
      if (begins_line && leading_space(indent) == indent.size()) data = data.slice(0, line);
    }
    if (data.size() > 0) add(Token::Kind::data, data.bytes());
  }

  // Continues behind the end of a tag, `length` bytes long, with or without a sign.
  void end_tag(std::size_t length, bool signed_end, bool trims_line) {
    const char sign = signed_end ? source_[at_] : '\0';
    std::size_t to = at_ + length + (signed_end ? 1 : 0);
    if (sign == '-') {
      to += leading_space(std::string_view(source_).substr(to));
    } else if (sign != '+' && trims_line && to < source_.size() && source_[to] == '\n') {
      ++to;
    }
    advance(to);
  }

  void skip_comment() {
    const std::size_t end = source_.find("#}", at_ + 2);
    if (end == std::string::npos) fail("has a comment without an end");
    const char before = source_[end - 1];
    const bool signed_end = end > at_ + 2 && (before == '-' || before == '+');
    advance(signed_end ? end - 1 : end);
    end_tag(2, signed_end, true);
  }

  void read_tag() {
    const bool is_output = source_[at_ + 1] == '{';
    const std::string_view end = is_output ? "}}" : "%}";
    add(is_output ? Token::Kind::output : Token::Kind::statement, {});
    at_ += 2;
    if (rest().starts_with('-') || rest().starts_with('+')) ++at_;
    brackets_.clear();
    while (true) {
      advance(at_ + leading_space(rest()));
      if (at_ == source_.size()) fail("has a tag without an end");
      if (brackets_.empty()) {
        // "+}}" does not end an output tag: the "+" is an operator.
        const bool has_sign = rest()[0] == '-' || (rest()[0] == '+' && !is_output);
        if (rest().substr(has_sign ? 1 : 0).starts_with(end)) {
          add(Token::Kind::end_of_tag, {});
          return end_tag(2, has_sign, !is_output);
        }
      }
      read_token();
    }
  }

  void read_token() {
    const char c = source_[at_];
    if (begins_name(c)) return read_name();
    if (is_digit(c)) return read_number();
    if (c == '\'' || c == '"') return read_string();
    read_symbol();
  }

  void read_name() {
    const std::size_t begin = at_;
    while (at_ < source_.size() && continues_name(source_[at_])) ++at_;
    add(Token::Kind::name, source_.substr(begin, at_ - begin));
  }

  void read_number() {
    const std::size_t begin = at_;
    const auto digits = [this] {
      while (at_ < source_.size() && (is_digit(source_[at_]) || source_[at_] == '_')) ++at_;
    };
    const auto digit_follows = [this](std::size_t offset) {
      return at_ + offset < source_.size() && is_digit(source_[at_ + offset]);
    };
    digits();
    Token::Kind kind = Token::Kind::integer;
    const bool is_member = begin > 0 && source_[begin - 1] == '.';
    if (!is_member && rest().starts_with('.') && digit_follows(1)) {
      kind = Token::Kind::real;
      ++at_;
      digits();
    }
    if (at_ < source_.size() && continues_name(source_[at_])) {
      fail("has a number of an unknown form");
    }
    std::string text = source_.substr(begin, at_ - begin);
    text.erase(std::remove(text.begin(), text.end(), '_'), text.end());
    add(kind, std::move(text));
  }

  void read_symbol() {
    constexpr std::array<std::string_view, 29> kSymbols = {
        "//", "**", "==", "!=", ">=", "<=", "+", "-", "*", "/", "%", "~", "<", ">", "=",
        ".",  ":",  "|",  ",",  "(",  "[",  "{", ")", "]", "}", ";", "&", "^", "!"};
    const auto found = std::find_if(kSymbols.begin(), kSymbols.end(), [this](std::string_view one) {
      return rest().starts_with(one);
    });
    if (found == kSymbols.end()) {
      const std::string_view text = rest();
      fail("has " + in_quotes(text.substr(0, next_utf8_unit(text).length)) + " in a tag");
    }
    const std::string_view symbol = *found;
    if (symbol == "(" || symbol == "[" || symbol == "{") brackets_.push_back(symbol[0]);
    if (symbol == ")" || symbol == "]" || symbol == "}") close(symbol[0]);
    at_ += symbol.size();
    add(Token::Kind::symbol, std::string(symbol));
  }

  void close(char bracket) {
    const char open = bracket == ')' ? '(' : bracket == ']' ? '[' : '{';
    if (brackets_.empty() || brackets_.back() != open) {
      fail("has " + in_quotes(std::string(1, bracket)) + " without its other half");
    }
    brackets_.pop_back();
  }

  void read_string() {
    const char quote = source_[at_];
    const std::size_t begin = at_ + 1;
    std::size_t end = begin;
    while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size()) fail("has a string without an end");
    add(Token::Kind::string, unescaped(std::string_view(source_).substr(begin, end - begin)));
    advance(end + 1);
  }

  // The value of a string literal's inside, as in Python.
  std::string unescaped(std::string_view text) const {
    std::string value;
    while (!text.empty()) {
      const std::size_t plain = std::min(text.find('\\'), text.size());
      value += text.substr(0, plain);
      text.remove_prefix(plain);
      if (text.size() >= 2) take_escape(text, value);
    }
    return value;
  }

  void take_escape(std::string_view& text, std::string& value) const {
    constexpr std::string_view kNames = "abfnrtv\\'\"";
    constexpr std::string_view kValues = "\a\b\f\n\r\t\v\\'\"";
    const char c = text[1];
    const std::size_t named = kNames.find(c);
    text.remove_prefix(2);
    if (named != std::string_view::npos) {
      value += kValues[named];
    } else if (c == 'x' || c == 'u' || c == 'U') {
      take_code_point(text, c == 'x' ? 2 : c == 'u' ? 4 : 8, value);
    } else if (c == 'N' || is_digit(c)) {
      fail("has the escape '\\" + std::string(1, c) + "'");
    } else if (c != '\n') {  // an escaped line break is dropped, other escapes stay as they are
      value += '\\';
      value += c;
    }
  }

  void take_code_point(std::string_view& text, std::size_t digits, std::string& value) const {
    const std::string_view hex = text.substr(0, digits);
    std::uint32_t code = 0;
    const auto parsed = std::from_chars(hex.data(), hex.data() + hex.size(), code, 16);
    const bool whole = hex.size() == digits && parsed.ptr == hex.data() + hex.size();
    if (!whole || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) {
      fail("has an escape that is no character");
    }
    append_utf8(value, static_cast<char32_t>(code));
    text.remove_prefix(digits);
  }

  std::string source_;
  std::size_t at_ = 0;
  std::size_t line_ = 1;
  std::string brackets_;  // open brackets in the tag
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source) { return Lexer(source).run(); }

}  // namespace sluice::jinja
