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

// A limit on the memory of this process.
struct MemoryLimit {
  std::string source;        // "the container's memory limit (memory.max of /a/b)"
  std::uint64_t bytes = 0;   // limit
  std::uint64_t left = 0;    // unused; file caches that the kernel can drop count as left
  bool is_resident = false;  // it counts resident memory, and not address space
};

// A limit on the processors that run this process at the same time.
struct ProcessorLimit {
  std::string source;       // "the container's quota (cpu.max of /a/b)"
  double processors = 0.0;  // a quota may be a fraction
};

struct Topology {
  std::string processor;         // marketing name
  std::string instruction_sets;  // those that matter here: "AVX2 AVX-512 AVX512-BF16 AMX-BF16"
  int packages = 0;
  int usable_cores = 0;  // physical cores in this process's CPU set and affinity mask
  int usable_processing_units = 0;
  int threads = 0;             // default compute threads: one per core, within the quota
  std::uint64_t l2_bytes = 0;  // per core
  std::uint64_t l3_bytes = 0;  // largest shared cache
  std::uint64_t memory_bytes = 0;
  std::uint64_t available_bytes = 0;  // least that any limit leaves
  // All limits, the tightest first: cgroups (v1 and v2, with their ancestors), resources
  // (setrlimit), the machine.
  std::vector<MemoryLimit> memory_limits;
  std::vector<ProcessorLimit> processor_limits;
  std::vector<NumaNode> nodes;
};

// Throws Error{unsupported} where hwloc cannot tell.
Topology detect_topology();

// A GPU and the bus between its memory and the host's.
struct DeviceTopology {
  std::string name;         // as EngineConfig::device takes it
  std::string description;  // product and compute capability
  std::uint64_t memory_bytes = 0;
  double memory_rate = 0.0;  // its memory's nominal rate; this and the next two bytes per second
  double copied = 0.0;       // copies of megabytes from pinned host memory, as measured
  double read = 0.0;         // kernels that read there: how selected rows cross
  std::uint64_t cached_bytes = 0;  // least selected bytes per layer for a row cache to pay
};

// `device` as EngineConfig has it. Measuring takes some milliseconds. Throws Error{unsupported}
// if this build or this machine has no such device, Error{usage} for one without separate memory.
DeviceTopology detect_device(const std::string& device = "cuda");

struct Bandwidth {
  int threads = 0;
  double read_bytes_per_second = 0.0;
  double copy_bytes_per_second = 0.0;  // bytes copied; reads and writes are twice that
};

// Streams through `bytes` of memory with `threads` threads; best of three passes. Take several
// times the L3 cache to measure DRAM. `threads` 0 is Topology::threads. Throws Error{usage} for
// more than 1 TiB and for fewer than 0 threads.
Bandwidth measure_bandwidth(int threads, std::uint64_t bytes);

}  // namespace sluice
