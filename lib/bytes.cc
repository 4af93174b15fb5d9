#include "lib/bytes.h"

#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <optional>

#include "sluice/errors.h"

namespace sluice {
namespace {

std::optional<double> unit_factor(std::string unit) {
  for (char& c : unit) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (unit.empty() || unit == "b") return 1.0;
  constexpr std::string_view kPrefixes = "kmgt";
  const std::size_t exponent = kPrefixes.find(unit[0]);
  if (exponent == std::string_view::npos) return std::nullopt;
  const std::string_view rest = std::string_view(unit).substr(1);
  if (rest.empty() || rest == "ib") return std::pow(1024.0, static_cast<double>(exponent + 1));
  if (rest == "b") return std::pow(1000.0, static_cast<double>(exponent + 1));
  return std::nullopt;
}

}  // namespace

std::string format_bytes(std::uint64_t bytes) {
  constexpr std::array<const char*, 4> kUnits = {"KiB", "MiB", "GiB", "TiB"};
  if (bytes < 10240) return std::to_string(bytes) + " B";
  double value = static_cast<double>(bytes) / 1024.0;
  std::size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  std::array<char, 32> text{};
  char* const end = std::to_chars(text.data(), text.data() + text.size(), value,
                                  std::chars_format::fixed, value < 10.0 ? 2 : 1)
                        .ptr;
  return std::string(text.data(), end) + " " + kUnits.at(unit);
}

std::uint64_t parse_bytes(std::string_view text, std::string_view flag) {
  double value = 0.0;
  const auto [end, status] =
      std::from_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed);
  std::string_view rest = text.substr(static_cast<std::size_t>(end - text.data()));
  while (!rest.empty() && rest.front() == ' ') rest.remove_prefix(1);
  const std::optional<double> factor = unit_factor(std::string(rest));
  const double bytes = value * factor.value_or(0.0);
  if (status != std::errc{} || !factor || !(value >= 0.0) || !(bytes < 0x1p63)) {
    throw Error(ErrorCode::usage, std::string(flag) + ": '" + std::string(text) +
                                      "' is not a byte count; write for example 64MiB or 2.5GiB");
  }
  return static_cast<std::uint64_t>(bytes);
}

}  // namespace sluice
