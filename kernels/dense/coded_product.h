// Launches of the kernels of coded_gemv.cuh and coded_batch.cuh.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/dense/coded_tile.h"
#include "kernels/runtime/launch.h"

namespace sluice::cuda {

struct CodedProductParams {
  const std::byte* tiles;  // [tile_rows, columns]
  std::int64_t tile_rows;
  int columns;         // of tiles
  const std::byte* x;  // [tokens, inputs], `x_stride` bytes from token to token
  std::int64_t x_stride;
  int inputs;
  int tokens;
  bool is_cast;       // x is f32 of one token, to be cast, or normalised by `norm`
  const float* norm;  // [inputs] or null
  float epsilon;
  const float* bias;      // [outputs] or null
  void* y;                // [tokens, outputs]: f32, or elements of x's dtype after swiglu
  std::int64_t y_stride;  // elements
  std::int64_t outputs;   // after swiglu, which halves the number of rows
  bool accumulate;
  int results;  // of row_kernel(): their offset in shared memory
  // Of batch_kernel(), which divides a matrix into parts of kPartRows rows of tiles:
  int parts;
  int block_units;         // columns of parts for each block, except the last
  int teams;               // of a block
  int slots;               // of a team, for the inputs of a column
  float* partial;          // room for the sums of two parts for each block
  std::uint32_t* tickets;  // zero, kTeamWarps for each block
  std::int8_t levels[16];  // of int4
};

// Shape of a launch.
struct CodedLaunch {
  int blocks = 0;
  int warps = 0;  // that multiply; row_kernel() has one more
  std::size_t shared_bytes = 0;
};

// Columns of a product on the tensor cores: tokens, or their digits.
inline constexpr int kMmaColumns = 8;

// Bytes of a block's table of pairs of int4 levels, in shared memory.
template <WeightCode kCode>
inline constexpr int kPairTableBytes = kCode == WeightCode::int4 ? 256 * 128 : 0;

// Bytes from token to token of inputs as elements: 64 beyond a multiple of 128, so that eight lanes
// of two tokens read different banks.
__host__ __device__ constexpr int shared_token_bytes(int columns) {
  return columns * kTileInputs * 2 + 64;
}

// row_kernel(): up to kMostDigitTokens as digits (coded_digits.cuh), more as elements.
inline constexpr int kDigits = 3;
inline constexpr int kMostDigitTokens = 2;
inline constexpr int kMostRowTokens = kMmaColumns;
inline constexpr int kMostRowWarps = 16;
inline constexpr int kRowStages = 4;
// Neighbouring tiles of a stage, which are copied as one.
template <WeightCode kCode>
inline constexpr int kRowTiles = kCode == WeightCode::int4 ? 2 : 1;

// Bytes from a digit of `columns` tiles' inputs to the next: 32 beyond a multiple of 128, so that
// lanes of four digits read different banks.
__host__ __device__ constexpr int digit_stride(int columns) { return columns * kTileInputs + 32; }
// Numbers of a column of tiles that are kept beside its digits, and bytes of all.
template <WeightCode kCode>
inline constexpr int kColumnScales = kMmaColumns*(CodedTile<kCode>::kHasOffsets ? 1 + kTileGroups
                                                                                : 1);
template <WeightCode kCode>
constexpr int digit_bytes(int columns, int tokens) {
  return columns * kColumnScales<kCode> * static_cast<int>(sizeof(float)) +
         tokens * kDigits * digit_stride(columns);
}

// Tokens rounded up to pairs: the stride of sum_groups(), because a lane loads sums of two tokens.
__host__ __device__ constexpr int sum_tokens(int tokens) { return (tokens + 1) / 2 * 2; }
// Bytes of inputs as elements, with the table of pairs before them and sums of groups behind.
template <WeightCode kCode>
constexpr int element_bytes(int columns, int tokens) {
  const int sums = columns * kTileGroups * sum_tokens(tokens) * static_cast<int>(sizeof(float));
  return kPairTableBytes<kCode> + tokens * shared_token_bytes(columns) +
         (CodedTile<kCode>::kHasOffsets ? sums : 0);
}

// batch_kernel(): a team of warps, each with neighbouring rows of tiles, has a part of the outputs.
inline constexpr int kTeamWarps = 4;
inline constexpr int kWarpTiles = 2;
inline constexpr int kPartRows = kTeamWarps * kWarpTiles;
inline constexpr int kBatchStages = 2;
inline constexpr int kMostSlots = 3;                 // of a team, at least 2
inline constexpr int kTokenBytes = kTileInputs * 2;  // of a token in a slot
inline constexpr int kMostBatchTokens = 8 * kMmaColumns;
// Calls body() with the tiles of kMmaColumns tokens, as a constant, that batch_kernel() computes.
template <typename Body>
void dispatch_token_tiles(int tokens, const Body& body) {
  if (tokens <= 2 * kMmaColumns) return body(std::integral_constant<int, 2>());
  if (tokens <= 4 * kMmaColumns) return body(std::integral_constant<int, 4>());
  body(std::integral_constant<int, 8>());
}
// Teams of a block at most: as many as there are registers for.
template <int kTokenTiles>
inline constexpr int kMostTeams = kTokenTiles > 4   ? 2
                                  : kTokenTiles > 2 ? 3
                                                    : 4;

// The dtype of x is bf16 or f16. `is_gated`: swiglu.
template <WeightCode kCode>
void launch_row_kernel(const CodedProductParams& params, DType dtype, bool is_gated,
                       const CodedLaunch& shape, const Launch& launch);
template <WeightCode kCode>
void launch_batch_kernel(const CodedProductParams& params, DType dtype, const CodedLaunch& shape,
                         const Launch& launch);

extern template void launch_row_kernel<WeightCode::int8>(const CodedProductParams&, DType, bool,
                                                         const CodedLaunch&, const Launch&);
extern template void launch_row_kernel<WeightCode::int4>(const CodedProductParams&, DType, bool,
                                                         const CodedLaunch&, const Launch&);
extern template void launch_batch_kernel<WeightCode::int8>(const CodedProductParams&, DType,
                                                           const CodedLaunch&, const Launch&);
extern template void launch_batch_kernel<WeightCode::int4>(const CodedProductParams&, DType,
                                                           const CodedLaunch&, const Launch&);

}  // namespace sluice::cuda
