// Estimating logits from the key index and from rows.
#pragma once

#include "kernels/runtime/launch.h"
#include "lib/selection.h"

namespace sluice::cuda {

// Below, reading the logits once more takes no longer than digesting them.
inline constexpr std::int64_t kDigestedFrom = std::int64_t{1} << 18;

// Logits are f16, finite ones clamped to its range. Queries are rounded to f16 where they meet the
// index.
void estimate(const EstimateParams& params, const Launch& launch);

}  // namespace sluice::cuda
