// Runs a Llama-family decoder over the tokens of one step.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "engine/config.h"
#include "engine/weights.h"
#include "lib/backend.h"
#include "offload/step/kv_batch.h"
#include "offload/step/kv_prompt.h"
#include "offload/step/kv_session.h"
#include "sluice/engine.h"

namespace sluice {

class SoloStep;

class Decoder {
 public:
  Decoder(const ModelConfig& config, ModelWeights weights, Queue& queue,
          std::shared_ptr<RowObserver> observer = nullptr);

  // Allocates the activations for steps of up to `chunk` tokens. Call before the first step; steps
  // allocate nothing.
  void allocate(std::int64_t chunk);
  bool is_allocated() const { return a_.x.data() != nullptr; }

  // Runs the layers over `tokens` and appends them to `session`. `stops`, if set, is asked between
  // two layers where the step can be given up; once it returns true, so is the step, and the
  // session has the tokens it had before. Returns false then. Throws what the session throws.
  bool step(std::span<const TokenId> tokens, Phase phase, KvSession& session,
            const Stop& stops = {});

  // Appends the rows of the next `tokens` tokens, up to the session's chunk, which were computed
  // before: `read(layer)` returns the rows of every KV head, in the backend's host memory, which
  // the next call may overwrite.
  void restore(std::int64_t tokens, KvSession& session,
               const std::function<std::span<const RowSpan>(int layer)>& read);

  // Runs the tokens of a batch and computes the logits after each; the caller ends the batch. A
  // backend that records does so once for every kind of batch.
  void decode(std::span<const TokenId> tokens, KvBatch& batch);

  // A whole prompt under a policy whose prefill is sparse. Runs layer by layer, because every layer
  // looks at all tokens before it attends. `stream`: prompt_bytes() in the compute tier, for the
  // residual stream of the whole prompt. `progress` is called after every layer; if it returns
  // false, the run ends and returns false. Then, and after an error, the session has the tokens it
  // had before.
  bool prompt(std::span<const TokenId> tokens, KvSession& session, const Buffer& stream,
              const std::function<bool(double share)>& progress);

  static std::uint64_t prompt_bytes(const ModelConfig& config, std::int64_t tokens);

  // Logits [count, vocabulary] after tokens [first, first + count) of the last step; at most
  // kLogitRows at a time. In host memory, valid until the next call.
  std::span<const float> logits(std::int64_t first, std::int64_t count);
  // Computes logits() where sample() and read_logits() find them, as decode() does.
  void prepare_logits(std::int64_t count) { compute_logits(0, count); }
  // Copies the logits after one token of decode() into `to`, [vocabulary].
  void read_logits(std::int64_t token, std::span<float> to);
  // Draws the token after each token of decode(), on the device that has the logits; see
  // SampleParams.
  void sample(std::span<const TokenDraw> params, std::span<SampledToken> tokens);

  static constexpr std::int64_t kLogitRows = 64;
  // Tokens that the feed-forward part takes at a time, because its activations are the largest and
  // products of more rows are no faster.
  static constexpr std::int64_t kFeedForwardRows = 2048;

  static std::uint64_t activation_bytes(const ModelConfig& config, const Backend& backend,
                                        std::int64_t chunk);
  // Host memory besides, if activations are not in host memory; `observed`: by an observer, too.
  static std::uint64_t host_bytes(const ModelConfig& config, const Backend& backend,
                                  std::int64_t chunk, bool observed = false);

 private:
  // Bytes of the buffers below.
  struct ActivationBytes {
    ActivationBytes(const ModelConfig& config, const Backend& backend, std::int64_t chunk);

    std::size_t ids, x, normed, qkv, attended, lse, mixed, gate_up, product, logits;
    std::size_t early_normed, early_qkv;

    std::uint64_t sum() const {
      return ids + x + normed + qkv + attended + lse + mixed + gate_up + product + logits +
             early_normed + early_qkv;
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
    Buffer product;   // [up to kFeedForwardRows, intermediate] compute dtype
    Buffer logits;    // [kLogitRows, vocabulary] f32
    // For layers that choose rows early, beside the work of the layer before:
    Buffer early_normed;  // [2, up to kMostBatch, hidden] compute dtype, layers in turns
    Buffer early_qkv;     // as qkv, for up to kMostBatch tokens
  };

  // Gives up the step before `layer` if `stops` says so.
  bool is_stopped(int layer, std::int64_t tokens, SoloStep& step, const Stop& stops);

  // Positions of tokens in their sequences: those of a batch, or consecutive ones.
  struct Positions {
    TokenBatch batch = {};
    std::int64_t first = 0;
  };

  // The parts of a layer, on the residual stream x [tokens, hidden] f32.
  void embed(std::span<const TokenId> tokens, const Matrix& x);
  void project(int layer, const Matrix& x, const Positions& positions);
  // Shows queries, keys and values that project() computed to the observer, if there is one.
  void show(int layer, Phase phase, std::int64_t tokens);
  NewRows new_rows() const;
  Queries queries() const;
  void mix(int layer, const Matrix& x);
  void feed_forward(int layer, const Matrix& x);
  // One layer over a whole prompt, whose residual stream is `stream`.
  void prompt_layer(int layer, const Matrix& stream, const KvSession& session, KvPrompt& prompt);
  // Logits [count, vocabulary] after tokens [first, first + count), in the compute tier.
  Matrix compute_logits(std::int64_t first, std::int64_t count);
  RmsNormParams norm(const Matrix& x, const Buffer& weight, const Matrix& y) const;
  // Rotates queries and keys of `qkv`, [tokens, qkv].
  void rotate(const Buffer& qkv, const LayerWeights& weights, std::int64_t tokens,
              const Positions& positions);
  // Begins layer `layer` of a decode step early if it is to begin at this point: `x` is its state
  // at the point. Step: KvBatch or SoloStep.
  template <class Step>
  void begin_early(int layer, Early at, const Matrix& x, const Positions& positions, Step& step);

  ModelConfig config_;
  ModelWeights weights_;
  Queue* queue_;
  std::vector<float> inverse_frequencies_;
  Activations a_;
  Buffer host_logits_;  // copy of a_.logits, if that is not in host memory
  Buffer staged_ids_;   // [kLogitRows] token ids of decode(), in host memory
  std::shared_ptr<RowObserver> observer_;
  Buffer observed_;  // copy of a_.qkv for the observer, if that is not in host memory
};

}  // namespace sluice
