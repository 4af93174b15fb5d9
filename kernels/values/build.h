// Building value tiles from rows.
#pragma once

#include "kernels/runtime/launch.h"
#include "lib/value_tiles.h"

namespace sluice::cuda {

// Of rows in bf16 or f16; Error{unsupported} for others.
void build_values(const BuildValuesParams& params, const Launch& launch);
void build_values_batch(const BuildValuesBatchParams& params, const Launch& launch);

}  // namespace sluice::cuda
