// Chooses the next token from logits, as SamplingParams say.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "sluice/sampling.h"
#include "sluice/types.h"

namespace sluice {

class Sampler {
 public:
  // Throws what SamplingParams::validate throws.
  explicit Sampler(const SamplingParams& params);

  // `logits` [vocabulary], `history` the tokens so far, prompt included, for the repetition
  // penalty: it divides positive and multiplies negative logits of each token in the history
  // once. Throws Error{internal} if a logit is NaN or +inf, all are -inf, or a token of the
  // history has no logit.
  TokenId next(std::span<const float> logits, std::span<const TokenId> history);

 private:
  struct Candidate {
    float logit = 0.0f;
    TokenId id = 0;
    double weight = 0.0;  // in proportion to the probability; 1 for the most likely
  };
  static bool more_likely(const Candidate& a, const Candidate& b);
  static TokenId likeliest(std::span<const float> logits);

  void collect(std::span<const float> logits, std::span<const TokenId> history);
  void penalize(std::span<const TokenId> history);
  void keep_top_k();
  void weigh();
  void keep_top_p();
  void keep_min_p();
  TokenId draw();

  SamplingParams params_;
  std::mt19937_64 random_;
  std::vector<Candidate> candidates_;
  std::vector<bool> seen_;
};

}  // namespace sluice
