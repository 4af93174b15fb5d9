// Which selected rows are in a cache, in host memory that stands for the device's.
#pragma once

#include "cpu/threads.h"
#include "lib/backend/kv_ops.h"

namespace sluice::cpu {

// The operations of KvOps with the same names; every pointer is host memory.
void find_rows(const FindRowsParams& params, Threads& threads);
void forget_rows(const ForgetRowsParams& params);

// Where a row that find_rows() placed is read.
const std::byte* placed_row(const AttendSelectedParams& params, std::int64_t head,
                            const PlacedRow& place);
// Where it is to be put as well; null if nowhere.
std::byte* way_of(const AttendSelectedParams& params, std::int64_t head, const PlacedRow& place);

}  // namespace sluice::cpu
