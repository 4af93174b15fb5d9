#include "engine/tensors.h"

#include <optional>
#include <set>
#include <string_view>

#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

LayerTensors layer_tensors(const ModelConfig& c, int layer) {
  const std::string prefix = "model.layers." + std::to_string(layer) + ".";
  const std::string attention = prefix + "self_attn.";
  const std::string mlp = prefix + "mlp.";
  const std::int64_t hidden = c.hidden_size;
  const std::int64_t query = std::int64_t{c.num_attention_heads} * c.head_dim;
  const std::int64_t key = std::int64_t{c.num_key_value_heads} * c.head_dim;
  const std::int64_t intermediate = c.intermediate_size;
  const auto qkv = [&](const std::string& suffix) {
    return std::vector<NamedRows>{{attention + "q_proj" + suffix, query},
                                  {attention + "k_proj" + suffix, key},
                                  {attention + "v_proj" + suffix, key}};
  };
  LayerTensors t;
  t.input_norm = {{{prefix + "input_layernorm.weight", hidden}}};
  t.qkv = {qkv(".weight"), hidden};
  if (c.qkv_bias) t.qkv_bias = {qkv(".bias")};
  if (c.qk_norm) {
    t.q_norm = {{{attention + "q_norm.weight", c.head_dim}}};
    t.k_norm = {{{attention + "k_norm.weight", c.head_dim}}};
  }
  t.o = {{{attention + "o_proj.weight", hidden}}, query};
  if (c.o_bias) t.o_bias = {{{attention + "o_proj.bias", hidden}}};
  t.post_norm = {{{prefix + "post_attention_layernorm.weight", hidden}}};
  t.gate_up = {{{mlp + "gate_proj.weight", intermediate}, {mlp + "up_proj.weight", intermediate}},
               hidden};
  t.down = {{{mlp + "down_proj.weight", hidden}}, intermediate};
  return t;
}

}  // namespace

std::int64_t TensorGroup::rows() const {
  std::int64_t sum = 0;
  for (const NamedRows& part : parts) sum += part.rows;
  return sum;
}

std::vector<std::int64_t> TensorGroup::shape(std::size_t index) const {
  if (columns == 0) return {parts[index].rows};
  return {parts[index].rows, columns};
}

std::vector<const TensorGroup*> LayerTensors::all() const {
  return {&input_norm, &qkv, &qkv_bias, &q_norm, &k_norm, &o, &o_bias, &post_norm, &gate_up, &down};
}

ModelTensors model_tensors(const ModelConfig& c) {
  const char* const embedding = "model.embed_tokens.weight";
  ModelTensors t;
  t.embedding = {{{embedding, c.vocab_size}}, c.hidden_size};
  t.lm_head = {{{c.tie_word_embeddings ? embedding : "lm_head.weight", c.vocab_size}},
               c.hidden_size};
  t.final_norm = {{{"model.norm.weight", c.hidden_size}}};
  for (int layer = 0; layer < c.num_hidden_layers; ++layer) {
    t.layers.push_back(layer_tensors(c, layer));
  }
  return t;
}

namespace {

// Matrices that are fused must have one dtype.
void require_one_dtype(const Checkpoint& checkpoint, const TensorGroup& group) {
  if (group.columns == 0) return;
  const TensorInfo& first = checkpoint.info(group.parts.front().name);
  for (const NamedRows& part : group.parts) {
    const TensorInfo& info = checkpoint.info(part.name);
    if (info.dtype == first.dtype) continue;
    throw Error(ErrorCode::unsupported,
                checkpoint.file_of(part.name).string() + ": tensor " +
                    in_quotes(checkpoint.own_name(part.name)) + " is " + info.stored_dtype +
                    " beside " + in_quotes(checkpoint.own_name(first.name)) + " in " +
                    first.stored_dtype + "; convert the checkpoint to one dtype");
  }
}

// Returns true for RoPE frequencies, which follow from the config, and for a copy of tied
// embeddings.
bool is_redundant(std::string_view name, const ModelConfig& config) {
  return name.ends_with(".rotary_emb.inv_freq") ||
         (config.tie_word_embeddings && name == "lm_head.weight");
}

void require_read(const Checkpoint& checkpoint, const std::set<std::string, std::less<>>& read) {
  const ModelConfig& config = checkpoint.config();
  for (const std::string_view name : checkpoint.names()) {
    if (read.contains(name) || is_redundant(name, config)) continue;
    if (checkpoint.info(name).elements() == 0) {
      throw Error(ErrorCode::unsupported,
                  checkpoint.file_of(name).string() + ": has a tensor " +
                      in_quotes(checkpoint.own_name(name)) + " without any values, which no " +
                      config.architecture +
                      " has; whatever wrote it left something out. Save the checkpoint again "
                      "without it");
    }
    throw Error(ErrorCode::unsupported,
                checkpoint.file_of(name).string() + ": has a tensor " +
                    in_quotes(checkpoint.own_name(name)) + ", which no " + config.architecture +
                    " of " + std::to_string(config.num_hidden_layers) + " layers has with this " +
                    std::string(checkpoint.config_name()) +
                    "; without it the model would be another. Correct " +
                    std::string(checkpoint.layer_fields()) +
                    " there, or convert the checkpoint to plain F32, F16 or BF16 weights");
  }
}

}  // namespace

void check_tensors(const Checkpoint& checkpoint) {
  std::set<std::string, std::less<>> read;
  const auto check_group = [&](const TensorGroup& group) {
    for (std::size_t i = 0; i < group.parts.size(); ++i) {
      checkpoint.require(group.parts[i].name, group.shape(i));
      read.insert(group.parts[i].name);
    }
    require_one_dtype(checkpoint, group);
  };
  const ModelTensors tensors = model_tensors(checkpoint.config());
  for (const TensorGroup* group : {&tensors.embedding, &tensors.lm_head, &tensors.final_norm}) {
    check_group(*group);
  }
  for (const LayerTensors& layer : tensors.layers) {
    for (const TensorGroup* group : layer.all()) check_group(*group);
  }
  require_read(checkpoint, read);
}

DType matrix_dtype(const Checkpoint& checkpoint) {
  std::optional<DType> shared;
  bool differ = false;
  const auto add = [&](const TensorGroup& group) {
    if (group.columns == 0) return;
    for (const NamedRows& part : group.parts) {
      const DType dtype = checkpoint.info(part.name).dtype.value_or(DType::f32);
      differ = differ || shared.value_or(dtype) != dtype;
      shared = dtype;
    }
  };
  const ModelTensors tensors = model_tensors(checkpoint.config());
  add(tensors.lm_head);
  for (const LayerTensors& layer : tensors.layers) {
    for (const TensorGroup* group : layer.all()) add(*group);
  }
  return differ ? DType::f32 : shared.value_or(DType::f32);
}

}  // namespace sluice
