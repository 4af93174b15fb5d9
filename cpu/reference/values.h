// The reference backend's value tiles, from their definition: fp64, plain loops, one thread. See
// lib/value_tiles.h for what the operations do.
#pragma once

#include <functional>

#include "cpu/reference/reads.h"
#include "lib/value_tiles.h"

namespace sluice::cpu::reference {

void build_values(const BuildValuesParams& params);
void build_values_batch(const BuildValuesBatchParams& params);
// Tells on_page of each page that is read.
void attend_tiles(
    const AttendTilesParams& params,
    const std::function<void(const PageRead&)>& on_page = [](const PageRead&) {});
void merge_partials(const MergePartialsParams& params);

}  // namespace sluice::cpu::reference
