// `sluice bench --check`: holds the ledger of every decode step to a count apart from it.
#pragma once

#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "sluice/ledger.h"
#include "sluice/traffic_counter.h"

namespace sluice::tools {

// The ledger of a step and the count of it differ.
struct LedgerDiffers : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Steps whose ledger had what was counted.
struct CheckedSteps {
  int steps = 0;
  CountedTraffic counted;
};

// Checks the decode steps of one cell.
class StepCheck {
 public:
  // `sees_keys`: see difference(). `on_step` gets what was counted of each step that does not warm
  // up.
  using OnStep = std::function<void(const CountedTraffic&)>;
  StepCheck(TrafficCounter& counter, bool sees_keys, OnStep on_step)
      : counter_(counter), sees_keys_(sees_keys), on_step_(std::move(on_step)) {}
  StepCheck(const StepCheck&) = delete;
  StepCheck& operator=(const StepCheck&) = delete;
  ~StepCheck() { counter_.stop(); }

  // Before and after the work of a step. `recorded`: what the ledgers of its sequences have of it.
  // Throws LedgerDiffers.
  void begin_step();
  void end_step(std::span<const LedgerEntry> recorded, bool warms_up);
  // Throws LedgerDiffers if the steps that did not warm up moved something else in another run.
  void compare(std::span<const LedgerEntry> measured) const;
  // The steps that did not warm up.
  const CheckedSteps& steps() const { return checked_; }

 private:
  TrafficCounter& counter_;
  bool sees_keys_;
  OnStep on_step_;
  int step_ = 0;
  CheckedSteps checked_;
};

}  // namespace sluice::tools
