// The key index on the CPU: built from rows, and scanned for estimates. Operations and parameters
// are defined in lib/backend/index_ops.h; every pointer is host memory.
#pragma once

#include <cstdint>

#include "cpu/runtime/threads.h"
#include "lib/backend/index_ops.h"

namespace sluice::cpu {

void build_index(const BuildIndexParams& params, Threads& threads);
void build_batch(const BuildBatchParams& params, Threads& threads);
void estimate(const EstimateParams& params, Threads& threads);
void column_sums(const ColumnSumsParams& params, Threads& threads);
// Scratch of column_sums() in bytes, summed over `threads`, while it runs.
std::uint64_t column_sums_bytes(std::int64_t rows, int threads);

}  // namespace sluice::cpu
