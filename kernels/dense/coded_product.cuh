// Products of coded weights and up to 64 tokens. Each warp streams tiles (coded_tile.h) through a
// ring in shared memory, decodes them into fragments and multiplies them on the tensor cores; the
// products of a group of inputs are summed from zero, times the group's scale, in f32.
//
//   row_kernel     up to 8 tokens, whose inputs stay in shared memory. The warps of a block share
//                  the columns of one row of tiles, or of a gate's row and its up row.
//   tiles_kernel   more tokens, or longer inputs: every warp has its own two rows of tiles, and all
//                  inputs pass through two buffers that the block shares.
//
// Decoding int4 is a look-up of two neighbouring codes, because 16 unequal levels have no formula.
// The table has a copy for every lane, each in its own bank: 32 KiB.
#pragma once

#include "kernels/dense/coded_product.h"
#include "kernels/dense/rms_norm.cuh"
#include "kernels/runtime/barriers.cuh"
#include "kernels/runtime/device_math.cuh"
#include "kernels/runtime/dispatch.h"
#include "kernels/runtime/early_launch.cuh"
#include "kernels/runtime/ticket.cuh"

namespace sluice::cuda {

inline constexpr int kMostWarps = 16;

// Ring of a warp's stages in shared memory. A stage has kTiles tiles; `Walk` says which come next:
// bool next(const std::byte* (&tiles)[kTiles]), false when there are no more.
template <typename Walk, int kTiles, int kTileBytes, int kStages>
class TileRing {
 public:
  static constexpr int kStageBytes = kTiles * kTileBytes;

  // `is_used`: false for a warp that never takes a stage.
  __device__ TileRing(const Walk& walk, std::byte* stages, std::uint64_t* barriers,
                      bool is_used = true)
      : walk_(walk), stages_(stages), barriers_(barriers) {
    if (!is_used) return;
    if constexpr (kBulkCopies) {
      if (lane() == 0) {
        for (int i = 0; i < kStages; ++i) barrier_init(shared_address(&barriers[i]), 1);
        barrier_init_fence();
      }
      __syncwarp();
    }
    for (int i = 0; i < kStages; ++i) fetch(i);
  }

  // Waits for the next stage.
  __device__ const std::byte* take() {
    if constexpr (kBulkCopies) {
      barrier_wait(shared_address(&barriers_[stage_]), phases_ >> stage_ & 1u);
      phases_ ^= 1u << stage_;
    } else {
      copy_async_wait<kStages - 1>();
      __syncwarp();
    }
    return stages_ + stage_ * kStageBytes;
  }
  // Frees the stage that take() gave.
  __device__ void release() {
    __syncwarp();
    fetch(stage_);
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }

  __device__ void fetch(int stage) {
    const std::byte* from[kTiles];
    if (walk_.next(from)) copy(stage, from);
    if constexpr (!kBulkCopies) copy_async_commit();
  }
  __device__ void copy(int stage, const std::byte* const (&from)[kTiles]) const {
    std::byte* const to = stages_ + stage * kStageBytes;
    if constexpr (kBulkCopies) {
      if (lane() != 0) return;
      const std::uint32_t barrier = shared_address(&barriers_[stage]);
      barrier_expect(barrier, kStageBytes);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) copy_bulk(to + i * kTileBytes, from[i], kTileBytes, barrier);
    } else {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        for (int at = lane() * 16; at < kTileBytes; at += kWarp * 16) {
          copy_async_or_zero(to + i * kTileBytes + at, from[i] + at, true);
        }
      }
    }
  }

  Walk walk_;
  std::byte* stages_;
  std::uint64_t* barriers_;
  int stage_ = 0;
  std::uint32_t phases_ = 0;  // phases of the barriers, one bit each
};

// Fills the table of pairs of int4 codes: word [byte, lane] has the levels of the byte's low and
// high half. By all threads of the block.
template <WeightCode kCode, typename T>
__device__ __forceinline__ void build_pairs(const CodedProductParams& p, std::byte* table) {
  if constexpr (kCode == WeightCode::int4) {
    for (int i = static_cast<int>(threadIdx.x); i < 256 * kWarp;
         i += static_cast<int>(blockDim.x)) {
      const int byte = i / kWarp;
      reinterpret_cast<std::uint32_t*>(table)[i] = pack(
          T(), static_cast<float>(p.levels[byte % 16]), static_cast<float>(p.levels[byte / 16]));
    }
  }
}

// Two signed bytes, at bits 0 and 16 of `bits`, as elements; its other bytes are ignored. 0x43 is
// the upper byte of the bf16 numbers 128 to 255 (0x4300 to 0x437f) and of 256 (0x4380), 0x64 that
// of the f16 numbers 1024 to 1279.
__device__ __forceinline__ std::uint32_t pair_of_bytes(__nv_bfloat16, std::uint32_t bits) {
  const std::uint32_t low = (bits & 0x007f007fu) | 0x43004300u;   // 128 + lower seven bits
  const std::uint32_t sign = (bits & 0x00800080u) | 0xc300c300u;  // -128, or -256 if negative
  const __nv_bfloat162 one = __floats2bfloat162_rn(1.0f, 1.0f);
  const __nv_bfloat162 pair = __hfma2(*reinterpret_cast<const __nv_bfloat162*>(&low), one,
                                      *reinterpret_cast<const __nv_bfloat162*>(&sign));
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
__device__ __forceinline__ std::uint32_t pair_of_bytes(__half, std::uint32_t bits) {
  const std::uint32_t biased = (bits & 0x00ff00ffu) ^ 0x64806480u;  // 1024 + 128 + byte
  const __half2 pair = __hsub2(as_half2(biased), as_half2(0x64806480u));
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

// The fragments of a lane's codes of one group, of its two products.
template <WeightCode kCode, typename T>
__device__ __forceinline__ void decode_group(const std::byte* tile, int group, int lane,
                                             const std::byte* pairs, std::uint32_t (&a)[2][4]) {
  using Tile = CodedTile<kCode>;
  const std::byte* const codes =
      tile + (Tile::kFirstCode + (group * kWarp + lane) * Tile::kLaneWords) * 4;
  if constexpr (kCode == WeightCode::int4) {
    const uint2 words = *reinterpret_cast<const uint2*>(codes);
    const std::uint32_t of_product[2] = {words.x, words.y};
#pragma unroll
    for (int product = 0; product < 2; ++product) {
      const std::uint32_t word = of_product[product];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Byte i of the word, times 128 bytes for its row of the table.
        const std::uint32_t row = (i == 0 ? word << 7 : word >> (8 * i - 7)) & 0x7f80u;
        a[product][i] = *reinterpret_cast<const std::uint32_t*>(
            pairs + (row | static_cast<unsigned>(lane) * 4));
      }
    }
  } else {
    const uint4 words = *reinterpret_cast<const uint4*>(codes);
    const std::uint32_t of_half[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int half = 0; half < 4; ++half) {
      a[half / 2][half % 2 * 2] = pair_of_bytes(T(), of_half[half]);
      a[half / 2][half % 2 * 2 + 1] = pair_of_bytes(T(), of_half[half] >> 8);
    }
  }
}

// A lane's view of the inputs in shared memory.
struct LaneInputs {
  const std::byte* x;  // token l / 4 of the first eight tokens, from input 8 (l % 4) on
  int tile_stride;     // bytes from eight tokens to the next
  bool has_token;      // otherwise its inputs are zero
  const float* sums;   // [groups, tokens], from the first of the lane's two columns on
  int sum_stride;
};

// acc += weights times inputs, for kTiles tiles of the same column, which is counted from the first
// whose inputs are in shared memory.
template <WeightCode kCode, typename T, int kTiles, int kTokenTiles>
__device__ __forceinline__ void multiply_stage(const std::byte* tiles, int column,
                                               const LaneInputs& in, const std::byte* pairs,
                                               float (&acc)[kTiles][kTokenTiles][4]) {
  using Tile = CodedTile<kCode>;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int of_row = lane / 4 * kTileGroups * 4;              // bytes
  constexpr int kAtOnce = kTokenTiles > 4 ? 1 : kTileGroups;  // more would spill registers
#pragma unroll kAtOnce
  for (int group = 0; group < kTileGroups; ++group) {
    std::uint32_t a[kTiles][2][4];
    float2 scale[kTiles];
    float2 offset[kTiles];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      const std::byte* const tile = tiles + m * Tile::kBytes;
      decode_group<kCode, T>(tile, group, lane, pairs, a[m]);
      const std::byte* const line = tile + of_row + group * 4;
      scale[m] = __half22float2(*reinterpret_cast<const __half2*>(line));
      if constexpr (Tile::kHasOffsets) {
        offset[m] = __half22float2(*reinterpret_cast<const __half2*>(line + Tile::kScaleWords * 4));
      }
    }
    const int input = column * kTileInputs + group * static_cast<int>(kWeightGroup);
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      uint4 b = {0, 0, 0, 0};
      if (in.has_token) b = *reinterpret_cast<const uint4*>(in.x + n * in.tile_stride + input * 2);
      float2 sum = {0.0f, 0.0f};
      if constexpr (Tile::kHasOffsets) {
        sum = *reinterpret_cast<const float2*>(
            in.sums + (input / static_cast<int>(kWeightGroup)) * in.sum_stride + n * kMmaTokens);
      }
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        float c[4] = {};
        mma(T(), c, a[m][0], b.x, b.y);
        mma(T(), c, a[m][1], b.z, b.w);
        float(&to)[4] = acc[m][n];
        to[0] = fmaf(scale[m].x, c[0], to[0]);
        to[1] = fmaf(scale[m].x, c[1], to[1]);
        to[2] = fmaf(scale[m].y, c[2], to[2]);
        to[3] = fmaf(scale[m].y, c[3], to[3]);
        if constexpr (Tile::kHasOffsets) {
          to[0] = fmaf(offset[m].x, sum.x, to[0]);
          to[1] = fmaf(offset[m].x, sum.y, to[1]);
          to[2] = fmaf(offset[m].y, sum.x, to[2]);
          to[3] = fmaf(offset[m].y, sum.y, to[3]);
        }
      }
    }
  }
}

// Sums of the inputs of each group, [groups, stride], by all threads of the block. `x` has rows of
// `token_bytes` with `columns` tiles' inputs.
template <typename T>
__device__ __forceinline__ void sum_groups(const std::byte* x, int token_bytes, int tokens,
                                           int columns, float* sums, int stride) {
  const int groups = columns * kTileGroups;
  for (int i = static_cast<int>(threadIdx.x); i < groups * tokens;
       i += static_cast<int>(blockDim.x)) {
    const int token = i / groups;
    const int group = i % groups;
    const auto* const from =
        reinterpret_cast<const uint4*>(x + token * token_bytes + group * kWeightGroup * 2);
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const uint4 bits = from[part];
      const auto* const values = reinterpret_cast<const T*>(&bits);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum += to_float(values[e]);
    }
    sums[group * stride + token] = sum;
  }
}

// Stores a sum of the product.
__device__ __forceinline__ void store_sum(const CodedProductParams& p, std::int64_t output,
                                          int token, float sum) {
  float& y = static_cast<float*>(p.y)[token * p.y_stride + output];
  if (p.bias != nullptr) sum += p.bias[output];
  y = p.accumulate ? y + sum : sum;
}

// Every `warps`-th column of a block's rows of tiles.
template <int kTiles, int kTileBytes>
struct RowWalk {
  const std::byte* tiles;
  std::int64_t rows;      // of tiles, that blocks take turns at
  std::int64_t row;       // next
  std::int64_t pair_row;  // from a row of the gate to that of up in the same stage
  int columns;
  int first;   // column of this warp
  int column;  // next
  int warps;

  __device__ bool next(const std::byte* (&from)[kTiles]) {
    if (row >= rows || first >= columns) return false;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      from[i] = tiles + ((row + i * pair_row) * columns + column) * kTileBytes;
    }
    column += warps;
    if (column >= columns) {
      column = first;
      row += gridDim.x;
    }
    return true;
  }
};

// Inputs of all tokens, cast or normalised if the chain asks for it, and zeros after them.
template <typename T>
__device__ __forceinline__ void load_row_inputs(const CodedProductParams& p, std::byte* x) {
  const int token_bytes = shared_token_bytes(p.columns);
  const int units = p.columns * kTileInputs / 8;
  const int valid = p.inputs / 8;
  const auto threads = static_cast<int>(blockDim.x);
  if (!p.is_cast) {
    for (int i = static_cast<int>(threadIdx.x); i < units * p.tokens; i += threads) {
      const int token = i / units;
      const int unit = i % units;
      uint4 bits = {0, 0, 0, 0};
      if (unit < valid) {
        bits = *reinterpret_cast<const uint4*>(p.x + token * p.x_stride + std::int64_t{unit} * 16);
      }
      *reinterpret_cast<uint4*>(x + token * token_bytes + unit * 16) = bits;
    }
    return;
  }
  auto* const to = reinterpret_cast<T*>(x);
  for (int i = p.inputs + static_cast<int>(threadIdx.x); i < units * 8; i += threads) {
    to[i] = from_float<T>(0.0f);
  }
  const auto* const from = reinterpret_cast<const float*>(p.x);
  if (p.norm != nullptr) return normalise<T, 4>(from, p.norm, p.epsilon, to, p.inputs);
  for_columns<4>(p.inputs, [&](std::int64_t c) {
    const auto values = load_columns<4>(from + c);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[c + i] = from_float<T>(values.at[i]);
  });
}

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

// Adds up the warps' results, in their order, and stores the sums of `rows` rows of tiles; by one
// warp. Bias and old y are read while the warps still multiply.
template <typename T, bool kIsGated>
__device__ __forceinline__ void add_results(const CodedProductParams& p, const Results& results,
                                            std::int64_t rows) {
  constexpr int kOfLane = kTileOutputs * kMmaTokens / kWarp;
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
          body(j, i, output, i % p.tokens * p.y_stride + output);
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
      float sum = 0.0f;
      float up = 0.0f;
#pragma unroll 4
      for (int warp = 0; warp < results.warps; ++warp) {
        const float* const of_warp = results.of(turn, warp);
        sum += of_warp[i];
        if constexpr (kIsGated) up += of_warp[sums + i];
      }
      if constexpr (kIsGated) {
        static_cast<T*>(p.y)[at] = from_float<T>(swiglu_of(sum, up));
      } else {
        static_cast<float*>(p.y)[at] = before[j] + sum;
      }
    });
    results.arrive(results.empty, turn);
  }
}

// The first tiles are requested before the kernel that computes the inputs is over. The last warp
// adds up the others' results.
template <WeightCode kCode, typename T, bool kIsGated>
__global__ void __launch_bounds__((kMostWarps + 1) * kWarp, 1)
    row_kernel(const __grid_constant__ CodedProductParams p) {
  using Tile = CodedTile<kCode>;
  constexpr int kTiles = kIsGated ? 2 : 1;
  constexpr int kStages = kRowStages<kCode, kTiles>;
  using Walk = RowWalk<kTiles, Tile::kBytes>;
  using Ring = TileRing<Walk, kTiles, Tile::kBytes, kStages>;
  // The table of pairs, rings, inputs, sums of inputs, and results.
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ std::uint64_t barriers[kMostWarps][kStages];
  __shared__ std::uint64_t full[2];
  __shared__ std::uint64_t empty[2];
  const auto warps = static_cast<int>(blockDim.x) / kWarp - 1;
  const auto warp = static_cast<int>(threadIdx.x) / kWarp;
  const auto lane = static_cast<int>(threadIdx.x) % kWarp;
  const bool multiplies = warp < warps;
  std::byte* const rings = shared + kPairTableBytes<kCode>;
  std::byte* const x = rings + warps * kStages * Ring::kStageBytes;
  const int token_bytes = shared_token_bytes(p.columns);
  auto* const sums = reinterpret_cast<float*>(x + p.tokens * token_bytes);
  const int sum_stride = sum_tokens(p.tokens);
  float* const at = sums + (Tile::kHasOffsets ? p.columns * kTileGroups * sum_stride : 0);
  const Results results{at, warps, kTiles * kTileOutputs * p.tokens, full, empty};
  const std::int64_t rows = kIsGated ? p.tile_rows / 2 : p.tile_rows;

  allow_next_kernel();
  const Walk walk{p.tiles, rows, blockIdx.x, rows, p.columns, warp, warp, warps};
  Ring ring(walk, rings + warp * kStages * Ring::kStageBytes, barriers[warp], multiplies);
  if (threadIdx.x < 2) {
    barrier_init(shared_address(&full[threadIdx.x]), warps);
    barrier_init(shared_address(&empty[threadIdx.x]), 1);
  }
  build_pairs<kCode, T>(p, shared);
  wait_for_kernel_before();
  load_row_inputs<T>(p, x);
  if constexpr (Tile::kHasOffsets) {
    __syncthreads();
    sum_groups<T>(x, token_bytes, p.tokens, p.columns, sums, sum_stride);
  }
  __syncthreads();
  if (!multiplies) return add_results<T, kIsGated>(p, results, rows);

  LaneInputs in{};
  in.has_token = lane / 4 < p.tokens;
  in.x = x + (in.has_token ? lane / 4 * token_bytes : 0) + lane % 4 * 16;
  in.sums = sums + (lane % 4 * 2 < sum_stride ? lane % 4 * 2 : 0);
  in.sum_stride = sum_stride;
  int turn = 0;
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x, ++turn) {
    float acc[kTiles][1][4] = {};
    for (int column = warp; column < p.columns; column += warps) {
      multiply_stage<kCode, T, kTiles, 1>(ring.take(), column, in, shared, acc);
      ring.release();
    }
    results.wait_until_empty(turn);
    float* const to = results.of(turn, warp);
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) {
      const int token = lane % 4 * 2 + i % 2;
      const int output = i / 4 * kTileOutputs + lane / 4 + i % 4 / 2 * 8;
      if (token < p.tokens) to[output * p.tokens + token] = acc[i / 4][0][i % 4];
    }
    results.arrive(results.full, turn);
  }
}

// The columns of a warp's two rows of tiles.
template <int kTileBytes>
struct ColumnWalk {
  const std::byte* first;
  const std::byte* second;
  int left;  // columns

  __device__ bool next(const std::byte* (&from)[2]) {
    if (left-- <= 0) return false;
    from[0] = first;
    from[1] = second;
    first += kTileBytes;
    second += kTileBytes;
    return true;
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
__global__ void __launch_bounds__(kMostWarps / 2 * kWarp, 1)
    tiles_kernel(const __grid_constant__ CodedProductParams p) {
  using Tile = CodedTile<kCode>;
  constexpr int kTiles = 2;
  constexpr int kTokens = kTokenTiles * kMmaTokens;
  using Walk = ColumnWalk<Tile::kBytes>;
  using Ring = TileRing<Walk, kTiles, Tile::kBytes, kStages>;
  // The table of pairs, rings, two buffers of inputs, and sums of inputs.
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ std::uint64_t barriers[kMostWarps / 2][kStages];
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
  in.tile_stride = kMmaTokens * token_bytes;
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
      const int token = n * kMmaTokens + lane % 4 * 2 + i % 2;
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
void launch_row_kernel(const CodedProductParams& params, DType dtype, bool is_gated,
                       const CodedLaunch& shape, const Launch& launch) {
  dispatch_rows(dtype, [&](auto element) {
    using T = decltype(element);
    launch_early("coded_gemv", is_gated ? row_kernel<kCode, T, true> : row_kernel<kCode, T, false>,
                 dim3(static_cast<unsigned>(shape.blocks)),
                 dim3(static_cast<unsigned>((shape.warps + 1) * kWarp)), shape.shared_bytes, launch,
                 params);
  });
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
