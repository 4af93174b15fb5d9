#include <algorithm>
#include <array>
#include <cstdio>
#include <iterator>
#include <string>
#include <vector>

#include "sluice/errors.h"
#include "tools/calibration.h"
#include "tools/eval_report.h"
#include "tools/output.h"

namespace sluice::tools {
namespace {

constexpr int kFirstAnchor = 2;

// A set of anchor layers and its score at each budget.
struct Candidate {
  std::vector<int> anchors;
  std::vector<Score> scores;  // [budgets]
  double probes = 0.0;

  double recall() const {
    double sum = 0.0;
    for (const Score& score : scores) sum += score.recall.mean;
    return sum;
  }
  double nll() const {
    double sum = 0.0;
    for (const Score& score : scores) sum += score.nll.mean;
    return sum;
  }
};

// Higher recall wins; ties go to the lower negative log-likelihood.
bool better(const Candidate& a, const Candidate& b) {
  return a.recall() != b.recall() ? a.recall() > b.recall() : a.nll() < b.nll();
}

// The fewest layers whose recall is within the error of the best, because each of them scans the
// whole index. Ties go to the better candidate.
Candidate choose(const std::vector<Candidate>& candidates) {
  const Candidate& best = *std::min_element(candidates.begin(), candidates.end(), better);
  double error = 0.0;
  for (const Score& score : best.scores) error += score.recall.error;
  // At least the error of one missed needle, because finding all of them may be chance.
  error = std::max(error, static_cast<double>(best.scores.size()) / best.probes);
  const Candidate* chosen = &best;
  for (const Candidate& candidate : candidates) {
    if (candidate.recall() < best.recall() - error) continue;
    const std::size_t layers = candidate.anchors.size();
    const bool fewer = layers < chosen->anchors.size();
    if (fewer || (layers == chosen->anchors.size() && better(candidate, *chosen))) {
      chosen = &candidate;
    }
  }
  return *chosen;
}

std::vector<Candidate> candidates_of(int layers) {
  std::vector<Candidate> candidates = {{{kFirstAnchor}, {}, 0.0}};
  for (int second = kFirstAnchor + 1; second < layers; ++second) {
    candidates.push_back({{kFirstAnchor, second}, {}, 0.0});
  }
  for (int second = kFirstAnchor + 1; second < layers; ++second) {
    for (int third = second + 1; third < layers; ++third) {
      candidates.push_back({{kFirstAnchor, second, third}, {}, 0.0});
    }
  }
  return candidates;
}

Policy policy_of(const std::vector<int>& anchors, std::int64_t budget) {
  Policy policy = parse_policy("tidaldecode");
  policy.anchors = anchors;
  policy.k = {budget, 0};
  return policy;
}

std::string name_of(const std::vector<int>& anchors) {
  std::string name;
  for (const int layer : anchors) name += (name.empty() ? "" : ",") + std::to_string(layer);
  return name;
}

std::string row_of(const Candidate& candidate) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%-12s", name_of(candidate.anchors).c_str());
  std::string row = text.data();
  for (const Score& score : candidate.scores) {
    std::snprintf(text.data(), text.size(), "  %5.1f%% +- %4.1f  %6.3f", 100 * score.recall.mean,
                  100 * score.recall.error, score.nll.mean);
    row += text.data();
  }
  return row + "\n";
}

std::string table_of(const std::vector<Candidate>& candidates, const Score& dense,
                     const std::vector<std::int64_t>& budgets) {
  std::string table = "layers that  recall and NLL of the answers, by tokens kept\nselect      ";
  std::array<char, 64> text{};
  for (const std::int64_t budget : budgets) {
    std::snprintf(text.data(), text.size(), "  %22lld", static_cast<long long>(budget));
    table += text.data();
  }
  table += "\n";
  const auto shown = [&](std::size_t anchors, std::size_t most) {
    std::vector<Candidate> part;
    std::copy_if(candidates.begin(), candidates.end(), std::back_inserter(part),
                 [&](const Candidate& c) { return c.anchors.size() == anchors; });
    if (part.size() > most) {
      std::sort(part.begin(), part.end(), better);
      part.resize(most);
    }
    for (const Candidate& candidate : part) table += row_of(candidate);
  };
  shown(1, 1);
  shown(2, candidates.size());
  constexpr std::size_t kBestPairs = 10;
  shown(3, kBestPairs);
  return table + row_of({{}, std::vector<Score>(budgets.size(), dense), 0.0}) +
         "(the last line is dense attention; of two re-selection layers the best ten are shown)\n";
}

nlohmann::json score_json(const Score& score) {
  return {{"recall", json_of(score.recall)},
          {"nll", json_of(score.nll)},
          {"top1_agreement", score.top1_agreement},
          {"kl", score.kl}};
}

nlohmann::json report_of(const std::vector<Candidate>& candidates, const Candidate& chosen,
                         const Score& dense, const std::vector<std::int64_t>& budgets) {
  nlohmann::json list = nlohmann::json::array();
  for (const Candidate& candidate : candidates) {
    nlohmann::json scores = nlohmann::json::array();
    for (std::size_t i = 0; i < budgets.size(); ++i) {
      scores.push_back(score_json(candidate.scores[i]));
      scores.back()["budget"] = budgets[i];
    }
    list.push_back({{"anchors", candidate.anchors},
                    {"chosen", candidate.anchors == chosen.anchors},
                    {"scores", scores}});
  }
  return {{"probes", static_cast<std::int64_t>(chosen.probes)},
          {"dense", score_json(dense)},
          {"candidates", list}};
}

}  // namespace

Calibration calibrate_anchors(Engine& engine, const PassageBuilder& passages,
                              const TaskOptions& options,
                              const std::vector<std::int64_t>& budgets) {
  std::vector<Candidate> candidates = candidates_of(engine.info().kv.layers);
  std::vector<NamedPolicy> policies;
  for (const Candidate& candidate : candidates) {
    for (const std::int64_t budget : budgets) {
      policies.push_back({name_of(candidate.anchors), policy_of(candidate.anchors, budget)});
    }
  }
  ProgressBar bar("calibrate");
  const TaskResult result = run_task(
      engine, engine, input_of(passages, Task::needle, options), options, policies,
      Sessions::shared, [&](double share, const std::string& note) { bar.update(share, note); });
  bar.clear();
  const PolicyResult& dense = result.policies.front();
  std::size_t next = 1;
  for (Candidate& candidate : candidates) {
    for (std::size_t i = 0; i < budgets.size(); ++i) {
      candidate.probes = static_cast<double>(dense.probes.size());
      candidate.scores.push_back(score_of(result.policies[next++], dense));
    }
  }
  const Candidate chosen = choose(candidates);
  const Score whole = score_of(dense, dense);
  Policy policy = parse_policy("tidaldecode");
  policy.anchors = chosen.anchors;
  return {policy, table_of(candidates, whole, budgets),
          report_of(candidates, chosen, whole, budgets)};
}

void require_anchors(const ModelInfo& info) {
  if (info.kv.layers > kFirstAnchor + 1) return;
  throw Error(ErrorCode::unsupported, "calibrate: a model of " + std::to_string(info.kv.layers) +
                                          " layers has none to select anew; it needs 4");
}

}  // namespace sluice::tools
