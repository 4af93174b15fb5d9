#include "engine/gguf/source.h"

#include "engine/gguf/config.h"
#include "engine/gguf/tensors.h"
#include "engine/gguf/tokenizer.h"

namespace sluice::gguf {

GgufSource::GgufSource(const std::filesystem::path& path)
    : parts_(std::make_shared<const std::vector<GgufFile>>(open_gguf(path))) {}

ModelConfig GgufSource::config() const { return read_config(*parts_); }

std::unique_ptr<const TensorSource> GgufSource::tensors() const {
  return make_tensor_source(parts_, config());
}

std::string GgufSource::missing_tokenizer() const {
  if (has_tokenizer(metadata())) return {};
  return metadata().file().string() +
         ": has no tokenizer (tokenizer.ggml.model); convert the model again";
}

// The metadata itself says whether texts begin with the BOS token.
TokenizerSpec GgufSource::tokenizer(int vocabulary, std::optional<TokenId> /*bos*/) const {
  return read_tokenizer(metadata(), vocabulary);
}

ChatSource GgufSource::chat() const { return read_chat(metadata(), config().vocab_size); }

}  // namespace sluice::gguf
