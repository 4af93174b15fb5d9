// Attention of decoded tokens over many rows: split over the device, merged in the same launch.
// Source: Dao et al. 2023, "Flash-Decoding"; the split of work follows Osama et al. 2023,
// "Stream-K".
#pragma once

#include "kernels/runtime/launch.h"
#include "lib/backend.h"
#include "lib/selection.h"

namespace sluice::cuda {

// Queries that one block serves: with their rounding errors they fill the 16 rows of a matrix
// instruction. Rows are read once for every so many of a KV head.
inline constexpr int kBunch = 8;

// Whether the device has shared memory enough for rows of this head_dim.
bool attend_decode_fits(int head_dim, const DeviceLimits& device);

// Queries and softmax weights take part as sums of two numbers of the rows' dtype, which leaves
// fp32's rounding. Rows are read where they lie, from mapped host memory too; arenas are not used.
// Launches depend on counts and capacities alone; batch.tokens and the table of pages are read
// before the kernel before is over.
void attend_decode(const AttendBatchParams& params, const Launch& launch);
void attend_decode_selected(const AttendSelectedParams& params, const Launch& launch);

}  // namespace sluice::cuda
