#include "engine/gguf/config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "engine/config_limits.h"
#include "engine/gguf/names.h"
#include "engine/gguf/tokenizer.h"
#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice::gguf {
namespace {

constexpr const char* kArchitectureKey = "general.architecture";

struct Architecture {
  std::string_view name;
  bool always_qkv_bias;
  bool qk_norm;
};

constexpr std::array<Architecture, 3> kArchitectures = {{
    {"llama", false, false},  // Mistral's models, too
    {"qwen2", true, false},
    {"qwen3", false, true},
}};

// Keys that change what a model computes, with the values that leave it as it is. Others that
// Sluice does not read are descriptions.
// Source: gguf-py/gguf/constants.py of llama.cpp, Keys.
struct Feature {
  std::string_view key;
  double neutral;
  double also_neutral;
};

constexpr std::array<Feature, 22> kFeatures = {{
    {"expert_count", 0.0, 0.0},
    {"expert_shared_count", 0.0, 0.0},
    {"nextn_predict_layers", 0.0, 0.0},
    {"n_deepstack_layers", 0.0, 0.0},
    {"use_parallel_residual", 0.0, 0.0},
    {"swin_norm", 0.0, 0.0},
    {"logit_scale", 1.0, 0.0},
    {"residual_scale", 1.0, 0.0},
    {"embedding_scale", 1.0, 0.0},
    {"attn_logit_softcapping", 0.0, 0.0},
    {"final_logit_softcapping", 0.0, 0.0},
    {"rescale_every_n_layers", 0.0, 0.0},
    {"full_attention_interval", 0.0, 1.0},
    {"attention.causal", 1.0, 1.0},
    {"attention.scale", 0.0, 0.0},
    {"attention.output_scale", 1.0, 0.0},
    {"attention.temperature_scale", 0.0, 0.0},
    {"attention.max_alibi_bias", 0.0, 0.0},
    {"attention.clamp_kqv", 0.0, 0.0},
    {"attention.shared_kv_layers", 0.0, 0.0},
    {"rope.scaling.alpha", 0.0, 0.0},
    {"rope.scaling.yarn_log_multiplier", 0.0, 0.0},
}};

// Keys that always ask for something that is not computed.
constexpr std::array<std::string_view, 4> kRefused = {
    "attention.sliding_window_pattern", "rope.dimension_sections", "attention.q_lora_rank",
    "attention.kv_lora_rank"};

// The metadata of an architecture, by keys without its name.
class Keys {
 public:
  Keys(const GgufMetadata& metadata, std::string_view architecture)
      : metadata_(&metadata), prefix_(std::string(architecture) + ".") {}

  std::string full(std::string_view key) const { return prefix_ + std::string(key); }
  bool has(std::string_view key) const { return metadata_->has(full(key)); }

  // An integer, or one of the same value for every layer.
  std::int64_t integer(std::string_view key, std::int64_t least, std::int64_t most,
                       std::optional<std::int64_t> fallback = {}) const {
    if (!metadata_->is_array(full(key))) {
      return metadata_->integer(full(key), least, most, fallback);
    }
    const std::vector<std::int64_t> layers = metadata_->integers(full(key), kMaxLayers);
    if (layers.empty()) corrupt(key, "is empty");
    for (const std::int64_t value : layers) {
      if (value != layers.front()) unsupported(key, "differs from layer to layer");
    }
    if (layers.front() < least || layers.front() > most) {
      corrupt(key, "has " + std::to_string(layers.front()) + ", which is not between " +
                       std::to_string(least) + " and " + std::to_string(most));
    }
    return layers.front();
  }
  int size(std::string_view key, int most, std::optional<std::int64_t> fallback = {}) const {
    return static_cast<int>(integer(key, 1, most, fallback));
  }
  double number(std::string_view key, double least, double most,
                std::optional<double> fallback = {}) const {
    return metadata_->number(full(key), least, most, fallback);
  }
  std::string_view string(std::string_view key, std::string_view fallback) const {
    return metadata_->string(full(key), fallback);
  }
  // A number, or 0 and 1 for false and true; nothing for any other value.
  std::optional<double> any_number(std::string_view key) const {
    constexpr double kMost = 1e300;
    const GgufValue& value = metadata_->values().at(full(key));
    if (value.is_array || value.kind == GgufKind::string) return std::nullopt;
    if (value.kind == GgufKind::boolean) return metadata_->boolean(full(key)) ? 1.0 : 0.0;
    return metadata_->number(full(key), -kMost, kMost);
  }

  [[noreturn]] void corrupt(std::string_view key, const std::string& what) const {
    metadata_->corrupt(full(key), what);
  }
  [[noreturn]] void unsupported(std::string_view key, const std::string& what) const {
    metadata_->unsupported(full(key), what);
  }

 private:
  const GgufMetadata* metadata_;
  std::string prefix_;
};

const Architecture& find_architecture(const GgufMetadata& metadata) {
  const std::string_view name = metadata.string(kArchitectureKey);
  const auto* const found =
      std::find_if(kArchitectures.begin(), kArchitectures.end(),
                   [&](const Architecture& entry) { return entry.name == name; });
  if (found != kArchitectures.end()) return *found;
  metadata.unsupported(kArchitectureKey,
                       "is " + in_quotes(name) +
                           ", but of GGUF files Sluice handles llama (Mistral's models, too), "
                           "qwen2 and qwen3");
}

void require_supported(const Keys& keys) {
  for (const Feature& feature : kFeatures) {
    if (!keys.has(feature.key)) continue;
    const std::optional<double> value = keys.any_number(feature.key);
    if (value == feature.neutral || value == feature.also_neutral) continue;
    keys.unsupported(feature.key, "is " + (value ? digits(*value) : std::string("set")) +
                                      ", a feature that Sluice does not handle");
  }
  for (const std::string_view key : kRefused) {
    if (keys.has(key)) keys.unsupported(key, "is set, a feature that Sluice does not handle");
  }
}

void read_sizes(const Keys& keys, ModelConfig& config) {
  config.hidden_size = keys.size("embedding_length", kMaxHidden);
  config.intermediate_size = keys.size("feed_forward_length", kMaxIntermediate);
  config.num_hidden_layers = keys.size("block_count", kMaxLayers);
  config.max_position_embeddings = keys.integer("context_length", 1, kMaxPositions);
  config.rms_norm_eps =
      static_cast<float>(keys.number("attention.layer_norm_rms_epsilon", kMinNormEps, kMaxNormEps));
  const std::int64_t window = keys.integer("attention.sliding_window", 0, kMaxPositions, 0);
  if (window > 0) config.window = window;
}

void read_heads(const Keys& keys, ModelConfig& config) {
  const int heads = keys.size("attention.head_count", kMaxHeads);
  config.num_attention_heads = heads;
  config.num_key_value_heads = keys.size("attention.head_count_kv", kMaxHeads, heads);
  if (heads % config.num_key_value_heads != 0) {
    keys.corrupt("attention.head_count", "(" + std::to_string(heads) +
                                             ") is not a multiple of attention.head_count_kv (" +
                                             std::to_string(config.num_key_value_heads) + ")");
  }
  if (!keys.has("attention.key_length") && config.hidden_size % heads != 0) {
    keys.corrupt("embedding_length",
                 "is not a multiple of attention.head_count, and there is no attention.key_length");
  }
  constexpr int kMost = 1 << 16;
  config.head_dim = keys.size("attention.key_length", kMost, config.hidden_size / heads);
  if (config.head_dim < kMinHeadDim || config.head_dim > kMaxHeadDim || config.head_dim % 2 != 0) {
    keys.unsupported("attention.key_length", "is " + std::to_string(config.head_dim) +
                                                 ", but Sluice handles even ones from 16 to 256");
  }
  for (const char* const same : {"attention.value_length", "rope.dimension_count"}) {
    const int value = keys.size(same, kMost, config.head_dim);
    if (value == config.head_dim) continue;
    keys.unsupported(same, "is " + std::to_string(value) +
                               ", but Sluice handles only that of the keys, " +
                               std::to_string(config.head_dim));
  }
}

YarnScaling read_yarn(const Keys& keys, double theta, std::int64_t context) {
  YarnScaling yarn;
  yarn.original_max_position_embeddings = static_cast<double>(
      keys.integer("rope.scaling.original_context_length", 1, kMaxPositions, context));
  yarn.factor = keys.number("rope.scaling.factor", 1.0, kMaxRopeFactor);
  yarn.beta_fast = keys.number("rope.scaling.yarn_beta_fast", 1e-3, kMaxRopeFactor, yarn.beta_fast);
  yarn.beta_slow = keys.number("rope.scaling.yarn_beta_slow", 1e-3, kMaxRopeFactor, yarn.beta_slow);
  if (yarn.beta_fast < yarn.beta_slow) {
    keys.corrupt("rope.scaling.yarn_beta_fast", "is smaller than rope.scaling.yarn_beta_slow");
  }
  if (theta <= 1.0) keys.corrupt("rope.freq_base", "is 1, with which yarn has no frequencies");
  if (keys.number("rope.scaling.yarn_ext_factor", -1.0, 1e3, 1.0) != 1.0) {
    keys.unsupported("rope.scaling.yarn_ext_factor", "is not 1");
  }
  yarn.attention_factor = yarn_temperature(yarn.factor) *
                          keys.number("rope.scaling.attn_factor", 1e-3, 1e3, 1.0) *
                          keys.number("rope.scaling.yarn_attn_factor", 1e-3, 1e3, 1.0);
  return yarn;
}

// Files without rope.scaling.type scale by a factor that may have its older name.
void read_linear(const Keys& keys, RopeConfig& rope) {
  const double older = keys.number("rope.scale_linear", 0.0, kMaxRopeFactor, 0.0);
  const double factor = keys.number("rope.scaling.factor", 0.0, kMaxRopeFactor, older);
  if (factor == 0.0 || factor == 1.0) return;
  if (factor < 1.0) keys.corrupt("rope.scaling.factor", "is " + digits(factor) + ", less than 1");
  rope.scaling = LinearScaling{factor};
}

RopeConfig read_rope(const Keys& keys, std::int64_t context) {
  RopeConfig rope;
  rope.theta = keys.number("rope.freq_base", 1.0, kMaxTheta, rope.theta);
  const std::string_view type = keys.string("rope.scaling.type", "linear");
  if (type == "yarn") {
    rope.scaling = read_yarn(keys, rope.theta, context);
  } else if (type == "linear") {
    read_linear(keys, rope);
  } else if (type != "none") {
    keys.unsupported("rope.scaling.type",
                     "is " + in_quotes(type) + ", but Sluice handles none, linear and yarn");
  }
  return rope;
}

[[noreturn]] void throw_tensor(const GgufFile& file, std::string_view tensor,
                               const std::string& what) {
  throw Error(ErrorCode::corrupt, file.path().string() + ": tensor " + in_quotes(tensor) + " " +
                                      what + "; download the file again");
}

struct FoundTensor {
  const GgufFile* file = nullptr;
  const GgufTensor* tensor = nullptr;
};

FoundTensor find(const std::vector<GgufFile>& parts, std::string_view name) {
  for (const GgufFile& part : parts) {
    const auto found = part.tensors().find(name);
    if (found != part.tensors().end()) return {&part, &found->second};
  }
  return {};
}

// Divisors of the frequencies, which stand in a tensor.
void read_factors(const std::vector<GgufFile>& parts, const Keys& keys, ModelConfig& config) {
  const FoundTensor found = find(parts, kRopeFactors);
  if (found.tensor == nullptr) return;
  const std::int64_t half = config.head_dim / 2;
  if (found.tensor->type->element != DType::f32 ||
      found.tensor->shape != std::vector<std::int64_t>{half}) {
    throw_tensor(*found.file, kRopeFactors, "is not F32 [" + std::to_string(half) + "]");
  }
  if (!std::holds_alternative<std::monostate>(config.rope.scaling)) {
    keys.unsupported("rope.scaling.type", "stands beside a tensor " + in_quotes(kRopeFactors));
  }
  FactorScaling scaling;
  scaling.factors.resize(static_cast<std::size_t>(half));
  found.file->read(*found.tensor, 0, std::as_writable_bytes(std::span(scaling.factors)));
  for (const float factor : scaling.factors) {
    if (factor >= 1e-3f && factor <= static_cast<float>(kMaxRopeFactor)) continue;
    throw_tensor(*found.file, kRopeFactors, "has a factor of " + digits(factor));
  }
  config.rope.scaling = std::move(scaling);
}

// The embedding says how many tokens the model has; metadata may only agree.
void read_vocabulary(const std::vector<GgufFile>& parts, const Keys& keys, ModelConfig& config) {
  const FoundTensor embedding = find(parts, kEmbedding);
  if (embedding.tensor == nullptr) {
    throw Error(ErrorCode::corrupt, parts.front().path().string() + ": has no tensor " +
                                        in_quotes(kEmbedding) +
                                        ", so it has no model; download the whole file");
  }
  const std::vector<std::int64_t>& shape = embedding.tensor->shape;
  if (shape.size() != 2 || shape[1] != config.hidden_size || shape[0] > kMaxVocabulary) {
    throw_tensor(*embedding.file, kEmbedding,
                 "does not have rows of embedding_length (" + std::to_string(config.hidden_size) +
                     "), one for each of at most " + std::to_string(kMaxVocabulary) + " tokens");
  }
  config.vocab_size = static_cast<int>(shape[0]);
  const int said = keys.size("vocab_size", kMaxVocabulary, config.vocab_size);
  if (said == config.vocab_size) return;
  keys.corrupt("vocab_size", "is " + std::to_string(said) + ", but " + in_quotes(kEmbedding) +
                                 " has " + std::to_string(config.vocab_size) + " rows");
}

}  // namespace

bool has_paired_rows(const ModelConfig& config) { return config.architecture == "llama"; }

ModelConfig read_config(const std::vector<GgufFile>& parts) {
  const GgufMetadata& metadata = parts.front().metadata();
  const Architecture& architecture = find_architecture(metadata);
  const Keys keys(metadata, architecture.name);
  ModelConfig config;
  config.architecture = architecture.name;
  require_supported(keys);
  read_sizes(keys, config);
  read_heads(keys, config);
  config.rope = read_rope(keys, config.max_position_embeddings);
  read_factors(parts, keys, config);
  read_vocabulary(parts, keys, config);
  config.tie_word_embeddings = find(parts, kHead).tensor == nullptr;
  config.qkv_bias =
      architecture.always_qkv_bias || find(parts, layer_tensor(0, "attn_q.bias")).tensor != nullptr;
  config.o_bias = find(parts, layer_tensor(0, "attn_output.bias")).tensor != nullptr;
  config.qk_norm = architecture.qk_norm;
  config.bos_token_id = bos_token(metadata, config.vocab_size);
  config.eos_token_ids = end_tokens(metadata, config.vocab_size);
  return config;
}

}  // namespace sluice::gguf
