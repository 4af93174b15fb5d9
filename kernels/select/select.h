// Choosing positions by estimated weight.
#pragma once

#include <cstddef>

#include "kernels/runtime/launch.h"
#include "lib/selection.h"

namespace sluice::cuda {

// Logits are f16 and survive. No part of it waits for the host. top_p cuts each query head at a
// multiple of 1/128 nat: what weighs between two of them is kept or left out together. Weights are
// fp32; of top_k with one query head per KV head, logits are compared themselves.
void select(const SelectParams& params, const Launch& launch);

// Scratch with which select() takes the fewest rounds, from sizes alone. With less it takes more;
// that of one KV head of a token must fit. See paths.cuh for the ways that it goes.
std::size_t select_scratch_bytes(const SelectParams& params, const DeviceLimits& device);

}  // namespace sluice::cuda
