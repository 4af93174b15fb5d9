// Logits of whole pages from their quantised keys.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/runtime/launch.h"
#include "kernels/scan/channels.h"

namespace sluice::cuda {

struct PrepareArgs;

// Tiles of all heads in one launch, at most.
inline constexpr std::int64_t kMostTiles = std::int64_t{1} << 28;

// Tiles per KV head of a token, at most.
std::int64_t most_tiles(const EstimateParams& params);

// Arguments of the preparation that must run before scan_tiles(), by prepare_scan() or scan_rows().
// It uses tile_scan_scratch_bytes() of the scratch.
PrepareArgs prepare_args(const ScanPass& pass, const Launch& launch);
void prepare_scan(const ScanPass& pass, const PrepareArgs& args, const Launch& launch);

void scan_tiles(const ScanPass& pass, const Launch& launch);

std::size_t tile_scan_scratch_bytes(const EstimateParams& params);

}  // namespace sluice::cuda
