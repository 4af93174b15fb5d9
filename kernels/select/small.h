// `small` for several query heads per KV head; small.cu has it for one.
#pragma once

#include <cstddef>

#include "kernels/runtime/launch.h"
#include "kernels/select/call.cuh"

namespace sluice::cuda {

// Shared memory of a block.
std::size_t group_bytes(const SelectCall& call);
void run_group(const SelectCall& call, const Launch& launch);

}  // namespace sluice::cuda
