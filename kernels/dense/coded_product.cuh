// Products of coded weights and up to 64 tokens. Each warp streams tiles (coded_tile.h) of its own
// two rows through a ring in shared memory, decodes them into fragments and multiplies them on the
// tensor cores; the products of a group of inputs are summed from zero, times the group's scale, in
// f32. All inputs pass through two buffers that the block's warps share.
#pragma once

#include "kernels/dense/coded_elements.cuh"
#include "kernels/dense/coded_product.h"
#include "kernels/dense/coded_ring.cuh"
#include "kernels/runtime/barriers.cuh"
#include "kernels/runtime/device_math.cuh"
#include "kernels/runtime/dispatch.h"
#include "kernels/runtime/early_launch.cuh"
#include "kernels/runtime/ticket.cuh"

namespace sluice::cuda {

inline constexpr int kMostTilesWarps = 8;

// Stores a sum of the product.
__device__ __forceinline__ void store_sum(const CodedProductParams& p, std::int64_t output,
                                          int token, float sum) {
  float& y = static_cast<float*>(p.y)[token * p.y_stride + output];
  if (p.bias != nullptr) sum += p.bias[output];
  y = p.accumulate ? y + sum : sum;
}

// The columns of a warp's two rows of tiles.
template <int kTileBytes>
struct ColumnWalk {
  const std::byte* first;
  const std::byte* second;
  int left;  // columns

  __device__ int next(const std::byte* (&from)[2]) {
    if (left-- <= 0) return 0;
    from[0] = first;
    from[1] = second;
    first += kTileBytes;
    second += kTileBytes;
    return kTileBytes;
  }
};

// Requests the inputs of `columns` tiles from `column` on; missing ones are zero.
template <int kTokens>
__device__ __forceinline__ void fetch_inputs(const CodedProductParams& p, int column, int columns,
                                             std::byte* to, int token_bytes) {
  const int units = columns * kTileInputs / 8;
  for (int i = static_cast<int>(threadIdx.x); i < units * kTokens;
       i += static_cast<int>(blockDim.x)) {
    const int token = i / units;
    const int unit = i % units;
    const int input = column * kTileInputs + unit * 8;
    const bool is_there = token < p.tokens && input < p.inputs;
    const std::byte* const from =
        is_there ? p.x + token * p.x_stride + std::int64_t{input} * 2 : p.x;
    copy_async_or_zero(to + token * token_bytes + unit * 16, from, is_there);
  }
  copy_async_commit();
}

// A block has a part of the outputs, two rows of tiles for each warp, and a slice of the columns.
// Inputs pass through shared memory in chunks of `chunk_columns` columns.
template <WeightCode kCode, typename T, int kTokenTiles, int kStages>
__global__ void __launch_bounds__(kMostTilesWarps* kWarp, 1)
    tiles_kernel(const __grid_constant__ CodedProductParams p) {
  using Tile = CodedTile<kCode>;
  constexpr int kTiles = 2;
  constexpr int kTokens = kTokenTiles * kMmaColumns;
  using Walk = ColumnWalk<Tile::kBytes>;
  using Ring = TileRing<Walk, kTiles, Tile::kBytes, kStages>;
  // The table of pairs, rings, two buffers of inputs, and sums of inputs.
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ std::uint64_t barriers[kMostTilesWarps][kStages];
  __shared__ bool is_last;
  const auto warps = static_cast<int>(blockDim.x) / kWarp;
  const auto warp = static_cast<int>(threadIdx.x) / kWarp;
  const auto lane = static_cast<int>(threadIdx.x) % kWarp;
  std::byte* const rings = shared + kPairTableBytes<kCode>;
  std::byte* const x = rings + warps * kStages * Ring::kStageBytes;
  const int token_bytes = shared_token_bytes(p.chunk_columns);
  const int buffer_bytes = kTokens * token_bytes;
  auto* const sums = reinterpret_cast<float*>(x + 2 * buffer_bytes);

  const int part = static_cast<int>(blockIdx.x) / p.slices;
  const int slice = static_cast<int>(blockIdx.x) % p.slices;
  const int begin = slice * p.slice_columns;
  const int end = min(begin + p.slice_columns, p.columns);
  const std::int64_t row = (std::int64_t{part} * warps + warp) * kTiles;
  const bool has_tiles = row < p.tile_rows;
  const auto tile_at = [&](std::int64_t r) {
    return p.tiles + (min(r, p.tile_rows - 1) * p.columns + begin) * Tile::kBytes;
  };

  allow_next_kernel();
  Ring ring({tile_at(row), tile_at(row + 1), has_tiles ? end - begin : 0},
            rings + warp * kStages * Ring::kStageBytes, barriers[warp]);
  build_pairs<kCode, T>(p, shared);
  wait_for_kernel_before();
  fetch_inputs<kTokens>(p, begin, min(p.chunk_columns, end - begin), x, token_bytes);

  LaneInputs in{};
  in.has_token = true;
  in.tile_stride = kMmaColumns * token_bytes;
  in.sums = sums + lane % 4 * 2;
  in.sum_stride = kTokens;
  float acc[kTiles][kTokenTiles][4] = {};
  int turn = 0;
  for (int first = begin; first < end; first += p.chunk_columns, turn ^= 1) {
    const int columns = min(p.chunk_columns, end - first);
    const std::byte* const inputs = x + turn * buffer_bytes;
    // The inputs of this chunk are there, and all warps are done with those in the other buffer.
    copy_async_wait<0>();
    __syncthreads();
    const int next = first + p.chunk_columns;
    if (next < end) {
      fetch_inputs<kTokens>(p, next, min(p.chunk_columns, end - next),
                            x + (turn ^ 1) * buffer_bytes, token_bytes);
    }
    if constexpr (Tile::kHasOffsets) {
      sum_groups<T>(inputs, token_bytes, kTokens, columns, sums, kTokens);
      __syncthreads();
    }
    if (!has_tiles) continue;
    in.x = inputs + lane / 4 * token_bytes + lane % 4 * 16;
    for (int column = 0; column < columns; ++column) {
      multiply_stage<kCode, T, kTiles, kTokenTiles>(ring.take(), column, in, shared, acc);
      ring.release();
    }
  }

  const auto for_results = [&](const auto& body) {
    if (!has_tiles) return;
#pragma unroll
    for (int i = 0; i < kTiles * kTokenTiles * 4; ++i) {
      const int m = i / (kTokenTiles * 4);
      const int n = i / 4 % kTokenTiles;
      const std::int64_t output = (row + m) * kTileOutputs + lane / 4 + i % 4 / 2 * 8;
      const int token = n * kMmaColumns + lane % 4 * 2 + i % 2;
      if (output < p.outputs && token < p.tokens) body(output, token, acc[m][n][i % 4]);
    }
  };
  if (p.slices == 1) {
    for_results(
        [&](std::int64_t output, int token, float sum) { store_sum(p, output, token, sum); });
    return;
  }
  const auto partial_at = [&](int of_slice, int token, std::int64_t output) {
    return p.partial + (std::int64_t{of_slice} * p.tokens + token) * p.padded_outputs + output;
  };
  for_results(
      [&](std::int64_t output, int token, float sum) { *partial_at(slice, token, output) = sum; });
  // The last block of a part adds up its slices, in their order.
  __syncthreads();
  if (threadIdx.x == 0) is_last = takes_last_ticket(&p.tickets[part], p.slices);
  __syncthreads();
  if (!is_last) return;
  const int outputs = warps * kTiles * kTileOutputs;
  for (int i = static_cast<int>(threadIdx.x); i < outputs * p.tokens;
       i += static_cast<int>(blockDim.x)) {
    const std::int64_t output = std::int64_t{part} * outputs + i % outputs;
    if (output >= p.outputs) continue;
    float sum = 0.0f;
    for (int s = 0; s < p.slices; ++s) sum += __ldcg(partial_at(s, i / outputs, output));
    store_sum(p, output, i / outputs, sum);
  }
  if (threadIdx.x == 0) p.tickets[part] = 0;
}

template <WeightCode kCode>
void launch_tiles_kernel(const CodedProductParams& params, DType dtype, const CodedLaunch& shape,
                         const Launch& launch) {
  const auto run = [&](auto kernel) {
    launch_early("coded_gemm", kernel, dim3(static_cast<unsigned>(shape.blocks)),
                 dim3(static_cast<unsigned>(shape.warps * kWarp)), shape.shared_bytes, launch,
                 params);
  };
  dispatch_rows(dtype, [&](auto element) {
    using T = decltype(element);
    const bool deep = shape.stages > 2;
    if (shape.token_tiles == 2) {
      return run(deep ? tiles_kernel<kCode, T, 2, 4> : tiles_kernel<kCode, T, 2, 2>);
    }
    if (shape.token_tiles == 4) {
      return run(deep ? tiles_kernel<kCode, T, 4, 4> : tiles_kernel<kCode, T, 4, 2>);
    }
    run(deep ? tiles_kernel<kCode, T, 8, 4> : tiles_kernel<kCode, T, 8, 2>);
  });
}

}  // namespace sluice::cuda
