// New rows, and sums of rows' values.
#pragma once

#include "kernels/runtime/launch.h"
#include "lib/backend.h"
#include "lib/selection.h"

namespace sluice::cuda {

void append(const AppendParams& params, const Launch& launch);
void append_batch(const AppendBatchParams& params, const Launch& launch);
void sum_values(const SumValuesParams& params, const Launch& launch);

}  // namespace sluice::cuda
