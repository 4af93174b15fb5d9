#include "lib/check.h"

#include <cstdio>
#include <cstdlib>

namespace sluice {

void check_failed(const char* reason, const std::source_location& where) noexcept {
  std::fprintf(stderr, "sluice: internal error: %s (%s:%u, %s)\n", reason, where.file_name(),
               static_cast<unsigned>(where.line()), where.function_name());
  std::abort();
}

}  // namespace sluice
