// The memory and processors that this process may use: for plans, caps, threads and `topology`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sluice/topology.h"

namespace sluice {

struct ProcessLimits {
  std::vector<MemoryLimit> memory;         // the one with the least left first
  std::vector<ProcessorLimit> processors;  // the tightest first; at least one
  std::uint64_t machine_bytes = 0;         // memory of the machine; 0 if unknown

  // Threads that can run at the same time; at least 1. A quota of 1.5 processors keeps two busy.
  int threads() const;
};

// Reads the present limits. Memory: cgroups v1 and v2 (memory.max, memory.high,
// memory.limit_in_bytes), RLIMIT_AS, RLIMIT_DATA and free memory. Processors: the affinity mask and
// the quotas of cgroups (cpu.max, cpu.cfs_quota_us). A limit that cannot be read or makes no sense
// is ignored. `root` is the folder with proc and sys. Throws only std::bad_alloc.
ProcessLimits process_limits(const std::string& root = "/");

enum class Counted : std::uint8_t {
  resident,  // memory that is already part of the process's address space
  reserved,  // address space, whether memory or not
  all        // both
};

// Throws Error{memory} with the name of the limit if fewer than `bytes` are left under one that
// counts such memory: "WHAT another 1 GiB, more than LIMIT: 96 MiB left; REMEDY".
void require_memory(std::uint64_t bytes, Counted counted, const std::string& what,
                    const std::string& remedy);

}  // namespace sluice
