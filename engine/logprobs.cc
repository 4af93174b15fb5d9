#include "sluice/logprobs.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "sluice/errors.h"

namespace sluice {
namespace {

// The ids of the `count` largest logits, best first.
std::vector<TokenId> likeliest(std::span<const float> logits, std::size_t count) {
  std::vector<TokenId> ids(logits.size());
  std::iota(ids.begin(), ids.end(), TokenId{0});
  const auto end = ids.begin() + static_cast<std::ptrdiff_t>(std::min(count, ids.size()));
  std::partial_sort(ids.begin(), end, ids.end(), [&](TokenId a, TokenId b) {
    const float first = logits[static_cast<std::size_t>(a)];
    const float second = logits[static_cast<std::size_t>(b)];
    return first != second ? first > second : a < b;
  });
  ids.erase(end, ids.end());
  return ids;
}

}  // namespace

ScoredToken score_token(std::span<const float> logits, TokenId token, int top) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - largest);
  const double log_sum = std::log(sum);
  if (!std::isfinite(largest) || !std::isfinite(log_sum)) {
    throw Error(ErrorCode::numeric, "the model gave token " + std::to_string(token) +
                                        " a probability that is NaN; check the checkpoint's "
                                        "weights, or compute in f32 with rows of bf16 or f32");
  }
  const auto logprob = [&](TokenId id) {
    const double logit = logits[static_cast<std::size_t>(id)];
    return static_cast<float>(logit - largest - log_sum);
  };
  ScoredToken scored = {token, logprob(token), {}};
  if (top <= 0) return scored;
  for (const TokenId id : likeliest(logits, static_cast<std::size_t>(top))) {
    scored.top.push_back({id, logprob(id)});
  }
  return scored;
}

}  // namespace sluice
