// Attention of query tokens, one or many, over one run of rows per KV head, on tensor cores.
// Source: Dao 2023, "FlashAttention-2"; Shah et al. 2024, "FlashAttention-3".
#pragma once

#include "kernels/runtime/launch.h"
#include "lib/backend.h"

namespace sluice::cuda {

// AttendParams as lib/backend.h describes them; q and the softmax weights are rounded to the dtype
// of the rows, sums are fp32. Rows must be on the device. Throws Error{unsupported} for a head_dim
// or a row dtype that has no kernel.
void attend_prefill(const AttendParams& params, const Launch& launch);

}  // namespace sluice::cuda
