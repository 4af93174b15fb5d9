// The parts of a Plan that come from the process and the machine.
#pragma once

#include <cstdint>
#include <optional>

#include "sluice/engine.h"

namespace sluice {

// What the process holds by itself: its resident memory now, and what the kernels' libraries take
// when they are first used.
std::uint64_t program_bytes();

// Throws Error{memory} if the plan needs more than `host_cap`, of which others were promised
// `promised`, or if what it needs besides the `used` bytes of all that are there is more than a
// limit of the process leaves (lib/process_limits.h).
void require_host_memory(const Plan& plan, std::optional<std::uint64_t> host_cap,
                         std::uint64_t promised, std::uint64_t used);

}  // namespace sluice
