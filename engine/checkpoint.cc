#include "engine/checkpoint.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "engine/json_object.h"
#include "io/file.h"
#include "io/json.h"
#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kHead = "lm_head.weight";
constexpr std::uint64_t kMaxIndexBytes = std::uint64_t{16} << 20;

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (const std::int64_t size : shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(size);
  }
  return text + "]";
}

// The index must not lead out of the directory: a plain, printable file name.
bool is_shard_name(std::string_view name) {
  const bool plain = std::all_of(name.begin(), name.end(), [](char c) {
    return c >= 0x20 && c < 0x7f && c != '/' && c != '\\';
  });
  return plain && !name.empty() && name.size() <= 255 && name.front() != '.';
}

std::string shard_name(const JsonObject& index, const std::string& tensor,
                       const nlohmann::json& value) {
  if (!value.is_string()) index.corrupt(in_quotes(tensor), "has no file name");
  std::string name = value.get<std::string>();
  if (!is_shard_name(name)) {
    index.corrupt(in_quotes(tensor),
                  "lies in " + in_quotes(name) + ", which is no plain file name");
  }
  return name;
}

SafetensorsFile open_shard(const std::filesystem::path& shard,
                           const std::filesystem::path& index_path) {
  if (file_exists(shard)) return SafetensorsFile::open(shard);
  throw Error(ErrorCode::not_found, shard.string() + ": there is no such file, but " +
                                        index_path.filename().string() +
                                        " names it; download the rest of the checkpoint");
}

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

Checkpoint::Checkpoint(std::filesystem::path directory, ModelConfig config)
    : directory_(std::move(directory)), config_(std::move(config)) {}

Checkpoint Checkpoint::open(const std::filesystem::path& directory) {
  require_folder(directory);
  require_no_cache(directory);
  Checkpoint checkpoint(directory, read_config(directory));
  const std::filesystem::path single = directory / "model.safetensors";
  const std::filesystem::path index = directory / "model.safetensors.index.json";
  if (file_exists(single)) {
    checkpoint.open_single(single);
  } else if (file_exists(index)) {
    checkpoint.open_shards(index);
  } else {
    throw Error(ErrorCode::not_found,
                directory.string() +
                    ": has neither model.safetensors nor model.safetensors.index.json; download "
                    "the weights, or convert them to safetensors");
  }
  checkpoint.settle_tied_embeddings();
  const TensorInfo& embedding = checkpoint.info(kEmbedding);
  if (!embedding.dtype) {
    throw Error(ErrorCode::unsupported, directory.string() + ": the weights are " +
                                            embedding.stored_dtype +
                                            "; convert them to F32, F16 or BF16");
  }
  checkpoint.dtype_ = *embedding.dtype;
  return checkpoint;
}

// As in transformers 5 (PreTrainedModel.tie_weights): if one of the two is missing, the other
// serves as both; two that differ are not tied.
void Checkpoint::settle_tied_embeddings() {
  if (!config_.tie_word_embeddings || !has(kHead)) return;
  if (has(kEmbedding)) {
    config_.tie_word_embeddings = are_equal(kEmbedding, kHead);
  } else {
    require(kHead, {config_.vocab_size, config_.hidden_size});
    auto head = tensors_.extract(kHead);
    head.key() = kEmbedding;
    tensors_.insert(std::move(head));
  }
}

// Compares all bytes.
bool Checkpoint::are_equal(std::string_view first, std::string_view second) const {
  const TensorInfo& info = this->info(first);
  const TensorInfo& other = this->info(second);
  if (info.shape != other.shape || info.stored_dtype != other.stored_dtype) return false;
  constexpr std::uint64_t kPiece = std::uint64_t{1} << 20;
  std::vector<std::byte> piece(std::min(kPiece, info.bytes()));
  std::vector<std::byte> other_piece(piece.size());
  for (std::uint64_t at = 0; at < info.bytes(); at += piece.size()) {
    const auto bytes = static_cast<std::size_t>(std::min(kPiece, info.bytes() - at));
    read(first, at, std::span(piece).first(bytes));
    read(second, at, std::span(other_piece).first(bytes));
    if (std::memcmp(piece.data(), other_piece.data(), bytes) != 0) return false;
  }
  return true;
}

void Checkpoint::open_single(const std::filesystem::path& path) {
  files_.push_back(SafetensorsFile::open(path));
  for (const auto& [name, tensor] : files_.front().tensors()) {
    tensors_.emplace(name, Location{&tensor, 0});
  }
}

void Checkpoint::open_shards(const std::filesystem::path& index_path) {
  const nlohmann::json json = read_json_file(index_path, kMaxIndexBytes);
  const JsonObject index(json, index_path);
  const JsonObject weight_map = index.object("weight_map");
  std::map<std::string, std::size_t> shards;
  for (const auto& [tensor, value] : json.at("weight_map").items()) {
    const std::string shard = shard_name(weight_map, tensor, value);
    const auto [found, is_new] = shards.try_emplace(shard, files_.size());
    if (is_new) files_.push_back(open_shard(directory_ / shard, index_path));
    const TensorInfo* const info = files_[found->second].find(tensor);
    if (info == nullptr) {
      weight_map.corrupt(in_quotes(tensor), "should lie in " + shard + " but does not");
    }
    tensors_.emplace(info->name, Location{info, found->second});
  }
  require_indexed(index_path);
}

void Checkpoint::require_indexed(const std::filesystem::path& index_path) const {
  for (const SafetensorsFile& file : files_) {
    for (const auto& [name, tensor] : file.tensors()) {
      const auto found = tensors_.find(name);
      if (found != tensors_.end() && found->second.info == &tensor) continue;
      throw Error(ErrorCode::corrupt, file.path().string() + ": has a tensor " + in_quotes(name) +
                                          " that " + index_path.filename().string() +
                                          " does not place there; download both files again");
    }
  }
}

std::vector<std::string_view> Checkpoint::names() const {
  std::vector<std::string_view> names;
  for (const auto& [name, location] : tensors_) names.push_back(name);
  return names;
}

const std::filesystem::path& Checkpoint::file_of(std::string_view name) const {
  return files_[locate(name).file].path();
}

const Checkpoint::Location& Checkpoint::locate(std::string_view name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    throw Error(ErrorCode::corrupt, directory_.string() + ": the checkpoint has no tensor " +
                                        in_quotes(name) +
                                        ", which its config.json calls for; download it again");
  }
  return found->second;
}

std::int64_t Checkpoint::parameters() const {
  std::int64_t sum = 0;
  for (const auto& [name, location] : tensors_) sum += location.info->elements();
  return sum;
}

std::uint64_t Checkpoint::parameter_bytes() const {
  std::uint64_t sum = 0;
  for (const auto& [name, location] : tensors_) sum += location.info->bytes();
  return sum;
}

void Checkpoint::require(std::string_view name, const std::vector<std::int64_t>& shape) const {
  const Location& location = locate(name);
  const SafetensorsFile& file = files_[location.file];
  const TensorInfo& info = *location.info;
  if (info.elements() == 0) {
    throw Error(ErrorCode::corrupt, file.path().string() + ": tensor " + in_quotes(name) + " is " +
                                        shape_text(info.shape) +
                                        ", so it was saved without its values, as training in "
                                        "parts does; save the checkpoint again with all values "
                                        "gathered");
  }
  if (info.shape != shape) {
    throw Error(ErrorCode::corrupt, file.path().string() + ": tensor " + in_quotes(name) + " is " +
                                        shape_text(info.shape) + " but config.json calls for " +
                                        shape_text(shape) + "; download both files again");
  }
  file.require_loadable(info);
}

void Checkpoint::require_unchanged() const {
  for (const SafetensorsFile& file : files_) file.require_unchanged();
}

void Checkpoint::read(std::string_view name, std::uint64_t first,
                      std::span<std::byte> destination) const {
  const Location& location = locate(name);
  files_[location.file].read(*location.info, first, destination);
}

}  // namespace sluice
