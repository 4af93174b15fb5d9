// Tokens that a checkpoint names beside its tokenizer.json.
#pragma once

#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/added_tokens.h"

namespace sluice {

struct SpecialTokens {
  // "bos_token", "eos_token" and so on, and their texts, in transformers' order.
  std::vector<std::pair<std::string, std::string>> named;
  // Tokens to add to those of tokenizer.json, in this order; without ids.
  std::vector<AddedToken> added;
  bool has_config = false;            // there is a tokenizer_config.json
  std::optional<bool> add_bos_token;  // as tokenizer_config.json has it
  bool heeds_add_bos_token = false;   // the tokenizer's class is one that reads it

  std::optional<std::string> text_of(const std::string& name) const;
};

// Reads tokenizer_config.json, special_tokens_map.json and added_tokens.json, with config.json for
// the tokens that the tokenizer's class brings along; `known` are the added tokens of
// tokenizer.json, with the ids that stand there. Follows transformers 5.24
// (tokenization_utils_base, tokenization_utils_tokenizers, auto/tokenization_auto), which agrees
// with 4.57 except for the cases in tests/data/special_token_cases.json. Throws Error{corrupt} for
// files that are broken or contradict tokenizer.json, and Error{unsupported} for 'single_word',
// 'split_special_tokens' and contents that the two versions read differently.
SpecialTokens read_special_tokens(const std::filesystem::path& checkpoint,
                                  std::span<const AddedToken> known);

// Reads only the fields `named` and `add_bos_token`.
std::vector<std::pair<std::string, std::string>> read_token_names(
    const std::filesystem::path& checkpoint);
std::optional<bool> read_add_bos_token(const std::filesystem::path& checkpoint);

}  // namespace sluice
