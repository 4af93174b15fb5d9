// The queries of one KV head as scans of the index want them: which channels count, scaled so that
// f16 holds them, and split into two halves of a mantissa each.
// Source of channel choice and temperature: Ribar et al. 2024, "SparQ Attention", section 3.
#pragma once

#include "kernels/device_math.cuh"

namespace sluice::cuda {

inline constexpr int kMaxHeadDim = 256;
// Query heads of a KV head that one pass serves; larger groups take several.
inline constexpr int kMaxQueries = 16;
inline constexpr int kQueryThreads = 128;  // of the blocks that load queries

// The next kernel of the stream may begin, if it was launched to: it waits for what it needs.
__device__ __forceinline__ void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}
// Until the kernel before is done and its writes can be seen.
__device__ __forceinline__ void wait_for_queries() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

struct QueryArgs {
  const float* q;  // [kv_heads, group, head_dim]
  int group;
  int head_dim;
  int channels;  // that count; head_dim of them unless the method is SparQ
  int first;     // of the query heads of this pass
  int count;     // of them, up to kMaxQueries
};

// In shared memory.
struct Queries {
  float q[kMaxQueries][kMaxHeadDim];   // scaled by a power of two into [-1, 1]
  float factor[kMaxQueries];           // turns sums over scaled queries into logits
  float4 size[kMaxHeadDim / 4];        // sums of |q| over the group, then negative ones
  std::uint16_t channel[kMaxHeadDim];  // those that count, ascending
  bool counts[kMaxHeadDim];
  int before[kMaxHeadDim / kWarp];
};

// One over the temperature; `all` and `kept` are sums of |q|. 0 for a query of zeros.
__device__ __forceinline__ float inverse_temperature(float all, float kept, const QueryArgs& a) {
  const auto d = static_cast<float>(a.head_dim);
  if (a.channels == a.head_dim) return __frsqrt_rn(d);
  if (kept == 0.0f) return 0.0f;
  return sqrtf(all / (kept * d));
}

// 2^-e with |largest| <= 2^e. Zero for Inf, which thereby becomes NaN in every product.
__device__ __forceinline__ float power_below_inverse(float largest) {
  if (!(largest <= 3.0e38f)) return 0.0f;
  const int exponent = max(static_cast<int>(__float_as_uint(largest) >> 23) - 126, -120);
  return __uint_as_float(static_cast<std::uint32_t>(127 - min(exponent, 126)) << 23);
}

// Marks the channels with the largest sums; of equals the first.
__device__ inline void mark_channels(const QueryArgs& a, Queries& to) {
  for (int c = static_cast<int>(threadIdx.x); c < a.head_dim; c += kQueryThreads) {
    int larger = 0;
    if (a.channels < a.head_dim) {
      const float size = reinterpret_cast<const float*>(to.size)[c];
      const auto look = [&](float theirs, int other) {
        larger += theirs > size || (theirs == size && other < c) ? 1 : 0;
      };
      for (int other = 0; other < a.head_dim; other += 4) {
        const float4 theirs = to.size[other / 4];
        look(theirs.x, other);
        look(theirs.y, other + 1);
        look(theirs.z, other + 2);
        look(theirs.w, other + 3);
      }
    }
    to.counts[c] = larger < a.channels;
  }
}

// Lists the marked channels in ascending order.
__device__ inline void list_channels(const QueryArgs& a, Queries& to) {
  constexpr int kRounds = kMaxHeadDim / kQueryThreads;
  unsigned masks[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int c = round * kQueryThreads + static_cast<int>(threadIdx.x);
    masks[round] = __ballot_sync(kAllLanes, c < a.head_dim && to.counts[c]);
    if (c % kWarp == 0) to.before[c / kWarp] = __popc(masks[round]);
  }
  __syncthreads();
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int c = round * kQueryThreads + static_cast<int>(threadIdx.x);
    const unsigned bit = 1u << (c % kWarp);
    int place = __popc(masks[round] & (bit - 1u));
    for (int warp = 0; warp < c / kWarp; ++warp) place += to.before[warp];
    if ((masks[round] & bit) != 0) to.channel[place] = static_cast<std::uint16_t>(c);
  }
}

// Scales query `n` in place; one warp each.
__device__ inline void scale_query(const QueryArgs& a, int n, Queries& to) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float all = 0.0f;
  float kept = 0.0f;
  float largest = 0.0f;
  for (int c = lane; c < a.head_dim; c += kWarp) {
    const float size = fabsf(to.q[n][c]);
    all += size;
    if (!to.counts[c]) continue;
    kept += size;
    largest = fmaxf(largest, size);
  }
  all = warp_sum(all);
  kept = warp_sum(kept);
  const float inverse = power_below_inverse(warp_max(largest));
  for (int c = lane; c < a.head_dim; c += kWarp) {
    to.q[n][c] = to.counts[c] ? to.q[n][c] * inverse : 0.0f;
  }
  if (lane == 0) {
    to.factor[n] = inverse_temperature(all, kept, a) * (inverse > 0.0f ? 1.0f / inverse : 1.0f);
  }
}

// Called by all kQueryThreads threads of a block; ends with a barrier.
__device__ inline void load_queries(const QueryArgs& a, int head, Queries& to) {
  const int thread = static_cast<int>(threadIdx.x);
  const float* const q = a.q + static_cast<std::int64_t>(head) * a.group * a.head_dim;
  for (int i = thread; i < a.count * a.head_dim; i += kQueryThreads) {
    to.q[i / a.head_dim][i % a.head_dim] = q[a.first * a.head_dim + i];
  }
  for (int c = thread; c < kMaxHeadDim && a.channels < a.head_dim; c += kQueryThreads) {
    float size = c < a.head_dim ? 0.0f : -1.0f;
    if (c < a.head_dim) {
      for (int g = 0; g < a.group; ++g) size += fabsf(q[g * a.head_dim + c]);
    }
    // NaN counts first.
    reinterpret_cast<float*>(to.size)[c] = size == size ? size : __int_as_float(0x7f800000);
  }
  __syncthreads();
  mark_channels(a, to);
  __syncthreads();
  list_channels(a, to);
  for (int n = thread / kWarp; n < a.count; n += kQueryThreads / kWarp) scale_query(a, n, to);
  __syncthreads();
}

}  // namespace sluice::cuda
