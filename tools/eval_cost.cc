#include "tools/eval_cost.h"

#include <utility>

namespace sluice::tools {
namespace {

// Traffic of decode steps and corrections so far, from a session's ledger.
std::map<Movement, Traffic> counted(const Ledger& ledger) {
  std::map<Movement, Traffic> traffic;
  constexpr Tier kTiers[] = {Tier::device, Tier::host, Tier::disk};
  for (const Tier from : kTiers) {
    for (const Tier to : kTiers) {
      for (int number = 0; number < kCauses; ++number) {
        const auto cause = static_cast<Cause>(number);
        Traffic sum = ledger.total(Phase::decode, from, to, cause);
        sum += ledger.total(Phase::correction, from, to, cause);
        if (sum.rows > 0) traffic[{from, to, cause}] = sum;
      }
    }
  }
  return traffic;
}

// The traffic added from `before` to `after`.
std::map<Movement, Traffic> since(const std::map<Movement, Traffic>& before,
                                  std::map<Movement, Traffic> after) {
  for (const auto& [movement, traffic] : before) {
    after[movement].rows -= traffic.rows;
    after[movement].bytes -= traffic.bytes;
  }
  std::erase_if(after, [](const auto& entry) { return entry.second.rows == 0; });
  return after;
}

// Rows attended by corrections, over all layers and KV heads.
std::uint64_t corrected_rows(const Ledger& ledger) {
  std::uint64_t rows = ledger.total(Phase::correction, Tier::host, Tier::device, Cause::miss).rows;
  for (const Tier tier : {Tier::device, Tier::host}) {
    rows += ledger.total(Phase::correction, tier, tier, Cause::hit).rows;
  }
  return rows;
}

// Cost of one step of `tokens`, from the session's ledger, without traffic. Layers without a
// selection were dense.
Cost cost_of(const Session& session, std::int64_t tokens) {
  const KvShape& shape = session.plan().shape;
  Cost cost;
  cost.tokens = tokens;
  const std::int64_t first = session.length() - tokens;
  double dense = 0.0;
  double tail = 0.0;
  for (std::int64_t i = 0; i < tokens; ++i) {
    dense += static_cast<double>(first + i + 1);
    tail += static_cast<double>((first + i) % kPageTokens + 1);
  }
  const StepSelection& selection = session.selection();
  const auto dense_layers =
      static_cast<double>(shape.layers) - static_cast<double>(selection.size());
  cost.attended = dense * dense_layers;
  cost.selected = (dense - tail) * dense_layers;
  for (const LayerSelection& layer : selection) {
    cost.attended += layer.attended * static_cast<double>(tokens);
    cost.selected += layer.selected * static_cast<double>(tokens);
    if (layer.follower) continue;
    cost.cut += layer.cut;
    cost.alpha += layer.alpha * static_cast<double>(tokens);
    cost.alphas += tokens;
  }
  return cost;
}

}  // namespace

Cost& Cost::operator+=(const Cost& other) {
  tokens += other.tokens;
  attended += other.attended;
  selected += other.selected;
  alpha += other.alpha;
  alphas += other.alphas;
  cut += other.cut;
  for (const auto& [movement, moved] : other.traffic) traffic[movement] += moved;
  return *this;
}

Cost DecodeCost::all() const {
  Cost sum = cold;
  sum += warm;
  return sum;
}

DecodeCost& DecodeCost::operator+=(const DecodeCost& other) {
  cold += other.cold;
  warm += other.warm;
  return *this;
}

CostMeter::CostMeter(const Session& session)
    : session_(&session),
      counted_(counted(session.ledger())),
      corrected_(corrected_rows(session.ledger())) {}

void CostMeter::end_step(DecodeCost* cost) {
  const Ledger& ledger = session_->ledger();
  const std::int64_t tokens = ledger.history().back().tokens;
  const std::uint64_t corrected = corrected_rows(ledger);
  std::map<Movement, Traffic> traffic = counted(ledger);
  if (cost != nullptr) {
    Cost step = cost_of(*session_, tokens);
    step.traffic = since(counted_, traffic);
    const double rows = static_cast<double>(corrected - corrected_) /
                        static_cast<double>(session_->plan().shape.kv_heads);
    step.attended += rows;
    step.selected += rows;
    (decoded_ < kColdTokens ? cost->cold : cost->warm) += step;
  }
  decoded_ += tokens;
  counted_ = std::move(traffic);
  corrected_ = corrected;
}

}  // namespace sluice::tools
