#include "tools/eval_report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <optional>
#include <span>

#include "lib/bytes.h"

namespace sluice::tools {
namespace {

// One value per probe.
std::vector<double> per_probe(const PolicyResult& result, const auto& value) {
  std::vector<double> values;
  for (const ProbeResult& probe : result.probes) values.push_back(value(probe));
  return values;
}

// All values of a list that each probe has.
std::vector<double> all_of(const PolicyResult& result, const auto& list) {
  std::vector<double> values;
  for (const ProbeResult& probe : result.probes) {
    const auto& more = list(probe);
    values.insert(values.end(), more.begin(), more.end());
  }
  return values;
}

std::vector<double> facts_right(const PolicyResult& result) {
  return all_of(result, [](const ProbeResult& probe) {
    std::vector<double> right;
    for (const FactResult& fact : probe.facts) right.push_back(fact.right ? 1.0 : 0.0);
    return right;
  });
}

// NLL differences over the same targets; a repetition may have ended early in one of the two.
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

std::string bytes_text(double bytes) { return format_bytes(static_cast<std::uint64_t>(bytes)); }

// A difference with its sign, padded to `width`. A value that rounds to zero is +0 from either
// side.
std::string change_text(double change, int width, int decimals) {
  const double unit = std::pow(10.0, decimals);
  const double rounded = std::round(change * unit) / unit;
  return format("%+*.*f", width, decimals, rounded == 0.0 ? 0.0 : rounded);
}

// Bytes per token that crossed between tiers; nullopt without tokens.
std::optional<double> moved_per_token(const Cost& cost, const KvShape& shape) {
  if (cost.tokens == 0) return std::nullopt;
  return cost_per_token(cost, shape).moved_bytes;
}

std::string moved_text(const Cost& cost, const KvShape& shape) {
  const std::optional<double> moved = moved_per_token(cost, shape);
  return moved ? bytes_text(*moved) : "-";
}

nlohmann::json moved_json(const Cost& cost, const KvShape& shape) {
  nlohmann::json entry = {{"tokens", cost.tokens}, {"transferred_bytes_per_token", nullptr}};
  const std::optional<double> moved = moved_per_token(cost, shape);
  if (moved) entry["transferred_bytes_per_token"] = *moved;
  return entry;
}

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

// Heading of the task's own column, which comes before the columns that all tasks share.
std::string quality_header(Task task) {
  if (has_facts(task)) return "recall          vs dense      ";
  if (task == Task::perplexity) return "perplexity  nll vs dense       ";
  if (task == Task::repetition) return "characters      vs dense       ";
  return {};
}

std::string quality(Task task, const Score& s) {
  if (has_facts(task)) {
    return format("%5.1f%% +- %4.1f  %s +- %4.1f  ", 100 * s.recall.mean, 100 * s.recall.error,
                  change_text(100 * s.recall_change.mean, 5, 1).c_str(),
                  100 * s.recall_change.error);
  }
  if (task == Task::perplexity) {
    return format("%9.3f   %s +- %6.4f  ", std::exp(s.nll.mean),
                  change_text(s.nll_change.mean, 7, 4).c_str(), s.nll_change.error);
  }
  if (task == Task::repetition) {
    return format("%6.1f +- %5.1f  %s +- %5.1f  ", s.characters.mean, s.characters.error,
                  change_text(s.characters_change.mean, 6, 1).c_str(), s.characters_change.error);
  }
  return {};
}

// Recall by depth, in quarters of the context.
nlohmann::json by_depth(const PolicyResult& result) {
  std::array<std::vector<double>, 4> quarters;
  for (const ProbeResult& probe : result.probes) {
    for (const FactResult& fact : probe.facts) {
      const auto quarter = static_cast<std::size_t>(std::clamp(fact.depth * 4.0, 0.0, 3.0));
      quarters[quarter].push_back(fact.right ? 1.0 : 0.0);
    }
  }
  nlohmann::json list = nlohmann::json::array();
  for (const std::vector<double>& quarter : quarters) {
    list.push_back({{"probes", quarter.size()}, {"recall", estimate_of(quarter).mean}});
  }
  return list;
}

// A name wider than its column gets a line to itself.
std::string in_column(const std::string& name, std::size_t width) {
  if (name.size() <= width) return name + std::string(width - name.size(), ' ') + " ";
  return name + "\n" + std::string(width + 1, ' ');
}

std::size_t name_width(const TaskResult& result) {
  constexpr std::size_t kWidest = 24;
  std::size_t width = 10;
  for (const PolicyResult& policy : result.policies) {
    if (policy.name.size() <= kWidest) width = std::max(width, policy.name.size());
  }
  return width;
}

std::string drift_table(const TaskResult& result, std::size_t width) {
  std::string table = in_column("to token", width);
  for (const Window& window : windows_of(result.policies.front())) {
    table += format("  %13lld", static_cast<long long>(window.end));
  }
  table += "\n";
  for (const PolicyResult& policy : result.policies) {
    table += in_column(policy.name, width);
    for (const Window& window : windows_of(policy)) {
      table += format("  %6.4f %5.1f%%", window.kl.mean, 100 * window.top1_agreement.mean);
    }
    table += "\n";
  }
  return table + "(KL and top-1 agreement since the number of tokens in the column before)\n";
}

nlohmann::json drift_json(const PolicyResult& policy) {
  nlohmann::json list = nlohmann::json::array();
  for (const Window& window : windows_of(policy)) {
    list.push_back({{"begin", window.begin},
                    {"end", window.end},
                    {"kl", json_of(window.kl)},
                    {"top1_agreement", json_of(window.top1_agreement)}});
  }
  return list;
}

// Rows that dense attention fetches as a multiple of `rows`; no number for a policy that fetches
// none.
std::string less_rows(double dense, double rows) {
  if (dense == rows) return "1.0";
  return rows > 0.0 ? format("%.1f", dense / rows) : "-";
}

}  // namespace

Estimate estimate_of(const std::vector<double>& values) {
  Estimate e;
  if (values.empty()) return e;
  const auto count = static_cast<double>(values.size());
  e.mean = std::accumulate(values.begin(), values.end(), 0.0) / count;
  double squares = 0.0;
  for (const double v : values) squares += (v - e.mean) * (v - e.mean);
  if (values.size() > 1) e.error = std::sqrt(squares / (count - 1.0) / count);
  return e;
}

nlohmann::json json_of(const Estimate& estimate) {
  return {{"mean", estimate.mean}, {"standard_error", estimate.error}};
}

Score score_of(const PolicyResult& result, const PolicyResult& dense) {
  const auto nll = [](const ProbeResult& p) { return p.nll; };
  const auto kl = [](const ProbeResult& p) { return p.kl; };
  const auto agree = [](const ProbeResult& p) { return p.agree; };
  const auto characters = [](const ProbeResult& p) { return static_cast<double>(p.characters); };
  Score score;
  score.recall = estimate_of(facts_right(result));
  score.recall_change = estimate_of(minus(facts_right(result), facts_right(dense)));
  score.nll = estimate_of(all_of(result, nll));
  score.nll_change = estimate_of(nll_changes(result, dense));
  score.characters = estimate_of(per_probe(result, characters));
  score.characters_change =
      estimate_of(minus(per_probe(result, characters), per_probe(dense, characters)));
  score.top1_agreement = estimate_of(all_of(result, agree)).mean;
  score.kl = estimate_of(all_of(result, kl)).mean;
  return score;
}

std::vector<Window> windows_of(const PolicyResult& result) {
  constexpr std::size_t kWindows = 8;
  const std::size_t tokens = result.probes.front().kl.size();
  const std::size_t count = std::min(kWindows, tokens);
  std::vector<Window> windows;
  for (std::size_t i = 0; i < count; ++i) {
    Window window = {i * tokens / count, (i + 1) * tokens / count, {}, {}};
    const auto part = [&](const std::vector<double>& values) {
      return std::span(values).subspan(window.begin, window.end - window.begin);
    };
    window.kl = estimate_of(all_of(result, [&](const ProbeResult& p) { return part(p.kl); }));
    window.top1_agreement =
        estimate_of(all_of(result, [&](const ProbeResult& p) { return part(p.agree); }));
    windows.push_back(window);
  }
  return windows;
}

bool can_do(const TaskResult& result) {
  constexpr double kLeast = 0.2;
  const PolicyResult& dense = result.policies.front();
  return !has_facts(result.task) || score_of(dense, dense).recall.mean >= kLeast;
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
  const PolicyResult& dense = result.policies.front();
  const std::size_t width = name_width(result);
  std::string table = format("%s at %lld tokens, %zu probes per policy",
                             std::string(to_string(result.task)).c_str(),
                             static_cast<long long>(result.context), dense.probes.size());
  if (has_facts(result.task)) table += format(", %zu facts", facts_right(dense).size());
  table += "\n";
  table += in_column("policy", width) +
           format("%stop-1   KL      %9s %8s %10s %10s %10s %10s %6s\n",
                  quality_header(result.task).c_str(), "rows/head", "1/dense", "cold/tok",
                  "warm/tok", "read/tok", "index/tok", "alpha");
  const double rows = cost_per_token(dense.cost.all(), shape).selected_rows;
  for (const PolicyResult& policy : result.policies) {
    const CostPerToken cost = cost_per_token(policy.cost.all(), shape);
    const Score score = score_of(policy, dense);
    table +=
        in_column(policy.name, width) +
        format("%s%5.1f%%  %6.4f  %9.1f %8s %10s %10s %10s %10s %6.3f\n",
               quality(result.task, score).c_str(), 100 * score.top1_agreement, score.kl,
               cost.selected_rows, less_rows(rows, cost.selected_rows).c_str(),
               moved_text(policy.cost.cold, shape).c_str(),
               moved_text(policy.cost.warm, shape).c_str(), bytes_text(cost.read_bytes).c_str(),
               bytes_text(cost.index_bytes + cost.value_bytes).c_str(), cost.alpha);
  }
  table += format(
      "(cold and warm: moved between tiers, up to %lld tokens behind a context and after them)\n",
      static_cast<long long>(kColdTokens));
  if (result.task == Task::drift) table += drift_table(result, width);
  if (!can_do(result)) {
    table += format(
        "dense attention is right in %.1f%%: the model cannot do this, and recall says "
        "nothing about policies\n",
        100 * score_of(dense, dense).recall.mean);
  }
  return table;
}

nlohmann::json eval_json(const TaskResult& result, const KvShape& shape) {
  nlohmann::json policies = nlohmann::json::array();
  for (const PolicyResult& policy : result.policies) {
    const Score s = score_of(policy, result.policies.front());
    const Cost cost = policy.cost.all();
    const CostPerToken c = cost_per_token(cost, shape);
    nlohmann::json entry = {{"name", policy.name},
                            {"policy", policy.policy},
                            {"probes", policy.probes.size()},
                            {"top1_agreement", s.top1_agreement},
                            {"kl", s.kl},
                            {"attended_rows", c.attended_rows},
                            {"selected_rows", c.selected_rows},
                            {"transferred_bytes_per_token", c.moved_bytes},
                            {"read_bytes_per_token", c.read_bytes},
                            {"index_bytes_per_token", c.index_bytes},
                            {"value_bytes_per_token", c.value_bytes},
                            {"kept_index_bytes", policy.kept_index_bytes},
                            {"traffic", traffic_json(cost)},
                            {"cold", moved_json(policy.cost.cold, shape)},
                            {"warm", moved_json(policy.cost.warm, shape)},
                            {"plan", nlohmann::json::parse(policy.plan.to_json())},
                            {"alpha", c.alpha},
                            {"cut_share", c.cut_share}};
    if (has_facts(result.task)) {
      entry["facts"] = facts_right(policy).size();
      entry["recall"] = json_of(s.recall);
      entry["recall_change"] = json_of(s.recall_change);
    }
    if (has_facts(result.task) && result.task != Task::common_words) {
      entry["recall_by_depth"] = by_depth(policy);
    }
    if (result.task == Task::perplexity || result.task == Task::agreement) {
      entry["nll"] = json_of(s.nll);
      entry["nll_change"] = json_of(s.nll_change);
      entry["perplexity"] = std::exp(s.nll.mean);
    }
    if (result.task == Task::drift) entry["windows"] = drift_json(policy);
    if (result.task == Task::repetition) {
      entry["characters"] = json_of(s.characters);
      entry["characters_change"] = json_of(s.characters_change);
    }
    policies.push_back(entry);
  }
  return {{"task", to_string(result.task)},
          {"context", result.context},
          {"dense_can_do", can_do(result)},
          {"policies", policies}};
}

}  // namespace sluice::tools
