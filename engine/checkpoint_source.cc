#include "engine/checkpoint_source.h"

#include <utility>

#include "engine/folder_source.h"
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

// A path to a single file gets its own message, because "no config.json" would not explain it.
void require_folder(const std::filesystem::path& path) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return;
  if (path.extension() == ".gguf") {
    throw Error(ErrorCode::unsupported,
                path.string() +
                    ": GGUF files are not read; give the folder of the checkpoint in "
                    "the Hugging Face format (config.json, tokenizer.json and "
                    "safetensors)");
  }
  throw Error(ErrorCode::not_found, path.string() +
                                        ": is a file; give the folder of a checkpoint, which has "
                                        "config.json, tokenizer.json and safetensors");
}

}  // namespace

std::unique_ptr<const CheckpointSource> CheckpointSource::open(const std::filesystem::path& path) {
  require_folder(path);
  require_no_cache(path);
  return std::make_unique<FolderSource>(path);
}

}  // namespace sluice
