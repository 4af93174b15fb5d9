// A checkpoint in a GGUF file, or in the files that one was split into.
#pragma once

#include <memory>
#include <vector>

#include "engine/checkpoint_source.h"
#include "io/gguf.h"

namespace sluice::gguf {

class GgufSource final : public CheckpointSource {
 public:
  // Reads the headers: see open_gguf().
  explicit GgufSource(const std::filesystem::path& path);

  ModelConfig config() const override;
  std::unique_ptr<const TensorSource> tensors() const override;
  std::string missing_tokenizer() const override;
  TokenizerSpec tokenizer(int vocabulary, std::optional<TokenId> bos) const override;
  ChatSource chat() const override;

 private:
  const GgufMetadata& metadata() const { return parts_->front().metadata(); }

  std::shared_ptr<const std::vector<GgufFile>> parts_;
};

}  // namespace sluice::gguf
