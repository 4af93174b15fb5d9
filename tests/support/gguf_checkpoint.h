// Checkpoints as GGUF files, converted as llama.cpp's scripts do and not by the code under test.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "engine/checkpoint.h"
#include "tests/io/test_files.h"
#include "tests/support/elements.h"
#include "tests/support/gguf_writer.h"

namespace sluice::testing {

inline constexpr std::uint32_t kGgufF32 = 0;
inline constexpr std::uint32_t kGgufF16 = 1;
inline constexpr std::uint32_t kGgufBf16 = 30;

// "model.layers.3.mlp.up_proj.weight" becomes "blk.3.ffn_up.weight".
inline std::string gguf_tensor_name(std::string name) {
  const std::vector<std::pair<std::string, std::string>> parts = {
      {"model.embed_tokens", "token_embd"}, {"lm_head", "output"},
      {"model.norm", "output_norm"},        {"model.layers.", "blk."},
      {"input_layernorm", "attn_norm"},     {"post_attention_layernorm", "ffn_norm"},
      {"self_attn.q_proj", "attn_q"},       {"self_attn.k_proj", "attn_k"},
      {"self_attn.v_proj", "attn_v"},       {"self_attn.o_proj", "attn_output"},
      {"self_attn.q_norm", "attn_q_norm"},  {"self_attn.k_norm", "attn_k_norm"},
      {"mlp.gate_proj", "ffn_gate"},        {"mlp.up_proj", "ffn_up"},
      {"mlp.down_proj", "ffn_down"}};
  for (const auto& [from, to] : parts) {
    const std::size_t at = name.find(from);
    if (at != std::string::npos) name.replace(at, from.size(), to);
  }
  return name;
}

// Llama files have the rows of each head in pairs, of the first and of the second half.
inline std::vector<float> in_pairs(const std::vector<float>& rows, std::size_t columns,
                                   std::size_t head_dim) {
  std::vector<float> paired(rows.size());
  for (std::size_t row = 0; row < rows.size() / columns; ++row) {
    const std::size_t head = row / head_dim * head_dim;
    const std::size_t in_head = row % head_dim;
    const std::size_t half = head_dim / 2;
    const std::size_t to = head + (in_head < half ? 2 * in_head : 2 * (in_head - half) + 1);
    for (std::size_t i = 0; i < columns; ++i) paired[to * columns + i] = rows[row * columns + i];
  }
  return paired;
}

inline bool is_turned(const std::string& name) {
  return name.find("q_proj") != std::string::npos || name.find("k_proj") != std::string::npos;
}

// The keys of an architecture, without its scaling of RoPE.
inline GgufWriter gguf_keys(const ModelConfig& c) {
  const std::string name = c.architecture == "mistral" ? "llama" : c.architecture;
  const auto number = [](auto value) { return static_cast<std::uint32_t>(value); };
  GgufWriter writer;
  writer.add_string("general.architecture", name);
  writer.add_u32(name + ".embedding_length", number(c.hidden_size));
  writer.add_u32(name + ".feed_forward_length", number(c.intermediate_size));
  writer.add_u32(name + ".block_count", number(c.num_hidden_layers));
  writer.add_u32(name + ".context_length", number(c.max_position_embeddings));
  writer.add_u32(name + ".attention.head_count", number(c.num_attention_heads));
  writer.add_u32(name + ".attention.head_count_kv", number(c.num_key_value_heads));
  writer.add_u32(name + ".attention.key_length", number(c.head_dim));
  writer.add_u32(name + ".attention.value_length", number(c.head_dim));
  writer.add_u32(name + ".rope.dimension_count", number(c.head_dim));
  writer.add_f32(name + ".rope.freq_base", static_cast<float>(c.rope.theta));
  writer.add_f32(name + ".attention.layer_norm_rms_epsilon", c.rms_norm_eps);
  if (c.window) writer.add_u32(name + ".attention.sliding_window", number(*c.window));
  return writer;
}

// Adds linear or yarn scaling, or the factors of Llama 3.1 as a tensor.
inline void add_rope(GgufWriter& writer, const ModelConfig& c) {
  const std::string name = c.architecture == "mistral" ? "llama" : c.architecture;
  const std::string scaling = name + ".rope.scaling.";
  if (const auto* const linear = std::get_if<LinearScaling>(&c.rope.scaling)) {
    writer.add_string(scaling + "type", "linear");
    writer.add_f32(scaling + "factor", static_cast<float>(linear->factor));
  } else if (const auto* const yarn = std::get_if<YarnScaling>(&c.rope.scaling)) {
    writer.add_string(scaling + "type", "yarn");
    writer.add_f32(scaling + "factor", static_cast<float>(yarn->factor));
    writer.add_u32(scaling + "original_context_length",
                   static_cast<std::uint32_t>(yarn->original_max_position_embeddings));
    writer.add_f32(scaling + "yarn_beta_fast", static_cast<float>(yarn->beta_fast));
    writer.add_f32(scaling + "yarn_beta_slow", static_cast<float>(yarn->beta_slow));
    // Readers multiply by 1 + 0.1 log(factor) themselves.
    const double own = 1.0 + 0.1 * std::log(yarn->factor);
    writer.add_f32(scaling + "attn_factor", static_cast<float>(yarn->attention_factor / own));
  } else if (std::holds_alternative<Llama3Scaling>(c.rope.scaling)) {
    const std::vector<float> scaled = inverse_frequencies(c);
    const std::vector<float> plain = inverse_frequencies({c.rope.theta, {}}, c.head_dim);
    std::vector<float> factors;
    for (std::size_t i = 0; i < plain.size(); ++i) factors.push_back(plain[i] / scaled[i]);
    const std::vector<std::byte> bytes = encoded(factors, DType::f32);
    writer.add_tensor("rope_freqs.weight", kGgufF32, {factors.size()},
                      {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }
}

inline std::vector<float> tensor_values(const Checkpoint& checkpoint, std::string_view name) {
  const TensorInfo& info = checkpoint.info(name);
  std::vector<std::byte> bytes(static_cast<std::size_t>(info.bytes()));
  checkpoint.read(name, 0, bytes);
  return decoded(bytes, info.dtype.value());
}

// Adds all tensors, matrices in `dtype` and vectors in F32.
inline void add_tensors(GgufWriter& writer, const Checkpoint& checkpoint, DType dtype) {
  const ModelConfig& config = checkpoint.config();
  const bool pairs = config.architecture == "llama" || config.architecture == "mistral";
  for (const std::string_view view : checkpoint.names()) {
    const std::string name(view);
    const TensorInfo& info = checkpoint.info(name);
    std::vector<float> values = tensor_values(checkpoint, name);
    const bool is_matrix = info.shape.size() > 1;
    if (pairs && is_turned(name)) {
      values = in_pairs(values, is_matrix ? static_cast<std::size_t>(info.shape[1]) : 1,
                        static_cast<std::size_t>(config.head_dim));
    }
    const DType to = is_matrix ? dtype : DType::f32;
    const std::vector<std::byte> bytes = encoded(values, to);
    const std::uint32_t type = to == DType::f32   ? kGgufF32
                               : to == DType::f16 ? kGgufF16
                                                  : kGgufBf16;
    writer.add_tensor(gguf_tensor_name(name), type, {info.shape.begin(), info.shape.end()},
                      {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }
}

// A tokenizer.json's vocabulary and merges, with its added tokens as control tokens.
inline void add_tokenizer(GgufWriter& writer, const std::filesystem::path& tokenizer_json,
                          const std::string& pre) {
  const nlohmann::json json = nlohmann::json::parse(read_bytes(tokenizer_json));
  std::map<int, std::pair<std::string, int>> by_id;
  for (const auto& [text, id] : json["model"]["vocab"].items()) by_id[id] = {text, 1};
  for (const nlohmann::json& token : json["added_tokens"]) {
    by_id[token["id"]] = {token["content"], token["special"] ? 3 : 4};
  }
  std::vector<std::string> texts;
  std::vector<std::int32_t> types;
  for (const auto& [id, token] : by_id) {
    texts.push_back(token.first);
    types.push_back(token.second);
  }
  std::vector<std::string> merges;
  for (const nlohmann::json& merge : json["model"]["merges"]) {
    merges.push_back(merge.is_string()
                         ? merge.get<std::string>()
                         : merge[0].get<std::string>() + " " + merge[1].get<std::string>());
  }
  writer.add_string("tokenizer.ggml.model", "gpt2");
  writer.add_string("tokenizer.ggml.pre", pre);
  writer.add_strings("tokenizer.ggml.tokens", texts);
  writer.add_i32s("tokenizer.ggml.token_type", types);
  writer.add_strings("tokenizer.ggml.merges", merges);
}

}  // namespace sluice::testing
