// The parts of a Plan that come from the process and the machine.
#pragma once

#include <cstdint>
#include <optional>

#include "sluice/engine.h"

namespace sluice {

// Bytes of the process itself: its resident memory now, and what the kernels' libraries allocate at
// first use.
std::uint64_t program_bytes();

// Throws Error{memory} if the plan and the `promised` bytes of other sessions exceed `host_cap`,
// or, for a plan of this process (`is_here`), if the bytes it needs beyond the `used` ones exceed
// what a limit of the process leaves (lib/process_limits.h). `threads` compute.
void require_host_memory(const Plan& plan, std::optional<std::uint64_t> host_cap,
                         std::uint64_t promised, std::uint64_t used, int threads, bool is_here);

}  // namespace sluice
