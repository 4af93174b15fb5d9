#include <array>
#include <cstdio>
#include <optional>
#include <set>

#include "io/gguf.h"
#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr const char* kNumber = "split.no";
constexpr const char* kCount = "split.count";
constexpr const char* kTensors = "split.tensors.count";
constexpr int kMaxParts = 1024;

// "-00002-of-00003.gguf"
std::string part_suffix(std::int64_t number, std::int64_t count) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "-%05lld-of-%05lld.gguf",
                static_cast<long long>(number) + 1, static_cast<long long>(count));
  return text.data();
}

// The name of part `number`, if `path` is named as part `own`.
std::optional<std::filesystem::path> part_path(const std::filesystem::path& path, std::int64_t own,
                                               std::int64_t number, std::int64_t count) {
  const std::string name = path.filename().string();
  const std::string suffix = part_suffix(own, count);
  if (!name.ends_with(suffix)) return std::nullopt;
  return path.parent_path() /
         (name.substr(0, name.size() - suffix.size()) + part_suffix(number, count));
}

GgufFile open_part(const std::filesystem::path& path, const std::filesystem::path& first) {
  if (file_exists(path)) return GgufFile::open(path);
  throw Error(ErrorCode::not_found, path.string() + ": there is no such file, but " +
                                        first.filename().string() +
                                        " is split and needs it; download all its parts");
}

// Part `number` of `count` must say so, and its tensors must be new.
void require_part(const GgufFile& part, std::int64_t number, std::int64_t count,
                  std::set<std::string_view>& names) {
  const GgufMetadata& metadata = part.metadata();
  const std::int64_t own = metadata.integer(kNumber, 0, kMaxParts);
  const std::int64_t of = metadata.integer(kCount, 1, kMaxParts);
  if (own != number || of != count) {
    metadata.corrupt(kNumber, "and split.count say that it is part " + std::to_string(own + 1) +
                                  " of " + std::to_string(of) + ", not part " +
                                  std::to_string(number + 1) + " of " + std::to_string(count));
  }
  for (const auto& [name, tensor] : part.tensors()) {
    if (names.insert(name).second) continue;
    throw Error(ErrorCode::corrupt, part.path().string() + ": tensor " + in_quotes(name) +
                                        " is in an earlier part, too; download all parts again");
  }
}

}  // namespace

std::vector<GgufFile> open_gguf(const std::filesystem::path& path) {
  std::vector<GgufFile> parts;
  parts.push_back(GgufFile::open(path));
  const GgufMetadata& metadata = parts.front().metadata();
  const std::int64_t count = metadata.integer(kCount, 0, kMaxParts, 1);
  if (count <= 1) return parts;
  const std::int64_t own = metadata.integer(kNumber, 0, count - 1);
  const std::int64_t tensors = metadata.integer(kTensors, 0, std::int64_t{1} << 24);
  const auto first = part_path(path, own, 0, count);
  if (own > 0) {
    throw Error(ErrorCode::usage, path.string() + ": is part " + std::to_string(own + 1) + " of " +
                                      std::to_string(count) + "; give the first" +
                                      (first ? ", " + first->string() : std::string()));
  }
  if (!first) {
    throw Error(ErrorCode::not_found, path.string() + ": is part 1 of " + std::to_string(count) +
                                          ", so its name must end in " + part_suffix(0, count) +
                                          " for the other parts to be found; rename it");
  }
  std::set<std::string_view> names;
  require_part(parts.front(), 0, count, names);
  for (std::int64_t i = 1; i < count; ++i) {
    parts.push_back(open_part(*part_path(path, 0, i, count), path));
    require_part(parts.back(), i, count, names);
  }
  if (static_cast<std::int64_t>(names.size()) != tensors) {
    parts.front().metadata().corrupt(kTensors, "is " + std::to_string(tensors) +
                                                   ", but the parts have " +
                                                   std::to_string(names.size()) + " tensors");
  }
  return parts;
}

}  // namespace sluice
