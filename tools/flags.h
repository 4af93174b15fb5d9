// Parsing of flag values where CLI11's default would surprise.
#pragma once

#include <CLI/CLI.hpp>
#include <charconv>
#include <limits>
#include <string>
#include <vector>

#include "lib/text.h"

namespace sluice::tools {

// Decimal integers in the range of Integer only: 010 is ten, and -1 is refused as a seed.
template <typename Integer>
CLI::Validator whole_number() {
  const auto read = [](std::string& text) -> std::string {
    using Limits = std::numeric_limits<Integer>;
    Integer value{};
    const char* const end = text.data() + text.size();
    const auto [stop, status] = std::from_chars(text.data(), end, value);
    if (status == std::errc{} && stop == end) {
      text = std::to_string(value);
      return {};
    }
    return in_quotes(text) + " is not a whole number from " + std::to_string(Limits::min()) +
           " to " + std::to_string(Limits::max());
  };
  return {read, ""};
}

template <typename Integer>
CLI::Option* add_integer(CLI::App& app, const char* name, Integer& value, const std::string& help) {
  return app.add_option(name, value, help)->transform(whole_number<Integer>());
}

// The same for a flag that may be given several times.
template <typename Integer>
CLI::Option* add_integer(CLI::App& app, const char* name, std::vector<Integer>& values,
                         const char* help) {
  return app.add_option(name, values, help)->transform(whole_number<Integer>());
}

// For a number whose 0 means that the flag was not given.
inline CLI::Validator not_zero() {
  return {[](std::string& text) {
            return std::string(text == "0" ? "0 is too few; give 1 or more" : "");
          },
          ""};
}

// Lets the reports of `flags` replace any file.
inline CLI::Option* add_force(CLI::App& app, bool& force, const std::string& flags) {
  return app.add_flag("--force", force,
                      "let " + flags +
                          " replace a file that is there, though it is no report of sluice; files "
                          "that the command reads are never replaced");
}

}  // namespace sluice::tools
