// Log probabilities of tokens, as the model gave them.
#pragma once

#include <span>
#include <vector>

#include "sluice/types.h"

namespace sluice {

struct TokenLogprob {
  TokenId token = 0;
  float logprob = 0.0f;  // nats: log softmax of the model's logits at temperature 1
};

// A token and what else could have stood there.
struct ScoredToken {
  TokenId token = 0;
  float logprob = 0.0f;           // NaN if none was computed
  std::vector<TokenLogprob> top;  // the likeliest, best first, lower ids first where equal
};

// log softmax(logits)[token] and the `top` likeliest tokens, computed in fp64. Throws
// Error{numeric} if a logit is NaN or +inf, or all are -inf.
ScoredToken score_token(std::span<const float> logits, TokenId token, int top);

}  // namespace sluice
