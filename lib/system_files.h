// Reads the small text files of /proc and /sys, whatever their contents.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

// The text of a file, up to 4 MiB of it; empty if it cannot be read.
std::string system_text(const std::string& path);

// `name` below `folder`, with one slash between them, or `folder` if the name is empty. Not a
// std::filesystem::path, because libstdc++ 12 frees parts of one twice if memory runs out while it
// is joined.
std::string joined(std::string_view folder, std::string_view name);

// Words between spaces, tabs and line breaks.
std::vector<std::string_view> words_of(std::string_view text);
std::vector<std::string_view> lines_of(std::string_view text);

// The value of a text that is a decimal number and nothing else. nullopt for "max", "unlimited",
// "-1", a number past 64 bits.
std::optional<std::uint64_t> number_of(std::string_view word);

// The number after `key` on the line that starts with it, as in "MemAvailable:   123 kB", without
// its unit.
std::optional<std::uint64_t> number_after(std::string_view text, std::string_view key);

}  // namespace sluice
