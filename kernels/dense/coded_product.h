// Launch of the products of coded_product.cuh.
#pragma once

#include <cstddef>
#include <cstdint>

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
  // Of tiles_kernel(), which divides the columns into slices (split-K):
  int slices;                   // in different blocks
  int slice_columns;            // of a slice, except the last
  int chunk_columns;            // whose inputs are in shared memory at a time
  float* partial;               // [slices, tokens, padded_outputs], if there are several slices
  std::int64_t padded_outputs;  // outputs, rounded up to those of whole blocks
  std::uint32_t* tickets;       // zero, one for each block's part of the outputs
  std::int8_t levels[16];       // of int4
};

// Shape of a launch.
struct CodedLaunch {
  int blocks = 0;
  int warps = 0;        // that multiply; row_kernel() has one more
  int stages = 0;       // of tiles_kernel()
  int stage_tiles = 0;  // of tiles_kernel(): neighbouring tiles in a stage, at most kStageTiles
  int token_tiles = 0;  // of tiles_kernel(): of kMmaColumns tokens, 2, 4 or 8
  std::size_t shared_bytes = 0;
};

// Columns of a product on the tensor cores: tokens, or their digits.
inline constexpr int kMmaColumns = 8;

// Bytes of a block's table of pairs of int4 levels, in shared memory before the warps' stages.
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

// The dtype of x is bf16 or f16. `is_gated`: swiglu.
template <WeightCode kCode>
void launch_row_kernel(const CodedProductParams& params, DType dtype, bool is_gated,
                       const CodedLaunch& shape, const Launch& launch);
template <WeightCode kCode>
void launch_tiles_kernel(const CodedProductParams& params, DType dtype, const CodedLaunch& shape,
                         const Launch& launch);

extern template void launch_row_kernel<WeightCode::int8>(const CodedProductParams&, DType, bool,
                                                         const CodedLaunch&, const Launch&);
extern template void launch_row_kernel<WeightCode::int4>(const CodedProductParams&, DType, bool,
                                                         const CodedLaunch&, const Launch&);
extern template void launch_tiles_kernel<WeightCode::int8>(const CodedProductParams&, DType,
                                                           const CodedLaunch&, const Launch&);
extern template void launch_tiles_kernel<WeightCode::int4>(const CodedProductParams&, DType,
                                                           const CodedLaunch&, const Launch&);

}  // namespace sluice::cuda
