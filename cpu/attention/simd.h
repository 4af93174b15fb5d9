// Attention kernels for the widest vectors that the processor has (Highway dynamic dispatch).
#pragma once

#include <span>

#include "cpu/attention/tile.h"
#include "lib/backend/index_ops.h"

namespace sluice::cpu {

// Few queries: each row is streamed from memory once, against all queries of the tile. Vectors lie
// along the channels. The tile's rows are `runs`, one after the other, instead of tile.rows.
void attend_decode(const AttendTile& tile, std::span<const RowSpan> runs);

// Many queries, one per vector lane: maxima, exponentials and sums need no horizontal steps.
// Rows become fp32 once per block and serve all queries of the tile.
void attend_prefill(const AttendTile& tile);

// Floats of scratch that the calling thread takes for a tile of these queries, whatever its rows.
std::size_t decode_scratch(const AttendTile& tile);
std::size_t prefill_scratch(const AttendTile& tile);

}  // namespace sluice::cpu
