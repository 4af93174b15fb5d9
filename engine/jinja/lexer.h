// The text, the tags and the tokens inside of tags that a Jinja template consists of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sluice::jinja {

struct Token {
  enum class Kind : std::uint8_t {
    data,        // text between tags
    output,      // {{
    statement,   // {%
    end_of_tag,  // }} or %}
    name,
    string,  // its value
    integer,
    real,
    symbol,  // an operator or a bracket
    end_of_file,
  };
  Kind kind = Kind::end_of_file;
  std::string text;
  std::size_t line = 1;
};

// White space around tags is removed as transformers has Jinja do it (trim_blocks, lstrip_blocks,
// and one line break at the end of the file). Throws Error{unsupported} that names the line, for a
// tag or a string without an end and for characters that cannot begin a token.
std::vector<Token> tokenize(std::string_view source);

}  // namespace sluice::jinja
