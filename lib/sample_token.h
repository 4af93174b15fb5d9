// Drawing a token from logits.
#pragma once

#include <cstdint>
#include <span>

#include "sluice/sampling.h"
#include "sluice/types.h"

namespace sluice {

// The outcome of a draw.
struct SampledToken {
  TokenId id = -1;   // -1: none, because a logit is bad or all are -Inf
  TokenId bad = -1;  // the first token whose logit is NaN or +Inf; -1: there is none
  float bad_logit = 0.0f;
};

SampledToken draw_token(std::span<const float> logits, const TokenDraw& params);

// Throws Error{numeric} if there is none.
TokenId token_of(const SampledToken& sampled);

// Both at once.
TokenId sample_token(std::span<const float> logits, const TokenDraw& params);

}  // namespace sluice
