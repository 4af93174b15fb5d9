// Codes elements as lib/weight_code.cc does, to the same bits: its operations in fp32 in its order,
// none of them fused. Half a warp has a group, a lane two of its weights.
#include <cstring>

#include "kernels/dense/coded.h"
#include "kernels/dense/coded_part.cuh"
#include "kernels/runtime/dispatch.h"
#include "kernels/runtime/early_launch.cuh"
#include "lib/check.h"
#include "lib/weight_code.h"

namespace sluice::cuda {
namespace {

constexpr int kCodeThreads = kTileOutputs * kWarp;
constexpr int kPart = 512;  // inputs of a block
constexpr int kLanes = 16;  // of a group
constexpr int kOwn = 2;     // weights of a lane: `lane` and `lane` + kLanes
constexpr std::uint16_t kHalfNan = 0x7e00;

struct CodeParams {
  const std::byte* rows;  // [count, inputs], elements
  std::int64_t count;
  std::int64_t inputs;
  std::byte* tiles;  // of the first row
  std::int64_t columns;
  float levels[16];     // of int4
  float midpoints[15];  // between them
};

__device__ __forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float minus(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float over(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float stored(float x) { return __half2float(__float2half_rn(x)); }
__device__ __forceinline__ std::uint16_t half_bits(float x) {
  return isnan(x) ? kHalfNan : __half_as_ushort(__float2half_rn(x));
}

// The half of a warp that has a group; halves may diverge.
struct Half {
  unsigned lanes;
  int lane;

  __device__ Half()
      : lanes(threadIdx.x % kWarp < kLanes ? 0x0000ffffu : 0xffff0000u),
        lane(static_cast<int>(threadIdx.x) % kLanes) {}

  // The sum of term(i) over the lane's weights i, and over lanes.
  template <typename Term>
  __device__ __forceinline__ float sum(const Term& term) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) sum = plus(sum, term(i));
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
      sum = plus(sum, __shfl_xor_sync(lanes, sum, step));
    }
    return sum;
  }
  // The weight that is_before(a, b) puts before all others; of equal ones the first in the group.
  template <typename IsBefore>
  __device__ __forceinline__ float first(const float (&w)[kOwn], const IsBefore& is_before) const {
    float best = w[0];
    int at = lane;
    const auto take = [&](float other, int other_at) {
      if (is_before(other, best) || (!is_before(best, other) && other_at < at)) {
        best = other;
        at = other_at;
      }
    };
    take(w[1], lane + kLanes);
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(lanes, best, step);
      take(other, __shfl_xor_sync(lanes, at, step));
    }
    return best;
  }
  __device__ __forceinline__ bool all(bool is_true) const {
    return __all_sync(lanes, is_true) != 0;
  }
};

// A lane's codes under a scale and an offset, and the group's squared error.
struct Coded {
  float values[kOwn] = {};  // -128 to 127, or levels
  float scale = 0.0f;
  float offset = 0.0f;
  float error = INFINITY;
};

__device__ __forceinline__ void keep_better(const Half& half, const float (&w)[kOwn], Coded& coded,
                                            Coded& best) {
  coded.error = half.sum([&](int i) {
    const float difference = minus(w[i], plus(times(coded.scale, coded.values[i]), coded.offset));
    return times(difference, difference);
  });
  if (coded.error < best.error) best = coded;
}

__device__ Coded best_levels(const CodeParams& p, const Half& half, const float (&w)[kOwn]) {
  const float largest = half.first(w, [](float a, float b) { return fabsf(a) > fabsf(b); });
  Coded best;
  for (int end = 0; end < 16; end += 15) {
    for (int clip = -2; clip <= 5; ++clip) {
      const float clipped = times(largest, minus(1.0f, times(0.05f, static_cast<float>(clip))));
      const float inverse = over(p.levels[end], clipped);
      Coded coded;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const float scaled = times(w[i], inverse);
        coded.values[i] = p.levels[0];
#pragma unroll
        for (int k = 0; k < 15; ++k) {
          if (scaled > p.midpoints[k]) coded.values[i] = p.levels[k + 1];
        }
      }
      const float products = half.sum([&](int i) { return times(w[i], coded.values[i]); });
      const float squares =
          half.sum([&](int i) { return times(coded.values[i], coded.values[i]); });
      coded.scale = stored(over(products, squares));
      keep_better(half, w, coded, best);
    }
  }
  return best;
}

__device__ void fit_line(const Half& half, const float (&w)[kOwn], float sum, Coded& coded) {
  constexpr float kCount = kWeightGroup;
  const float codes = half.sum([&](int i) { return coded.values[i]; });
  const float squares = half.sum([&](int i) { return times(coded.values[i], coded.values[i]); });
  const float products = half.sum([&](int i) { return times(coded.values[i], w[i]); });
  const float determinant = minus(times(kCount, squares), times(codes, codes));
  const float scale = determinant > 0.0f
                          ? over(minus(times(kCount, products), times(codes, sum)), determinant)
                          : 0.0f;
  coded.scale = stored(scale);
  coded.offset = stored(over(minus(sum, times(coded.scale, codes)), kCount));
}

__device__ Coded best_line(const Half& half, const float (&w)[kOwn]) {
  constexpr float kRounding = 0x1.8p23f;
  const float low = half.first(w, [](float a, float b) { return a < b; });
  const float high = half.first(w, [](float a, float b) { return a > b; });
  Coded best;
  if (low == high) {
    best.offset = low;
    best.error = 0.0f;
    return best;
  }
  const float sum = half.sum([&](int i) { return w[i]; });
  for (int clip = -3; clip <= 2; ++clip) {
    Coded coded;
    const float part = minus(1.0f, times(0.005f, static_cast<float>(clip)));
    coded.scale = stored(times(over(minus(high, low), 255.0f), part));
    coded.offset = stored(times(0.5f, plus(plus(low, high), coded.scale)));
    for (int pass = 0; pass < 2 && coded.scale > 0.0f; ++pass) {
      const float inverse = over(1.0f, coded.scale);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const float code = times(minus(w[i], coded.offset), inverse);
        const float clamped = code < -128.0f ? -128.0f : code > 127.0f ? 127.0f : code;
        coded.values[i] = minus(plus(clamped, kRounding), kRounding);
      }
      fit_line(half, w, sum, coded);
      keep_better(half, w, coded, best);
    }
  }
  return best;
}

// Codes a group of a row in shared memory.
template <WeightCode kCode>
__device__ __forceinline__ void code_group(const CodeParams& p, const Half& half,
                                           const float (&w)[kOwn], int row, int group,
                                           PartRows<kCode, kPart>& to) {
  Coded coded;
  if (half.all(isfinite(w[0]) && isfinite(w[1]))) {
    if constexpr (kCode == WeightCode::int8) {
      coded = best_line(half, w);
    } else {
      coded = best_levels(p, half, w);
    }
  }
  const bool is_coded = isfinite(coded.error);
  if (half.lane == 0) {
    to.scales[row][group] = is_coded ? half_bits(coded.scale) : kHalfNan;
    to.offsets[row][group] = is_coded ? half_bits(coded.offset) : std::uint16_t{0};
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int at = group * static_cast<int>(kWeightGroup) + i * kLanes + half.lane;
    const float value = is_coded ? coded.values[i] : 0.0f;
    if constexpr (kCode == WeightCode::int8) {
      to.codes[row][at] = static_cast<std::uint8_t>(static_cast<int>(value));
    } else {
      int code = 0;
#pragma unroll
      for (int k = 0; k < 15; ++k) code += value > p.levels[k] ? 1 : 0;
      if (!is_coded) code = 0;
      const int next = __shfl_down_sync(half.lanes, code, 1);
      if (half.lane % 2 == 0) to.codes[row][at / 2] = static_cast<std::uint8_t>(code | next << 4);
    }
  }
}

// A warp reads a row of the part, in units of a word.
template <WeightCode kCode, typename T, typename Word>
__global__ void __launch_bounds__(kCodeThreads) code_kernel(const __grid_constant__ CodeParams p) {
  __shared__ alignas(16) T elements[kTileOutputs][kPart];
  __shared__ PartRows<kCode, kPart> part;
  take_turn();
  const int row = static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t output = std::int64_t{blockIdx.x} * kTileOutputs + row;
  const std::int64_t first = std::int64_t{blockIdx.y} * kPart;
  const auto inputs =
      output < p.count ? static_cast<int>(min(p.inputs - first, std::int64_t{kPart})) : 0;
  constexpr int kOfWord = sizeof(Word) / sizeof(T);
  const auto* const from =
      reinterpret_cast<const Word*>(reinterpret_cast<const T*>(p.rows) + output * p.inputs + first);
  auto* const to = reinterpret_cast<Word*>(elements[row]);
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x) % kWarp; i < inputs / kOfWord; i += kWarp) {
    to[i] = from[i];
  }
  __syncwarp();
  const Half half;
  for (int group = static_cast<int>(threadIdx.x) % kWarp / kLanes;
       group < PartRows<kCode, kPart>::kGroups; group += kWarp / kLanes) {
    const int at = group * static_cast<int>(kWeightGroup) + half.lane;
    if (at - half.lane < inputs) {
      const float w[kOwn] = {to_float(elements[row][at]), to_float(elements[row][at + kLanes])};
      code_group<kCode>(p, half, w, row, group, part);
      continue;
    }
    if (half.lane == 0) part.scales[row][group] = part.offsets[row][group] = 0;
    constexpr int kBytes = static_cast<int>(kWeightGroup) * CodedTile<kCode>::kBits / 8;
    for (int i = half.lane; i < kBytes; i += kLanes) part.codes[row][group * kBytes + i] = 0;
  }
  __syncthreads();
  write_part(part, p.tiles, p.columns);
}

template <WeightCode kCode, typename T>
void code(const CodeParams& p, const Launch& launch) {
  const dim3 grid(static_cast<unsigned>((p.count + kTileOutputs - 1) / kTileOutputs),
                  static_cast<unsigned>((p.inputs + kPart - 1) / kPart));
  const auto place = reinterpret_cast<std::uintptr_t>(p.rows);
  // Rows have a multiple of 32 elements.
  const bool is_wide = place % sizeof(uint4) == 0;
  launch_early("write_weight", is_wide ? code_kernel<kCode, T, uint4> : code_kernel<kCode, T, T>,
               grid, kCodeThreads, 0, launch, p);
}

}  // namespace

void code_rows(const CodedMatrix& to, std::int64_t first, const WeightRows& rows,
               const Launch& launch) {
  check(!rows.format.is_coded() && rows.inputs == to.inputs && first + rows.rows <= to.outputs,
        "write_weight: formats or shapes disagree");
  check(first % kTileOutputs == 0 &&
            (rows.rows % kTileOutputs == 0 || first + rows.rows == to.outputs),
        "write_weight: a part of a tile");
  CodeParams p{};
  p.rows = static_cast<const std::byte*>(rows.data);
  p.count = rows.rows;
  p.inputs = rows.inputs;
  p.columns = to.tile_columns();
  p.tiles = to.tiles + first / kTileOutputs * p.columns * to.tile_bytes();
  for (std::size_t i = 0; i < kWeightLevels.size(); ++i) {
    p.levels[i] = static_cast<float>(kWeightLevels[i]);
    if (i > 0) p.midpoints[i - 1] = 0.5f * (p.levels[i - 1] + p.levels[i]);
  }
  const auto run = [&](auto element) {
    using T = decltype(element);
    if (to.code == WeightCode::int8) return code<WeightCode::int8, T>(p, launch);
    code<WeightCode::int4, T>(p, launch);
  };
  if (rows.format.element == DType::f32) return run(0.0f);
  dispatch_rows(rows.format.element, run);
}

}  // namespace sluice::cuda
