// Building the key index from rows.
#pragma once

#include "kernels/runtime/launch.h"
#include "lib/selection.h"

namespace sluice::cuda {

void build_index(const BuildIndexParams& params, const Launch& launch);
void build_batch(const BuildBatchParams& params, const Launch& launch);

}  // namespace sluice::cuda
