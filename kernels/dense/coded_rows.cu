#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernels/dense/coded.h"
#include "kernels/dense/coded_part.cuh"
#include "kernels/runtime/device_math.cuh"
#include "kernels/runtime/dispatch.h"
#include "kernels/runtime/early_launch.cuh"
#include "lib/check.h"
#include "lib/weight_code.h"

namespace sluice::cuda {
namespace {

// Levels of int4, as floats, by value because kWeightLevels is host memory.
struct Levels {
  float at[16];
};

Levels levels() {
  Levels levels{};
  std::copy(kWeightLevels.begin(), kWeightLevels.end(), levels.at);
  return levels;
}

// Rows come over the bus: a warp reads a row, in pieces of 512 bytes and more.
constexpr int kPart = 1024;
constexpr int kPackThreads = kTileOutputs * kWarp;

struct PackParams {
  const std::byte* rows;  // [count, row_bytes]
  std::int64_t row_bytes;
  std::int64_t count;
  std::int64_t inputs;
  std::int64_t offsets;  // of the offsets and of the codes in a row, bytes
  std::int64_t codes;
  std::byte* tiles;  // of the first row
  std::int64_t columns;
};

// Copies `bytes` of `from`, or zeros where it is null, and zeros up to `room`; by one warp. All are
// multiples of the word.
template <typename Word>
__device__ void copy_row(const std::byte* from, std::int64_t bytes, void* to, int room) {
  constexpr int kWordBytes = sizeof(Word);
  for (int i = static_cast<int>(threadIdx.x) % kWarp; i < room / kWordBytes; i += kWarp) {
    const bool is_there = from != nullptr && std::int64_t{i} * kWordBytes < bytes;
    static_cast<Word*>(to)[i] = is_there ? reinterpret_cast<const Word*>(from)[i] : Word{};
  }
}

// `Word` is the widest that codes are aligned to.
template <WeightCode kCode, typename Word>
__global__ void __launch_bounds__(kPackThreads) pack_kernel(const __grid_constant__ PackParams p) {
  using Tile = CodedTile<kCode>;
  __shared__ PartRows<kCode, kPart> part;
  take_turn();
  const int row = static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t output = std::int64_t{blockIdx.x} * kTileOutputs + row;
  const std::int64_t first = std::int64_t{blockIdx.y} * kPart;
  const std::int64_t inputs = p.inputs - first;  // in this part and after it
  const std::byte* const from = output < p.count ? p.rows + output * p.row_bytes : nullptr;
  const auto at = [&](std::int64_t offset) { return from == nullptr ? nullptr : from + offset; };
  const std::int64_t group_bytes = inputs / kWeightGroup * 2;
  const std::int64_t group_at = first / kWeightGroup * 2;
  copy_row<std::uint16_t>(at(group_at), group_bytes, part.scales[row], sizeof part.scales[row]);
  if constexpr (Tile::kHasOffsets) {
    copy_row<std::uint16_t>(at(p.offsets + group_at), group_bytes, part.offsets[row],
                            sizeof part.offsets[row]);
  }
  copy_row<Word>(at(p.codes + first * Tile::kBits / 8), inputs * Tile::kBits / 8, part.codes[row],
                 sizeof part.codes[row]);
  __syncthreads();
  write_part(part, p.tiles, p.columns);
}

template <WeightCode kCode>
void pack(const PackParams& p, const Launch& launch) {
  const dim3 grid(static_cast<unsigned>((p.count + kTileOutputs - 1) / kTileOutputs),
                  static_cast<unsigned>((p.inputs + kPart - 1) / kPart));
  const bool is_wide =
      (reinterpret_cast<std::uintptr_t>(p.rows) | static_cast<std::uintptr_t>(p.row_bytes) |
       static_cast<std::uintptr_t>(p.codes)) %
          sizeof(uint4) ==
      0;
  launch_early("write_weight",
               is_wide ? pack_kernel<kCode, uint4> : pack_kernel<kCode, std::uint16_t>, grid,
               kPackThreads, 0, launch, p);
}

// Scale and offset of a row's group in a tile.
template <WeightCode kCode>
__device__ __forceinline__ float2 line_of(const std::byte* tile, int row, int group) {
  using Tile = CodedTile<kCode>;
  const auto* const halves = reinterpret_cast<const __half*>(tile);
  const int at = (row % 8 * kTileGroups + group) * 2 + row / 8;
  const float scale = __half2float(halves[at]);
  if constexpr (!Tile::kHasOffsets) return {scale, 0.0f};
  return {scale, __half2float(halves[at + 2 * Tile::kScaleWords])};
}

template <WeightCode kCode>
__device__ __forceinline__ float weight_of(std::uint32_t word, int shift, float2 line,
                                           const float* levels) {
  if constexpr (kCode == WeightCode::int4) return line.x * levels[word >> shift & 15u];
  const auto code = static_cast<std::int8_t>(word >> shift & 255u);
  return fmaf(line.x, static_cast<float>(code), line.y);
}

struct UnpackParams {
  const std::byte* tiles;  // of the first output
  int columns;
  int inputs;
  std::int64_t rows;
  void* to;  // [rows, inputs]
  Levels levels;
};

constexpr int kUnpackThreads = 256;

// Stores eight elements in units of 16 bytes.
template <typename T>
__device__ __forceinline__ void store_eight(T* to, const float (&values)[8]) {
  uint4 words;
  words.x = cuda::pack(T(), values[0], values[1]);
  words.y = cuda::pack(T(), values[2], values[3]);
  words.z = cuda::pack(T(), values[4], values[5]);
  words.w = cuda::pack(T(), values[6], values[7]);
  *reinterpret_cast<uint4*>(to) = words;
}
__device__ __forceinline__ void store_eight(float* to, const float (&values)[8]) {
  *reinterpret_cast<float4*>(to) = {values[0], values[1], values[2], values[3]};
  *reinterpret_cast<float4*>(to + 4) = {values[4], values[5], values[6], values[7]};
}

// One warp for each tile: of row blockIdx.y, columns by blockIdx.x. All codes are requested before
// the first is decoded. A lane decodes eight inputs of two rows at a time, whose stores fill
// sectors.
template <WeightCode kCode, typename T>
__global__ void __launch_bounds__(kUnpackThreads)
    unpack_kernel(const __grid_constant__ UnpackParams p) {
  using Tile = CodedTile<kCode>;
  using Codes = std::conditional_t<kCode == WeightCode::int8, uint4, uint2>;
  __shared__ float levels[16];
  if (threadIdx.x < 16) levels[threadIdx.x] = p.levels.at[threadIdx.x];
  __syncthreads();
  take_turn();
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int column = static_cast<int>(blockIdx.x) * (kUnpackThreads / kWarp) +
                     static_cast<int>(threadIdx.x) / kWarp;
  if (column >= p.columns) return;
  const std::byte* const tile =
      p.tiles + (std::int64_t{blockIdx.y} * p.columns + column) * Tile::kBytes;
  const auto* const codes =
      reinterpret_cast<const Codes*>(tile + Tile::kFirstCode * sizeof(std::uint32_t)) + lane;
  Codes of_groups[kTileGroups];
#pragma unroll
  for (int group = 0; group < kTileGroups; ++group)
    of_groups[group] = __ldcs(codes + group * kWarp);
#pragma unroll
  for (int group = 0; group < kTileGroups; ++group) {
    const int input = column * kTileInputs + group * static_cast<int>(kWeightGroup) + lane % 4 * 8;
    if (input >= p.inputs) return;
    const auto* const bits = reinterpret_cast<const std::uint32_t*>(&of_groups[group]);
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const int row = lane / 4 + 8 * high;
      const std::int64_t output = std::int64_t{blockIdx.y} * kTileOutputs + row;
      if (output >= p.rows) continue;
      const float2 line = line_of<kCode>(tile, row, group);
      float weights[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        // Lane 0's words and shifts are every lane's.
        const auto place = Tile::place_of(8 * high, i);
        weights[i] =
            weight_of<kCode>(bits[place.word - Tile::kFirstCode], place.shift, line, levels);
      }
      store_eight(static_cast<T*>(p.to) + output * p.inputs + input, weights);
    }
  }
}

template <WeightCode kCode>
void unpack(const UnpackParams& p, DType dtype, const Launch& launch) {
  constexpr int kWarps = kUnpackThreads / kWarp;
  const dim3 grid(static_cast<unsigned>((p.columns + kWarps - 1) / kWarps),
                  static_cast<unsigned>((p.rows + kTileOutputs - 1) / kTileOutputs));
  const auto run = [&](auto element) {
    launch_early("unpack_weight", unpack_kernel<kCode, decltype(element)>, grid, kUnpackThreads, 0,
                 launch, p);
  };
  if (dtype == DType::f32) return run(0.0f);
  dispatch_rows(dtype, run);
}

// One block for each token.
template <WeightCode kCode>
__global__ void __launch_bounds__(kUnpackThreads)
    embed_coded_kernel(const std::byte* tiles, std::int64_t rows, std::int64_t columns,
                       const TokenId* ids, float* y, std::int64_t y_stride, std::int64_t inputs,
                       const __grid_constant__ Levels table) {
  using Tile = CodedTile<kCode>;
  __shared__ float levels[16];
  if (threadIdx.x < 16) levels[threadIdx.x] = table.at[threadIdx.x];
  __syncthreads();
  take_turn();
  const TokenId id = ids[blockIdx.x];
  const bool is_known = id >= 0 && id < rows;
  const int row = is_known ? static_cast<int>(id % kTileOutputs) : 0;
  const std::byte* const of_row =
      tiles + (is_known ? id / kTileOutputs : 0) * columns * Tile::kBytes;
  float* const to = y + blockIdx.x * y_stride;
  for (std::int64_t c = threadIdx.x; c < inputs; c += kUnpackThreads) {
    const std::byte* const tile = of_row + c / kTileInputs * Tile::kBytes;
    const auto input = static_cast<int>(c % kTileInputs);
    const auto place = Tile::place_of(row, input);
    const std::uint32_t word = reinterpret_cast<const std::uint32_t*>(tile)[place.word];
    const float2 line = line_of<kCode>(tile, row, input / static_cast<int>(kWeightGroup));
    to[c] = is_known ? weight_of<kCode>(word, place.shift, line, levels) : 0.0f;
  }
}

}  // namespace

void pack_rows(const CodedMatrix& to, std::int64_t first, const WeightRows& rows,
               const Launch& launch) {
  check(rows.format == WeightFormat(to.code) && rows.inputs == to.inputs &&
            first + rows.rows <= to.outputs,
        "write_weight: formats or shapes disagree");
  check(first % kTileOutputs == 0 &&
            (rows.rows % kTileOutputs == 0 || first + rows.rows == to.outputs),
        "write_weight: a part of a tile");
  const CodedRow at(rows.format, rows.inputs);
  PackParams p{};
  p.rows = static_cast<const std::byte*>(rows.data);
  p.row_bytes = static_cast<std::int64_t>(rows.format.row_bytes(rows.inputs));
  p.count = rows.rows;
  p.inputs = rows.inputs;
  p.offsets = static_cast<std::int64_t>(at.offsets);
  p.codes = static_cast<std::int64_t>(at.codes);
  p.columns = to.tile_columns();
  p.tiles = to.tiles + first / kTileOutputs * p.columns * to.tile_bytes();
  if (to.code == WeightCode::int8) return pack<WeightCode::int8>(p, launch);
  pack<WeightCode::int4>(p, launch);
}

void unpack_rows(const CodedMatrix& from, std::int64_t first, std::int64_t rows, DType dtype,
                 void* to, const Launch& launch) {
  check(first % kTileOutputs == 0 && first + rows <= from.outputs, "unpack: part of a tile");
  UnpackParams p{};
  p.columns = static_cast<int>(from.tile_columns());
  p.inputs = static_cast<int>(from.inputs);
  p.tiles = from.tiles + first / kTileOutputs * from.tile_columns() * from.tile_bytes();
  p.rows = rows;
  p.to = to;
  p.levels = levels();
  if (from.code == WeightCode::int8) return unpack<WeightCode::int8>(p, dtype, launch);
  unpack<WeightCode::int4>(p, dtype, launch);
}

void embed_coded(const EmbedParams& params, const CodedMatrix& table, const Launch& launch) {
  const Matrix& y = params.y;
  check(y.dtype == DType::f32 && y.columns == table.inputs, "embed: output must be f32 rows");
  const auto kernel = table.code == WeightCode::int8 ? embed_coded_kernel<WeightCode::int8>
                                                     : embed_coded_kernel<WeightCode::int4>;
  launch_early("embed", kernel, dim3(static_cast<unsigned>(y.rows)), kUnpackThreads, 0, launch,
               table.tiles, table.outputs, table.tile_columns(), params.ids,
               static_cast<float*>(y.data), y.stride, table.inputs, levels());
}

}  // namespace sluice::cuda
