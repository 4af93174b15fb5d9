// A compiled regular expression (PCRE2, with its JIT compiler where the machine has one).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "engine/onig.h"

struct pcre2_real_code_8;
struct pcre2_real_match_data_8;
struct pcre2_real_match_context_8;

namespace sluice {

// Immutable, so threads may share it; each thread searches with its own Matcher.
class Regex {
 public:
  // `pattern` is Oniguruma's syntax. Throws what translate_onig throws, and Error{unsupported} for
  // an expression that PCRE2 does not take, such as a look-behind of any length.
  explicit Regex(std::string_view pattern);

 private:
  explicit Regex(ClassExpression expression);
  friend class Matcher;
  struct Free {
    void operator()(pcre2_real_code_8* code) const;
  };
  CodeClasses classes_;
  std::unique_ptr<pcre2_real_code_8, Free> code_;
};

// Budget of steps that all searches in one text share. A search of few steps is free, so that
// ordinary expressions never run out; one that backtracks for long pays for its steps. Counts
// steps, not seconds, because then the same text fails on every machine or on none.
class StepBudget {
 public:
  explicit StepBudget(std::size_t text_bytes);

  // Throws Error{tokenizer} if fewer steps are left.
  void spend(std::uint64_t steps);

 private:
  std::size_t text_bytes_;
  std::uint64_t steps_;
  std::uint64_t left_;
};

class Matcher {
 public:
  struct Span {
    std::size_t begin = 0;
    std::size_t end = 0;
  };

  // `regex` and `budget` must outlive it.
  Matcher(const Regex& regex, StepBudget& budget);

  // Begins with `text`, which must be valid UTF-8 and stay until the last match is found.
  void start(std::string_view text);
  // The next match in it; behind an empty one the search goes on at the next character. Throws what
  // StepBudget throws, and Error{tokenizer} if the search takes too much memory.
  std::optional<Span> next();

 private:
  struct Free {
    void operator()(pcre2_real_match_data_8* data) const;
    void operator()(pcre2_real_match_context_8* context) const;
  };
  // PCRE2's result of a search for a match that begins at `from`, or with `options` 0 at it or
  // later.
  int match(std::size_t from, std::uint32_t options, std::uint32_t steps);
  // PCRE2's result of a search for a match at `at`, for any number of steps within the budget.
  int match_at(std::size_t at);
  // The first match at `from` or later, in characters.
  std::optional<Span> find(std::size_t from);
  // Offset of character `index`, which must not be less than in the call before.
  std::size_t byte_of(std::size_t index);

  const Regex* regex_;
  StepBudget* budget_;
  std::string_view text_;
  std::string characters_;  // the class of each character of the text
  std::size_t from_ = 0;    // the character at which the search goes on
  std::size_t index_ = 0;   // a character, and the byte that it begins with
  std::size_t byte_ = 0;
  bool backtracks_ = false;  // the text has made a search take many steps
  std::unique_ptr<pcre2_real_match_data_8, Free> data_;
  std::unique_ptr<pcre2_real_match_context_8, Free> context_;
};

}  // namespace sluice
