// The numbers of an evaluation: means with their standard errors, for people and for programs.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "sluice/types.h"
#include "tools/eval_runner.h"

namespace sluice::tools {

struct Estimate {
  double mean = 0.0;
  double error = 0.0;  // standard error of the mean
};
Estimate estimate_of(const std::vector<double>& values);
nlohmann::json json_of(const Estimate& estimate);

// The scores of one policy. Differences to dense are paired: the same probes and targets.
struct Score {
  Estimate recall;         // share of facts that were answered
  Estimate recall_change;  // against dense
  Estimate score;          // of answers that have one, 0 to 1
  Estimate score_change;   // against dense
  Estimate nll;            // nats per target
  Estimate nll_change;     // against dense
  Estimate characters;     // before the first wrong token
  Estimate characters_change;
  double top1_agreement = 0.0;  // share of targets
  double kl = 0.0;              // nats per target
};
Score score_of(const PolicyResult& result, const PolicyResult& dense);

// Tokens [begin, end) of every probe.
struct Window {
  std::size_t begin = 0;
  std::size_t end = 0;
  Estimate kl;              // nats per token
  Estimate top1_agreement;  // share of tokens
};
// Up to 8 windows, equally long to within a token. Probes must be equally long.
std::vector<Window> windows_of(const PolicyResult& result);

// Returns true if dense attention recalls a fifth of the facts, or has a fifth of the highest
// score, or if the task has neither: a model below that says nothing about policies.
bool can_do(const TaskResult& result);

// Means per decoded token; bytes as the ledger counted them.
struct CostPerToken {
  double attended_rows = 0.0;  // per KV head and layer
  double selected_rows = 0.0;  // per KV head and layer, without the newest page
  double moved_bytes = 0.0;    // between tiers, both ways and whatever the cause
  double read_bytes = 0.0;     // rows attended where they were
  double index_bytes = 0.0;    // read to estimate weights, wherever that lies
  double value_bytes = 0.0;    // of values in a few bits
  double alpha = 0.0;
  double cut_share = 0.0;  // of selections that a cap cut
};
CostPerToken cost_per_token(const Cost& cost, const KvShape& shape);

nlohmann::json eval_json(const TaskResult& result, const KvShape& shape);
// From eval_json(), so that the results of an earlier run are shown alike.
std::string eval_table(const nlohmann::json& result);

}  // namespace sluice::tools
