#include "engine/constrain/rules.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/utf8.h"
#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice::constrain {
namespace {

constexpr int kMostDepth = 100;
constexpr std::size_t kMostBytes = 1 << 20;

bool is_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
         c == '_';
}

class RuleParser {
 public:
  RuleParser(std::string_view text, Grammar& grammar)
      : text_(text), rest_(text), grammar_(&grammar) {}

  NodeId parse() {
    skip_space();
    while (!rest_.empty()) definition();
    for (const auto& [name, rule] : rules_) {
      if (!rule.defined) broken("the rule " + in_quotes(name) + " is used and not defined");
    }
    const auto root = rules_.find("root");
    if (root == rules_.end()) broken("there is no rule `root`");
    return root->second.node;
  }

 private:
  struct Rule {
    NodeId node = -1;
    bool defined = false;
  };

  [[noreturn]] void broken(const std::string& what) const {
    const auto read = text_.substr(0, text_.size() - rest_.size());
    const auto line = 1 + std::count(read.begin(), read.end(), '\n');
    throw Error(ErrorCode::usage, "grammar, line " + std::to_string(line) + ": " + what);
  }

  bool at(std::string_view start) const { return rest_.starts_with(start); }
  bool take(std::string_view start) {
    if (!at(start)) return false;
    rest_.remove_prefix(start.size());
    return true;
  }
  void skip_space() {
    while (!rest_.empty()) {
      if (at("#")) {
        rest_.remove_prefix(std::min(rest_.find('\n'), rest_.size()));
      } else if (at(" ") || at("\t") || at("\r") || at("\n")) {
        rest_.remove_prefix(1);
      } else {
        return;
      }
    }
  }

  std::string take_name() {
    const auto* const end = std::find_if_not(rest_.begin(), rest_.end(), is_name);
    std::string name(rest_.begin(), end);
    rest_.remove_prefix(name.size());
    skip_space();
    return name;
  }

  // Returns true if a rule begins here.
  bool at_definition() const {
    const auto* const end = std::find_if_not(rest_.begin(), rest_.end(), is_name);
    const auto behind = rest_.substr(static_cast<std::size_t>(end - rest_.begin()));
    const std::size_t next = std::min(behind.find_first_not_of(" \t\r\n"), behind.size());
    return end != rest_.begin() && behind.substr(next).starts_with("::=");
  }

  void definition() {
    const std::string name = take_name();
    if (name.empty() || !take("::=")) broken("a rule must begin with NAME ::=");
    skip_space();
    rule_of(name);
    if (rules_[name].defined) broken("the rule " + in_quotes(name) + " is defined twice");
    rules_[name].defined = true;
    const NodeId body = alternatives(0);
    grammar_->define(rules_[name].node, body);
    if (!rest_.empty() && !at_definition()) broken("neither a part of a rule nor a new one");
  }

  NodeId rule_of(const std::string& name) {
    Rule& rule = rules_[name];
    if (rule.node < 0) rule.node = grammar_->rule();
    return rule.node;
  }

  NodeId alternatives(int depth) {
    if (depth > kMostDepth) broken("groups are nested more than 100 deep");
    std::vector<NodeId> all;
    bool goes_on = true;
    while (goes_on) {
      std::vector<NodeId> parts;
      while (const auto part = item(depth)) parts.push_back(*part);
      all.push_back(grammar_->sequence(parts));
      goes_on = take("|");
      if (goes_on) skip_space();
    }
    return all.size() == 1 ? all.front() : grammar_->choice(all);
  }

  std::optional<NodeId> item(int depth) {
    std::optional<NodeId> node;
    if (take("\"")) {
      node = literal();
    } else if (take("[")) {
      node = grammar_->code_point(bracketed());
    } else if (take(".")) {
      node = grammar_->code_point(CodeSet::all());
    } else if (take("(")) {
      skip_space();
      node = alternatives(depth + 1);
      if (!take(")")) broken("a `)` is missing");
    } else if (!rest_.empty() && is_name(rest_.front()) && !at_definition()) {
      node = rule_of(take_name());
    }
    if (!node) return std::nullopt;
    skip_space();
    while (const auto range = quantifier()) {
      node = grammar_->repeat(*node, range->first, range->second);
      skip_space();
    }
    return node;
  }

  NodeId literal() {
    std::string text;
    while (!take("\"")) {
      if (rest_.empty() || at("\n")) broken("a text has no end");
      append_utf8(text, character());
    }
    return grammar_->bytes(text);
  }

  CodeSet bracketed() {
    const bool is_negative = take("^");
    std::vector<CodeRange> ranges;
    while (!take("]")) {
      if (rest_.empty() || at("\n")) broken("a `]` is missing");
      CodeRange range;
      range.first = range.last = character();
      if (at("-") && !at("-]")) {
        rest_.remove_prefix(1);
        if (rest_.empty() || at("\n")) broken("a `]` is missing");
        range.last = character();
      }
      if (range.first > range.last) broken("a range ends before it begins");
      ranges.push_back(range);
    }
    const CodeSet set(std::move(ranges));
    return is_negative ? ~set : set;
  }

  // A character as it is or by an escape.
  char32_t character() {
    if (!take("\\")) {
      const char32_t code = first_code_point(rest_);
      rest_.remove_prefix(next_utf8_unit(rest_).length);
      return code;
    }
    if (take("n")) return '\n';
    if (take("r")) return '\r';
    if (take("t")) return '\t';
    if (take("x")) return hex(2);
    if (take("u")) return hex(4);
    if (take("U")) return hex(8);
    if (rest_.empty() || std::string_view("\"\\[]-^/").find(rest_.front()) == std::string::npos) {
      broken("an unknown escape");
    }
    const char32_t code = static_cast<unsigned char>(rest_.front());
    rest_.remove_prefix(1);
    return code;
  }

  char32_t hex(std::size_t length) {
    char32_t code = 0;
    for (std::size_t i = 0; i < length; ++i) {
      const char c = rest_.empty() ? '\0' : rest_.front();
      const std::size_t place = std::string_view("0123456789abcdefABCDEF").find(c);
      const std::size_t digit = place > 15 ? place - 6 : place;
      if (c == '\0' || place == std::string_view::npos)
        broken("an escape lacks hexadecimal digits");
      code = code * 16 + static_cast<char32_t>(digit);
      rest_.remove_prefix(1);
    }
    const bool is_half = code >= 0xD800 && code <= 0xDFFF;
    if (code > CodeSet::kLast || is_half) broken("an escape names no character");
    return code;
  }

  std::optional<std::pair<std::int32_t, std::int32_t>> quantifier() {
    if (take("*")) return std::pair(0, kUnbounded);
    if (take("+")) return std::pair(1, kUnbounded);
    if (take("?")) return std::pair(0, 1);
    if (!take("{")) return std::nullopt;
    const std::optional<std::int32_t> least = count();
    std::int32_t most = least.value_or(0);
    const bool is_range = take(",");
    if (is_range) most = count().value_or(kUnbounded);
    if (!take("}") || (!least && !is_range) || most < least.value_or(0)) {
      broken("`{` must begin a repetition such as {2,5}");
    }
    return std::pair(least.value_or(0), most);
  }

  std::optional<std::int32_t> count() {
    std::optional<std::int32_t> value;
    while (!rest_.empty() && rest_.front() >= '0' && rest_.front() <= '9') {
      value = value.value_or(0) * 10 + (rest_.front() - '0');
      rest_.remove_prefix(1);
      if (*value > kMostRepeats) broken("a repetition is above " + std::to_string(kMostRepeats));
    }
    return value;
  }

  std::string_view text_;
  std::string_view rest_;
  Grammar* grammar_;
  std::map<std::string, Rule> rules_;
};

}  // namespace

void compile_rules(std::string_view rules, Grammar& grammar) {
  if (rules.size() > kMostBytes) {
    throw Error(ErrorCode::usage,
                "grammar: it has more than " + std::to_string(kMostBytes) + " bytes");
  }
  if (find_invalid_utf8(rules)) throw Error(ErrorCode::usage, "grammar: it is not valid UTF-8");
  grammar.finish(RuleParser(rules, grammar).parse(), "grammar: it");
}

}  // namespace sluice::constrain
