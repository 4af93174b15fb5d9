// The fields of a request that constrain its answer: `response_format`, `regex` and `grammar`.
#pragma once

#include <optional>
#include <string_view>

#include "sluice/constraint.h"
#include "tools/serve/fields.h"

namespace sluice::tools {

// The constraint that a body asks for; none if it asks for none. `text` is the body as it came,
// because a schema's properties are answered in their order, which `fields` does not have. Throws
// Error{usage} or {unsupported}.
std::optional<Constraint> read_constraint(const Fields& fields, std::string_view text,
                                          const Constraints& constraints);

}  // namespace sluice::tools
