// Softmax weights summed over probes: what ZipVL scores tokens by.
#pragma once

#include "kernels/runtime/launch.h"
#include "lib/selection.h"

namespace sluice::cuda {

void column_sums(const ColumnSumsParams& params, const Launch& launch);

}  // namespace sluice::cuda
