#include "tools/eval_report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "lib/bytes.h"

namespace sluice::tools {
namespace {

// One value per probe, or per target of all probes.
std::vector<double> per_probe(const PolicyResult& result, const auto& value) {
  std::vector<double> values;
  for (const ProbeResult& probe : result.probes) values.push_back(value(probe));
  return values;
}

std::vector<double> per_target(const PolicyResult& result) {
  std::vector<double> values;
  for (const ProbeResult& probe : result.probes) {
    values.insert(values.end(), probe.nll.begin(), probe.nll.end());
  }
  return values;
}

// NLL of the same targets; a repetition may have been ended early in one of the two.
std::vector<double> nll_changes(const PolicyResult& result, const PolicyResult& dense) {
  std::vector<double> changes;
  for (std::size_t i = 0; i < result.probes.size(); ++i) {
    const std::vector<double>& own = result.probes[i].nll;
    const std::vector<double>& other = dense.probes[i].nll;
    for (std::size_t t = 0; t < std::min(own.size(), other.size()); ++t) {
      changes.push_back(own[t] - other[t]);
    }
  }
  return changes;
}

std::vector<double> minus(std::vector<double> a, const std::vector<double>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] -= b[i];
  return a;
}

std::string format(const char* pattern, auto... values) {
  std::array<char, 256> text{};
  std::snprintf(text.data(), text.size(), pattern, values...);
  return text.data();
}

nlohmann::json json_of(const Estimate& e) {
  return {{"mean", e.mean}, {"standard_error", e.error}};
}

std::string bytes_text(double bytes) { return format_bytes(static_cast<std::uint64_t>(bytes)); }

// The ledger's sums, per decoded token.
nlohmann::json traffic_json(const Cost& cost) {
  const auto tokens = static_cast<double>(std::max<std::int64_t>(cost.tokens, 1));
  nlohmann::json list = nlohmann::json::array();
  for (const auto& [movement, traffic] : cost.traffic) {
    const auto& [from, to, cause] = movement;
    list.push_back({{"from", to_string(from)},
                    {"to", to_string(to)},
                    {"cause", to_string(cause)},
                    {"rows_per_token", static_cast<double>(traffic.rows) / tokens},
                    {"bytes_per_token", static_cast<double>(traffic.bytes) / tokens}});
  }
  return list;
}

std::string quality_header(Task task) {
  switch (task) {
    case Task::needle:
      return "recall          vs dense";
    case Task::perplexity:
      return "perplexity  nll vs dense      top-1   KL    ";
    case Task::agreement:
      return "top-1   KL    ";
    case Task::repetition:
      return "characters      vs dense";
  }
  return {};
}

std::string quality(Task task, const Score& s) {
  switch (task) {
    case Task::needle:
      return format("%5.1f%% +- %4.1f  %+5.1f +- %4.1f", 100 * s.recall.mean, 100 * s.recall.error,
                    100 * s.recall_change.mean, 100 * s.recall_change.error);
    case Task::perplexity:
      return format("%9.3f  %+7.4f +- %6.4f  %5.1f%%  %6.4f", std::exp(s.nll.mean),
                    s.nll_change.mean, s.nll_change.error, 100 * s.top1_agreement, s.kl);
    case Task::agreement:
      return format("%5.1f%%  %6.4f", 100 * s.top1_agreement, s.kl);
    case Task::repetition:
      return format("%6.1f +- %5.1f  %+6.1f +- %5.1f", s.characters.mean, s.characters.error,
                    s.characters_change.mean, s.characters_change.error);
  }
  return {};
}

// Recall by depth in quarters of the context; empty for tasks without depths.
nlohmann::json by_depth(const PolicyResult& result) {
  std::array<std::vector<double>, 4> quarters;
  for (const ProbeResult& probe : result.probes) {
    const auto quarter = static_cast<std::size_t>(std::clamp(probe.depth * 4.0, 0.0, 3.0));
    quarters[quarter].push_back(probe.right ? 1.0 : 0.0);
  }
  nlohmann::json list = nlohmann::json::array();
  for (const std::vector<double>& quarter : quarters) {
    list.push_back({{"probes", quarter.size()}, {"recall", estimate_of(quarter).mean}});
  }
  return list;
}

}  // namespace

Estimate estimate_of(const std::vector<double>& values) {
  Estimate e;
  if (values.empty()) return e;
  const auto count = static_cast<double>(values.size());
  for (const double v : values) e.mean += v / count;
  double squares = 0.0;
  for (const double v : values) squares += (v - e.mean) * (v - e.mean);
  if (values.size() > 1) e.error = std::sqrt(squares / (count - 1.0) / count);
  return e;
}

Score score_of(const PolicyResult& result, const PolicyResult& dense) {
  const auto right = [](const ProbeResult& p) { return p.right ? 1.0 : 0.0; };
  const auto characters = [](const ProbeResult& p) { return static_cast<double>(p.characters); };
  Score score;
  score.recall = estimate_of(per_probe(result, right));
  score.recall_change = estimate_of(minus(per_probe(result, right), per_probe(dense, right)));
  score.nll = estimate_of(per_target(result));
  score.nll_change = estimate_of(nll_changes(result, dense));
  score.characters = estimate_of(per_probe(result, characters));
  score.characters_change =
      estimate_of(minus(per_probe(result, characters), per_probe(dense, characters)));
  double targets = 0.0;
  for (const ProbeResult& probe : result.probes) {
    targets += static_cast<double>(probe.nll.size());
    score.top1_agreement += probe.top1_as_dense;
    score.kl += probe.kl;
  }
  if (targets > 0.0) {
    score.top1_agreement /= targets;
    score.kl /= targets;
  }
  return score;
}

CostPerToken cost_per_token(const Cost& cost, const KvShape& shape) {
  CostPerToken result;
  const auto tokens = static_cast<double>(std::max<std::int64_t>(cost.tokens, 1));
  result.attended_rows = cost.attended / tokens / shape.layers;
  result.selected_rows = cost.selected / tokens / shape.layers;
  for (const auto& [movement, traffic] : cost.traffic) {
    const auto& [from, to, cause] = movement;
    const double bytes = static_cast<double>(traffic.bytes) / tokens;
    if (from != to) result.moved_bytes += bytes;
    if (from == to && cause == Cause::hit) result.read_bytes += bytes;
    if (cause == Cause::index_read) result.index_bytes += bytes;
    if (cause == Cause::value_read) result.value_bytes += bytes;
  }
  result.alpha = 1.0;
  if (cost.alphas > 0) {
    result.alpha = cost.alpha / static_cast<double>(cost.alphas);
    result.cut_share =
        static_cast<double>(cost.cut) / static_cast<double>(cost.alphas) / shape.kv_heads;
  }
  return result;
}

std::string eval_table(const TaskResult& result, const KvShape& shape) {
  std::string table = format(
      "%s at %lld tokens, %zu probes per policy\n", std::string(to_string(result.task)).c_str(),
      static_cast<long long>(result.context), result.policies.front().probes.size());
  table += format("%-14s %s  %9s %8s %10s %10s %10s %6s\n", "policy",
                  quality_header(result.task).c_str(), "rows/head", "1/dense", "moved/tok",
                  "read/tok", "index/tok", "alpha");
  const double dense = cost_per_token(result.policies.front().cost, shape).selected_rows;
  for (const PolicyResult& policy : result.policies) {
    const CostPerToken cost = cost_per_token(policy.cost, shape);
    table +=
        format("%-14s %s  %9.1f %8.1f %10s %10s %10s %6.3f\n", policy.name.substr(0, 14).c_str(),
               quality(result.task, score_of(policy, result.policies.front())).c_str(),
               cost.selected_rows, dense / std::max(cost.selected_rows, 1.0),
               bytes_text(cost.moved_bytes).c_str(), bytes_text(cost.read_bytes).c_str(),
               bytes_text(cost.index_bytes + cost.value_bytes).c_str(), cost.alpha);
  }
  return table;
}

nlohmann::json eval_json(const TaskResult& result, const KvShape& shape) {
  nlohmann::json policies = nlohmann::json::array();
  for (const PolicyResult& policy : result.policies) {
    const Score s = score_of(policy, result.policies.front());
    const CostPerToken c = cost_per_token(policy.cost, shape);
    nlohmann::json entry = {{"name", policy.name},
                            {"policy", policy.policy},
                            {"probes", policy.probes.size()},
                            {"attended_rows", c.attended_rows},
                            {"selected_rows", c.selected_rows},
                            {"transferred_bytes_per_token", c.moved_bytes},
                            {"read_bytes_per_token", c.read_bytes},
                            {"index_bytes_per_token", c.index_bytes},
                            {"value_bytes_per_token", c.value_bytes},
                            {"traffic", traffic_json(policy.cost)},
                            {"alpha", c.alpha},
                            {"cut_share", c.cut_share}};
    switch (result.task) {
      case Task::needle:
        entry["recall"] = json_of(s.recall);
        entry["recall_change"] = json_of(s.recall_change);
        entry["recall_by_depth"] = by_depth(policy);
        break;
      case Task::perplexity:
      case Task::agreement:
        entry["nll"] = json_of(s.nll);
        entry["nll_change"] = json_of(s.nll_change);
        entry["perplexity"] = std::exp(s.nll.mean);
        entry["top1_agreement"] = s.top1_agreement;
        entry["kl"] = s.kl;
        break;
      case Task::repetition:
        entry["characters"] = json_of(s.characters);
        entry["characters_change"] = json_of(s.characters_change);
        break;
    }
    policies.push_back(entry);
  }
  return {{"task", to_string(result.task)}, {"context", result.context}, {"policies", policies}};
}

}  // namespace sluice::tools
