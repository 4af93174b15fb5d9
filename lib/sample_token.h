// Draws a token from logits.
#pragma once

#include <cstdint>
#include <span>

#include "sluice/sampling.h"
#include "sluice/types.h"

namespace sluice {

// The outcome of a draw.
struct SampledToken {
  TokenId id = -1;   // -1: none, because a logit is bad or all are -Inf
  TokenId bad = -1;  // the first token whose logit is NaN or +Inf; -1: none
  float bad_logit = 0.0f;
};

SampledToken draw_token(std::span<const float> logits, const TokenDraw& params);

// The drawn token. Throws Error{numeric} if none was drawn.
TokenId token_of(const SampledToken& sampled);

// draw_token(), then token_of().
TokenId sample_token(std::span<const float> logits, const TokenDraw& params);

}  // namespace sluice
