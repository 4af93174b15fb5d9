// A Jinja template: parsed once, rendered as transformers would. It reaches nothing but the
// variables it is given.
#pragma once

#include <cstdint>
#include <ctime>
#include <string_view>
#include <vector>

#include "model/jinja/ast.h"
#include "model/jinja/value.h"

namespace sluice::jinja {

// What this reads of Jinja 3.1: for (with its loop variable, if, else, break, continue), if, set,
// macro, transformers' generation, all expressions but powers and chains of comparisons, and the
// filters, tests, methods and functions of library.h. Everything else is refused by name, be it
// where the template is parsed or where it gets there.
class Template {
 public:
  // `source` is UTF-8. Throws Error{unsupported}.
  explicit Template(std::string_view source) : statements_(parse(source)) {}

  // `now` is what strftime_now writes. Throws Error{unsupported} for what cannot be computed, or
  // takes more than `budget` (see Budget), and Error{prompt} if the template calls
  // raise_exception.
  Text render(const Dict& variables, const std::tm& now, std::uint64_t budget) const;

 private:
  std::vector<Statement> statements_;
};

}  // namespace sluice::jinja
