#include "sluice/bus.h"

#include <array>
#include <charconv>
#include <optional>
#include <span>
#include <vector>

#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

struct Unit {
  std::string_view name;
  double factor;
};
constexpr std::array kRates = {Unit{"B/s", 1.0},      Unit{"KB/s", 1e3},     Unit{"MB/s", 1e6},
                               Unit{"GB/s", 1e9},     Unit{"TB/s", 1e12},    Unit{"KiB/s", 0x1p10},
                               Unit{"MiB/s", 0x1p20}, Unit{"GiB/s", 0x1p30}, Unit{"TiB/s", 0x1p40}};
constexpr std::array kTimes = {Unit{"s", 1.0}, Unit{"ms", 1e-3}, Unit{"us", 1e-6},
                               Unit{"ns", 1e-9}};

// A number with one of the units behind it.
std::optional<double> quantity(std::string_view text, std::span<const Unit> units) {
  double value = 0.0;
  const auto [end, status] =
      std::from_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed);
  if (status != std::errc{}) return std::nullopt;
  const std::string_view unit = text.substr(static_cast<std::size_t>(end - text.data()));
  for (const Unit& known : units) {
    if (unit == known.name) return value * known.factor;
  }
  return std::nullopt;
}

std::vector<std::string_view> parts_of(std::string_view text) {
  std::vector<std::string_view> parts;
  for (std::size_t begin = 0;;) {
    const std::size_t comma = text.find(',', begin);
    parts.push_back(text.substr(begin, comma - begin));
    if (comma == std::string_view::npos) return parts;
    begin = comma + 1;
  }
}

}  // namespace

Bus parse_bus(std::string_view text, std::string_view flag) {
  // Beyond these numbers a bus is a slip of the pen, and sums would overflow.
  constexpr double kMostRate = 1e15;
  constexpr double kMostLatency = 10.0;
  const std::vector<std::string_view> parts = parts_of(text);
  Bus bus;
  bus.name = text;
  const bool is_complete = parts.size() == 2;
  const auto rate = is_complete ? quantity(parts[0], kRates) : std::nullopt;
  const auto latency = is_complete ? quantity(parts[1], kTimes) : std::nullopt;
  const auto is_time = [](const std::optional<double>& time) {
    return time && *time >= 0.0 && *time <= kMostLatency;
  };
  if (!rate || !(*rate >= 1.0 && *rate <= kMostRate) || !is_time(latency)) {
    throw Error(ErrorCode::usage,
                std::string(flag) + ": " + in_quotes(text) +
                    " is no bus; give its rate and the latency of a request, as 12.5GB/s,10us");
  }
  bus.bytes_per_second = *rate;
  bus.latency = *latency;
  return bus;
}

Crossing& Crossing::operator+=(const Crossing& other) {
  bytes += other.bytes;
  requests += other.requests;
  return *this;
}

double transfer_seconds(const Bus& bus, const Crossing& crossing) {
  return static_cast<double>(crossing.bytes) / bus.bytes_per_second +
         static_cast<double>(crossing.requests) * bus.latency;
}

}  // namespace sluice
