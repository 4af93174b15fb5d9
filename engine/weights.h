// The weights of a Llama-family decoder, in the form that the backend computes with.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "engine/checkpoint.h"
#include "lib/backend.h"

namespace sluice {

// Matrices that read the same input are fused: one call, and the input is converted once.
struct LayerWeights {
  Buffer input_norm;                // [hidden] f32
  std::unique_ptr<Weight> qkv;      // [(query_heads + 2 * kv_heads) * head_dim, hidden]
  Buffer qkv_bias;                  // [outputs of qkv] f32, or empty
  Buffer q_norm;                    // [head_dim] f32, or empty
  Buffer k_norm;                    // [head_dim] f32, or empty
  std::unique_ptr<Weight> o;        // [hidden, query_heads * head_dim]
  Buffer o_bias;                    // [hidden] f32, or empty
  Buffer post_norm;                 // [hidden] f32
  std::unique_ptr<Weight> gate_up;  // [2 * intermediate, hidden]
  std::unique_ptr<Weight> down;     // [hidden, intermediate]
};

struct ModelWeights {
  Buffer embedding;  // memory of `table`, unless the head's is used
  Matrix table;      // [vocabulary, hidden] embeddings, in the checkpoint's dtype; or none, and:
  std::unique_ptr<Weight> coded_embedding;  // memory of `coded_table`, unless it is the head
  const Weight* coded_table = nullptr;      // the same, coded
  std::vector<LayerWeights> layers;
  Buffer final_norm;                // [hidden] f32
  std::unique_ptr<Weight> lm_head;  // [vocabulary, hidden]
};

// EngineConfig::weights: the format of matrices. Unset: the checkpoint's codes where it has codes.
using WeightChoice = std::optional<WeightFormat>;

// Loads with `readers` threads. For `progress` and errors see read_tensors().
ModelWeights load_weights(const Checkpoint& checkpoint, Backend& backend,
                          const WeightChoice& choice, int readers,
                          const std::function<void(double)>& progress);

// Throws Error{unsupported} if the backend cannot store the model's matrices so.
void require_formats(const Checkpoint& checkpoint, const Backend& backend,
                     const WeightChoice& choice);

struct WeightSizes {
  std::vector<WeightShape> products;  // one per matrix shape
  std::uint64_t total = 0;            // bytes that load_weights will hold
  std::uint64_t transient = 0;        // bytes of host memory besides, while it runs
};
WeightSizes weight_sizes(const Checkpoint& checkpoint, const Backend& backend,
                         const WeightChoice& choice, int readers);

}  // namespace sluice
