#include "engine/folder_source.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "engine/config_limits.h"
#include "engine/json_object.h"
#include "engine/quantization.h"
#include "engine/quantized_source.h"
#include "io/file.h"
#include "io/json.h"
#include "io/safetensors.h"
#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr std::uint64_t kMaxIndexBytes = std::uint64_t{16} << 20;

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

class SafetensorsSource final : public TensorSource {
 public:
  explicit SafetensorsSource(std::filesystem::path folder) : folder_(std::move(folder)) {
    const std::filesystem::path single = folder_ / "model.safetensors";
    const std::filesystem::path index = folder_ / "model.safetensors.index.json";
    if (file_exists(single)) {
      open_single(single);
    } else if (file_exists(index)) {
      open_shards(index);
    } else {
      throw Error(ErrorCode::not_found,
                  folder_.string() +
                      ": has neither model.safetensors nor model.safetensors.index.json; download "
                      "the weights, or convert them to safetensors");
    }
  }

  const std::filesystem::path& path() const override { return folder_; }
  std::string_view config_name() const override { return "config.json"; }
  std::string_view layer_fields() const override {
    return "model_type, num_hidden_layers or attention_bias";
  }
  std::string own_name(std::string_view name) const override { return std::string(name); }

  std::map<std::string_view, SourceTensor> tensors() const override {
    std::map<std::string_view, SourceTensor> all;
    for (std::size_t i = 0; i < files_.size(); ++i) {
      for (const auto& [name, info] : files_[i].tensors()) {
        all.emplace(name, SourceTensor{&info, &files_[i].path(), i, info.bytes()});
      }
    }
    return all;
  }

  void require_loadable(const SourceTensor& tensor) const override {
    files_[tensor.part].require_loadable(*tensor.info);
  }

  void read(const SourceTensor& tensor, std::uint64_t first,
            std::span<std::byte> destination) const override {
    files_[tensor.part].read_stored(*tensor.info, first, destination);
  }

  void require_unchanged() const override {
    for (const SafetensorsFile& file : files_) file.require_unchanged();
  }

 private:
  void open_single(const std::filesystem::path& path) {
    files_.push_back(SafetensorsFile::open(path));
  }

  void open_shards(const std::filesystem::path& index_path) {
    const nlohmann::json json = read_json_file(index_path, kMaxIndexBytes);
    const JsonObject index(json, index_path);
    const JsonObject weight_map = index.object("weight_map");
    std::map<std::string, std::size_t> shards;
    std::map<std::string_view, std::size_t> places;  // keys lie in files_
    for (const auto& [tensor, value] : json.at("weight_map").items()) {
      const std::string shard = shard_name(weight_map, tensor, value);
      const auto [found, is_new] = shards.try_emplace(shard, files_.size());
      if (is_new) files_.push_back(open_shard(folder_ / shard, index_path));
      const TensorInfo* const info = files_[found->second].find(tensor);
      if (info == nullptr) {
        weight_map.corrupt(in_quotes(tensor), "should lie in " + shard + " but does not");
      }
      places.emplace(info->name, found->second);
    }
    require_indexed(index_path, places);
  }

  void require_indexed(const std::filesystem::path& index_path,
                       const std::map<std::string_view, std::size_t>& places) const {
    for (std::size_t i = 0; i < files_.size(); ++i) {
      for (const auto& [name, tensor] : files_[i].tensors()) {
        const auto found = places.find(name);
        if (found != places.end() && found->second == i) continue;
        throw Error(ErrorCode::corrupt, files_[i].path().string() + ": has a tensor " +
                                            in_quotes(name) + " that " +
                                            index_path.filename().string() +
                                            " does not place there; download both files again");
      }
    }
  }

  std::filesystem::path folder_;
  std::vector<SafetensorsFile> files_;
};

}  // namespace

ModelConfig FolderSource::config() const { return read_config(folder_); }

std::unique_ptr<const TensorSource> FolderSource::tensors() const {
  auto stored = std::make_unique<SafetensorsSource>(folder_);
  const std::filesystem::path file = folder_ / "config.json";
  const nlohmann::json json = read_json_file(file, kMaxConfigBytes);
  const std::optional<Quantization> how = parse_quantization(JsonObject(json, file));
  if (!how) return stored;
  return make_quantized_source(std::move(stored), *how);
}

std::string FolderSource::missing_tokenizer() const {
  const std::filesystem::path file = folder_ / "tokenizer.json";
  if (file_exists(file)) return {};
  return file.string() + ": there is no such file; copy the tokenizer.json of the checkpoint there";
}

TokenizerSpec FolderSource::tokenizer(int vocabulary, std::optional<TokenId> bos) const {
  return read_tokenizer_folder(folder_, vocabulary, bos);
}

ChatSource FolderSource::chat() const { return read_chat_source(folder_); }

}  // namespace sluice
