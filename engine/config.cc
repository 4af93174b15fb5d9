#include "engine/config.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "engine/config_features.h"
#include "engine/config_limits.h"
#include "engine/json_object.h"
#include "io/file.h"
#include "io/json.h"

namespace sluice {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kMaxEosTokens = 64;

int bounded(const JsonObject& config, const char* key, int most,
            std::optional<std::int64_t> fallback = {}) {
  return static_cast<int>(config.integer(key, 1, most, fallback));
}

TokenId token_id(const JsonObject& config, const char* key, const Json& value, int vocabulary) {
  if (!value.is_number_integer()) {
    config.corrupt(key, "is " + json_kind(value) + ", not a token id");
  }
  if (value < 0 || value >= vocabulary) {
    config.corrupt(key, "names token " + value.dump() + ", outside the vocabulary of " +
                            std::to_string(vocabulary));
  }
  return value.get<TokenId>();
}

// Adds the ids of `eos_token_id`, a number or a list of numbers, that are not there yet.
void add_eos(const JsonObject& config, ModelConfig& result) {
  constexpr const char* kKey = "eos_token_id";
  if (!config.has(kKey)) return;
  const Json& value = config.value(kKey);
  const Json list = value.is_array() ? value : Json::array({value});
  if (list.size() > kMaxEosTokens) {
    config.corrupt(kKey, "names more than " + std::to_string(kMaxEosTokens) + " tokens");
  }
  for (const Json& entry : list) {
    const TokenId id = token_id(config, kKey, entry, result.vocab_size);
    const auto end = result.eos_token_ids.end();
    if (std::find(result.eos_token_ids.begin(), end, id) == end) {
      result.eos_token_ids.push_back(id);
    }
  }
}

void parse_sizes(const JsonObject& config, ModelConfig& result) {
  result.hidden_size = bounded(config, "hidden_size", kMaxHidden);
  result.intermediate_size = bounded(config, "intermediate_size", kMaxIntermediate);
  result.num_hidden_layers = bounded(config, "num_hidden_layers", kMaxLayers);
  result.vocab_size = bounded(config, "vocab_size", kMaxVocabulary);
  result.max_position_embeddings = config.integer("max_position_embeddings", 1, kMaxPositions);
  result.rms_norm_eps =
      static_cast<float>(config.number("rms_norm_eps", kMinNormEps, kMaxNormEps, 1e-6));
  result.tie_word_embeddings = config.boolean("tie_word_embeddings", false);
}

void parse_heads(const JsonObject& config, const Architecture& architecture, ModelConfig& result) {
  const int heads = bounded(config, "num_attention_heads", kMaxHeads);
  result.num_attention_heads = heads;
  result.num_key_value_heads = bounded(config, "num_key_value_heads", kMaxHeads, heads);
  if (heads % result.num_key_value_heads != 0) {
    config.corrupt("num_attention_heads", "(" + std::to_string(heads) +
                                              ") is not a multiple of num_key_value_heads (" +
                                              std::to_string(result.num_key_value_heads) + ")");
  }
  const bool by_default = !config.contains("head_dim") && architecture.default_head_dim != 0;
  if (!config.has("head_dim") && !by_default && result.hidden_size % heads != 0) {
    config.corrupt("hidden_size",
                   "is not a multiple of num_attention_heads, and there is no "
                   "head_dim");
  }
  const int derived = by_default ? architecture.default_head_dim : result.hidden_size / heads;
  result.head_dim = bounded(config, "head_dim", 1 << 16, derived);
  if (result.head_dim < kMinHeadDim || result.head_dim > kMaxHeadDim || result.head_dim % 2 != 0) {
    config.unsupported("head_dim", "is " + std::to_string(result.head_dim) +
                                       ", but Sluice handles even ones from 16 to 256");
  }
}

void parse_biases(const JsonObject& config, const Architecture& architecture, ModelConfig& result) {
  const bool bias = config.boolean("attention_bias", false) && architecture.has_attention_bias;
  result.qkv_bias = bias || architecture.always_qkv_bias;
  result.o_bias = bias;
  result.qk_norm = architecture.qk_norm;
}

ModelConfig parse_config(const JsonObject& config) {
  const Architecture& architecture = find_architecture(config);
  ModelConfig result;
  result.architecture = architecture.model_type;
  parse_sizes(config, result);
  require_supported(config, architecture);
  parse_windows(config, architecture, result);
  parse_heads(config, architecture, result);
  parse_biases(config, architecture, result);
  result.rope = parse_rope(config, result.max_position_embeddings);
  if (config.has("bos_token_id")) {
    result.bos_token_id =
        token_id(config, "bos_token_id", config.value("bos_token_id"), result.vocab_size);
  }
  add_eos(config, result);
  return result;
}

}  // namespace

ModelConfig parse_config(const nlohmann::json& json, const std::filesystem::path& file) {
  return parse_config(JsonObject(json, file));
}

ModelConfig read_config(const std::filesystem::path& directory) {
  const std::filesystem::path file = directory / "config.json";
  const Json json = read_json_file(file, kMaxConfigBytes);
  ModelConfig config = parse_config(json, file);

  const std::filesystem::path generation_file = directory / "generation_config.json";
  if (file_exists(generation_file)) {
    const Json generation = read_json_file(generation_file, kMaxConfigBytes);
    add_eos(JsonObject(generation, generation_file), config);
  }
  return config;
}

std::vector<float> inverse_frequencies(const ModelConfig& config) {
  return inverse_frequencies(config.rope, config.head_dim);
}

}  // namespace sluice
