// Queries of one KV head, prepared for scans of the index: channels chosen, values scaled by a
// power of two so that f16 can hold them.
// Source of channel choice and temperature: Ribar et al. 2024, "SparQ Attention", section 3.
#pragma once

#include "kernels/runtime/device_math.cuh"
#include "kernels/runtime/early_launch.cuh"
#include "kernels/runtime/hadamard.cuh"
#include "kernels/scan/channels.h"

namespace sluice::cuda {

inline constexpr int kMaxHeadDim = 256;
inline constexpr int kQueryThreads = 128;  // per block that loads queries
// Words per lane in which a warp holds one value per channel: channel c is word c / kWarp of lane
// c % kWarp.
inline constexpr int kChannelWords = kMaxHeadDim / kWarp;

struct QueryArgs {
  const float* q;         // [tokens, kv_heads, group, head_dim]
  std::int64_t q_stride;  // floats from token to token
  int group;
  int head_dim;
  int channels;            // channels used; head_dim unless the method is SparQ
  int first;               // first query head of this pass, within the group
  int count;               // query heads of this pass, up to kMaxQueries
  Rotation rotation = {};  // of queries for rotated tiles

  // The queries of one KV head, [group, head_dim].
  __device__ __forceinline__ const float* of(int token, int kv_head) const {
    return q + token * q_stride + static_cast<std::int64_t>(kv_head) * group * head_dim;
  }
};

inline QueryArgs query_args(const ScanPass& pass) {
  const EstimateParams& p = *pass.estimate;
  return {
      p.q,         p.q_stride, p.shape.group(), p.shape.head_dim, channels_of(p), pass.first_query,
      pass.queries};
}

// The queries of one KV head, in shared memory.
struct Queries {
  float q[kMaxQueries][kMaxHeadDim];    // scaled into [-1, 1], zero in unused channels
  float factor[kMaxQueries];            // turns sums over scaled queries into logits
  alignas(16) int size[kMaxHeadDim];    // sums of |q| over the group; see channel_size()
  std::uint32_t counts[kChannelWords];  // one bit per channel, set if it is used
  std::uint16_t channel[kMaxHeadDim];   // the used channels, ascending
};

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x % kWarp); }

// Returns 1 / temperature. `all` and `kept` are sums of |q| over all and over the used channels. A
// query of zeros gives 0.
__device__ __forceinline__ float inverse_temperature(float all, float kept, const QueryArgs& a) {
  const auto d = static_cast<float>(a.head_dim);
  if (a.channels == a.head_dim) return __frsqrt_rn(d);
  if (kept == 0.0f) return 0.0f;
  return sqrtf(all / (kept * d));
}

// Returns 2^-e with |largest| <= 2^e; 0 for Inf, because Inf * 0 is NaN and reaches the logits.
__device__ __forceinline__ float power_below_inverse(float largest) {
  if (!(largest <= 3.0e38f)) return 0.0f;
  const int exponent = max(static_cast<int>(__float_as_uint(largest) >> 23) - 126, -120);
  return __uint_as_float(static_cast<std::uint32_t>(127 - min(exponent, 126)) << 23);
}

// Sum of |q| over the group as the bits of a float, which sort like the floats because none is
// negative; -1 beyond head_dim. NaN sorts first.
__device__ __forceinline__ int channel_size(const QueryArgs& a, const float* q, int channel) {
  if (channel >= a.head_dim) return -1;
  float sum = 0.0f;
#pragma unroll 4
  for (int g = 0; g < a.group; ++g) sum += fabsf(q[g * a.head_dim + channel]);
  return sum == sum ? __float_as_int(sum) : 0x7f800000;
}

// Rank of channel `c` by size, largest first; ties go to the lower channel. Adding the sign bit of
// a difference takes two instructions per channel.
__device__ __forceinline__ int rank_of(const QueryArgs& a, int c, const Queries& of) {
  const int own = of.size[c];
  unsigned before = 0;
#pragma unroll 4
  for (int i = 0; i < a.head_dim; i += 4) {
    const int4 other = *reinterpret_cast<const int4*>(&of.size[i]);
    const int bar = own - (i + 4 <= c ? 1 : 0);  // channels with larger sizes come before
    before += static_cast<unsigned>(bar - other.x) >> 31;
    before += static_cast<unsigned>(bar - other.y) >> 31;
    before += static_cast<unsigned>(bar - other.z) >> 31;
    before += static_cast<unsigned>(bar - other.w) >> 31;
  }
  for (int i = c / 4 * 4; i < c; ++i) before += of.size[i] == own ? 1 : 0;
  return static_cast<int>(before);
}

// Chooses the channels with the largest sizes; all threads call it. Ranks need one short loop; a
// search would wait for its own instructions to be fetched.
__device__ __forceinline__ void choose_channels(const QueryArgs& a, Queries& to) {
  static_assert(kMaxHeadDim % kQueryThreads == 0);
#pragma unroll 1
  for (int c = static_cast<int>(threadIdx.x); c < kMaxHeadDim; c += kQueryThreads) {
    const bool counts = c < a.head_dim && rank_of(a, c, to) < a.channels;
    const unsigned chosen = __ballot_sync(kAllLanes, counts);
    if (lane_id() == 0) to.counts[c / kWarp] = chosen;
  }
  __syncthreads();
#pragma unroll 1
  for (int c = static_cast<int>(threadIdx.x); c < a.head_dim; c += kQueryThreads) {
    const unsigned chosen = to.counts[c / kWarp];
    if ((chosen >> lane_id() & 1) == 0) continue;
    int place = __popc(chosen & ((1u << lane_id()) - 1u));
#pragma unroll 1
    for (int i = 0; i < c / kWarp; ++i) place += __popc(to.counts[i]);
    to.channel[place] = static_cast<std::uint16_t>(c);
  }
}

// Scales query head `n` of this pass; one warp calls it.
__device__ __forceinline__ void scale_query(const QueryArgs& a, const float* of_head, int n,
                                            Queries& to) {
  const float* const from = of_head + (a.first + n) * a.head_dim;
  float q[kChannelWords];
#pragma unroll
  for (int i = 0; i < kChannelWords; ++i) {
    const int c = i * kWarp + lane_id();
    q[i] = c < a.head_dim ? from[c] : 0.0f;
  }
  if (a.rotation.block > 1) rotate_words(q, a.rotation);
  float all = 0.0f;
  float kept = 0.0f;
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kChannelWords; ++i) {
    const bool counts = (to.counts[i] >> lane_id() & 1) != 0;
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

// Loads the queries that a.of() gave as `of_head`. All kQueryThreads threads of a block call it; it
// ends with a barrier.
__device__ inline void load_queries(const QueryArgs& a, const float* of_head, Queries& to) {
  const auto thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kWarp;
  if (a.channels < a.head_dim) {
#pragma unroll 1
    for (int c = thread; c < kMaxHeadDim; c += kQueryThreads) {
      to.size[c] = channel_size(a, of_head, c);
    }
    __syncthreads();
    choose_channels(a, to);
  } else {
    for (int c = thread; c < kMaxHeadDim; c += kQueryThreads) {
      to.channel[c] = static_cast<std::uint16_t>(c);
    }
    if (thread < kChannelWords) to.counts[thread] = kAllLanes;
  }
  __syncthreads();
#pragma unroll 1
  for (int n = warp; n < a.count; n += kQueryThreads / kWarp) scale_query(a, of_head, n, to);
  __syncthreads();
}

}  // namespace sluice::cuda
