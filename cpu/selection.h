// Choosing tokens on the CPU: estimates, pruning and attention over what was chosen.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/threads.h"
#include "lib/backend/kv_ops.h"

namespace sluice::cpu {

// The operations of Backend with the same names; every pointer is host memory.
void estimate(const EstimateParams& params, Threads& threads);
void select(const SelectParams& params, Threads& threads);
void attend_selected(const AttendSelectedParams& params, Threads& threads);
void gather(const GatherParams& params, Threads& threads);
void column_sums(const ColumnSumsParams& params, Threads& threads);
void choose_tokens(const ChooseTokensParams& params);
void pack_tokens(const PackTokensParams& params, Threads& threads);
void unpack_tokens(const UnpackTokensParams& params, Threads& threads);
void sum_values(const SumValuesParams& params);

// A cut through non-negative weights: everything heavier than `weight` is kept, and of those that
// weigh exactly as much the first `ties`.
struct Cut {
  float weight = 0.0f;
  std::int64_t ties = 0;
};

// The cut that keeps the `count` heaviest of `weights`; of equals the first.
Cut cut_by_count(std::span<const float> weights, std::int64_t count);

// The cut that keeps the fewest whose sum reaches `target`; everything if the sum falls short.
Cut cut_by_weight(std::span<const float> weights, double target);

}  // namespace sluice::cpu
