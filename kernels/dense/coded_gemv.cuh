// Products of coded weights and up to 8 tokens, whose inputs stay in shared memory, as digits
// (coded_digits.cuh) or as elements (coded_elements.cuh). The warps of a block share the columns of
// one row of tiles (coded_tile.h), or of a gate's row and its up row; one warp more adds up their
// results.
#pragma once

#include "kernels/dense/coded_digits.cuh"
#include "kernels/dense/coded_elements.cuh"
#include "kernels/dense/coded_product.h"
#include "kernels/dense/coded_ring.cuh"
#include "kernels/dense/rms_norm.cuh"
#include "kernels/runtime/barriers.cuh"
#include "kernels/runtime/device_math.cuh"
#include "kernels/runtime/dispatch.h"
#include "kernels/runtime/early_launch.cuh"

namespace sluice::cuda {

// Inputs of up to 8 tokens in shared memory, as elements. The same members as DigitInputs.
template <WeightCode kCode, typename T>
class ElementInputs {
 public:
  static constexpr int kOfToken = 1;

  // `shared` has element_bytes().
  __device__ ElementInputs(const CodedProductParams& p, std::byte* shared)
      : p_(p), pairs_(shared), x_(shared + kPairTableBytes<kCode>) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    sums_ = reinterpret_cast<float*>(x_ + p.tokens * shared_token_bytes(p.columns));
    own_.has_token = lane / 4 < p.tokens;
    own_.x = x_ + (own_.has_token ? lane / 4 * shared_token_bytes(p.columns) : 0) + lane % 4 * 16;
    own_.sum_stride = sum_tokens(p.tokens);
    own_.sums = sums_ + (lane % 4 * 2 < own_.sum_stride ? lane % 4 * 2 : 0);
  }

  __device__ void prepare() { build_pairs<kCode, T>(p_, pairs_); }
  __device__ void load(const std::byte* x, std::int64_t stride) {
    const int units = p_.columns * kTileInputs / 8;
    for (int i = static_cast<int>(threadIdx.x); i < units * p_.tokens;
         i += static_cast<int>(blockDim.x)) {
      const int token = i / units;
      const int unit = i % units;
      uint4 bits = {0, 0, 0, 0};
      if (unit * 8 < p_.inputs) {
        bits = *reinterpret_cast<const uint4*>(x + token * stride + std::int64_t{unit} * 16);
      }
      *reinterpret_cast<uint4*>(x_ + token * shared_token_bytes(p_.columns) + unit * 16) = bits;
    }
    if constexpr (CodedTile<kCode>::kHasOffsets) {
      __syncthreads();
      sum_groups<T>(x_, shared_token_bytes(p_.columns), p_.tokens, p_.columns, sums_,
                    own_.sum_stride);
    }
  }
  __device__ __forceinline__ void multiply(const std::byte* tile, int column,
                                           float (&acc)[4]) const {
    multiply_tile<kCode, T>(tile, column, own_, pairs_, acc);
  }

 private:
  const CodedProductParams& p_;
  std::byte* pairs_;
  std::byte* x_;  // [tokens]
  float* sums_;   // [groups, sum_tokens()] if codes have offsets
  LaneInputs own_;
};

// Inputs of all tokens, cast or normalised if the chain asks for it. By all threads of the block;
// `scratch` has room for a token's elements.
template <typename T, typename Inputs>
__device__ __forceinline__ void load_inputs(const CodedProductParams& p, Inputs& inputs,
                                            std::byte* scratch) {
  if (!p.is_cast) return inputs.load(p.x, p.x_stride);
  auto* const x = reinterpret_cast<T*>(scratch);
  const auto* const from = reinterpret_cast<const float*>(p.x);
  if (p.norm != nullptr) {
    normalise<T, 4>(from, p.norm, p.epsilon, x, p.inputs);
  } else {
    for_columns<4>(p.inputs, [&](std::int64_t c) {
      const auto values = load_columns<4>(from + c);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[c + i] = from_float<T>(values.at[i]);
    });
  }
  __syncthreads();
  inputs.load(scratch, 0);
}

// Every `warps`-th part of a block's rows of tiles: kTiles neighbouring columns, fewer at a row's
// end. Of a gated product the gate's part, then that of up.
template <bool kIsGated, int kTileBytes, int kTiles>
class RowWalk {
 public:
  // `rows` of tiles, or pairs of them, that blocks take turns at.
  __device__ RowWalk(const std::byte* tiles, std::int64_t rows, int columns, int warp, int warps)
      : columns_(columns), first_(warp * kTiles), column_(first_), step_(warps * kTiles) {
    const std::int64_t row_bytes = std::int64_t{columns} * kTileBytes;
    const int parts = (columns - first_ + step_ - 1) / step_;  // of a row
    at_ = tiles + blockIdx.x * row_bytes + first_ * kTileBytes;
    to_next_row_ = gridDim.x * row_bytes - std::int64_t{parts} * step_ * kTileBytes;
    to_up_ = rows * row_bytes;
    rows_ = 0;
    if (first_ < columns && blockIdx.x < rows) {
      rows_ = static_cast<int>((rows - blockIdx.x + gridDim.x - 1) / gridDim.x);
    }
  }

  __device__ int next(const std::byte* (&from)[1]) {
    if (rows_ == 0) return 0;
    from[0] = at_;
    const int bytes = min(kTiles, columns_ - column_) * kTileBytes;
    if constexpr (kIsGated) {
      is_up_ = !is_up_;
      if (is_up_) return bytes;
      from[0] += to_up_;
    }
    column_ += step_;
    at_ += step_ * kTileBytes;
    if (column_ >= columns_) {
      column_ = first_;
      at_ += to_next_row_;
      --rows_;
    }
    return bytes;
  }

 private:
  const std::byte* at_;       // the next part
  std::int64_t to_next_row_;  // from behind the last part of a row
  std::int64_t to_up_;        // from the gate's row
  int rows_;                  // left
  int columns_;
  int first_;   // column of this warp
  int column_;  // next
  int step_;
  bool is_up_ = false;
};

// Two buffers through which a block's warps hand their results to the warp that adds them up, so
// that they need not wait for it.
struct Results {
  float* at;  // [2, warps, count]
  int warps;
  int count;             // of a warp
  std::uint64_t* full;   // [2]: all warps have written
  std::uint64_t* empty;  // [2]: the results are added up

  // The results of a warp in its `turn`.
  __device__ float* of(int turn, int warp) const { return at + (turn % 2 * warps + warp) * count; }
  __device__ void wait_until_full(int turn) const {
    barrier_wait(shared_address(&full[turn % 2]), turn / 2 % 2);
  }
  __device__ void wait_until_empty(int turn) const {
    barrier_wait(shared_address(&empty[turn % 2]), (turn / 2 + 1) % 2);
  }
  // By a whole warp, after its last access.
  __device__ void arrive(std::uint64_t* barriers, int turn) const {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) barrier_arrive(shared_address(&barriers[turn % 2]));
  }
};

// Adds up the warps' results, of kOfToken columns for each token, in their order, and stores the
// sums of `rows` rows of tiles; by one warp. Bias and old y are read while the warps still
// multiply.
template <typename T, bool kIsGated, int kOfToken>
__device__ __forceinline__ void add_results(const CodedProductParams& p, const Results& results,
                                            std::int64_t rows) {
  constexpr int kOfLane =
      kTileOutputs * (kOfToken == 1 ? kMostRowTokens : kMostDigitTokens) / kWarp;
  const auto lane = static_cast<int>(threadIdx.x) % kWarp;
  const int sums = kTileOutputs * p.tokens;
  int turn = 0;
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x, ++turn) {
    const auto for_sums = [&](const auto& body) {
#pragma unroll
      for (int j = 0; j < kOfLane; ++j) {
        const int i = lane + j * kWarp;
        const std::int64_t output = row * kTileOutputs + i / p.tokens;
        if (i < sums && output < p.outputs) {
          body(j, i * kOfToken, output, i % p.tokens * p.y_stride + output);
        }
      }
    };
    float before[kOfLane] = {};
    if constexpr (!kIsGated) {
      for_sums([&](int j, int, std::int64_t output, std::int64_t at) {
        if (p.bias != nullptr) before[j] = p.bias[output];
        if (p.accumulate) before[j] += static_cast<const float*>(p.y)[at];
      });
    }
    results.wait_until_full(turn);
    for_sums([&](int j, int i, std::int64_t, std::int64_t at) {
      const auto sum_of = [&](int first) {
        float sum = 0.0f;
#pragma unroll 4
        for (int warp = 0; warp < results.warps; ++warp) {
          const float* const of_warp = results.of(turn, warp) + first;
#pragma unroll
          for (int column = 0; column < kOfToken; ++column) sum += of_warp[column];
        }
        return sum;
      };
      const float sum = sum_of(i);
      if constexpr (kIsGated) {
        static_cast<T*>(p.y)[at] = from_float<T>(swiglu_of(sum, sum_of(sums * kOfToken + i)));
      } else {
        static_cast<float*>(p.y)[at] = before[j] + sum;
      }
    });
    results.arrive(results.empty, turn);
  }
}

// The first tiles are requested before the kernel that computes the inputs is over. The last warp
// adds up the others' results.
template <WeightCode kCode, typename T, bool kIsGated, typename Inputs>
__global__ void __launch_bounds__((kMostRowWarps + 1) * kWarp, 1)
    row_kernel(const __grid_constant__ CodedProductParams p) {
  using Tile = CodedTile<kCode>;
  constexpr int kTiles = kRowTiles<kCode>;
  using Walk = RowWalk<kIsGated, Tile::kBytes, kTiles>;
  using Ring = TileRing<Walk, 1, kTiles * Tile::kBytes, kRowStages>;
  constexpr int kRows = kIsGated ? 2 : 1;
  // Rings and inputs; then results, and before them a token's elements.
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ std::uint64_t barriers[kMostRowWarps][kRowStages];
  __shared__ std::uint64_t full[2];
  __shared__ std::uint64_t empty[2];
  const auto warps = static_cast<int>(blockDim.x) / kWarp - 1;
  const auto warp = static_cast<int>(threadIdx.x) / kWarp;
  const auto lane = static_cast<int>(threadIdx.x) % kWarp;
  const bool multiplies = warp < warps;
  const std::int64_t rows = p.tile_rows / kRows;
  const int columns = p.tokens * Inputs::kOfToken;
  Inputs inputs(p, shared + warps * kRowStages * Ring::kStageBytes);
  std::byte* const behind = shared + p.results;
  const Results results{reinterpret_cast<float*>(behind), warps, kRows * kTileOutputs * columns,
                        full, empty};

  allow_next_kernel();
  Ring ring(Walk(p.tiles, rows, p.columns, warp, warps),
            shared + warp * kRowStages * Ring::kStageBytes, barriers[warp], multiplies);
  if (threadIdx.x < 2) {
    barrier_init(shared_address(&full[threadIdx.x]), warps);
    barrier_init(shared_address(&empty[threadIdx.x]), 1);
  }
  inputs.prepare();
  wait_for_kernel_before();
  load_inputs<T>(p, inputs, behind);
  __syncthreads();
  if (!multiplies) return add_results<T, kIsGated, Inputs::kOfToken>(p, results, rows);

  int turn = 0;
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x, ++turn) {
    float acc[kRows][4] = {};
    for (int column = warp * kTiles; column < p.columns; column += warps * kTiles) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const std::byte* const tiles = ring.take();
        if (kTiles == 1 || column + 1 == p.columns) {
          inputs.multiply(tiles, column, acc[r]);
        } else {
          inputs.multiply(tiles, column, acc[r]);
          inputs.multiply(tiles + Tile::kBytes, column + 1, acc[r]);
        }
        ring.release();
      }
    }
    results.wait_until_empty(turn);
    float* const to = results.of(turn, warp);
#pragma unroll
    for (int i = 0; i < kRows * 4; ++i) {
      const int column = lane % 4 * 2 + i % 2;
      const int output = i / 4 * kTileOutputs + lane / 4 + i % 4 / 2 * 8;
      if (column < columns) to[output * columns + column] = acc[i / 4][i % 4];
    }
    results.arrive(results.full, turn);
  }
}

template <WeightCode kCode>
void launch_row_kernel(const CodedProductParams& params, DType dtype, bool is_gated,
                       const CodedLaunch& shape, const Launch& launch) {
  const auto run = [&](auto kernel) {
    launch_early("coded_gemv", kernel, dim3(static_cast<unsigned>(shape.blocks)),
                 dim3(static_cast<unsigned>((shape.warps + 1) * kWarp)), shape.shared_bytes, launch,
                 params);
  };
  dispatch_rows(dtype, [&](auto element) {
    using T = decltype(element);
    if (is_gated) return run(row_kernel<kCode, T, true, DigitInputs<kCode, T>>);
    if (params.tokens <= kMostDigitTokens) {
      return run(row_kernel<kCode, T, false, DigitInputs<kCode, T>>);
    }
    run(row_kernel<kCode, T, false, ElementInputs<kCode, T>>);
  });
}

}  // namespace sluice::cuda
