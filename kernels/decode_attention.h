// Attention of one query token over many rows: split over the device, merged in the same launch.
// Source: Dao et al. 2023, "Flash-Decoding"; the split of work follows Osama et al. 2023,
// "Stream-K".
#pragma once

#include "kernels/launch.h"
#include "lib/backend.h"
#include "lib/selection.h"

namespace sluice::cuda {

// Whether the device has shared memory enough for rows of this head_dim.
bool attend_decode_fits(int head_dim, const DeviceLimits& device);

// One token of AttendParams. Queries and softmax weights take part as sums of two numbers of the
// rows' dtype, which leaves fp32's rounding. Rows may be on the device or in mapped host memory.
void attend_decode(const AttendParams& params, const Launch& launch);

// One token of AttendSelectedParams: rows are read where they lie, from host memory too; the arena
// is not used. Writes heads[].resident.
void attend_decode_selected(const AttendSelectedParams& params, const Launch& launch);

// Writes heads[].resident alone.
void count_resident(const AttendSelectedParams& params, const Launch& launch);

}  // namespace sluice::cuda
