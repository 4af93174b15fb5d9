// The features of transformers' architectures, and which of them the decoder computes.
#pragma once

#include <cstdint>
#include <string_view>

#include "engine/config.h"
#include "engine/json_object.h"

namespace sluice {

struct Architecture {
  std::string_view model_type;
  std::string_view class_name;  // in `architectures`
  bool has_attention_bias;      // `attention_bias` turns on the biases of q, k, v and o
  bool always_qkv_bias;
  bool qk_norm;
  bool has_window_switch;  // `sliding_window` counts only with `use_sliding_window`
  bool slides_by_default;  // attention is over a window even without `sliding_window`
  int default_head_dim;    // 0: hidden_size / num_attention_heads
};

// Throws Error{unsupported} for an architecture that is not known, naming it.
const Architecture& find_architecture(const JsonObject& config);

// Throws Error{unsupported} naming the first key that asks for a feature the decoder lacks: a
// model run without it would give wrong text instead of an error.
void require_supported(const JsonObject& config, const Architecture& architecture);

// Sets the window of the newest tokens that some layers attend to, and which layers those are.
void parse_windows(const JsonObject& config, const Architecture& architecture, ModelConfig& result);

}  // namespace sluice
