#include "tools/bench_check.h"

namespace sluice::tools {

void StepCheck::begin_step() {
  static_cast<void>(counter_.take());
  counter_.start();
}

void StepCheck::end_step(std::span<const LedgerEntry> recorded, bool warms_up) {
  counter_.stop();
  ++step_;
  const CountedTraffic counted = counter_.take();
  const std::string differs = difference(counted, recorded, sees_keys_);
  if (!differs.empty()) {
    throw LedgerDiffers("the ledger is wrong: step " + std::to_string(step_) + ", " + differs);
  }
  if (warms_up) return;
  ++checked_.steps;
  checked_.counted.beside += counted.beside;
  for (const auto& [movement, traffic] : counted.moved) checked_.counted.moved[movement] += traffic;
  if (on_step_) on_step_(counted);
}

void StepCheck::compare(std::span<const LedgerEntry> measured) const {
  const std::string differs = difference(checked_.counted, measured, sees_keys_);
  if (differs.empty()) return;
  throw LedgerDiffers("the measured steps moved other rows than the same steps when counted: " +
                      differs);
}

}  // namespace sluice::tools
