// What a Jinja template writes, seen without running it.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>

namespace sluice {

// Marks in TemplateSketch::text. Templates that hold such bytes themselves are refused.
namespace mark {
inline constexpr char kValue = '\x01';      // a variable, a member or an element of one
inline constexpr char kTrimmed = '\x02';    // the same, without white space around it
inline constexpr char kBos = '\x03';        // the variable bos_token
inline constexpr char kEos = '\x04';        // the variable eos_token
inline constexpr char kStatement = '\x05';  // what stands on both sides may not follow each other
inline constexpr char kComputed = '\x06';   // anything else
}  // namespace mark

// Throws Error{unsupported}: the chat template `what`, and which are known.
[[noreturn]] void refuse_template(const std::string& what);

struct TemplateSketch {
  // Literal text and string literals that are written or assigned, in the order of the template,
  // with marks between them. White space around tags is removed as transformers has Jinja do it
  // (trim_blocks, lstrip_blocks).
  std::string text;
  // Where `text` was behind the last statement that names add_generation_prompt; 0: there is none.
  std::size_t generation = 0;
  // All statements and expressions, a line each, single spaces for white space.
  std::string code;
  // What {% set name = 'literal' %} assigns, the last of each name; without a value where it is
  // something computed from literals.
  std::map<std::string, std::string> assigned;
  std::map<std::string, std::string> computed;  // name, expression
};

// Takes time linear in the length. Throws Error{unsupported} for a tag or a string that does not
// end, for control characters and for tags that would have to be run: macros, filters, blocks.
TemplateSketch sketch_template(std::string_view source);

}  // namespace sluice
