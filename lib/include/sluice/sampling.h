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
  std::uint64_t seed = 0;           // the same seed, prompt and build give the same text
  int max_tokens = 128;
  // Generation ends before the first of these strings. One may hold the text of special tokens,
  // which decoded text does not show: "<|im_end|>" ends it at that token.
  std::vector<std::string> stop;

  // Throws Error{usage} that names the parameter and its range.
  void validate() const;
};

// One draw by such parameters, from logits that the repetition penalty has been applied to. A set
// of the most likely tokens takes those of lower ids first where logits are equal; the draw goes
// through ids in order.
struct TokenDraw {
  double temperature = 0.0;  // 0: the most likely token
  int top_k = 0;
  double top_p = 1.0;
  double min_p = 0.0;
  double random = 0.0;  // in [0, 1)
};

}  // namespace sluice
