#include "engine/config_features.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "engine/quantization.h"
#include "lib/text.h"

namespace sluice {
namespace {

using Json = nlohmann::json;

constexpr std::array<Architecture, 4> kArchitectures = {{
    {"llama", "LlamaForCausalLM", true, false, false, false, false, 0},
    {"mistral", "MistralForCausalLM", false, false, false, false, true, 0},
    {"qwen2", "Qwen2ForCausalLM", false, true, false, true, false, 0},
    {"qwen3", "Qwen3ForCausalLM", true, false, true, true, false, 128},
}};

std::string value_text(const Json& value) {
  if (value.is_string()) return in_quotes(value.get<std::string>());
  const bool is_dumped_as_null = value.is_number_float() && !std::isfinite(value.get<double>());
  if (is_dumped_as_null) return json_text(value.get<double>());
  return value.is_primitive() ? value.dump() : "set";
}

// Throws if the key is given with another value.
void require_value(const JsonObject& config, const char* key, const Json& supported) {
  if (!config.has(key)) return;
  const Json& value = config.value(key);
  if (std::string_view(value.type_name()) != supported.type_name()) {
    config.corrupt(key, "is not a " + std::string(supported.type_name()));
  }
  if (value != supported) {
    config.unsupported(
        key, "is " + value_text(value) + ", but Sluice handles only " + value_text(supported));
  }
}

void require_absent(const JsonObject& config, const char* key) {
  if (config.has(key)) {
    config.unsupported(
        key, "is " + value_text(config.value(key)) + ", a feature that Sluice does not handle");
  }
}

// By layer, whether `layer_types` gives it a window; nothing if the key is not given.
std::optional<std::vector<bool>> sliding_by_type(const JsonObject& config, int layers) {
  if (!config.has("layer_types")) return std::nullopt;
  const Json& types = config.value("layer_types");
  if (!types.is_array() || types.size() != static_cast<std::size_t>(layers)) {
    config.corrupt("layer_types", "is not an array with an entry per layer");
  }
  std::vector<bool> slide;
  for (const Json& type : types) {
    if (!type.is_string()) config.corrupt("layer_types", "has an entry that is no string");
    const auto& name = type.get_ref<const std::string&>();
    slide.push_back(name == "sliding_attention");
    if (!slide.back() && name != "full_attention") {
      config.unsupported("layer_types",
                         "has " + value_text(type) +
                             ", but Sluice handles only 'full_attention' and 'sliding_attention'");
    }
  }
  return slide;
}

// By layer, whether it attends to a window. Empty if some layers do and which is not known:
// transformers reads no window of this architecture.
std::vector<bool> sliding_layers(const JsonObject& config, const Architecture& architecture,
                                 int layers) {
  const std::optional<std::vector<bool>> by_type = sliding_by_type(config, layers);
  if (by_type && architecture.has_window_switch) return *by_type;
  std::vector<bool> slide(static_cast<std::size_t>(layers));
  if (architecture.has_window_switch) {
    constexpr int kDefaultFull = 28;  // the first layers, which attend to everything
    if (!config.boolean("use_sliding_window", false)) return slide;
    const auto full = config.integer("max_window_layers", 0, 1 << 20, kDefaultFull);
    for (std::int64_t layer = full; layer < layers; ++layer) {
      slide[static_cast<std::size_t>(layer)] = true;
    }
    return slide;
  }
  if (architecture.slides_by_default) return std::vector<bool>(slide.size(), true);
  const bool any = by_type && std::find(by_type->begin(), by_type->end(), true) != by_type->end();
  return any || config.has("sliding_window") ? std::vector<bool>() : slide;
}

void require_class(const JsonObject& config, const Architecture& architecture) {
  if (!config.has("architectures")) return;
  const Json& names = config.value("architectures");
  if (!names.is_array() || names.empty() ||
      !std::all_of(names.begin(), names.end(), [](const Json& name) { return name.is_string(); })) {
    config.corrupt("architectures", "is not an array of names");
  }
  if (names[0] != architecture.class_name) {
    config.unsupported("architectures", "names " + value_text(names[0]) + ", but for " +
                                            std::string(architecture.model_type) +
                                            " Sluice handles only " +
                                            std::string(architecture.class_name));
  }
}

}  // namespace

const Architecture& find_architecture(const JsonObject& config) {
  const std::string model_type = config.string("model_type");
  for (const Architecture& architecture : kArchitectures) {
    if (architecture.model_type != model_type) continue;
    require_class(config, architecture);
    return architecture;
  }
  config.unsupported("model_type", "is " + in_quotes(model_type) +
                                       ", but Sluice handles llama, mistral, qwen2 and qwen3");
}

void parse_windows(const JsonObject& config, const Architecture& architecture,
                   ModelConfig& result) {
  const std::vector<bool> slide = sliding_layers(config, architecture, result.num_hidden_layers);
  const bool none = !slide.empty() && std::find(slide.begin(), slide.end(), true) == slide.end();
  const bool is_null = config.contains("sliding_window") && !config.has("sliding_window");
  if (none || is_null) return;
  constexpr int kDefaultWindow = 4096;
  result.window = config.integer("sliding_window", 1, std::int64_t{1} << 30, kDefaultWindow);
  for (const bool slides : slide) result.windows.push_back(slides ? *result.window : 0);
}

void require_supported(const JsonObject& config, const Architecture& architecture) {
  require_value(config, "hidden_act", "silu");
  require_value(config, "mlp_bias", false);
  require_value(config, "is_causal", true);
  require_value(config, "is_encoder_decoder", false);
  require_value(config, "use_mrope", false);
  if (config.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0) {
    config.unsupported("partial_rotary_factor", "is not 1");
  }
  if (!architecture.has_attention_bias && !architecture.always_qkv_bias) {
    require_value(config, "attention_bias", false);
  }
  parse_quantization(config);
  for (const char* key : {"compression_config", "attn_logit_softcapping", "final_logit_softcapping",
                          "dual_chunk_attention_config", "num_experts", "num_local_experts",
                          "attention_multiplier", "embedding_multiplier", "residual_multiplier",
                          "logits_scaling", "logit_scale", "no_rope_layers"}) {
    require_absent(config, key);
  }
}

}  // namespace sluice
