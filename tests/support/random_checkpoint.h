// A small model with random weights and no tokenizer. Keys and queries are scaled so that attention
// is peaked and every row it reads shows in the logits.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/io/test_files.h"
#include "tests/support/random.h"
#include "tests/support/temp_dir.h"

namespace sluice::testing {

class RandomCheckpoint {
 public:
  static constexpr int kLayers = 3;
  static constexpr int kHidden = 64;
  static constexpr int kHeads = 4;
  static constexpr int kKvHeads = 2;
  static constexpr int kHeadDim = 32;
  static constexpr int kIntermediate = 96;
  static constexpr int kVocabulary = 128;

  // Variants of a seed differ in their weights by `jitter`, a relative deviation.
  explicit RandomCheckpoint(std::uint64_t seed, std::uint64_t variant = 0, float jitter = 0.0f)
      : random_(seed), variant_(variant), jitter_(jitter) {
    add_matrix("model.embed_tokens", kVocabulary, kHidden, 1.0f);
    for (int layer = 0; layer < kLayers; ++layer) {
      add_layer("model.layers." + std::to_string(layer) + ".");
    }
    add_norm("model.norm");
    add_matrix("lm_head", kVocabulary, kHidden, 1.0f / std::sqrt(float{kHidden}));
    directory_.write("config.json", config());
    directory_.write("model.safetensors", safetensors("{" + header_ + "}", data_));
  }

  const std::filesystem::path& path() const { return directory_.path(); }

 private:
  void add_layer(const std::string& name) {
    const float unit = 1.0f / std::sqrt(float{kHidden});
    const float peaked = 1.4f * unit;  // logits with a deviation of 2
    add_norm(name + "input_layernorm");
    add_matrix(name + "self_attn.q_proj", kHeads * kHeadDim, kHidden, peaked);
    add_matrix(name + "self_attn.k_proj", kKvHeads * kHeadDim, kHidden, peaked);
    add_matrix(name + "self_attn.v_proj", kKvHeads * kHeadDim, kHidden, unit);
    add_matrix(name + "self_attn.o_proj", kHidden, kHeads * kHeadDim,
               1.0f / std::sqrt(float{kHeads * kHeadDim}));
    add_norm(name + "post_attention_layernorm");
    add_matrix(name + "mlp.gate_proj", kIntermediate, kHidden, unit);
    add_matrix(name + "mlp.up_proj", kIntermediate, kHidden, unit);
    add_matrix(name + "mlp.down_proj", kHidden, kIntermediate,
               1.0f / std::sqrt(float{kIntermediate}));
  }

  void add_matrix(const std::string& name, int outputs, int inputs, float deviation) {
    const std::int64_t count = std::int64_t{outputs} * inputs;
    std::vector<float> values = random_.normal(count, deviation);
    const std::vector<float> noise = variant_.normal(count, jitter_);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] *= 1.0f + noise[i];
    add(name, "[" + std::to_string(outputs) + "," + std::to_string(inputs) + "]", values);
  }
  void add_norm(const std::string& name) {
    add(name, "[" + std::to_string(kHidden) + "]",
        std::vector<float>(static_cast<std::size_t>(kHidden), 1.0f));
  }
  void add(const std::string& name, const std::string& shape, const std::vector<float>& values) {
    const std::size_t begin = data_.size();
    data_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
    if (!header_.empty()) header_ += ",";
    header_ += entry(name + ".weight", "F32", shape, begin, data_.size());
  }

  static std::string config() {
    const auto field = [](const std::string& name, int value) {
      return "\"" + name + "\":" + std::to_string(value) + ",";
    };
    return R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_act":"silu",)" +
           field("hidden_size", kHidden) + field("intermediate_size", kIntermediate) +
           field("num_hidden_layers", kLayers) + field("num_attention_heads", kHeads) +
           field("num_key_value_heads", kKvHeads) + field("head_dim", kHeadDim) +
           field("vocab_size", kVocabulary) +
           R"("max_position_embeddings":4096,"rms_norm_eps":1e-6,"rope_theta":10000.0,)" +
           R"("tie_word_embeddings":false,"torch_dtype":"float32"})";
  }

  Random random_;
  Random variant_;
  float jitter_;
  std::string header_;
  std::string data_;
  TempDir directory_;
};

}  // namespace sluice::testing
