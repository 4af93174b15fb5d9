// Limits of one device, real or simulated.
#pragma once

#include <cstdint>
#include <string_view>

namespace sluice::cuda {

// Properties of the device that launchers depend on.
struct DeviceLimits {
  int multiprocessors = 0;
  int shared_bytes = 0;  // per block, at most
  int capability = 0;    // 90 for compute capability 9.0
  std::uint64_t memory_bytes = 0;
  // A cluster with fewer logits than this reads all of them, not their digest: kDigestedFrom of
  // scan/scan.h, except in tests of select().
  std::int32_t digested_entries = 1 << 18;
  // Bytes per second of rows that decode attention reads from host memory; 0: the bus's own rate.
  std::uint64_t bus_rate = 0;
};

// Limits of the current device. If the project was configured with SLUICE_PRETEND_GPU, they are cut
// down to the GPU whose compute capability the environment variable SLUICE_PRETEND_GPU names,
// behind a bus of SLUICE_PRETEND_BUS GB/s.
DeviceLimits current_limits();

// Limits of a device that simulates another: "8.0" (A100), "8.6" (RTX 3090), "8.9" (RTX 4090) or
// "12.0" (RTX 5090). It gains nothing except a higher compute capability of the same features.
// Throws Error{unsupported} for any other name, and for a capability that needs newer instructions.
DeviceLimits pretended_limits(const DeviceLimits& real, std::string_view capability);

// Bytes per second of a simulated slower bus, from its GB/s, e.g. "12.5". Throws Error{unsupported}
// unless it is a number from 0.1 to 1000.
std::uint64_t pretended_bus(std::string_view gigabytes);

}  // namespace sluice::cuda
