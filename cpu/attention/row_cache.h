// Where rows that find_rows() placed are read, and where they are cached.
#pragma once

#include "lib/backend/kv_ops.h"

namespace sluice::cpu {

// Where a row that find_rows() placed is read.
const std::byte* placed_row(const AttendSelectedParams& params, std::int64_t head,
                            const PlacedRow& place);
// Where it is to be put as well; null if nowhere.
std::byte* way_of(const AttendSelectedParams& params, std::int64_t head, const PlacedRow& place);

}  // namespace sluice::cpu
