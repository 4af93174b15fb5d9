#include "tools/bench_cell.h"

#include <chrono>
#include <set>

#include "tools/distributions.h"

namespace sluice::tools {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Decodes one known token per session; returns the logits of the first, valid until its next call.
std::span<const float> decode(Engine& engine, std::span<Session> sessions,
                              std::span<const std::span<const TokenId>> texts) {
  const auto next = [&](std::size_t i) {
    return texts[i][static_cast<std::size_t>(sessions[i].length())];
  };
  if (sessions.size() == 1) return sessions[0].decode(next(0));
  std::vector<StepToken> tokens;
  for (std::size_t i = 0; i < sessions.size(); ++i) {
    StepToken& token = tokens.emplace_back();
    token.session = &sessions[i];
    token.token = next(i);
  }
  std::span<const float> first;
  for (const StepResult& result : engine.step(tokens)) {
    if (result.error) throw Error(*result.error);
    if (first.empty()) first = result.logits;
  }
  return first;
}

void compare(std::span<const float> logits, std::size_t step, DenseAnswers& dense,
             CellResult& result) {
  std::vector<float> own = log_probabilities(logits);
  if (step == dense.size()) dense.push_back(own);
  result.kl.push_back(divergence(dense[step], own));
  result.agree.push_back(likeliest(dense[step]) == likeliest(own) ? 1.0 : 0.0);
}

std::vector<const Ledger*> session_ledgers(std::span<const Session> sessions) {
  std::vector<const Ledger*> ledgers;
  for (const Session& session : sessions) ledgers.push_back(&session.ledger());
  return ledgers;
}

}  // namespace

std::vector<LedgerEntry> new_entries(std::span<const Ledger* const> ledgers,
                                     std::vector<std::uint64_t>& seen) {
  std::vector<LedgerEntry> entries;
  for (std::size_t i = 0; i < ledgers.size(); ++i) {
    for (const LedgerStep& step : ledgers[i]->history()) {
      if (step.index < seen[i]) continue;
      entries.insert(entries.end(), step.entries.begin(), step.entries.end());
    }
    seen[i] = ledgers[i]->history().back().index + 1;
  }
  return entries;
}

void add_step(std::span<const LedgerEntry> entries, std::map<LayerMovement, Moved>& moved) {
  std::set<LayerMovement> kinds;
  for (const LedgerEntry& entry : entries) {
    const LayerMovement kind = {entry.layer, entry.from, entry.to, entry.cause};
    moved[kind].traffic += entry.traffic;
    kinds.insert(kind);
  }
  for (const LayerMovement& kind : kinds) ++moved[kind].requests;
}

Recount::Recount(const BenchFlags& flags)
    : device(flags.model.config().device), threads(flags.model.config().threads) {
  if (!flags.check && flags.transfers.empty()) return;
  counter = std::make_shared<TrafficCounter>();
  for (const std::string& name : flags.transfers) ways.push_back(parse_transfer(name));
  if (!ways.empty()) counter->keep_missed();
}

void recount(CellResult& measured, const CellKey& key, const BenchSteps& steps, Recount& how,
             bool sees_keys, const std::function<void(StepCheck&)>& run) {
  if (how.counter == nullptr) return;
  const KvPlan& plan = measured.plan.kv;
  if (!plan.in_place) {
    for (const TransferWay& way : how.ways) measured.brought.push_back({way, {}, {}});
  }
  const std::int64_t tokens = tokens_of(key, steps);
  StepCheck check(*how.counter, sees_keys, [&](const CountedTraffic& counted) {
    if (measured.brought.empty()) return;
    if (how.bench == nullptr || how.bench->tokens() < tokens) {
      how.bench.reset();
      how.bench = std::make_unique<TransferBench>(how.device, how.threads, plan.shape, tokens);
    }
    for (Brought& brought : measured.brought) how.bench->bring(counted.missed, brought);
  });
  run(check);
  measured.checked = check.steps();
  if (plan.host_attention) return;
  std::vector<LedgerEntry> entries;
  for (const auto& [kind, moved] : measured.moved) {
    const auto& [layer, from, to, cause] = kind;
    entries.push_back({layer, from, to, cause, moved.traffic});
  }
  check.compare(entries);
}

Crossing CellResult::crossed() const {
  Crossing sum;
  for (const auto& [kind, what] : moved) {
    if (std::get<1>(kind) == std::get<2>(kind)) continue;
    sum += {what.traffic.bytes, what.requests};
  }
  return sum;
}

std::int64_t tokens_of(const CellKey& key, const BenchSteps& steps) {
  return key.context + steps.warm_up + steps.steps;
}

SessionOptions session_of(const CellKey& key, const Policy& policy, const BenchSteps& steps) {
  SessionOptions options;
  options.context = tokens_of(key, steps);
  options.policies = {policy};
  options.sequences = key.sequences;
  return options;
}

bool is_answer(const Error& error) {
  return error.code() == ErrorCode::memory || error.code() == ErrorCode::unsupported;
}

CellResult run_cell(Engine& engine, const CellKey& key, const Policy& policy,
                    const BenchSteps& steps, std::span<const std::span<const TokenId>> texts,
                    DenseAnswers& dense, const CellWatch& watch) {
  SessionOptions options = session_of(key, policy, steps);
  options.reports_positions = watch.positions != nullptr;
  CellResult result;
  result.plan = engine.plan(options);
  std::vector<Session> sessions;
  sessions.push_back(engine.new_session(options));
  while (sessions.size() < texts.size()) sessions.push_back(sessions.front().sibling());
  const Clock::time_point start = Clock::now();
  std::vector<std::uint64_t> seen;
  for (std::size_t i = 0; i < sessions.size(); ++i) {
    sessions[i].prefill(texts[i].first(static_cast<std::size_t>(key.context)));
    seen.push_back(sessions[i].ledger().history().back().index + 1);
  }
  result.prompt_seconds = seconds_since(start);
  for (int step = 0; step < steps.warm_up + steps.steps; ++step) {
    const bool counts = step >= steps.warm_up;
    const Clock::time_point begin = Clock::now();
    if (watch.check != nullptr) watch.check->begin_step();
    const std::span<const float> logits = decode(engine, sessions, texts);
    const double seconds = seconds_since(begin);
    const std::vector<LedgerEntry> entries = new_entries(session_ledgers(sessions), seen);
    if (watch.check != nullptr) watch.check->end_step(entries, !counts);
    if (watch.positions != nullptr) watch.positions->add(sessions[0].selection(), entries);
    if (!counts) continue;
    add_step(entries, result.moved);
    result.step_seconds.push_back(seconds);
    compare(logits, static_cast<std::size_t>(step - steps.warm_up), dense, result);
  }
  return result;
}

}  // namespace sluice::tools
