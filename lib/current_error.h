// Exceptions of the standard library as errors of Sluice.
#pragma once

#include <string>

#include "sluice/errors.h"

namespace sluice {

// The exception that is being handled: an Error as it is; Error{memory} where an allocation failed;
// else Error{internal}. `what` begins the messages of those two, as in "reading rows: ".
Error current_error(const std::string& what = {});

}  // namespace sluice
