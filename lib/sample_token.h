// Drawing a token from logits.
#pragma once

#include <cstdint>
#include <span>

#include "sluice/types.h"

namespace sluice {

// What to draw, in the order of SamplingParams and with its meanings. A set of the most likely
// tokens takes those of lower ids first where logits are equal; the draw goes through ids in order.
struct SampleParams {
  double temperature = 0.0;  // 0: the most likely token
  int top_k = 0;
  double top_p = 1.0;
  double min_p = 0.0;
  double random = 0.0;  // in [0, 1)
};

// What became of a draw.
struct SampledToken {
  TokenId id = -1;   // -1: there is none, for a logit is bad or all are -Inf
  TokenId bad = -1;  // the first token whose logit is NaN or +Inf; -1: there is none
  float bad_logit = 0.0f;
};

SampledToken draw_token(std::span<const float> logits, const SampleParams& params);

// Throws Error{numeric} if there is none.
TokenId token_of(const SampledToken& sampled);

// Both at once.
TokenId sample_token(std::span<const float> logits, const SampleParams& params);

}  // namespace sluice
