// A Hugging Face checkpoint directory: config.json and the weights as safetensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string_view>
#include <vector>

#include "engine/config.h"
#include "io/safetensors.h"
#include "sluice/types.h"

namespace sluice {

// Its tensors can be read from several threads.
class Checkpoint {
 public:
  // Reads the config and the headers of model.safetensors, or else of the shards that
  // model.safetensors.index.json names. Reads no weights, except where the config ties the
  // embeddings and the file has an lm_head.weight, to compare the two. Throws Error{not_found} for
  // a missing file, Error{corrupt} if the files contradict their format or each other,
  // Error{unsupported} for a model that the decoder does not handle, Error{io}.
  static Checkpoint open(const std::filesystem::path& directory);

  // tie_word_embeddings is false if the checkpoint has an lm_head.weight that differs, whatever
  // config.json says.
  const ModelConfig& config() const { return config_; }
  DType dtype() const { return dtype_; }  // of the embedding
  std::int64_t parameters() const;        // elements of all tensors
  std::uint64_t parameter_bytes() const;  // bytes of all tensors, as stored

  bool has(std::string_view name) const { return tensors_.contains(name); }
  std::vector<std::string_view> names() const;  // of all tensors, sorted
  // The file that a tensor lies in. Throws Error{corrupt} if there is no such tensor.
  const std::filesystem::path& file_of(std::string_view name) const;
  // Throws Error{corrupt} if there is no such tensor.
  const TensorInfo& info(std::string_view name) const { return *locate(name).info; }
  // Throws Error{corrupt} if there is no such tensor or its shape is not `shape`,
  // Error{unsupported} unless its dtype is F32, F16 or BF16.
  void require(std::string_view name, const std::vector<std::int64_t>& shape) const;
  // Fills `destination` with a tensor as it is stored, from its byte `first` on. Throws
  // Error{corrupt} if there is no such tensor, and what SafetensorsFile::read throws.
  void read(std::string_view name, std::uint64_t first, std::span<std::byte> destination) const;
  // Call after all weights are read: throws Error{io} if a file of weights was written to since it
  // was opened.
  void require_unchanged() const;

 private:
  struct Location {
    const TensorInfo* info;
    std::size_t file;  // index into files_
  };

  Checkpoint(std::filesystem::path directory, ModelConfig config);
  void open_single(const std::filesystem::path& path);
  void open_shards(const std::filesystem::path& index_path);
  void require_indexed(const std::filesystem::path& index_path) const;
  const Location& locate(std::string_view name) const;
  void settle_tied_embeddings();
  bool are_equal(std::string_view first, std::string_view second) const;

  std::filesystem::path directory_;
  ModelConfig config_;
  DType dtype_ = DType::f32;
  std::vector<SafetensorsFile> files_;
  std::map<std::string_view, Location> tensors_;  // keys and infos lie in files_
};

}  // namespace sluice
