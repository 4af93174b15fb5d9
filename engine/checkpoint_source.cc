#include "engine/checkpoint_source.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "engine/folder_source.h"
#include "engine/gguf/source.h"
#include "io/file.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

// Hugging Face's cache keeps several revisions of a checkpoint, so the folder names none of them.
void require_no_cache(const std::filesystem::path& path) {
  std::error_code none;
  if (std::filesystem::exists(path / "config.json", none)) return;
  const std::filesystem::directory_iterator snapshots(path / "snapshots", none);
  if (none || begin(snapshots) == end(snapshots)) return;
  throw Error(ErrorCode::not_found, path.string() +
                                        ": is a folder of a download cache; give the checkpoint "
                                        "in it, such as " +
                                        snapshots->path().string());
}

// Returns true for a file that begins as GGUF files do, or is named as one, so that the error for a
// broken or missing one says so.
bool is_gguf(const std::filesystem::path& path) {
  std::error_code ignored;
  if (path.extension() == ".gguf" && !std::filesystem::is_directory(path, ignored)) return true;
  if (!std::filesystem::is_regular_file(path, ignored)) return false;
  std::array<std::byte, 4> start{};
  const File file = File::open(path);
  if (file.size() < start.size()) return false;
  file.read(0, start);
  return std::memcmp(start.data(), "GGUF", start.size()) == 0;
}

// A path to a single file gets its own message, because "no config.json" would not explain it.
void require_folder(const std::filesystem::path& path) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return;
  throw Error(ErrorCode::not_found, path.string() +
                                        ": is a file, but no GGUF file; give the folder of a "
                                        "checkpoint, which has config.json, tokenizer.json and "
                                        "safetensors");
}

// A folder of GGUF files: which of them is meant, only the user knows.
void require_no_gguf_folder(const std::filesystem::path& path) {
  std::error_code none;
  if (std::filesystem::exists(path / "config.json", none)) return;
  std::vector<std::filesystem::path> found;
  for (const auto& entry : std::filesystem::directory_iterator(path, none)) {
    if (entry.path().extension() == ".gguf") found.push_back(entry.path());
  }
  if (found.empty()) return;
  throw Error(ErrorCode::not_found,
              path.string() +
                  ": is a folder without config.json; give a GGUF file in it, such as " +
                  std::min_element(found.begin(), found.end())->string());
}

}  // namespace

std::unique_ptr<const CheckpointSource> CheckpointSource::open(const std::filesystem::path& path) {
  if (is_gguf(path)) return std::make_unique<gguf::GgufSource>(path);
  require_folder(path);
  require_no_cache(path);
  require_no_gguf_folder(path);
  return std::make_unique<FolderSource>(path);
}

}  // namespace sluice
