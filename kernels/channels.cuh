// The queries of one KV head as scans of the index want them: which channels count, and scaled by
// a power of two so that f16 holds them.
// Source of channel choice and temperature: Ribar et al. 2024, "SparQ Attention", section 3.
#pragma once

#include "kernels/device_math.cuh"
#include "kernels/early_launch.cuh"

namespace sluice::cuda {

inline constexpr int kMaxHeadDim = 256;
// Query heads of a KV head that one pass serves; larger groups take several.
inline constexpr int kMaxQueries = 16;
inline constexpr int kQueryThreads = 128;  // of the blocks that load queries
// A warp holds something of every channel as so many words of each lane: channel c is word
// c / kWarp of lane c % kWarp.
inline constexpr int kChannelWords = kMaxHeadDim / kWarp;

struct QueryArgs {
  const float* q;  // [kv_heads, group, head_dim]
  int group;
  int head_dim;
  int channels;  // that count; head_dim of them unless the method is SparQ
  int first;     // of the query heads of this pass
  int count;     // of them, up to kMaxQueries

  __device__ __forceinline__ const float* head(int head) const {
    return q + static_cast<std::int64_t>(head) * group * head_dim;
  }
  // Query head `n` of this pass.
  __device__ __forceinline__ const float* query(int head_number, int n) const {
    return head(head_number) + (first + n) * head_dim;
  }
};

// Of one KV head, in shared memory.
struct Queries {
  float q[kMaxQueries][kMaxHeadDim];    // scaled into [-1, 1], zero in channels that do not count
  float factor[kMaxQueries];            // turns sums over scaled queries into logits
  int size[kMaxHeadDim];                // sums of |q| over the group; see channel_size()
  std::uint32_t counts[kChannelWords];  // a bit for every channel that counts
  std::uint16_t channel[kMaxHeadDim];   // those that count, ascending
};

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x % kWarp); }

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

// The sum of |q| over the group as bits, which are in order as integers; -1 beyond the channels.
// NaN counts first.
__device__ __forceinline__ int channel_size(const QueryArgs& a, int head, int channel) {
  if (channel >= a.head_dim) return -1;
  const float* const q = a.head(head) + channel;
  float sum = 0.0f;
#pragma unroll 4
  for (int g = 0; g < a.group; ++g) sum += fabsf(q[g * a.head_dim]);
  return sum == sum ? __float_as_int(sum) : 0x7f800000;
}

__device__ __forceinline__ int count_from(const int (&sizes)[kChannelWords], int least) {
  int count = 0;
#pragma unroll
  for (int i = 0; i < kChannelWords; ++i) count += sizes[i] >= least ? 1 : 0;
  return __reduce_add_sync(kAllLanes, count);
}

// The size of the `wanted`th largest, or any above the next one's.
__device__ __forceinline__ int threshold_of(const int (&sizes)[kChannelWords], int wanted) {
  unsigned least = 0x7fffffff;  // as such, -1 is large
  int largest = 0;
#pragma unroll
  for (int i = 0; i < kChannelWords; ++i) {
    least = min(least, static_cast<unsigned>(sizes[i]));
    largest = max(largest, sizes[i]);
  }
  auto low = static_cast<int>(__reduce_min_sync(kAllLanes, least));  // has as many or more
  int high = __reduce_max_sync(kAllLanes, largest) + 1;              // has fewer
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    const int count = count_from(sizes, middle);
    if (count == wanted) return middle;
    if (count > wanted) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Notes the channels with the largest sizes, by a warp; of equals the first.
__device__ __forceinline__ void choose_channels(int wanted, Queries& to) {
  int sizes[kChannelWords];
#pragma unroll
  for (int i = 0; i < kChannelWords; ++i) sizes[i] = to.size[i * kWarp + lane_id()];
  const int threshold = threshold_of(sizes, wanted);
  int room = wanted - count_from(sizes, threshold + 1);  // for those of just this size
  int place = 0;
  const unsigned before = (1u << lane_id()) - 1u;
#pragma unroll
  for (int i = 0; i < kChannelWords; ++i) {
    const unsigned equal = __ballot_sync(kAllLanes, sizes[i] == threshold);
    const bool fits = sizes[i] == threshold && __popc(equal & before) < room;
    const unsigned chosen = __ballot_sync(kAllLanes, sizes[i] > threshold || fits);
    room -= __popc(equal);
    if ((chosen >> lane_id() & 1) != 0) {
      to.channel[place + __popc(chosen & before)] =
          static_cast<std::uint16_t>(i * kWarp + lane_id());
    }
    place += __popc(chosen);
    if (lane_id() == 0) to.counts[i] = chosen;
  }
}

// Scales query `n`, by a warp.
__device__ __forceinline__ void scale_query(const QueryArgs& a, int head, int n, Queries& to) {
  const float* const from = a.query(head, n);
  float q[kChannelWords];
  float all = 0.0f;
  float kept = 0.0f;
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kChannelWords; ++i) {
    const int c = i * kWarp + lane_id();
    const bool counts = (to.counts[i] >> lane_id() & 1) != 0;
    q[i] = c < a.head_dim ? from[c] : 0.0f;
    all += fabsf(q[i]);
    if (!counts) q[i] = 0.0f;
    kept += fabsf(q[i]);
    largest = fmaxf(largest, fabsf(q[i]));
  }
  all = warp_sum(all);
  kept = warp_sum(kept);
  const float inverse = power_below_inverse(warp_max(largest));
#pragma unroll
  for (int i = 0; i < kChannelWords; ++i) to.q[n][i * kWarp + lane_id()] = q[i] * inverse;
  if (lane_id() == 0) {
    to.factor[n] = inverse_temperature(all, kept, a) * (inverse > 0.0f ? 1.0f / inverse : 1.0f);
  }
}

// Called by all kQueryThreads threads of a block; ends with a barrier.
__device__ inline void load_queries(const QueryArgs& a, int head, Queries& to) {
  const auto thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kWarp;
  if (a.channels < a.head_dim) {
    for (int c = thread; c < kMaxHeadDim; c += kQueryThreads) {
      to.size[c] = channel_size(a, head, c);
    }
    __syncthreads();
    if (warp == 0) choose_channels(a.channels, to);
  } else {
    for (int c = thread; c < kMaxHeadDim; c += kQueryThreads) {
      to.channel[c] = static_cast<std::uint16_t>(c);
    }
    if (thread < kChannelWords) to.counts[thread] = kAllLanes;
  }
  __syncthreads();
  for (int n = warp; n < a.count; n += kQueryThreads / kWarp) scale_query(a, head, n, to);
  __syncthreads();
}

}  // namespace sluice::cuda
