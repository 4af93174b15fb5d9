#include "engine/onig.h"

#include <array>
#include <cctype>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "engine/onig_class.h"
#include "engine/unicode/properties.h"
#include "engine/utf8.h"

namespace sluice {
namespace {

using onig::broken;
using onig::Cursor;
using onig::refuse;

constexpr std::size_t kMostSets = 1000;
constexpr std::size_t kMostGroups = 200;       // PCRE2 nests 250
constexpr std::uint32_t kMostRepeats = 65535;  // PCRE2's limit

CodeSet newline() { return {{'\n', '\n'}}; }

// Reads an expression once, from left to right. The result gets PCRE2's syntax directly but only
// the number of each set, because the classes are known only after the last set.
class Translator {
 public:
  explicit Translator(std::string_view pattern) : cursor_(pattern) {}

  ClassExpression run() {
    while (!cursor_.done()) element();
    close_options();
    if (groups_.size() > 1) broken("a '(' has no ')'");
    CodeClasses classes(sets_);
    std::string pattern;
    for (const Part& part : parts_) {
      pattern += part.set ? members(classes.of(*part.set)) : part.syntax;
    }
    return {std::move(classes), std::move(pattern)};
  }

 private:
  struct Part {
    std::string syntax;
    std::optional<std::size_t> set;
  };
  struct Group {
    bool ignore_case = false;
    bool look_around = false;
    bool not_behind = false;    // "(?<!"
    bool options = false;       // "(?i)", which ends where the group around it ends
    std::size_t part = 0;       // the part that opens it
    bool may_be_empty = false;  // an alternative before this one may match nothing
    bool consumes = false;      // this alternative matches at least one character
    bool consumed = false;      // `consumes` before the last element
  };
  enum class Last { nothing, item, quantifier, assertion };
  // Oniguruma tries "\b.+a" only where a line begins, as if "\b" were not there, and so misses "ba"
  // in " ba"; the same with "\B" and "(?<!". These are refused. Says if the last element, apart
  // from parentheses, was one of the three, or a "." behind one.
  enum class Boundary { none, passed, passed_and_dot };

  static std::string members(std::span<const std::uint8_t> classes) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    std::string result = "[";
    for (const std::uint8_t c : classes) {
      result += {'\\', 'x', kDigits[c >> 4], kDigits[c & 0xF]};
    }
    return classes.empty() ? "[^\\x00-\\xff]" : result + "]";
  }

  void syntax(std::string text) { parts_.push_back({std::move(text), std::nullopt}); }

  void set(const CodeSet& set) {
    const auto [found, added] = numbers_.emplace(set, sets_.size());
    if (added) sets_.push_back(set);
    if (sets_.size() > kMostSets) refuse("more than 1000 different classes of characters");
    parts_.push_back({{}, found->second});
  }

  void element() {
    switch (cursor_.front()) {
      case '\\':
        return escape();
      case '[':
        return item(onig::take_class(cursor_, ignore_case()));
      case '(':
        return open();
      case ')':
        return close();
      case '|':
        cursor_.skip(1);
        return alternative();
      case '*':
      case '+':
      case '?':
        return quantifier();
      case '{':
        return interval();
      case '.':
        cursor_.skip(1);
        return dot();
      case '^':
        cursor_.skip(1);
        return assertion("(?:\\A|(?<=", newline(), ")(?!\\z))");
      case '$':
        cursor_.skip(1);
        return assertion("(?:\\z|(?=", newline(), "))");
      default:
        return literal();
    }
  }

  void dot() {
    const bool passed = boundary_ == Boundary::passed;
    item(~newline());
    if (passed) boundary_ = Boundary::passed_and_dot;
  }

  void item(const CodeSet& characters) {
    folded_.clear();
    boundary_ = Boundary::none;
    set(characters);
    item_read(false);
  }

  void item_read(bool may_be_empty) {
    last_ = Last::item;
    last_group_.reset();
    last_may_be_empty_ = may_be_empty;
    groups_.back().consumed = groups_.back().consumes;
    groups_.back().consumes |= !may_be_empty;
  }

  void assertion(std::string begin, const CodeSet& characters, std::string end) {
    folded_.clear();
    syntax(std::move(begin));
    set(characters);
    syntax(std::move(end));
    last_ = Last::assertion;
  }

  bool ignore_case() const { return groups_.back().ignore_case; }

  void literal() {
    const std::string_view start = cursor_.rest();
    const char32_t character = onig::take_literal(cursor_);
    const CodeSet alone = {{character, character}};
    if (!ignore_case()) return item(alone);
    // Oniguruma takes U+00DF for "ss" and the reverse. Which literals it joins depends on how it
    // rewrites the expression, so any that may be neighbours are refused.
    std::u32string folded = std::exchange(folded_, {}) + unicode::fold(character);
    if (unicode::folds_to_several().contains(character) || unicode::ends_with_full_fold(folded)) {
      refuse("(?i) with '" + std::string(start.substr(0, start.size() - cursor_.rest().size())) +
             "', which may match another number of characters");
    }
    item(unicode::fold_closure(alone));
    folded_ = std::move(folded);
  }

  void escape() {
    if (std::optional<CodeSet> characters =
            onig::take_set_escape(cursor_, onig::Place::expression)) {
      return item(*characters);
    }
    if (cursor_.take("\\b")) return word_boundary("=", "!", "!", "=");
    if (cursor_.take("\\B")) return word_boundary("=", "=", "!", "!");
    if (cursor_.take("\\A")) return assertion("\\A");
    if (cursor_.take("\\z")) return assertion("\\z");
    if (cursor_.take("\\Z")) return assertion("(?=", newline(), "?\\z)");
    if (cursor_.take("\\R")) return line_break();
    if (cursor_.take("\\N")) return dot();
    if (cursor_.take("\\O")) return item(CodeSet::all());
    literal();
  }

  void assertion(std::string text) {
    folded_.clear();
    syntax(std::move(text));
    last_ = Last::assertion;
  }

  // "=" or "!" for the character before and the one behind, in two alternatives.
  void word_boundary(const std::string& before, const std::string& behind,
                     const std::string& or_before, const std::string& or_behind) {
    const CodeSet word = onig::word_character();
    assertion("(?:(?<" + before, word, ")(?" + behind);
    set(word);
    assertion(")|(?<" + or_before, word, ")(?" + or_behind);
    set(word);
    syntax("))");
    boundary_ = Boundary::passed;
  }

  void line_break() {
    begin("(?>", {ignore_case()});
    item({{'\r', '\r'}});
    item(newline());
    alternative();
    item({{0xA, 0xD}, {0x85, 0x85}, {0x2028, 0x2029}});
    close_group();
  }

  void alternative() {
    folded_.clear();
    boundary_ = Boundary::none;
    syntax("|");
    groups_.back().may_be_empty |= !groups_.back().consumes;
    groups_.back().consumes = false;
    last_ = Last::nothing;
  }

  void open() {
    constexpr std::array<std::string_view, 4> kLookAround = {"(?=", "(?!", "(?<=", "(?<!"};
    Group group = {ignore_case()};
    for (const std::string_view start : kLookAround) {
      if (!cursor_.take(start)) continue;
      group.look_around = true;
      group.not_behind = start == "(?<!";
      return begin(std::string(start), group);
    }
    if (cursor_.take("(?>")) return begin("(?>", group);
    if (cursor_.take("(?:")) return begin("(?:", group);
    if (cursor_.at("(*")) refuse("(*");
    if (!cursor_.at("(?")) {
      cursor_.skip(1);
      return begin("(?:", group);  // nothing refers to captures
    }
    const std::string_view construct = cursor_.rest().substr(0, 4);
    cursor_.skip(2);
    group.ignore_case = !cursor_.take("-");
    if (!cursor_.take("i")) refuse(construct);
    group.options = cursor_.take(")");
    if (!group.options && !cursor_.take(":")) refuse(construct);
    begin("(?:", group);
  }

  void begin(std::string start, Group group) {
    group.part = parts_.size();
    syntax(std::move(start));
    if (groups_.size() > kMostGroups) refuse("((((");
    groups_.push_back(group);
    last_ = Last::nothing;
  }

  void close_options() {
    while (groups_.back().options) close_group();
  }

  void close_group() {
    const Group group = groups_.back();
    groups_.pop_back();
    syntax(")");
    item_read(group.look_around || group.may_be_empty || !group.consumes);
    last_group_ = group.part;
    if (group.look_around) last_ = Last::assertion;
    if (group.not_behind) boundary_ = Boundary::passed;
  }

  void close() {
    cursor_.skip(1);
    close_options();
    if (groups_.size() == 1) broken("a ')' has no '('");
    close_group();
  }

  void require_item() const {
    if (last_ == Last::quantifier) refuse("a quantifier behind a quantifier");
    if (last_ != Last::item) broken("a quantifier has nothing to repeat");
  }

  // "+" behind "*", "+" or "?" is possessive, and "?" lazy.
  void quantifier() {
    require_item();
    if (cursor_.front() != '+') groups_.back().consumes = groups_.back().consumed;
    std::string text(1, cursor_.front());
    cursor_.skip(1);
    if (cursor_.at("+") || cursor_.at("?")) {
      text += cursor_.front();
      cursor_.skip(1);
    }
    if (text == "*" || text == "+") require_no_boundary();
    if (text.size() > 1 && text[1] == '+' && last_group_) {
      // An atomic group serves for both forms, see Regex.
      parts_[*last_group_].syntax.insert(0, "(?>");
      text[1] = ')';
    }
    syntax(std::move(text));
    last_ = Last::quantifier;
  }

  void require_no_boundary() const {
    if (boundary_ == Boundary::passed_and_dot) refuse("\\b, \\B or (?<!...) before .* or .+");
  }

  std::optional<std::uint32_t> take_number() {
    std::uint32_t value = 0;
    bool any = false;
    while (std::isdigit(static_cast<unsigned char>(cursor_.front())) != 0) {
      value = value * 10 + static_cast<std::uint32_t>(cursor_.front() - '0');
      if (value > kMostRepeats) refuse("a repeat count above 65535");
      cursor_.skip(1);
      any = true;
    }
    return any ? std::optional(value) : std::nullopt;
  }

  // {n}, {n,}, {,m} and {n,m}; anything else that begins with "{" is text.
  void interval() {
    const Cursor start = cursor_;
    cursor_.skip(1);
    const std::optional<std::uint32_t> least = take_number();
    const bool comma = cursor_.take(",");
    const std::optional<std::uint32_t> most = comma ? take_number() : least;
    if ((!least && !most) || !cursor_.take("}")) {
      cursor_ = start;
      return literal();
    }
    require_item();
    if (least && most && *least > *most) refuse("{n,m} with n above m");
    if (cursor_.at("+")) refuse("}+");
    // Oniguruma leaves such a loop at once where the group matches nothing, PCRE2 counts that.
    if (least.value_or(0) > 1 && last_may_be_empty_) refuse("{n} behind a group that may be empty");
    if (least.value_or(0) == 0) groups_.back().consumes = groups_.back().consumed;
    syntax("{" + std::to_string(least.value_or(0)) + "," + (most ? std::to_string(*most) : "") +
           "}");
    if (cursor_.take("?")) {
      if (most == least) refuse("{n}?");
      syntax("?");
    } else if (!most) {
      require_no_boundary();
    }
    last_ = Last::quantifier;
  }

  Cursor cursor_;
  std::vector<Part> parts_;
  std::vector<CodeSet> sets_;
  std::map<CodeSet, std::size_t> numbers_;
  std::vector<Group> groups_ = {Group{}};
  Last last_ = Last::nothing;
  bool last_may_be_empty_ = false;
  std::optional<std::size_t> last_group_;  // the part that opened it, if the last item is a group
  Boundary boundary_ = Boundary::none;
  std::u32string folded_;  // literals under (?i) that Oniguruma may join
};

}  // namespace

ClassExpression translate_onig(std::string_view pattern) {
  if (find_invalid_utf8(pattern)) broken("it is not UTF-8");
  return Translator(pattern).run();
}

}  // namespace sluice
