// Characters, escapes and bracketed classes of Oniguruma's syntax.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "engine/unicode/code_set.h"

namespace sluice::onig {

// Error{unsupported} for a construct that Oniguruma reads and Sluice does not.
[[noreturn]] void refuse(std::string_view construct);
// Error{tokenizer} for one that Oniguruma does not read either.
[[noreturn]] void broken(const std::string& reason);

// The unread rest of an expression, which must be valid UTF-8.
class Cursor {
 public:
  explicit Cursor(std::string_view rest) : rest_(rest) {}

  bool done() const { return rest_.empty(); }
  std::string_view rest() const { return rest_; }
  char front() const { return rest_.empty() ? '\0' : rest_.front(); }
  bool at(std::string_view start) const { return rest_.starts_with(start); }
  // Steps over `start`; returns false if the rest does not begin with it.
  bool take(std::string_view start);
  void skip(std::size_t bytes) { rest_.remove_prefix(bytes); }
  char32_t take_character();

 private:
  std::string_view rest_;
};

// A character that is written as it is or by an escape: "a", "\n", "\x{41}", "\u0041", "\[".
char32_t take_literal(Cursor& cursor);

// The place of an escape, because \w has six more characters outside of brackets.
enum class Place { expression, brackets };

// The set of \w outside of brackets, and of the word characters that \b looks for.
CodeSet word_character();

// Takes the set of an escape: \d \D \h \H \s \S \w \W \p{..} \P{..}. Returns nothing and leaves the
// cursor if there is none.
std::optional<CodeSet> take_set_escape(Cursor& cursor, Place place);

// From "[" to the "]" that closes it. Case is ignored by the whole class and not by classes within
// it, so "[^[^a]]" with `ignore_case` has "A". Throws Error{unsupported} if ignoring case makes it
// match several characters, as "ss" for U+00DF.
CodeSet take_class(Cursor& cursor, bool ignore_case);

}  // namespace sluice::onig
