// Chooses the next token from logits, as SamplingParams say.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "sluice/sampling.h"
#include "sluice/types.h"

namespace sluice {

class Sampler {
 public:
  // Throws what SamplingParams::validate throws.
  explicit Sampler(const SamplingParams& params);

  // The token at `position` of the session, which is Session::length() when the logits were
  // computed: a draw is a function of the seed and the position, and repeats.
  //
  // `logits` [vocabulary], `history` the tokens so far, prompt included, for the repetition
  // penalty: it divides positive and multiplies negative logits of each token in the history
  // once. Throws Error{numeric} if a logit is NaN or +inf or all are -inf, and what
  // require_history() throws.
  TokenId next(std::span<const float> logits, std::span<const TokenId> history,
               std::int64_t position) const;

  // Throws Error{usage} if one of these tokens has no logit among `vocabulary`.
  void require_history(std::span<const TokenId> history, std::size_t vocabulary) const;

  // Returns true if next() reads the history.
  bool penalizes() const { return params_.repetition_penalty != 1.0; }
  // Parameters of the draw at `position`, for a draw in the backend.
  TokenDraw draw(std::int64_t position) const;

 private:
  std::vector<float> penalized(std::span<const float> logits,
                               std::span<const TokenId> history) const;

  SamplingParams params_;
};

}  // namespace sluice
