// Predicts how long steps take on a machine that is known by its data sheet alone.
#pragma once

#include "sluice/planning.h"

namespace sluice::planning {

// Bytes that a decode step behind the plan's whole context reads under `policy`.
StepBytes step_bytes(const Plan& plan, const Policy& policy, const ModelInfo& info,
                     const std::optional<WeightFormat>& weights);

// Times of a step and of a prompt as long as the context. docs/million.md compares them with
// measurements.
StepTimes predict(const Machine& machine, const Plan& plan, const StepBytes& bytes,
                  const Policy& policy, const ModelInfo& info,
                  const std::optional<WeightFormat>& weights, int chunk);

}  // namespace sluice::planning
