// JSON from files that are not trusted.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace sluice {

// Objects and arrays inside each other, at most.
inline constexpr int kMaxJsonDepth = 32;

// The JSON document in a file of up to `max_bytes`. Stricter than the parser alone: a key that
// stands twice in an object, more than kMaxJsonDepth levels, or a NUL byte (which the parser takes
// for the end) is an error. Throws Error{corrupt}, and what read_text_file throws.
nlohmann::json read_json_file(const std::filesystem::path& path, std::uint64_t max_bytes);

// Text from a file as it may stand in a one-line message: in quotes, without control characters
// and cut to a readable length.
std::string in_quotes(std::string_view text);

}  // namespace sluice
