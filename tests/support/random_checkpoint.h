// A small model with random weights and no tokenizer. Keys and queries are scaled so that attention
// is peaked and every row it reads shows in the logits.
#pragma once

#include <cmath>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "tests/io/test_files.h"
#include "tests/support/random.h"
#include "tests/support/temp_dir.h"

namespace sluice::testing {

// Changes to the model, which the weights of others do not depend on.
struct RandomModel {
  std::string type = "llama";  // qwen2 has biases of q, k and v, qwen3 norms of q and k
  int layers = 3;
  int kv_heads = 2;
  bool varied_norms = false;  // else all norms are 1
  // Layers whose attention, or feed-forward part, adds nothing to the hidden state.
  std::set<int> without_attention = {};
  std::set<int> without_feed_forward = {};
};

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
  explicit RandomCheckpoint(std::uint64_t seed, std::uint64_t variant = 0, float jitter = 0.0f,
                            const RandomModel& model = {})
      : model_(model), random_(seed), variant_(variant), jitter_(jitter) {
    add_matrix("model.embed_tokens", kVocabulary, kHidden, 1.0f);
    for (int layer = 0; layer < model_.layers; ++layer) {
      add_layer(layer, "model.layers." + std::to_string(layer) + ".");
    }
    add_norm("model.norm");
    add_matrix("lm_head", kVocabulary, kHidden, 1.0f / std::sqrt(float{kHidden}));
    directory_.write("config.json", config());
    directory_.write("model.safetensors", safetensors("{" + header_ + "}", data_));
  }

  const std::filesystem::path& path() const { return directory_.path(); }

 private:
  void add_layer(int layer, const std::string& name) {
    const float unit = 1.0f / std::sqrt(float{kHidden});
    const float peaked = 1.4f * unit;  // logits with a deviation of 2
    add_norm(name + "input_layernorm");
    add_matrix(name + "self_attn.q_proj", kHeads * kHeadDim, kHidden, peaked);
    add_matrix(name + "self_attn.k_proj", model_.kv_heads * kHeadDim, kHidden, peaked);
    add_matrix(name + "self_attn.v_proj", model_.kv_heads * kHeadDim, kHidden, unit);
    add_matrix(name + "self_attn.o_proj", kHidden, kHeads * kHeadDim,
               model_.without_attention.contains(layer)
                   ? 0.0f
                   : 1.0f / std::sqrt(float{kHeads * kHeadDim}));
    if (model_.type == "qwen2") {
      add_vector(name + "self_attn.q_proj.bias", kHeads * kHeadDim, 0.0f);
      add_vector(name + "self_attn.k_proj.bias", model_.kv_heads * kHeadDim, 0.0f);
      add_vector(name + "self_attn.v_proj.bias", model_.kv_heads * kHeadDim, 0.0f);
    }
    if (model_.type == "qwen3") {
      add_vector(name + "self_attn.q_norm.weight", kHeadDim, 1.0f);
      add_vector(name + "self_attn.k_norm.weight", kHeadDim, 1.0f);
    }
    add_norm(name + "post_attention_layernorm");
    add_matrix(name + "mlp.gate_proj", kIntermediate, kHidden, unit);
    add_matrix(name + "mlp.up_proj", kIntermediate, kHidden, unit);
    add_matrix(name + "mlp.down_proj", kHidden, kIntermediate,
               model_.without_feed_forward.contains(layer)
                   ? 0.0f
                   : 1.0f / std::sqrt(float{kIntermediate}));
  }

  void add_matrix(const std::string& name, int outputs, int inputs, float deviation) {
    const std::int64_t count = std::int64_t{outputs} * inputs;
    std::vector<float> values = random_.normal(count, deviation);
    const std::vector<float> noise = variant_.normal(count, jitter_);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] *= 1.0f + noise[i];
    add(name + ".weight", "[" + std::to_string(outputs) + "," + std::to_string(inputs) + "]",
        values);
  }
  // `mean` plus random numbers.
  void add_vector(const std::string& name, int size, float mean) {
    std::vector<float> values = random_.normal(size, 0.5f);
    for (float& value : values) value += mean;
    add(name, "[" + std::to_string(size) + "]", values);
  }
  void add_norm(const std::string& name) {
    if (model_.varied_norms) return add_vector(name + ".weight", kHidden, 1.0f);
    add(name + ".weight", "[" + std::to_string(kHidden) + "]",
        std::vector<float>(static_cast<std::size_t>(kHidden), 1.0f));
  }
  void add(const std::string& name, const std::string& shape, const std::vector<float>& values) {
    const std::size_t begin = data_.size();
    data_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
    if (!header_.empty()) header_ += ",";
    header_ += entry(name, "F32", shape, begin, data_.size());
  }

  std::string config() const {
    const auto field = [](const std::string& name, int value) {
      return "\"" + name + "\":" + std::to_string(value) + ",";
    };
    const std::string name = model_.type == "llama"   ? "Llama"
                             : model_.type == "qwen2" ? "Qwen2"
                                                      : "Qwen3";
    return R"({"architectures":[")" + name + R"(ForCausalLM"],"model_type":")" + model_.type +
           R"(","hidden_act":"silu",)" + field("hidden_size", kHidden) +
           field("intermediate_size", kIntermediate) + field("num_hidden_layers", model_.layers) +
           field("num_attention_heads", kHeads) + field("num_key_value_heads", model_.kv_heads) +
           field("head_dim", kHeadDim) + field("vocab_size", kVocabulary) +
           R"("max_position_embeddings":4096,"rms_norm_eps":1e-6,"rope_theta":10000.0,)" +
           R"("tie_word_embeddings":false,"torch_dtype":"float32"})";
  }

  RandomModel model_;
  Random random_;
  Random variant_;
  float jitter_;
  std::string header_;
  std::string data_;
  TempDir directory_;
};

}  // namespace sluice::testing
