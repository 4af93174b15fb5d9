// Changes to the logits of an answer before a token is drawn.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "sluice/types.h"

namespace sluice {

struct LogitBias {
  TokenId token = 0;
  double bias = 0.0;  // added to the token's logit, -100 to 100
};

struct LogitRules {
  // Subtracted from the logit of every token of the answer: once, and once per occurrence. -2 to 2.
  // Source: the penalties of OpenAI's API, over the answer only.
  double presence_penalty = 0.0;
  double frequency_penalty = 0.0;
  std::vector<LogitBias> bias;
  // Called last, with the answer so far and the logits [vocabulary], which it may change; -inf
  // forbids a token. It runs on the thread that draws, so it must be quick, and must not call the
  // object that called it. An exception ends the answer with an error.
  std::function<void(std::span<const TokenId> answer, std::span<float> logits)> mask;

  // Returns true if no logit would change.
  bool empty() const;
  // Throws Error{usage} that names the field and its range.
  void validate(int vocabulary) const;
  // Applies penalties, bias and mask to the logits [vocabulary].
  void apply(std::span<const TokenId> answer, std::span<float> logits) const;
};

}  // namespace sluice
