// What this process may use of the machine. Plans, caps, threads and `topology` all ask here.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "sluice/topology.h"

namespace sluice {

struct ProcessLimits {
  std::vector<MemoryLimit> memory;         // the one with the least left first
  std::vector<ProcessorLimit> processors;  // the tightest first; at least one
  std::uint64_t machine_bytes = 0;         // of memory; 0 if unknown

  // Threads that can run at the same time; at least 1. A quota of 1.5 processors keeps two busy.
  int threads() const;
};

// Reads the limits as they are now: of memory those of cgroups (v1 and v2; memory.max, memory.high,
// memory.limit_in_bytes), RLIMIT_AS, RLIMIT_DATA and free memory; of processors the affinity mask
// and the quotas of cgroups (cpu.max, cpu.cfs_quota_us). A limit that cannot be read or makes no
// sense is none. `root` is the folder that has proc and sys. Throws nothing but std::bad_alloc.
ProcessLimits process_limits(const std::filesystem::path& root = "/");

enum class Counted : std::uint8_t {
  resident,  // memory that is part of the process's address space already
  all        // and address space
};

// Throws Error{memory}, naming the limit, where less than `bytes` are left under one of those that
// count such memory: "WHAT another 1 GiB, more than LIMIT: 96 MiB left; REMEDY".
void require_memory(std::uint64_t bytes, Counted counted, const std::string& what,
                    const std::string& remedy);

}  // namespace sluice
