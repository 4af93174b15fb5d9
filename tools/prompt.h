// Reading the prompt of `sluice generate`.
#pragma once

#include <string>

namespace sluice::tools {

// The text of a file, of a pipe or device at that path, or, for "-" and "", of standard input,
// which may be a terminal. Throws Error{not_found} or {io} naming it, Error{prompt} past 1 GiB,
// Error{interrupted}.
std::string read_prompt(const std::string& path);

}  // namespace sluice::tools
