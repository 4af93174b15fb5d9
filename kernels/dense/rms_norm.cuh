// RMSNorm by one block, as a separate kernel or as the first step of a product.
#pragma once

#include <cstdint>

#include "kernels/runtime/device_math.cuh"

namespace sluice::cuda {

// Sum over a block of whole warps; every thread gets it. May be called once per kernel.
__device__ inline float block_sum(float x) {
  __shared__ float sums[kWarp];
  const unsigned lane = threadIdx.x % kWarp;
  x = warp_sum(x);
  if (lane == 0) sums[threadIdx.x / kWarp] = x;
  __syncthreads();
  return warp_sum(lane < blockDim.x / kWarp ? sums[lane] : 0.0f);
}

// kWidth neighbouring columns.
template <int kWidth>
struct Columns {
  float at[kWidth];
};
template <int kWidth>
__device__ __forceinline__ Columns<kWidth> load_columns(const float* from) {
  if constexpr (kWidth == 4) {
    const float4 x = *reinterpret_cast<const float4*>(from);
    return {{x.x, x.y, x.z, x.w}};
  } else {
    return {{*from}};
  }
}

// Calls body(column) for this thread's columns, kWidth at a time.
template <int kWidth, typename Body>
__device__ __forceinline__ void for_columns(std::int64_t columns, const Body& body) {
  const std::int64_t step = std::int64_t{blockDim.x} * kWidth;
  for (std::int64_t c = std::int64_t{threadIdx.x} * kWidth; c < columns; c += step) body(c);
}

// to = x / rms(x) * weight.
template <typename T, int kWidth>
__device__ __forceinline__ void normalise(const float* x, const float* weight, float epsilon, T* to,
                                          std::int64_t columns) {
  float squares = 0.0f;
  for_columns<kWidth>(columns, [&](std::int64_t c) {
    for (const float value : load_columns<kWidth>(x + c).at) squares += value * value;
  });
  const float factor = 1.0f / sqrtf(block_sum(squares) / static_cast<float>(columns) + epsilon);
  for_columns<kWidth>(columns, [&](std::int64_t c) {
    const auto values = load_columns<kWidth>(x + c);
    const auto weights = load_columns<kWidth>(weight + c);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      to[c + i] = from_float<T>(values.at[i] * factor * weights.at[i]);
    }
  });
}

}  // namespace sluice::cuda
