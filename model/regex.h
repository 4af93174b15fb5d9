// A compiled regular expression (PCRE2, with its JIT compiler where the machine has one).
#pragma once

#include <cstddef>
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

class Matcher {
 public:
  struct Span {
    std::size_t begin = 0;
    std::size_t end = 0;
  };

  // `regex` must outlive it.
  explicit Matcher(const Regex& regex);

  // The first match in `text`, which must be valid UTF-8, that begins at `from` or later. Throws
  // Error{tokenizer} if the search takes more steps or memory than such a text can need.
  std::optional<Span> find(std::string_view text, std::size_t from);

 private:
  struct Free {
    void operator()(pcre2_real_match_data_8* data) const;
    void operator()(pcre2_real_match_context_8* context) const;
  };
  const pcre2_real_code_8* code_;
  std::unique_ptr<pcre2_real_match_data_8, Free> data_;
  std::unique_ptr<pcre2_real_match_context_8, Free> context_;
};

}  // namespace sluice
