#include "lib/system_files.h"

#include <algorithm>
#include <charconv>
#include <fstream>

namespace sluice {
namespace {

constexpr std::size_t kMostBytes = std::size_t{4} << 20;

std::vector<std::string_view> split(std::string_view text, std::string_view separators) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t begin = std::min(text.find_first_not_of(separators), text.size());
    text.remove_prefix(begin);
    if (text.empty()) return parts;
    const std::size_t end = std::min(text.find_first_of(separators), text.size());
    parts.push_back(text.substr(0, end));
    text.remove_prefix(end);
  }
}

}  // namespace

std::string system_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text;
  constexpr std::size_t kStep = 4096;
  while (file && text.size() < kMostBytes) {
    const std::size_t before = text.size();
    text.resize(before + kStep);
    file.read(text.data() + before, kStep);
    text.resize(before + static_cast<std::size_t>(file.gcount()));
  }
  return text;
}

std::string joined(std::string_view folder, std::string_view name) {
  while (folder.ends_with('/')) folder.remove_suffix(1);
  while (name.starts_with('/')) name.remove_prefix(1);
  std::string path(folder);
  if (!name.empty()) path.append("/").append(name);
  return path;
}

std::vector<std::string_view> words_of(std::string_view text) { return split(text, " \t\r\n"); }

std::vector<std::string_view> lines_of(std::string_view text) { return split(text, "\n"); }

std::optional<std::uint64_t> number_of(std::string_view word) {
  std::uint64_t number = 0;
  const auto [stop, status] = std::from_chars(word.begin(), word.end(), number);
  if (status != std::errc() || stop != word.end()) return std::nullopt;
  return number;
}

std::optional<std::uint64_t> number_after(std::string_view text, std::string_view key) {
  for (const std::string_view line : lines_of(text)) {
    if (!line.starts_with(key)) continue;
    const std::string_view rest = line.substr(key.size());
    const std::vector<std::string_view> words = words_of(rest);
    // "inactive_file" must not match "inactive_file_pages".
    const bool whole = key.ends_with(':') || rest.starts_with(' ') || rest.starts_with('\t');
    if (whole && !words.empty()) return number_of(words.front());
  }
  return std::nullopt;
}

}  // namespace sluice
