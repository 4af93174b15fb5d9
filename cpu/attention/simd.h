// Attention kernels for the widest vectors that the processor has (Highway dynamic dispatch).
#pragma once

#include <span>

#include "cpu/attention/tile.h"
#include "lib/backend/index_ops.h"

namespace sluice::cpu {

// Few queries: each row is streamed from memory once for all queries of the tile. Vectors run along
// the channels. The tile's rows are `runs`, in order, instead of tile.rows.
void attend_decode(const AttendTile& tile, std::span<const RowSpan> runs);

// Many queries, one per vector lane, so maxima, exponentials and sums need no cross-lane
// operations. Rows are converted to fp32 once per block for all queries of the tile.
void attend_prefill(const AttendTile& tile);

// Scratch in the calling thread for a tile of these queries, in floats; independent of its rows.
std::size_t decode_scratch(const AttendTile& tile);
std::size_t prefill_scratch(const AttendTile& tile);

}  // namespace sluice::cpu
