// The machine as Sluice sees it, within what this process may use.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

struct NumaNode {
  int index = 0;
  std::uint64_t memory_bytes = 0;
  int cores = 0;
};

struct Topology {
  std::string processor;         // marketing name
  std::string instruction_sets;  // those that matter here: "AVX2 AVX-512 AVX512-BF16 AMX-BF16"
  int packages = 0;
  int usable_cores = 0;  // physical cores in this process's CPU set
  int usable_processing_units = 0;
  std::uint64_t l2_bytes = 0;  // per core
  std::uint64_t l3_bytes = 0;  // largest shared cache
  std::uint64_t memory_bytes = 0;
  std::uint64_t available_bytes = 0;  // the kernel's MemAvailable, within the cgroup's limit
  std::vector<NumaNode> nodes;
};

// Throws Error{unsupported} where hwloc cannot tell.
Topology detect_topology();

struct Bandwidth {
  int threads = 0;
  double read_bytes_per_second = 0.0;
  double copy_bytes_per_second = 0.0;  // bytes copied; reads and writes are twice that
};

// Streams through `bytes` of memory with `threads` threads; best of three passes. Take several
// times the L3 cache to measure DRAM. `threads` 0 is one per core.
Bandwidth measure_bandwidth(int threads, std::uint64_t bytes);

}  // namespace sluice
