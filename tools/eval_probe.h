// One probe under one policy: its answers, their distance from dense attention, and their cost.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "sluice/engine.h"
#include "tools/eval_cost.h"
#include "tools/eval_tasks.h"

namespace sluice::tools {

// Dense attention's distributions, and the answers that every policy is fed.
struct Baseline {
  std::vector<std::vector<float>> log_probabilities;  // [tokens of the answers][vocabulary]
  std::vector<TokenId> answers;                       // of all turns
};

struct FactResult {
  bool right = false;
  double depth = 0.0;  // of the fact
};

struct ProbeResult {
  std::vector<FactResult> facts;  // of all turns
  double score = 0.0;             // by the probe's reference
  std::string answer;             // the policy's own, of a probe with a reference
  int leading = 0;                // tokens before the first that was not the likeliest
  int characters = 0;             // of their text
                                  // Per token of the baseline's answers.
  std::vector<double> nll;        // nats
  std::vector<double> kl;         // KL(dense || this), nats
  std::vector<double> agree;      // 1: the likeliest token is dense attention's; 0: it is not
};

struct ProbeOptions {
  Writer writer = Writer::text;
  std::size_t step_tokens = 1;
  std::uint64_t seed = 0;          // of all draws
  std::span<const TokenId> ends;   // end an own answer before its length
  bool until_wrong = false;        // ends with the first step that has a wrong answer
  bool costs_until_wrong = false;  // counts what steps cost up to that one
};

// Fills `baseline` if it is empty. Otherwise feeds the session the baseline's answers; if facts are
// asked for and the policy in force would have answered differently, it then answers once more
// with its own tokens, which adds nothing to `cost`. `meter` is the session's. The session ends
// behind the probe.
ProbeResult run_probe(const Tokenizer& tokenizer, Session& session, const Probe& probe,
                      const ProbeOptions& options, Baseline& baseline, CostMeter& meter,
                      DecodeCost& cost);

}  // namespace sluice::tools
