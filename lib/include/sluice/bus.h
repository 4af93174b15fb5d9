// A model of the bus between host memory and a device, to say what the traffic of one machine would
// take on another.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace sluice {

struct Bus {
  std::string name;               // as it was given: "12.5GB/s,10us"
  double bytes_per_second = 0.0;  // above 0
  double latency = 0.0;           // seconds per request
  double item_latency = 0.0;      // seconds per further copy of a batched request
};

// Parses RATE,LATENCY or RATE,LATENCY,ITEM: 12.5GB/s,10us or 50GB/s,5us,0.43us. Rates are in B/s,
// KB/s, MB/s, GB/s or TB/s (or KiB/s and so on), times in s, ms, us or ns. Throws Error{usage}
// naming `flag`.
Bus parse_bus(std::string_view text, std::string_view flag);

// Data that crosses a bus.
struct Crossing {
  std::uint64_t bytes = 0;
  std::uint64_t requests = 0;  // issued one after another, each with the bus's latency
  std::uint64_t items = 0;     // copies beyond the first of batched requests

  Crossing& operator+=(const Crossing& other);
  friend bool operator==(const Crossing&, const Crossing&) = default;
};

// bytes / rate + requests * latency + items * item_latency.
double transfer_seconds(const Bus& bus, const Crossing& crossing);

// Ways of bringing the rows at `positions` (ascending, of one layer and KV head) to a device. Each
// returns an empty crossing for no positions; `row_bytes` is KvShape::row_bytes().
//
// One copy for every page of `page_tokens` tokens that has one of them, all of the page.
Crossing page_copies(std::span<const std::int32_t> positions, int page_tokens,
                     std::uint64_t row_bytes);
// One batched request, as cudaMemcpyBatchAsync, of a copy for every run of adjacent rows.
Crossing batched_copies(std::span<const std::int32_t> positions, std::uint64_t row_bytes);

}  // namespace sluice
