// Runs a Llama-family decoder over the tokens of one step.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "lib/backend.h"
#include "model/config.h"
#include "model/weights.h"
#include "offload/step/kv_batch.h"
#include "offload/step/kv_session.h"

namespace sluice {

class Decoder {
 public:
  Decoder(const ModelConfig& config, ModelWeights weights, Queue& queue);

  // Activations for steps of up to `chunk` tokens, before the first of them; none are allocated
  // later.
  void allocate(std::int64_t chunk);
  bool is_allocated() const { return a_.x.data() != nullptr; }

  // Runs the layers over `tokens` and appends them to `session`. Throws what the session throws.
  void step(std::span<const TokenId> tokens, Phase phase, KvSession& session);

  // A token of each session of a batch, and the logits after it; the caller ends the batch. A
  // backend that records does so once for every kind of batch.
  void decode(std::span<const TokenId> tokens, KvBatch& batch);

  // The same for a whole prompt under a policy whose prefill is sparse: layer by layer, for every
  // layer looks at all tokens before it attends. `stream`: prompt_bytes() of memory where
  // activations are, for the residual stream of the whole prompt. `progress` is called after every
  // layer and ends the run by returning false; then false is returned. Then, and after an error,
  // the session has the tokens that it had.
  bool prompt(std::span<const TokenId> tokens, KvSession& session, const Buffer& stream,
              const std::function<bool(double share)>& progress);

  static std::uint64_t prompt_bytes(const ModelConfig& config, std::int64_t tokens);

  // Logits [count, vocabulary] after tokens [first, first + count) of the last step; at most
  // kLogitRows at a time. In host memory, valid until the next call.
  std::span<const float> logits(std::int64_t first, std::int64_t count);
  // The same after the tokens of decode(): those of one of them into `to`, [vocabulary].
  void read_logits(std::int64_t token, std::span<float> to);
  // Draws the tokens after those of decode() where their logits are; see SampleParams.
  void sample(std::span<const TokenDraw> params, std::span<SampledToken> tokens);

  static constexpr std::int64_t kLogitRows = 64;
  // Tokens of a step that the feed-forward part takes at a time: its activations are the largest,
  // and products of more rows are no faster.
  static constexpr std::int64_t kFeedForwardRows = 2048;

  static std::uint64_t activation_bytes(const ModelConfig& config, const Backend& backend,
                                        std::int64_t chunk);
  // Host memory beside it, where activations are not there.
  static std::uint64_t host_bytes(const ModelConfig& config, const Backend& backend,
                                  std::int64_t chunk);

 private:
  // Bytes of the buffers below.
  struct ActivationBytes {
    ActivationBytes(const ModelConfig& config, const Backend& backend, std::int64_t chunk);

    std::size_t ids, x, normed, qkv, attended, lse, mixed, gate_up, product, logits;

    std::uint64_t sum() const {
      return ids + x + normed + qkv + attended + lse + mixed + gate_up + product + logits;
    }
  };
  // The buffers of one step; a row per token.
  struct Activations {
    Buffer ids;       // [chunk] token ids
    Buffer x;         // [chunk, hidden] f32, the residual stream
    Buffer normed;    // [chunk, hidden] compute dtype
    Buffer qkv;       // [chunk, (query_heads + 2 * kv_heads) * head_dim] f32
    Buffer attended;  // [chunk, query_heads * head_dim] f32
    Buffer lse;       // [chunk, query_heads] f32
    Buffer mixed;     // [chunk, query_heads * head_dim] compute dtype
    Buffer gate_up;   // [up to kFeedForwardRows, 2 * intermediate] f32
    Buffer product;   // [likewise, intermediate] compute dtype
    Buffer logits;    // [kLogitRows, vocabulary] f32
  };

  // Where tokens stand in their sequences: those of a batch, or a run from a position on.
  struct Positions {
    TokenBatch batch = {};
    std::int64_t first = 0;
  };

  // The parts of a layer, on the residual stream x [tokens, hidden] f32.
  void embed(std::span<const TokenId> tokens, const Matrix& x);
  void project(int layer, const Matrix& x, const Positions& positions);
  NewRows new_rows() const;
  Queries queries() const;
  void mix(int layer, const Matrix& x);
  void feed_forward(int layer, const Matrix& x);
  // A layer of a whole prompt, whose residual stream this is.
  void prompt_layer(int layer, const Matrix& stream, KvSession& session);
  // The logits after tokens [first, first + count), where activations are.
  Matrix compute_logits(std::int64_t first, std::int64_t count);
  RmsNormParams norm(const Matrix& x, const Buffer& weight, const Matrix& y) const;
  void rotate(const LayerWeights& weights, std::int64_t tokens, const Positions& positions);

  ModelConfig config_;
  ModelWeights weights_;
  Queue* queue_;
  std::vector<float> inverse_frequencies_;
  Activations a_;
  Buffer host_logits_;  // a copy of a_.logits, if that is not in host memory
  Buffer staged_ids_;   // [kLogitRows], host memory: of the tokens of decode()
};

}  // namespace sluice
