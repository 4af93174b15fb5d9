// A checkpoint that is open: its config, and its tensors by their Hugging Face names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "engine/config.h"
#include "engine/tensor_source.h"
#include "sluice/types.h"

namespace sluice {

class CheckpointSource;

// Its tensors can be read from several threads.
class Checkpoint {
 public:
  // Reads the config and the list of tensors at `path`: see CheckpointSource. Reads no weights,
  // except where the config ties the embeddings and there is an lm_head.weight, to compare the two.
  // Throws Error{not_found} for a missing file, Error{corrupt} if the files contradict their format
  // or each other, Error{unsupported} for a model that the decoder does not handle, Error{io}.
  static Checkpoint open(const std::filesystem::path& path);
  static Checkpoint open(const CheckpointSource& source);

  // tie_word_embeddings is false if the checkpoint has an lm_head.weight that differs, whatever its
  // config says.
  const ModelConfig& config() const { return config_; }
  // The name of the config in messages: "config.json".
  std::string_view config_name() const { return source_->config_name(); }
  std::string_view layer_fields() const { return source_->layer_fields(); }
  DType dtype() const { return dtype_; }  // of the embedding
  std::int64_t parameters() const;        // elements of all tensors
  std::uint64_t parameter_bytes() const;  // bytes of all tensors, as stored
  // The types of tensors as the files call them, those with most bytes first: "Q4_K, Q6_K, F32".
  std::string stored_types() const;

  bool has(std::string_view name) const { return tensors_.contains(name); }
  std::vector<std::string_view> names() const;  // of all tensors, sorted
  // The file that a tensor lies in, and its name there. Throws Error{corrupt} if there is no such
  // tensor.
  const std::filesystem::path& file_of(std::string_view name) const;
  std::string own_name(std::string_view name) const { return source_->own_name(name); }
  // Throws Error{corrupt} if there is no such tensor.
  const TensorInfo& info(std::string_view name) const { return *locate(name).info; }
  // Throws Error{corrupt} if there is no such tensor or its shape is not `shape`,
  // Error{unsupported} if its type is not read.
  void require(std::string_view name, const std::vector<std::int64_t>& shape) const;
  // Fills `destination` with a tensor's elements of its dtype, from their byte `first` on. Throws
  // Error{corrupt} if there is no such tensor, and what TensorSource::read throws.
  void read(std::string_view name, std::uint64_t first, std::span<std::byte> destination) const;
  // The narrowest code that has a matrix's weights as the file does; elements: it has no codes.
  // Throws Error{corrupt} if there is no such tensor.
  WeightCode code(std::string_view name) const { return locate(name).code; }
  bool has_codes() const;  // of any matrix
  // Fills `destination` with coded rows from row `first` on, in the tensor's code or in int8.
  // Throws as read() does.
  void read_codes(std::string_view name, std::int64_t first, WeightCode code,
                  std::span<std::byte> destination) const;
  // Bytes of host memory that a call of read() or read_codes() takes besides its destination.
  std::uint64_t scratch_bytes() const { return source_->scratch_bytes(); }
  // Call after all weights are read: throws Error{io} if a file of weights was written to since it
  // was opened.
  void require_unchanged() const { source_->require_unchanged(); }

 private:
  Checkpoint(ModelConfig config, std::unique_ptr<const TensorSource> source);
  const SourceTensor& locate(std::string_view name) const;
  void settle_tied_embeddings();
  bool are_equal(std::string_view first, std::string_view second) const;

  ModelConfig config_;
  DType dtype_ = DType::f32;
  std::unique_ptr<const TensorSource> source_;
  std::map<std::string_view, SourceTensor> tensors_;  // keys lie in the source
};

}  // namespace sluice
