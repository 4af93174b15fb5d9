#include "model/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include "lib/check.h"
#include "model/utf8.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

void require(bool holds, const std::string& message) {
  if (!holds) throw Error(ErrorCode::usage, message);
}

[[noreturn]] void throw_bad_logit(std::size_t id, float logit) {
  throw Error(ErrorCode::internal, "the model gave token " + std::to_string(id) + " the logit " +
                                       (std::isnan(logit) ? "NaN" : "infinity") +
                                       "; check the checkpoint's weights, or compute in f32");
}

[[noreturn]] void throw_no_candidate() {
  throw Error(ErrorCode::internal,
              "the model gave every token the logit -infinity; check the checkpoint's weights");
}

}  // namespace

void SamplingParams::validate() const {
  const auto text = [](double value) { return std::to_string(value); };
  require(std::isfinite(temperature) && temperature >= 0.0,
          "temperature " + text(temperature) + ": give a number of 0 (greedy) or more");
  require(top_k >= 0, "top-k " + std::to_string(top_k) + ": give 0 (all tokens) or more");
  require(top_p > 0.0 && top_p <= 1.0,
          "top-p " + text(top_p) + ": give a number above 0, up to 1 (all tokens)");
  require(min_p >= 0.0 && min_p <= 1.0, "min-p " + text(min_p) + ": give a number from 0 to 1");
  require(std::isfinite(repetition_penalty) && repetition_penalty > 0.0,
          "repetition-penalty " + text(repetition_penalty) + ": give a number above 0 (1 is off)");
  require(max_tokens >= 1, "max-tokens " + std::to_string(max_tokens) + ": give 1 or more");
  for (const std::string& string : stop) {
    require(!string.empty(), "stop: a stop string is empty; give it some text or leave it out");
    require(!find_invalid_utf8(string), "stop: a stop string is not UTF-8, so no text has it");
  }
}

Sampler::Sampler(const SamplingParams& params) : params_(params), random_(params.seed) {
  params_.validate();
}

bool Sampler::more_likely(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

TokenId Sampler::next(std::span<const float> logits, std::span<const TokenId> history) {
  if (params_.temperature == 0.0 && params_.repetition_penalty == 1.0) return likeliest(logits);
  collect(logits, history);
  if (params_.temperature == 0.0) {
    return std::min_element(candidates_.begin(), candidates_.end(), more_likely)->id;
  }
  keep_top_k();
  weigh();
  keep_top_p();
  keep_min_p();
  return draw();
}

// Greedy, without a list of candidates: that would take longer than some models' layers.
TokenId Sampler::likeliest(std::span<const float> logits) {
  std::size_t best = 0;
  float highest = -kInfinity;
  for (std::size_t id = 0; id < logits.size(); ++id) {
    const float logit = logits[id];
    if (!(logit < kInfinity)) throw_bad_logit(id, logit);
    if (logit > highest) {
      highest = logit;
      best = id;
    }
  }
  if (highest == -kInfinity) throw_no_candidate();
  return static_cast<TokenId>(best);
}

// Every token that has a chance at all, in the order of ids.
void Sampler::collect(std::span<const float> logits, std::span<const TokenId> history) {
  candidates_.clear();
  candidates_.reserve(logits.size());
  for (std::size_t id = 0; id < logits.size(); ++id) {
    if (!(logits[id] < kInfinity)) throw_bad_logit(id, logits[id]);
    candidates_.push_back({logits[id], static_cast<TokenId>(id)});
  }
  if (params_.repetition_penalty != 1.0) penalize(history);
  std::erase_if(candidates_, [](const Candidate& c) { return c.logit == -kInfinity; });
  if (candidates_.empty()) throw_no_candidate();
}

void Sampler::penalize(std::span<const TokenId> history) {
  seen_.assign(candidates_.size(), false);
  for (const TokenId id : history) {
    const auto index = static_cast<std::size_t>(id);
    if (id < 0 || index >= candidates_.size()) {
      throw Error(ErrorCode::internal,
                  "token " + std::to_string(id) + " of the history is not one of the " +
                      std::to_string(candidates_.size()) + " that the model has logits for");
    }
    if (seen_[index]) continue;
    seen_[index] = true;
    float& logit = candidates_[index].logit;
    if (std::isinf(logit)) continue;  // impossible before and after
    constexpr double kMost = std::numeric_limits<float>::max();
    const double factor =
        logit > 0.0f ? 1.0 / params_.repetition_penalty : params_.repetition_penalty;
    logit = static_cast<float>(std::clamp(logit * factor, -kMost, kMost));
  }
}

void Sampler::keep_top_k() {
  const auto k = static_cast<std::size_t>(params_.top_k);
  if (k == 0 || k >= candidates_.size()) return;
  std::nth_element(candidates_.begin(), candidates_.begin() + params_.top_k, candidates_.end(),
                   more_likely);
  candidates_.resize(k);
}

// Differences to the largest logit are divided, not logits, so no temperature overflows.
void Sampler::weigh() {
  const double most = std::min_element(candidates_.begin(), candidates_.end(), more_likely)->logit;
  for (Candidate& c : candidates_) c.weight = std::exp((c.logit - most) / params_.temperature);
}

// Halves the candidates until it is clear where the smallest set ends, so that only the last few
// need sorting: all from `end` on are out, all before `begin` are in.
void Sampler::keep_top_p() {
  if (params_.top_p >= 1.0) return;
  const auto at = [&](std::size_t i) {
    return candidates_.begin() + static_cast<std::ptrdiff_t>(i);
  };
  const auto weight = [&](std::size_t from, std::size_t to) {
    return std::accumulate(at(from), at(to), 0.0,
                           [](double sum, const Candidate& c) { return sum + c.weight; });
  };
  const double wanted = params_.top_p * weight(0, candidates_.size());
  std::size_t begin = 0;
  std::size_t end = candidates_.size();
  double kept = 0.0;
  while (end - begin > 32) {
    const std::size_t middle = begin + (end - begin) / 2;
    std::nth_element(at(begin), at(middle), at(end), more_likely);
    const double upper = weight(begin, middle);
    if (kept + upper >= wanted) {
      end = middle;
    } else {
      begin = middle;
      kept += upper;
    }
  }
  std::sort(at(begin), at(end), more_likely);
  while (begin < end && (begin == 0 || kept < wanted)) kept += candidates_[begin++].weight;
  candidates_.resize(begin);
}

void Sampler::keep_min_p() {
  if (params_.min_p == 0.0) return;
  std::erase_if(candidates_, [&](const Candidate& c) { return c.weight < params_.min_p; });
}

TokenId Sampler::draw() {
  double total = 0.0;
  for (const Candidate& c : candidates_) total += c.weight;
  // 53 random bits as a number in [0, 1); std::uniform_real_distribution differs by library.
  double left = static_cast<double>(random_() >> 11) * 0x1p-53 * total;
  for (const Candidate& c : candidates_) {
    left -= c.weight;
    if (left < 0.0) return c.id;
  }
  // Rounding used up the sum: the last one that has any weight.
  const auto last = std::find_if(candidates_.rbegin(), candidates_.rend(),
                                 [](const Candidate& c) { return c.weight > 0.0; });
  check(last != candidates_.rend(), "no candidate has any weight");
  return last->id;
}

}  // namespace sluice
