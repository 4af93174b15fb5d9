#include "sluice/ledger.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <numeric>

#include "lib/bytes.h"
#include "lib/check.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr std::array kAllPhases = {Phase::prefill, Phase::decode, Phase::correction};
constexpr std::array kAllTiers = {Tier::device, Tier::host, Tier::disk};
constexpr std::array kAllCauses = {Cause::append, Cause::write_back, Cause::hit,
                                   Cause::miss,   Cause::index_read, Cause::value_read,
                                   Cause::evict,  Cause::index_swap};
static_assert(kAllCauses.size() == kCauses);

std::string direction(Tier from, Tier to) {
  if (from == to) return "in " + std::string(to_string(from));
  return std::string(to_string(from)) + " -> " + std::string(to_string(to));
}

nlohmann::json entry_json(Tier from, Tier to, Cause cause, const Traffic& traffic) {
  return {{"from", to_string(from)},
          {"to", to_string(to)},
          {"cause", to_string(cause)},
          {"rows", traffic.rows},
          {"bytes", traffic.bytes}};
}

// Calls `visit(from, to, cause)` for every kind of entry.
template <typename Visit>
void for_each_kind(Visit visit) {
  for (const Tier from : kAllTiers)
    for (const Tier to : kAllTiers)
      for (const Cause cause : kAllCauses) visit(from, to, cause);
}

}  // namespace

Traffic& Traffic::operator+=(const Traffic& other) {
  rows += other.rows;
  bytes += other.bytes;
  return *this;
}

Ledger::Ledger(int layers) : layers_(layers) {
  if (layers < 1) throw Error(ErrorCode::usage, "a ledger needs at least one layer");
  for (auto& phase : totals_) phase.resize(static_cast<std::size_t>(layers));
}

std::size_t Ledger::kind(Tier from, Tier to, Cause cause) {
  return (static_cast<std::size_t>(from) * kTiers + static_cast<std::size_t>(to)) * kCauses +
         static_cast<std::size_t>(cause);
}

const Ledger::Totals& Ledger::totals(Phase phase, int layer) const {
  if (layer < 0 || layer >= layers_) {
    throw Error(ErrorCode::usage, "a ledger of " + std::to_string(layers_) +
                                      " layers has no layer " + std::to_string(layer));
  }
  return totals_[static_cast<std::size_t>(phase)][static_cast<std::size_t>(layer)];
}

void Ledger::begin_step(Phase phase, int tokens) {
  const std::uint64_t index = std::accumulate(steps_.begin(), steps_.end(), std::uint64_t{0});
  steps_[static_cast<std::size_t>(phase)] += 1;
  tokens_[static_cast<std::size_t>(phase)] += static_cast<std::uint64_t>(tokens);
  if (history_.size() == kHistory) history_.pop_front();
  history_.push_back({index, phase, tokens, {}});
}

void Ledger::drop_tokens() {
  check(!history_.empty(), "no step whose tokens could be dropped");
  drop_tokens(history_.back().tokens);
}

void Ledger::drop_tokens(int tokens) {
  check(!history_.empty() && tokens >= 0 && tokens <= history_.back().tokens,
        "more tokens to drop than the step has");
  LedgerStep& step = history_.back();
  tokens_[static_cast<std::size_t>(step.phase)] -= static_cast<std::uint64_t>(tokens);
  step.tokens -= tokens;
}

void Ledger::record(int layer, Tier from, Tier to, Cause cause, Traffic traffic) {
  check(!history_.empty(), "ledger entry outside a step");
  check(layer >= 0 && layer < layers_, "ledger layer out of range");
  if (traffic.rows == 0 && traffic.bytes == 0) return;
  LedgerStep& step = history_.back();
  auto& phase_totals = totals_[static_cast<std::size_t>(step.phase)];
  phase_totals[static_cast<std::size_t>(layer)][kind(from, to, cause)] += traffic;
  // The entries of a layer follow each other, so an equal one is near the end.
  const auto same = std::find_if(step.entries.rbegin(), step.entries.rend(), [&](const auto& e) {
    return e.layer == layer && e.from == from && e.to == to && e.cause == cause;
  });
  if (same != step.entries.rend()) {
    same->traffic += traffic;
  } else {
    step.entries.push_back({layer, from, to, cause, traffic});
  }
}

Traffic Ledger::total(Phase phase, int layer, Tier from, Tier to, Cause cause) const {
  return totals(phase, layer)[kind(from, to, cause)];
}

Traffic Ledger::total(Phase phase, Tier from, Tier to, Cause cause) const {
  Traffic sum;
  for (int layer = 0; layer < layers_; ++layer) sum += total(phase, layer, from, to, cause);
  return sum;
}

Traffic Ledger::crossed(Tier from, Tier to) const {
  Traffic sum;
  for (const Phase phase : kAllPhases)
    for (const Cause cause : kAllCauses) sum += total(phase, from, to, cause);
  return sum;
}

std::uint64_t Ledger::steps(Phase phase) const { return steps_[static_cast<std::size_t>(phase)]; }

std::uint64_t Ledger::tokens(Phase phase) const { return tokens_[static_cast<std::size_t>(phase)]; }

std::string Ledger::to_table() const {
  std::string table =
      "phase      direction        cause       rows            bytes       per token\n";
  for (const Phase phase : kAllPhases) {
    const std::uint64_t tokens = std::max<std::uint64_t>(this->tokens(phase), 1);
    for_each_kind([&](Tier from, Tier to, Cause cause) {
      const Traffic sum = total(phase, from, to, cause);
      if (sum.rows == 0) return;
      std::array<char, 160> line{};
      std::snprintf(line.data(), line.size(), "%-10s %-16s %-11s %-15llu %-11s %s\n",
                    std::string(to_string(phase)).c_str(), direction(from, to).c_str(),
                    std::string(to_string(cause)).c_str(),
                    static_cast<unsigned long long>(sum.rows), format_bytes(sum.bytes).c_str(),
                    format_bytes(sum.bytes / tokens).c_str());
      table += line.data();
    });
  }
  return table;
}

std::string Ledger::to_json() const {
  std::string text;
  write_json([&](std::string_view piece) { text += piece; });
  return text;
}

void Ledger::write_json(const std::function<void(std::string_view)>& sink) const {
  nlohmann::json root;
  for (const Phase phase : kAllPhases) {
    nlohmann::json& out = root[std::string(to_string(phase))];
    out["steps"] = steps(phase);
    out["tokens"] = tokens(phase);
    out["totals"] = nlohmann::json::array();
    out["layers"] = nlohmann::json::array();
    for_each_kind([&](Tier from, Tier to, Cause cause) {
      const Traffic sum = total(phase, from, to, cause);
      if (sum.rows > 0) out["totals"].push_back(entry_json(from, to, cause, sum));
    });
    for (int layer = 0; layer < layers_; ++layer) {
      nlohmann::json entries = nlohmann::json::array();
      for_each_kind([&](Tier from, Tier to, Cause cause) {
        const Traffic sum = total(phase, layer, from, to, cause);
        if (sum.rows > 0) entries.push_back(entry_json(from, to, cause, sum));
      });
      out["layers"].push_back(entries);
    }
  }
  std::string text = root.dump();
  text.back() = ',';  // instead of the closing brace, because the object goes on
  sink(text + "\"history\":[");
  std::string_view separator = "\n";
  for (const LedgerStep& step : history_) {
    nlohmann::json entries = nlohmann::json::array();
    for (const LedgerEntry& e : step.entries) {
      entries.push_back(entry_json(e.from, e.to, e.cause, e.traffic));
      entries.back()["layer"] = e.layer;
    }
    const nlohmann::json whole = {{"step", step.index},
                                  {"phase", to_string(step.phase)},
                                  {"tokens", step.tokens},
                                  {"entries", entries}};
    sink(std::string(separator) + whole.dump());
    separator = ",\n";
  }
  sink("]}");
}

}  // namespace sluice
