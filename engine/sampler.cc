#include "sluice/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "engine/utf8.h"
#include "lib/sample_token.h"
#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

void require(bool holds, const std::string& message) {
  if (!holds) throw Error(ErrorCode::usage, message);
}

}  // namespace

void SamplingParams::validate() const {
  require(std::isfinite(temperature) && temperature >= 0.0,
          "`temperature` " + digits(temperature) + ": give a finite number of 0 (greedy) or more");
  require(top_k >= 0, "`top_k` " + std::to_string(top_k) + ": give 0 (all tokens) or more");
  require(top_p > 0.0 && top_p <= 1.0,
          "`top_p` " + digits(top_p) + ": give a number above 0, up to 1 (all tokens)");
  require(min_p >= 0.0 && min_p <= 1.0, "`min_p` " + digits(min_p) + ": give a number from 0 to 1");
  require(std::isfinite(repetition_penalty) && repetition_penalty > 0.0,
          "`repetition_penalty` " + digits(repetition_penalty) +
              ": give a finite number above 0 (1 is off)");
  require(max_tokens >= 1, "`max_tokens` " + std::to_string(max_tokens) + ": give 1 or more");
  for (const std::string& string : stop) {
    require(!string.empty(), "`stop`: a stop string is empty; give it some text or leave it out");
    require(!find_invalid_utf8(string), "`stop`: a stop string is not UTF-8, so no text has it");
  }
}

Sampler::Sampler(const SamplingParams& params) : params_(params) { params_.validate(); }

TokenId Sampler::next(std::span<const float> logits, std::span<const TokenId> history,
                      std::int64_t position) const {
  const TokenDraw params = draw(position);
  return penalizes() ? sample_token(penalized(logits, history), params)
                     : sample_token(logits, params);
}

TokenDraw Sampler::draw(std::int64_t position) const {
  return {.temperature = params_.temperature,
          .top_k = params_.top_k,
          .top_p = params_.top_p,
          .min_p = params_.min_p,
          .seed = params_.seed,
          .position = position};
}

void Sampler::require_history(std::span<const TokenId> history, std::size_t vocabulary) const {
  if (!penalizes()) return;
  for (const TokenId id : history) {
    if (id < 0 || static_cast<std::size_t>(id) >= vocabulary) {
      throw Error(ErrorCode::usage,
                  "token " + std::to_string(id) + " of the history is not one of the " +
                      std::to_string(vocabulary) + " that the model has logits for");
    }
  }
}

std::vector<float> Sampler::penalized(std::span<const float> logits,
                                      std::span<const TokenId> history) const {
  require_history(history, logits.size());
  std::vector<float> result(logits.begin(), logits.end());
  std::vector<bool> seen(result.size(), false);
  for (const TokenId id : history) {
    const auto index = static_cast<std::size_t>(id);
    if (seen[index]) continue;
    seen[index] = true;
    float& logit = result[index];
    // Leaves -inf, which no penalty changes, and NaN and +inf, which are reported as errors later.
    if (!std::isfinite(logit)) continue;
    constexpr double kMost = std::numeric_limits<float>::max();
    const double factor =
        logit > 0.0f ? 1.0 / params_.repetition_penalty : params_.repetition_penalty;
    logit = static_cast<float>(std::clamp(logit * factor, -kMost, kMost));
  }
  return result;
}

}  // namespace sluice
