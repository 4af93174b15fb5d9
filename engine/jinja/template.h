// A Jinja template: parsed once, rendered as transformers would. It reaches nothing but the
// variables it is given.
#pragma once

#include <cstdint>
#include <ctime>
#include <string_view>
#include <vector>

#include "engine/jinja/ast.h"
#include "engine/jinja/value.h"

namespace sluice::jinja {

// The supported part of Jinja 3.1: for (with its loop variable, if, else, break, continue), if,
// set, macro, transformers' generation, all expressions except powers and chains of comparisons,
// and the filters, tests, methods and functions of library.h. Everything else is refused by name,
// when the template is parsed or when it gets there.
class Template {
 public:
  // `source` is UTF-8. Throws Error{unsupported}.
  explicit Template(std::string_view source) : statements_(parse(source)) {}

  // `now`: the time that strftime_now writes. Throws Error{unsupported} for a template that cannot
  // be computed or takes more than `budget` (see Budget), and Error{prompt} if it calls
  // raise_exception.
  Text render(const Dict& variables, const std::tm& now, std::uint64_t budget) const;

 private:
  std::vector<Statement> statements_;
};

}  // namespace sluice::jinja
