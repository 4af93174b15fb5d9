// Attention over value tiles.
#pragma once

#include <cstddef>

#include "kernels/runtime/launch.h"
#include "lib/value_tiles.h"

namespace sluice::cuda {

// Logits are f16; rows of them start at multiples of 16 bytes. Three kernels: pages are weighed,
// chosen per KV head, and read. No part of it waits for the host; results do not depend on the
// order in which blocks run. Query heads are taken kTileQueries at a time. Error{unsupported} if
// the scratch does not suffice for one token.
void attend_tiles(const AttendTilesParams& params, const Launch& launch);
void merge_partials(const MergePartialsParams& params, const Launch& launch);

inline constexpr int kTileQueries = 8;  // that read a page together

// Scratch with which all tokens are attended at once. With less they are in turns; that of one
// token must fit.
std::size_t attend_tiles_scratch_bytes(const AttendTilesParams& params, const DeviceLimits& device);

}  // namespace sluice::cuda
