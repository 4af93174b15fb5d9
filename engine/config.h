// The model's shape and features, from a checkpoint's config.json.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "engine/rope.h"
#include "sluice/types.h"

namespace sluice {

// Named as in config.json. Bounded and consistent: num_attention_heads is a multiple of
// num_key_value_heads, head_dim is even and 16 to 256, token ids lie in the vocabulary.
struct ModelConfig {
  std::string architecture;  // model_type: "llama", "mistral", "qwen2" or "qwen3"
  int hidden_size = 0;
  int intermediate_size = 0;
  int num_hidden_layers = 0;
  int num_attention_heads = 0;
  int num_key_value_heads = 0;
  int head_dim = 0;
  int vocab_size = 0;
  std::int64_t max_position_embeddings = 0;
  // Sliding window of some layers, in tokens; none: all layers attend to everything.
  std::optional<std::int64_t> window;
  // By layer: `window`, or 0 for layers that attend to everything. Empty if there is no window, or
  // if the checkpoint does not say which layers have it: then a context may not exceed it.
  std::vector<std::int64_t> windows;
  float rms_norm_eps = 1e-6f;
  bool tie_word_embeddings = false;
  bool qkv_bias = false;  // q_proj, k_proj and v_proj have a bias
  bool o_bias = false;    // so has o_proj
  bool qk_norm = false;   // RMSNorm of each head's query and key before RoPE (Qwen3)
  RopeConfig rope;
  std::optional<TokenId> bos_token_id;
  std::vector<TokenId> eos_token_ids;  // any of them ends the text
};

// Reads config.json and, if there is one, the eos_token_id of generation_config.json, both in
// `directory`. Where a key is missing, transformers' default holds.
// Throws Error{not_found}, Error{corrupt} naming file and key, or Error{unsupported} naming
// the feature that the decoder does not compute: nothing is silently dropped.
ModelConfig read_config(const std::filesystem::path& directory);
// The same of a config.json's value alone; messages name `file`.
ModelConfig parse_config(const nlohmann::json& json, const std::filesystem::path& file);

// [head_dim / 2], radians per token.
std::vector<float> inverse_frequencies(const ModelConfig& config);

}  // namespace sluice
