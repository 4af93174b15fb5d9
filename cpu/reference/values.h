// The reference backend's value tiles, written from their definition: fp64, plain loops, one
// thread. See lib/value_tiles.h for the operations.
#pragma once

#include <functional>

#include "cpu/reference/reads.h"
#include "lib/value_tiles.h"

namespace sluice::cpu::reference {

void build_values(const BuildValuesParams& params);
void build_values_batch(const BuildValuesBatchParams& params);
// Calls on_page for every page that it reads.
void attend_tiles(
    const AttendTilesParams& params,
    const std::function<void(const PageRead&)>& on_page = [](const PageRead&) {});
void merge_partials(const MergePartialsParams& params);

}  // namespace sluice::cpu::reference
