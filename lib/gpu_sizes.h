// Sizes and limits of the CUDA backend that a plan needs, so that a plan can be made where there is
// no GPU. The CUDA backend takes them from here, or checks its own against them when it is
// compiled.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "lib/backend.h"
#include "lib/sample_token.h"

namespace sluice::gpu {

// Head dimensions that attention has kernels for.
inline constexpr std::array kHeadDims = {32, 64, 80, 96, 128, 256};

// Codes of rows that it takes.
inline constexpr std::array kRowCodes = {RowCode::int8, RowCode::k8v4};

// Shared memory that every supported GPU gives a block: 8.6, 8.9 and 12.0 give no more. Whatever
// runs on a GPU with more has to run with this.
inline constexpr int kLeastSharedBytes = 99 << 10;

// Left to the driver and to cuBLAS if no cap is given.
inline constexpr std::uint64_t kReserve = std::uint64_t{512} << 20;

// Memory that a queue which computes and records charges for itself: scratch of its kernels with
// their counters, and recorded steps. In host memory: draws of tokens, and recorded steps.
inline constexpr std::size_t kScratchBytes = std::size_t{64} << 20;
inline constexpr std::size_t kCounterBytes = 16384 * sizeof(std::uint32_t) + sizeof(std::uint64_t);
inline constexpr std::size_t kRecordedNodes = 6144;
inline constexpr std::size_t kQueueDeviceBytes =
    kScratchBytes + kCounterBytes + kRecordedNodes * 4096;
// Scratch and counters of its branches, once they are prepared.
inline constexpr std::size_t kBranchScratchBytes = kScratchBytes / 2;
inline constexpr std::size_t kBranchDeviceBytes = kBranchScratchBytes + kCounterBytes;
inline constexpr std::size_t kDrawnTokens = 64;
inline constexpr std::size_t kQueueHostBytes =
    kDrawnTokens * sizeof(SampledToken) + kRecordedNodes * 8192;

// Coded weights lie in tiles of 16 outputs and 128 inputs, each with its scales.
inline constexpr std::int64_t kTileOutputs = 16;
inline constexpr std::int64_t kTileInputs = 128;
inline constexpr std::uint64_t kInt8TileBytes = 2304;
inline constexpr std::uint64_t kInt4TileBytes = 1152;

// Codes of weights that there are kernels for.
constexpr bool multiplies(WeightCode code) {
  return code == WeightCode::int8 || code == WeightCode::int4;
}

inline std::uint64_t weight_bytes(const WeightShape& shape) {
  const auto& [outputs, inputs, format] = shape;
  if (!format.is_coded()) return static_cast<std::uint64_t>(outputs) * format.row_bytes(inputs);
  const auto tiles = static_cast<std::uint64_t>((outputs + kTileOutputs - 1) / kTileOutputs *
                                                ((inputs + kTileInputs - 1) / kTileInputs));
  return tiles * (format.code == WeightCode::int8 ? kInt8TileBytes : kInt4TileBytes);
}

// Logits in half precision. 2^18 tokens get a digest, 20 bytes a page; from 8192 tokens on select()
// leaves the weights of pages, 24 bytes a page.
inline constexpr LogitFormat logit_format() {
  constexpr std::int64_t kDigestedFrom = std::int64_t{1} << 18;
  LogitFormat logits = {DType::f16, false, kDigestedFrom, 20, 24, 8192, kDigestedFrom};
  logits.most_group = 64;
  logits.most_tokens = 1 << 25;
  logits.most_tile_tokens = (std::int64_t{1} << 16) * kPageTokens;
  return logits;
}

// Bytes of rows that a step selects in a layer from which a row cache pays. Steps of Llama 3 8B's
// shape at 128K on an H100 that select half of this (`sparq`) take 7.45 ms without a cache and 7.55
// with one; steps that select this much (`sluice`), 10.4 and 10.3. Scaled to the bus by a power of
// two: buses differ by that much, measurements of one bus do not from run to run.
inline std::uint64_t cached_bytes(double bus_rate) {
  constexpr double kPcie5 = 50e9;  // bytes per second that kernels read
  constexpr double kBytes = 1 << 20;
  const double octaves = std::clamp(std::round(std::log2(bus_rate / kPcie5)), -6.0, 6.0);
  return static_cast<std::uint64_t>(kBytes * std::exp2(octaves));
}

// On an H200, dense and selecting steps of Llama 3 8B's shape take the same time at about 90K
// tokens; selection there is mostly latency.
inline std::uint64_t dense_bytes(double memory_rate) {
  constexpr double kSelecting = 75e-6;  // seconds
  return static_cast<std::uint64_t>(kSelecting * memory_rate);
}

}  // namespace sluice::gpu
