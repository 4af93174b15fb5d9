// JSON from files that are not trusted, and as text.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace sluice {

// Objects and arrays inside each other, at most.
inline constexpr int kMaxJsonDepth = 32;

// Values in a document, at most: twice those of the largest tokenizer.json in use. A value of two
// bytes in the file takes up to a hundred in memory.
inline constexpr int kMaxJsonValues = 1 << 22;

// The JSON document in a file of up to `max_bytes`. Stricter than the parser alone: a key that
// stands twice in an object, more than kMaxJsonDepth levels or kMaxJsonValues values, or a NUL byte
// (which the parser takes for the end) is an error as soon as it is met. NaN, Infinity and
// -Infinity, which Python's json module writes, are numbers that are not finite. Takes time
// n log n. Throws Error{corrupt}, whose message ends in `remedy`, and what read_text_file throws.
nlohmann::json read_json_file(const std::filesystem::path& path, std::uint64_t max_bytes,
                              std::string_view remedy = "download it again");

// The same for text that was read from `path`; messages end with `remedy`.
nlohmann::json parse_json(std::string text, const std::filesystem::path& path,
                          std::string_view remedy);

// The document as text, on one line or indented by this much. Bytes that are not UTF-8 become
// U+FFFD.
std::string dump_json(const nlohmann::json& json, int indent = -1);

}  // namespace sluice
