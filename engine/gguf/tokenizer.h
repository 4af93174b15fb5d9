// The tokenizer, special tokens and chat template in the metadata of a GGUF file.
#pragma once

#include <optional>
#include <vector>

#include "engine/tokenizer_config.h"
#include "engine/tokenizer_spec.h"
#include "io/gguf_metadata.h"
#include "sluice/types.h"

namespace sluice::gguf {

bool has_tokenizer(const GgufMetadata& metadata);

// A byte-level BPE tokenizer ("gpt2") of a model of `vocabulary` tokens; its ids are those of the
// file. Throws Error{tokenizer} if it is broken, Error{unsupported} naming the kind of tokenizer or
// its `pre` if Sluice does not run it.
TokenizerSpec read_tokenizer(const GgufMetadata& metadata, int vocabulary);

// Throws Error{corrupt} if the id is none of the model's.
std::optional<TokenId> bos_token(const GgufMetadata& metadata, int vocabulary);
// The ids that end a text: EOS, end of turn and end of message, and the control tokens that mean
// the same by their text.
std::vector<TokenId> end_tokens(const GgufMetadata& metadata, int vocabulary);

// Throws Error{unsupported} if the file has no template.
ChatSource read_chat(const GgufMetadata& metadata, int vocabulary);

}  // namespace sluice::gguf
