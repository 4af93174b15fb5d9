// Copies of small pieces and single rows by kernels, because the copy engine takes microseconds for
// each.
#pragma once

#include <span>

#include "kernels/runtime/launch.h"
#include "lib/backend/queue.h"

namespace sluice::cuda {

// Pieces of any number and alignment, on the device or in mapped host memory.
void copy_pieces(std::span<const CopyOp> ops, const Launch& launch);

// Ascending addresses keep address translation for host memory in its caches, and a few blocks
// saturate PCIe, so that the rest of the device can compute meanwhile.
inline constexpr int kGatherBlocks = 16;
void gather(const GatherParams& params, const Launch& launch, int blocks = kGatherBlocks);

// Tokens of whole floats, a few KiB each.
void pack_tokens(const PackTokensParams& params, const Launch& launch);
void unpack_tokens(const UnpackTokensParams& params, const Launch& launch);

// Does nothing, in plain order: what follows in the stream may be launched early
// (early_launch.cuh), which is only known to work behind a kernel of the same stream.
void fence(const Launch& launch);

// Writes the device's clock, in nanoseconds, when the stream comes to it. Kernels must reach `to`.
void note_time(std::uint64_t* to, const Launch& launch);

}  // namespace sluice::cuda
