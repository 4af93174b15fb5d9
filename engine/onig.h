// Regular expressions as tokenizer.json writes them: Oniguruma's Ruby syntax, as version 6.9.10 in
// Hugging Face's tokenizers 0.23 reads it (doc/RE of Oniguruma; Unicode 16.0).
#pragma once

#include <string>
#include <string_view>

#include "engine/unicode/code_classes.h"

namespace sluice {

// An expression over classes of characters instead of characters. The meaning of properties,
// classes and escapes is thus decided here, and the matching engine needs no Unicode.
struct ClassExpression {
  CodeClasses classes;
  std::string pattern;  // for PCRE2 without UTF: its characters are the classes
};

// Throws Error{unsupported} that names a construct with another meaning in PCRE2, or a property
// that Sluice does not have, and Error{tokenizer} if Oniguruma cannot read the expression either.
ClassExpression translate_onig(std::string_view pattern);

}  // namespace sluice
