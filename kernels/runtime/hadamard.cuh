// The Hadamard rotation of lib/hadamard.h within a warp.
#pragma once

#include "kernels/runtime/device_math.cuh"
#include "lib/hadamard.h"

namespace sluice::cuda {

// Rotates kWords * kWarp elements: element i is word i / kWarp of lane i % kWarp. The block is at
// most that many. Adds in the order of sluice::rotate(), so that codes come out the same.
template <int kWords>
__device__ __forceinline__ void rotate_words(float (&x)[kWords], const Rotation& rotation) {
  const auto lane = static_cast<int>(threadIdx.x % kWarp);
  // Not unrolled, because fetching code that runs once takes longer than the loop.
#pragma unroll 1
  for (int stride = 1; stride < min(rotation.block, kWarp); stride *= 2) {
    const bool is_second = (lane & stride) != 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const float other = __shfl_xor_sync(kAllLanes, x[i], stride);
      x[i] = is_second ? other - x[i] : x[i] + other;
    }
  }
#pragma unroll
  for (int stride = 1; stride < kWords; stride *= 2) {
    if (stride * kWarp >= rotation.block) break;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if ((i & stride) != 0) continue;
      const float a = x[i];
      const float b = x[i + stride];
      x[i] = a + b;
      x[i + stride] = a - b;
    }
  }
  if (rotation.block == 1) return;
#pragma unroll
  for (int i = 0; i < kWords; ++i) x[i] = __fmul_rn(x[i], rotation.scale);
}

}  // namespace sluice::cuda
