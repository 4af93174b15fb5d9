// Properties and case folding of characters, as in Oniguruma 6.9.10 (Unicode 16.0). They do not
// come from system libraries, so that a text is cut alike whatever their version.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "engine/unicode/code_set.h"

namespace sluice::unicode {

// A general category by its short name ("L", "Lu", "LC") or a script by its name ("Han", "Hani").
// The value of a script is Script, not Script_Extensions: U+3001 is Common, though only texts in
// Han and a few other scripts use it. Case, spaces, "-" and "_" make no difference.
std::optional<CodeSet> property(std::string_view name);

CodeSet white_space();  // \s
CodeSet word();         // [\w]: letters, marks, decimal digits, connectors

// The code point that represents all that differ from `code_point` by case only.
char32_t fold(char32_t code_point);
// `set` and all that differs from a member by case only.
CodeSet fold_closure(const CodeSet& set);

// Code points that match several when case is ignored: U+00DF matches "ss".
const CodeSet& folds_to_several();
// Returns true if `folded`, folded code points, ends with the full folding of one of them.
bool ends_with_full_fold(std::u32string_view folded);

}  // namespace sluice::unicode
