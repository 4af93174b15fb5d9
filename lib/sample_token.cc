#include "lib/sample_token.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "lib/gumbel.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Candidate {
  float logit = 0.0f;
  TokenId id = 0;
  double scaled = 0.0;  // (logit - the largest) / temperature
  double weight = 0.0;  // exp(scaled), computed for top-p and min-p
};
using Candidates = std::vector<Candidate>;

bool more_likely(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

SampledToken bad_at(std::size_t id, float logit) {
  return {.bad = static_cast<TokenId>(id), .bad_logit = logit};
}

SampledToken likeliest(std::span<const float> logits) {
  SampledToken best;
  float highest = -kInfinity;
  for (std::size_t id = 0; id < logits.size(); ++id) {
    const float logit = logits[id];
    if (!(logit < kInfinity)) return bad_at(id, logit);
    if (logit > highest) {
      highest = logit;
      best.id = static_cast<TokenId>(id);
    }
  }
  return best;
}

// Every token with a finite logit, in the order of ids, up to the first bad logit.
Candidates candidates_of(std::span<const float> logits, SampledToken& result) {
  Candidates candidates;
  candidates.reserve(logits.size());
  for (std::size_t id = 0; id < logits.size(); ++id) {
    const float logit = logits[id];
    if (!(logit < kInfinity)) {
      result = bad_at(id, logit);
      break;
    }
    if (logit != -kInfinity) candidates.push_back({logit, static_cast<TokenId>(id)});
  }
  return candidates;
}

// Keeps `last` and the candidates that are more likely.
void keep_until(const Candidate& last, Candidates& candidates) {
  std::erase_if(candidates, [&](const Candidate& c) { return more_likely(last, c); });
}

void keep_top_k(int k, Candidates& candidates) {
  if (k == 0 || static_cast<std::size_t>(k) >= candidates.size()) return;
  Candidates heaviest = candidates;
  const auto last = heaviest.begin() + (k - 1);
  std::nth_element(heaviest.begin(), last, heaviest.end(), more_likely);
  keep_until(*last, candidates);
}

// Divides differences to the largest logit, not logits, so that no temperature overflows.
void scale(double temperature, Candidates& candidates) {
  const double most = std::min_element(candidates.begin(), candidates.end(), more_likely)->logit;
  for (Candidate& c : candidates) c.scaled = (c.logit - most) / temperature;
}

double weight_of(std::span<const Candidate> candidates) {
  return std::accumulate(candidates.begin(), candidates.end(), 0.0,
                         [](double sum, const Candidate& c) { return sum + c.weight; });
}

// Halves the candidates until the end of the smallest set is known to within a few, so that only
// these need sorting: all from `end` on are out, all before `begin` are in.
void keep_top_p(double p, Candidates& candidates) {
  Candidates order = candidates;
  const auto at = [&](std::size_t i) { return order.begin() + static_cast<std::ptrdiff_t>(i); };
  const double wanted = p * weight_of(order);
  std::size_t begin = 0;
  std::size_t end = order.size();
  double kept = 0.0;
  while (end - begin > 32) {
    const std::size_t middle = begin + (end - begin) / 2;
    std::nth_element(at(begin), at(middle), at(end), more_likely);
    const double upper = weight_of(std::span(order).subspan(begin, middle - begin));
    if (kept + upper >= wanted) {
      end = middle;
    } else {
      begin = middle;
      kept += upper;
    }
  }
  std::sort(at(begin), at(end), more_likely);
  while (begin < end && (begin == 0 || kept < wanted)) kept += order[begin++].weight;
  keep_until(order[begin - 1], candidates);
}

void keep_probable(const TokenDraw& params, Candidates& candidates) {
  if (params.top_p >= 1.0 && params.min_p == 0.0) return;
  for (Candidate& c : candidates) c.weight = std::exp(c.scaled);
  if (params.top_p < 1.0) keep_top_p(params.top_p, candidates);
  std::erase_if(candidates, [&](const Candidate& c) { return c.weight < params.min_p; });
}

// The largest sum of scaled logit and noise; candidates are in the order of ids.
TokenId draw(const TokenDraw& params, std::span<const Candidate> candidates) {
  std::array<std::uint32_t, kNoiseGroup> words{};
  TokenId group = -1;  // the group of ids that `words` are for
  double best = -std::numeric_limits<double>::infinity();
  TokenId id = -1;
  for (const Candidate& c : candidates) {
    if (c.id / kNoiseGroup != group) {
      group = c.id / kNoiseGroup;
      words = noise_words(params.seed, static_cast<std::uint64_t>(params.position),
                          static_cast<std::uint32_t>(group));
    }
    const std::uint32_t word = words[static_cast<std::size_t>(c.id % kNoiseGroup)];
    if (c.scaled + gumbel_bound(std::countl_zero(word)) < best) continue;
    const double score = c.scaled + gumbel(word);
    if (score > best) {
      best = score;
      id = c.id;
    }
  }
  return id;
}

}  // namespace

SampledToken draw_token(std::span<const float> logits, const TokenDraw& params) {
  // No list of candidates, because making it would take longer than some models' layers.
  if (params.temperature == 0.0) return likeliest(logits);
  SampledToken result;
  Candidates candidates = candidates_of(logits, result);
  if (result.bad >= 0 || candidates.empty()) return result;
  keep_top_k(params.top_k, candidates);
  scale(params.temperature, candidates);
  keep_probable(params, candidates);
  result.id = draw(params, candidates);
  return result;
}

TokenId token_of(const SampledToken& sampled) {
  if (sampled.bad >= 0) {
    throw Error(ErrorCode::numeric, "the model gave token " + std::to_string(sampled.bad) +
                                        " the logit " +
                                        (std::isnan(sampled.bad_logit) ? "NaN" : "infinity") +
                                        "; check the checkpoint's weights, or compute in f32 with "
                                        "rows of bf16 or f32");
  }
  if (sampled.id < 0) {
    throw Error(ErrorCode::numeric,
                "the model gave every token the logit -infinity; check the checkpoint's weights");
  }
  return sampled.id;
}

TokenId sample_token(std::span<const float> logits, const TokenDraw& params) {
  return token_of(draw_token(logits, params));
}

}  // namespace sluice
