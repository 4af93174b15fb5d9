// The parts of a checkpoint, whatever format it comes in. Everything that depends on the format is
// behind this interface: folder_source.cc has the Hugging Face format, gguf/source.cc GGUF.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "engine/config.h"
#include "engine/tensor_source.h"
#include "engine/tokenizer_config.h"
#include "engine/tokenizer_spec.h"
#include "sluice/types.h"

namespace sluice {

class CheckpointSource {
 public:
  // Tells the format by what is at `path`; reads no more than that needs. Throws Error{not_found}
  // if it is neither a checkpoint directory nor a GGUF file.
  static std::unique_ptr<const CheckpointSource> open(const std::filesystem::path& path);
  virtual ~CheckpointSource() = default;

  // Throws Error{corrupt} or Error{unsupported} naming the place, as all below do, and what reading
  // files throws.
  virtual ModelConfig config() const = 0;
  virtual std::unique_ptr<const TensorSource> tensors() const = 0;

  // Says why tokenizer() cannot be called; empty if it can.
  virtual std::string missing_tokenizer() const = 0;
  // See Tokenizer::load_checkpoint().
  virtual TokenizerSpec tokenizer(int vocabulary, std::optional<TokenId> bos) const = 0;
  // Throws Error{unsupported} if there is no chat template.
  virtual ChatSource chat() const = 0;
};

}  // namespace sluice
