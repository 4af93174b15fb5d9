#include "model/onig.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <utility>

#include "sluice/errors.h"

namespace sluice {
namespace {

class Translator {
 public:
  explicit Translator(std::string_view pattern) : rest_(pattern) {}

  std::string run() {
    while (!rest_.empty()) {
      if (rest_.front() == '\\') {
        escape();
      } else if (in_class_) {
        class_character();
      } else {
        character();
      }
    }
    return std::move(result_);
  }

 private:
  [[noreturn]] static void refuse(std::string_view construct) {
    throw Error(ErrorCode::unsupported, "the regular expression uses '" + std::string(construct) +
                                            "', which Sluice does not support");
  }

  void copy(std::size_t length) {
    result_ += rest_.substr(0, length);
    rest_.remove_prefix(std::min(length, rest_.size()));
  }

  void escape() {
    const char letter = rest_.size() > 1 ? rest_[1] : '\0';
    if (letter == 's' || letter == 'S') {
      // PCRE2's \s also has U+180E, which is no white space since Unicode 6.3.
      result_ += letter == 's' ? "\\p{White_Space}" : "\\P{White_Space}";
      rest_.remove_prefix(2);
    } else if (letter == 'p' || letter == 'P' || letter == 'x') {
      const std::size_t end = rest_.find('}');
      if (rest_.size() < 3 || rest_[2] != '{' || end == std::string_view::npos) {
        refuse(rest_.substr(0, 2));
      }
      copy(end + 1);
    } else if (letter == 'u') {
      result_ += "\\x{" + std::string(rest_.substr(2, 4)) + "}";
      rest_.remove_prefix(std::min<std::size_t>(6, rest_.size()));
    } else if (std::isalnum(static_cast<unsigned char>(letter)) != 0 &&
               std::string_view("dDrntf").find(letter) == std::string_view::npos) {
      refuse(rest_.substr(0, 2));  // \w, \b, \h and others differ, or are rare
    } else {
      copy(2);
    }
  }

  void class_character() {
    if (rest_.front() == '[') refuse("a class inside a class");
    if (rest_.starts_with("&&")) refuse("&&");
    if (rest_.front() == ']') in_class_ = false;
    copy(1);
  }

  void character() {
    switch (rest_.front()) {
      case '[':
        in_class_ = true;
        copy(rest_.starts_with("[^") ? 2 : 1);
        if (rest_.starts_with("]")) refuse("[]");
        break;
      case '(':
        group();
        break;
      case '{':
        interval();
        break;
      default:
        copy(1);
    }
  }

  void group() {
    constexpr std::array<std::string_view, 7> kAlike = {"(?:",  "(?i:", "(?=", "(?!",
                                                        "(?<=", "(?<!", "(?>"};
    if (rest_.starts_with("(*")) refuse("(*");
    if (!rest_.starts_with("(?")) return copy(1);
    for (const std::string_view start : kAlike) {
      if (rest_.starts_with(start)) return copy(start.size());
    }
    refuse(rest_.substr(0, 4));
  }

  // {1,3} is the same in both, {,3} is literal text and {1,3}+ possessive in PCRE2 only.
  void interval() {
    const std::size_t end = rest_.find('}');
    if (end == std::string_view::npos) return copy(1);
    if (rest_.starts_with("{,")) refuse("{,");
    if (rest_.substr(end + 1).starts_with("+")) refuse("}+");
    copy(end + 1);
  }

  std::string_view rest_;
  std::string result_;
  bool in_class_ = false;
};

}  // namespace

std::string onig_to_pcre2(std::string_view pattern) { return Translator(pattern).run(); }

}  // namespace sluice
