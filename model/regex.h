// A compiled regular expression (PCRE2, with its JIT compiler where the machine has one).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

struct pcre2_real_code_8;
struct pcre2_real_match_data_8;
struct pcre2_real_match_context_8;

namespace sluice {

// Immutable, so threads may share it; each searches with a Matcher of its own.
class Regex {
 public:
  // `pattern` is Oniguruma's syntax, see onig.h. Throws Error{unsupported} for a construct that
  // Sluice does not support and Error{tokenizer} if it does not compile.
  explicit Regex(std::string_view pattern);

 private:
  friend class Matcher;
  struct Free {
    void operator()(pcre2_real_code_8* code) const;
  };
  std::unique_ptr<pcre2_real_code_8, Free> code_;
};

// What all searches in one text may take together. A search that does with few steps is free, so
// that no honest expression notices; one that backtracks for long pays for it. Steps are counted,
// not seconds: the same text fails everywhere or nowhere.
class StepBudget {
 public:
  explicit StepBudget(std::size_t text_bytes);

  // Throws Error{tokenizer} if that is more than there is left.
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

  // The first match in `text`, which must be valid UTF-8, that begins at `from` or later. Throws
  // what StepBudget throws, and Error{tokenizer} if the search takes too much memory.
  std::optional<Span> find(std::string_view text, std::size_t from);

 private:
  struct Free {
    void operator()(pcre2_real_match_data_8* data) const;
    void operator()(pcre2_real_match_context_8* context) const;
  };
  // PCRE2's result of a search for a match that begins at `from`, or with `options` 0 at it or
  // later.
  int match(std::string_view text, std::size_t from, std::uint32_t options, std::uint32_t steps);
  // Whether there is one at `at`, however many steps that takes.
  int match_at(std::string_view text, std::size_t at);

  const pcre2_real_code_8* code_;
  StepBudget* budget_;
  bool backtracks_ = false;  // the text has made a search take many steps
  std::unique_ptr<pcre2_real_match_data_8, Free> data_;
  std::unique_ptr<pcre2_real_match_context_8, Free> context_;
};

}  // namespace sluice
