// The reference backend's value tiles, from their definition: fp64, plain loops, one thread. See
// lib/value_tiles.h for what the operations do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "lib/value_tiles.h"

namespace sluice::cpu {

// What attention over value tiles reads of a page of one KV head.
struct ValuesRead {
  std::int32_t sequence = 0;
  int head = 0;
  std::int64_t page = 0;
  std::size_t bytes = 0;
};

}  // namespace sluice::cpu

namespace sluice::cpu::reference {

void build_values(const BuildValuesParams& params);
void build_values_batch(const BuildValuesBatchParams& params);
// Tells on_page of each page that is read.
void attend_tiles(
    const AttendTilesParams& params,
    const std::function<void(const ValuesRead&)>& on_page = [](const ValuesRead&) {});
void merge_partials(const MergePartialsParams& params);

}  // namespace sluice::cpu::reference
