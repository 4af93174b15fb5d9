#include "engine/gguf/names.h"

#include <algorithm>
#include <array>
#include <span>

namespace sluice::gguf {
namespace {

struct Pair {
  std::string_view gguf;
  std::string_view folder;
};

constexpr std::array<Pair, 3> kTensors = {{
    {kEmbedding, "model.embed_tokens.weight"},
    {kHead, "lm_head.weight"},
    {"output_norm.weight", "model.norm.weight"},
}};

// In a layer, before ".weight" or ".bias".
constexpr std::array<Pair, 11> kParts = {{
    {"attn_norm", "input_layernorm"},
    {"attn_q", "self_attn.q_proj"},
    {"attn_k", "self_attn.k_proj"},
    {"attn_v", "self_attn.v_proj"},
    {"attn_output", "self_attn.o_proj"},
    {"attn_q_norm", "self_attn.q_norm"},
    {"attn_k_norm", "self_attn.k_norm"},
    {"ffn_norm", "post_attention_layernorm"},
    {"ffn_gate", "mlp.gate_proj"},
    {"ffn_up", "mlp.up_proj"},
    {"ffn_down", "mlp.down_proj"},
}};

constexpr Pair kLayer = {"blk.", "model.layers."};

using Side = std::string_view Pair::*;

// The name on side `to` for `name` on side `from`.
std::optional<std::string_view> find(std::span<const Pair> pairs, std::string_view name, Side from,
                                     Side to) {
  const auto same = [&](const Pair& pair) { return pair.*from == name; };
  const auto found = std::find_if(pairs.begin(), pairs.end(), same);
  return found == pairs.end() ? std::nullopt : std::optional((*found).*to);
}

std::optional<std::string> translate(std::string_view name, Side from, Side to) {
  if (const auto tensor = find(kTensors, name, from, to)) return std::string(*tensor);
  if (!name.starts_with(kLayer.*from)) return std::nullopt;
  const std::string_view in_layers = name.substr((kLayer.*from).size());
  const std::size_t dot = in_layers.find('.');
  const std::size_t end = in_layers.rfind('.');
  if (dot == std::string_view::npos || end == dot) return std::nullopt;
  const auto part = find(kParts, in_layers.substr(dot + 1, end - dot - 1), from, to);
  if (!part) return std::nullopt;
  std::string other(kLayer.*to);
  other += in_layers.substr(0, dot + 1);
  other += *part;
  return other += in_layers.substr(end);
}

}  // namespace

std::string layer_tensor(int layer, std::string_view part) {
  return std::string(kLayer.gguf) + std::to_string(layer) + "." + std::string(part);
}

std::optional<std::string> folder_name(std::string_view gguf_name) {
  return translate(gguf_name, &Pair::gguf, &Pair::folder);
}

std::optional<std::string> gguf_name(std::string_view folder_name) {
  return translate(folder_name, &Pair::folder, &Pair::gguf);
}

}  // namespace sluice::gguf
