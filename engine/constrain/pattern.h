// Regular expressions as nodes of a grammar.
//
// The syntax is that of ECMA 262 without what no grammar can say or what JSON Schema advises
// against: characters, escapes (\d \w \s and their opposites in ASCII and ECMA's white space; \n
// \r \t \f \v \0, \xHH, \uHHHH, \u{H..}, and any punctuation), `.`, classes in brackets, groups,
// `|`, `* + ? {n} {n,} {n,m}`, each with a lazy `?`, and `^` and `$` at the ends of the outermost
// alternatives. Look-around, back references, \b, \p and flags are refused by name.
#pragma once

#include <functional>
#include <string_view>

#include "engine/constrain/grammar.h"

namespace sluice::constrain {

// How one character of a set is written.
using WriteCharacter = std::function<NodeId(const CodeSet&)>;

enum class Match : std::uint8_t {
  whole,  // the text is a match; `^` and `$` change nothing
  part,   // a match lies somewhere in the text, as JSON Schema has it
};

// Throws Error{usage} or {unsupported} that names the pattern and what is wrong in it.
NodeId compile_pattern(std::string_view pattern, Match match, const WriteCharacter& write,
                       Grammar& grammar);

}  // namespace sluice::constrain
