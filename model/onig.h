// Regular expressions as tokenizer.json writes them (Oniguruma's Ruby syntax) for PCRE2.
#pragma once

#include <string>
#include <string_view>

namespace sluice {

// The same expression for PCRE2 with UTF, UCP and MULTILINE. Only what both dialects read alike
// passes, so that text never splits differently from the checkpoint's training without a word:
// throws Error{unsupported} that names any other construct.
std::string onig_to_pcre2(std::string_view pattern);

}  // namespace sluice
