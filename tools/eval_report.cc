#include "tools/eval_report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <numeric>
#include <optional>
#include <span>

#include "lib/bytes.h"
#include "lib/text.h"

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

// A number of a report, in which null stands for one that is not finite.
double number_of(const nlohmann::json& value) {
  return value.is_number() ? value.get<double>() : std::numeric_limits<double>::quiet_NaN();
}

double mean_of(const nlohmann::json& estimate) { return number_of(estimate["mean"]); }
double error_of(const nlohmann::json& estimate) { return number_of(estimate["standard_error"]); }

// Moved bytes per token of a report's `cold` or `warm`.
std::string moved_text(const nlohmann::json& part) {
  const nlohmann::json& moved = part["transferred_bytes_per_token"];
  return moved.is_null() ? "-" : bytes_text(number_of(moved));
}

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
std::string quality_header(const nlohmann::json& result) {
  const nlohmann::json& policy = result["policies"][0];
  if (policy.contains("score")) return "score           vs dense      ";
  if (policy.contains("recall")) return "recall          vs dense      ";
  if (result["task"] == "perplexity") return "perplexity  nll vs dense       ";
  if (policy.contains("characters")) return "characters      vs dense       ";
  return {};
}

// A share and its difference to dense, in per cent.
std::string share_text(const nlohmann::json& share, const nlohmann::json& change) {
  return format("%5.1f%% +- %4.1f  %s +- %4.1f  ", 100 * mean_of(share), 100 * error_of(share),
                change_text(100 * mean_of(change), 5, 1).c_str(), 100 * error_of(change));
}

std::string quality(const nlohmann::json& result, const nlohmann::json& policy) {
  if (policy.contains("score")) return share_text(policy["score"], policy["score_change"]);
  if (policy.contains("recall")) return share_text(policy["recall"], policy["recall_change"]);
  if (result["task"] == "perplexity") {
    const nlohmann::json& change = policy["nll_change"];
    return format("%9.3f   %s +- %6.4f  ", number_of(policy["perplexity"]),
                  change_text(mean_of(change), 7, 4).c_str(), error_of(change));
  }
  if (policy.contains("characters")) {
    const nlohmann::json& own = policy["characters"];
    const nlohmann::json& change = policy["characters_change"];
    return format("%6.1f +- %5.1f  %s +- %5.1f  ", mean_of(own), error_of(own),
                  change_text(mean_of(change), 6, 1).c_str(), error_of(change));
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

std::string name_of(const nlohmann::json& policy) { return policy["name"].get<std::string>(); }

std::size_t name_width(const nlohmann::json& policies) {
  constexpr std::size_t kWidest = 24;
  std::size_t width = 10;
  for (const nlohmann::json& policy : policies) {
    const std::size_t own = name_of(policy).size();
    if (own <= kWidest) width = std::max(width, own);
  }
  return width;
}

std::string drift_table(const nlohmann::json& policies, std::size_t width) {
  std::string table = in_column("to token", width);
  for (const nlohmann::json& window : policies[0]["windows"]) {
    table += format("  %13lld", static_cast<long long>(window["end"].get<std::int64_t>()));
  }
  table += "\n";
  for (const nlohmann::json& policy : policies) {
    table += in_column(name_of(policy), width);
    for (const nlohmann::json& window : policy["windows"]) {
      table +=
          format("  %6.4f %5.1f%%", mean_of(window["kl"]), 100 * mean_of(window["top1_agreement"]));
    }
    table += "\n";
  }
  return table + "(KL and top-1 agreement since the number of tokens in the column before)\n";
}

std::string heading_of(const nlohmann::json& result) {
  const nlohmann::json& dense = result["policies"][0];
  std::string heading = result["task"].get<std::string>();
  if (result.contains("data")) heading += ", " + one_line(result["data"].get<std::string>()) + ",";
  heading +=
      format(" at %s%lld tokens, %zu probes per policy", result.contains("data") ? "up to " : "",
             static_cast<long long>(result["context"].get<std::int64_t>()),
             dense["probes"].get<std::size_t>());
  if (dense.contains("facts")) heading += format(", %zu facts", dense["facts"].get<std::size_t>());
  return heading + "\n";
}

// A line below the table of a task that the model cannot do.
std::string doubt_of(const nlohmann::json& result) {
  if (result["dense_can_do"].get<bool>()) return {};
  const nlohmann::json& dense = result["policies"][0];
  if (dense.contains("score")) {
    return format(
        "dense attention scores %.1f%%: the model cannot do this, and scores say nothing about "
        "policies\n",
        100 * mean_of(dense["score"]));
  }
  return format(
      "dense attention is right in %.1f%%: the model cannot do this, and recall says nothing about "
      "policies\n",
      100 * mean_of(dense["recall"]));
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

// The answers and scores of a file's lines, in their order.
nlohmann::json answers_json(const PolicyResult& policy) {
  nlohmann::json list = nlohmann::json::array();
  for (const ProbeResult& probe : policy.probes) {
    list.push_back({{"score", probe.score}, {"answer", probe.answer}});
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
  const auto points = [](const ProbeResult& p) { return p.score; };
  score.score = estimate_of(per_probe(result, points));
  score.score_change = estimate_of(minus(per_probe(result, points), per_probe(dense, points)));
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
  if (has_score(result.task)) return score_of(dense, dense).score.mean >= kLeast;
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
                            {"cut_share", c.cut_share},
                            {"prompt_seconds", policy.prompt_seconds},
                            {"answer_seconds", policy.answer_seconds}};
    if (has_score(result.task)) {
      entry["score"] = json_of(s.score);
      entry["score_change"] = json_of(s.score_change);
      entry["answers"] = answers_json(policy);
    }
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
  nlohmann::json json = {{"task", to_string(result.task)},
                         {"context", result.context},
                         {"dense_can_do", can_do(result)},
                         {"policies", policies}};
  if (!result.data.empty()) json["data"] = result.data;
  return json;
}

std::string eval_table(const nlohmann::json& result) {
  const nlohmann::json& policies = result["policies"];
  const std::size_t width = name_width(policies);
  std::string table = heading_of(result);
  table +=
      in_column("policy", width) + format("%stop-1   KL      %9s %8s %10s %10s %10s %10s %6s\n",
                                          quality_header(result).c_str(), "rows/head", "1/dense",
                                          "cold/tok", "warm/tok", "read/tok", "index/tok", "alpha");
  const double rows = number_of(policies[0]["selected_rows"]);
  for (const nlohmann::json& policy : policies) {
    const double selected = number_of(policy["selected_rows"]);
    const double index =
        number_of(policy["index_bytes_per_token"]) + number_of(policy["value_bytes_per_token"]);
    table += in_column(name_of(policy), width) +
             format("%s%5.1f%%  %6.4f  %9.1f %8s %10s %10s %10s %10s %6.3f\n",
                    quality(result, policy).c_str(), 100 * number_of(policy["top1_agreement"]),
                    number_of(policy["kl"]), selected, less_rows(rows, selected).c_str(),
                    moved_text(policy["cold"]).c_str(), moved_text(policy["warm"]).c_str(),
                    bytes_text(number_of(policy["read_bytes_per_token"])).c_str(),
                    bytes_text(index).c_str(), number_of(policy["alpha"]));
  }
  table += format(
      "(cold and warm: moved between tiers, up to %lld tokens behind a context and after them)\n",
      static_cast<long long>(kColdTokens));
  if (policies[0].contains("windows")) table += drift_table(policies, width);
  return table + doubt_of(result);
}

}  // namespace sluice::tools
