// A histogram of a row's weights, from which top_p takes its threshold.
#pragma once

#include "kernels/select/common.cuh"

namespace sluice::cuda {

// Adds the masses of the logits that are >= `least` to bins, counted down from bin `top`.
__device__ __forceinline__ void add_masses8(const uint4& v, std::uint16_t least, const BinMap& map,
                                            std::int32_t top, std::uint32_t* bins) {
  const float lowest = __half2float(__ushort_as_half(least));
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float2 pair = __half22float2(as_half2(word_of(v, w)));
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float x = e == 0 ? pair.x : pair.y;
      if (!(x >= lowest)) continue;
      std::uint32_t mass;
      const std::int32_t bin = map.bin(x, mass);
      atomicAdd(bins + (top - bin), mass);
    }
  }
}

}  // namespace sluice::cuda
