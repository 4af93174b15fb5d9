// A checkpoint in the Hugging Face format: a folder with config.json, tokenizer.json and
// safetensors.
#pragma once

#include <filesystem>

#include "engine/checkpoint_source.h"

namespace sluice {

class FolderSource final : public CheckpointSource {
 public:
  explicit FolderSource(std::filesystem::path folder) : folder_(std::move(folder)) {}

  ModelConfig config() const override;
  // The headers of model.safetensors, or else of the shards that model.safetensors.index.json
  // names.
  std::unique_ptr<const TensorSource> tensors() const override;
  std::string missing_tokenizer() const override;
  TokenizerSpec tokenizer(int vocabulary, std::optional<TokenId> bos) const override;
  ChatSource chat() const override;

 private:
  std::filesystem::path folder_;
};

}  // namespace sluice
