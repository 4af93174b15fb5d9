// How the tokenizers that GGUF files name in tokenizer.ggml.pre cut text before they merge.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace sluice::gguf {

struct PreTokenizer {
  std::string_view name;
  std::span<const char* const> patterns;  // see Splitter
  bool nfc = false;                       // normalises first, as the original tokenizer does
  bool ignore_merges = false;             // a piece that is a token is not merged from its bytes
  bool add_bos = false;                   // where tokenizer.ggml.add_bos_token is missing
};

// Null if Sluice does not know the name.
const PreTokenizer* find_pre_tokenizer(std::string_view name);

// All names, for messages.
std::string pre_tokenizer_names();

}  // namespace sluice::gguf
