// What the system says of an errno.
#pragma once

#include <string>
#include <system_error>

namespace sluice {

// Thread-safe, which strerror() is not.
inline std::string error_text(int error) { return std::generic_category().message(error); }

}  // namespace sluice
