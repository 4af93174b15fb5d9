// Value tiles on the CPU: building them, and attention over them. See lib/value_tiles.h for the
// operations; every pointer is host memory.
#pragma once

#include "cpu/runtime/threads.h"
#include "lib/value_tiles.h"

namespace sluice::cpu {

void build_values(const BuildValuesParams& params, Threads& threads);
void build_values_batch(const BuildValuesBatchParams& params, Threads& threads);
void attend_tiles(const AttendTilesParams& params, Threads& threads);
void merge_partials(const MergePartialsParams& params);

}  // namespace sluice::cpu
