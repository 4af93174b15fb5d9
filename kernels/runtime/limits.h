// What one device can do, or is told to pretend that it can.
#pragma once

#include <cstdint>
#include <string_view>

namespace sluice::cuda {

// What launchers ask of the device they run on.
struct DeviceLimits {
  int multiprocessors = 0;
  int shared_bytes = 0;  // that one block can have
  int capability = 0;    // 90 for compute capability 9.0
  std::uint64_t memory_bytes = 0;
  // With fewer logits than these a cluster reads all of them, not their digest.
  std::int32_t digested_entries = 1 << 18;
  // Bytes per second of rows that decoding attention reads from the host; 0: what the bus gives.
  std::uint64_t bus_rate = 0;
};

// Of the current device. Where the project was configured with SLUICE_PRETEND_GPU, no more than the
// GPU has whose compute capability the environment variable SLUICE_PRETEND_GPU names, behind a bus
// of as many GB/s as SLUICE_PRETEND_BUS says.
DeviceLimits current_limits();

// What is left of a device that passes for another: "8.0" (A100), "8.6" (RTX 3090), "8.9" (RTX
// 4090) or "12.0" (RTX 5090). It never gains anything but a higher compute capability of the same
// features. Throws Error{unsupported} for any other, and for a capability that needs newer
// instructions.
DeviceLimits pretended_limits(const DeviceLimits& real, std::string_view capability);

// Bytes per second of a bus that passes for a slower one, by its GB/s: "12.5", say. Throws
// Error{unsupported} for what is no number or not from 0.1 to 1000.
std::uint64_t pretended_bus(std::string_view gigabytes);

}  // namespace sluice::cuda
