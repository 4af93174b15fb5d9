// A model of the bus between host memory and a device, to say what the traffic of one machine would
// take on another.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace sluice {

struct Bus {
  std::string name;               // as it was given: "12.5GB/s,10us"
  double bytes_per_second = 0.0;  // above 0
  double latency = 0.0;           // seconds per request
};

// Parses RATE,LATENCY, as 12.5GB/s,10us. Rates are in B/s, KB/s, MB/s, GB/s or TB/s (or KiB/s and
// so on), times in s, ms, us or ns. Throws Error{usage} naming `flag`.
Bus parse_bus(std::string_view text, std::string_view flag);

// Data that crosses a bus.
struct Crossing {
  std::uint64_t bytes = 0;
  std::uint64_t requests = 0;  // issued one after another, each with the bus's latency

  Crossing& operator+=(const Crossing& other);
  friend bool operator==(const Crossing&, const Crossing&) = default;
};

// bytes / rate + requests * latency.
double transfer_seconds(const Bus& bus, const Crossing& crossing);

}  // namespace sluice
