// Runs a Llama-family decoder over the tokens of one step.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lib/backend.h"
#include "model/config.h"
#include "model/weights.h"
#include "offload/kv_session.h"

namespace sluice {

class Decoder {
 public:
  // Activations for steps of up to `chunk` tokens are allocated here, none later.
  Decoder(const ModelConfig& config, ModelWeights weights, Backend& backend, std::int64_t chunk);

  // Runs the layers over `tokens` and appends them to `session`. Throws what the session throws.
  void step(std::span<const TokenId> tokens, Phase phase, KvSession& session);

  // Logits [count, vocabulary] after tokens [first, first + count) of the last step; at most
  // kLogitRows at a time. In host memory, valid until the next call.
  std::span<const float> logits(std::int64_t first, std::int64_t count);

  static constexpr std::int64_t kLogitRows = 64;

  static std::uint64_t activation_bytes(const ModelConfig& config, const Backend& backend,
                                        std::int64_t chunk);

 private:
  // The buffers of one step; a row per token.
  struct Activations {
    Buffer x;         // [chunk, hidden] f32, the residual stream
    Buffer normed;    // [chunk, hidden] compute dtype
    Buffer qkv;       // [chunk, (query_heads + 2 * kv_heads) * head_dim] f32
    Buffer attended;  // [chunk, query_heads * head_dim] f32
    Buffer lse;       // [chunk, query_heads] f32
    Buffer mixed;     // [chunk, query_heads * head_dim] compute dtype
    Buffer gate_up;   // [chunk, 2 * intermediate] f32
    Buffer product;   // [chunk, intermediate] compute dtype
    Buffer logits;    // [kLogitRows, vocabulary] f32
  };

  void attention(int layer, std::int64_t tokens, KvSession& session);
  void feed_forward(int layer, std::int64_t tokens);
  void norm(const Matrix& x, const Buffer& weight, const Matrix& y);
  void rotate(float* x, int heads, const Buffer& norm, std::int64_t tokens,
              std::int64_t first_position);

  ModelConfig config_;
  ModelWeights weights_;
  Backend* backend_;
  std::vector<float> inverse_frequencies_;
  Activations a_;
};

}  // namespace sluice
