// How the next token is chosen, and when generation ends.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

// Applied in this order: repetition penalty, temperature, top-k, top-p, min-p.
struct SamplingParams {
  // 0 is greedy: the most likely token, lowest id on a tie, whatever top_k, top_p, min_p and seed.
  double temperature = 0.0;
  int top_k = 0;                    // keep the k most likely tokens; 0 keeps all
  double top_p = 1.0;               // keep the smallest set with this much probability
  double min_p = 0.0;               // drop tokens less likely than min_p * the most likely
  double repetition_penalty = 1.0;  // Keskar et al. 2019 (CTRL), section 4.1; 1 is off
  // The noise of a draw depends on the seed, the position in the session and the id alone.
  //
  // Promised: a seed gives the same text again for the same prompt on the same device and build,
  // with the same threads, chunk, caps and sessions per step; an answer cut off and continued draws
  // as one that was not. If one of these differs, for example a batch of 8 instead of 1, logits
  // differ by rounding; fewer than 1 % of draws differ then, and the text diverges after the first
  // that does. So does a greedy text if two logits are within rounding.
  //
  // Not promised: the same text from another device, build or compute dtype. Sessions with the same
  // seed have the same noise: give each fork a different seed.
  std::uint64_t seed = 0;
  int max_tokens = 128;
  // Generation ends before the first of these strings. One may hold the text of special tokens,
  // which decoded text does not show: "<|im_end|>" ends it at that token.
  std::vector<std::string> stop;

  // Throws Error{usage} that names the parameter and its range.
  void validate() const;
};

// One draw by such parameters, from logits that the repetition penalty has been applied to: the id
// with the largest logit / temperature + noise among those that top-k, top-p and min-p leave, the
// lowest of several. Noise has the Gumbel distribution, so that ids are drawn with their
// probabilities. Sets of the most likely tokens take lower ids first where logits are equal.
struct TokenDraw {
  double temperature = 0.0;  // 0: the most likely token
  int top_k = 0;
  double top_p = 1.0;
  double min_p = 0.0;
  std::uint64_t seed = 0;
  std::int64_t position = 0;  // of the token that is drawn
};

}  // namespace sluice
