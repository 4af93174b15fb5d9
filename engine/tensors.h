// The tensors of a Llama-family checkpoint, by their Hugging Face names.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/checkpoint.h"

namespace sluice {

struct NamedRows {
  std::string name;
  std::int64_t rows;
};

// Tensors that are concatenated into one: matrices with the same `columns`, or vectors (`columns`
// 0). It has no parts if the architecture lacks the tensor.
struct TensorGroup {
  std::vector<NamedRows> parts;
  std::int64_t columns = 0;

  std::int64_t rows() const;
  bool empty() const { return parts.empty(); }
  // The shape that part `index` must have.
  std::vector<std::int64_t> shape(std::size_t index) const;
};

struct LayerTensors {
  TensorGroup input_norm, qkv, qkv_bias, q_norm, k_norm, o, o_bias, post_norm, gate_up, down;
  std::vector<const TensorGroup*> all() const;
};

struct ModelTensors {
  TensorGroup embedding, lm_head, final_norm;
  std::vector<LayerTensors> layers;
};

ModelTensors model_tensors(const ModelConfig& config);

// Compares the headers with the config, before any weight is read. Throws Error{corrupt} naming a
// tensor that is missing or has another shape; Error{unsupported} for one whose dtype the decoder
// does not compute with or differs from its group's, and for one that would change the result but
// that the decoder does not read.
void check_tensors(const Checkpoint& checkpoint);

// The dtype that holds all matrices without loss: their own, or f32 if they differ.
DType matrix_dtype(const Checkpoint& checkpoint);

}  // namespace sluice
