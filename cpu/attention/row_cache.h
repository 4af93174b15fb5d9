// Addresses of rows that find_rows() placed: the source and, if the row is to be cached, its way.
#pragma once

#include "lib/backend/kv_ops.h"

namespace sluice::cpu {

// Address to read the row from.
const std::byte* placed_row(const AttendSelectedParams& params, std::int64_t head,
                            const PlacedRow& place);
// Way of the cache that the row is copied to; null if it is not cached.
std::byte* way_of(const AttendSelectedParams& params, std::int64_t head, const PlacedRow& place);

}  // namespace sluice::cpu
