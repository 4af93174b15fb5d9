// Always-on assertions for programmer errors: they end the process with the place and the reason.
#pragma once

#include <source_location>

namespace sluice {

[[noreturn]] void check_failed(const char* reason, const std::source_location& where) noexcept;

// Ends the process unless `condition` holds. For invariants of Sluice's own code; anything that
// input or the machine can cause is an Error instead.
inline void check(bool condition, const char* reason,
                  const std::source_location& where = std::source_location::current()) {
  if (!condition) [[unlikely]]
    check_failed(reason, where);
}

}  // namespace sluice
