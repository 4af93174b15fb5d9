// Byte counts as people write them: "64MiB", "1.5 GiB".
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace sluice {

// "0 B", "4096 B" below 10 KiB, then one or two decimals in KiB, MiB, GiB, TiB.
std::string format_bytes(std::uint64_t bytes);

// Reads a count with an optional binary (KiB, MiB, GiB, TiB, or K, M, G, T) or decimal (KB, MB,
// GB, TB) unit; fractions are allowed with a unit. `flag` names the source in the error.
// Throws Error{usage} if `text` is not a byte count or does not fit 64 bits.
std::uint64_t parse_bytes(std::string_view text, std::string_view flag);

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The bytes of `count` elements: counts are signed, sizes are not.
constexpr std::size_t bytes_of(std::int64_t count, std::size_t element_bytes) {
  return static_cast<std::size_t>(count) * element_bytes;
}

}  // namespace sluice
