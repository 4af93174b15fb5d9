// Turns the warps' results into outputs: combined in the block, merged between blocks.
#pragma once

#include "kernels/attention/decode_work.cuh"
#include "kernels/runtime/ticket.cuh"

namespace sluice::cuda {

// exp2(x - y), and 0 for x = -inf whatever y is.
__device__ __forceinline__ float weight_of(float x, float y) {
  return x == -INFINITY ? 0.0f : exp2_fast(x - y);
}

// sum += weight * x; an x whose weight is 0 is zero itself.
__device__ __forceinline__ void add_weighted(float4& sum, float weight, const float4& x) {
  sum.x += weight * x.x;
  sum.y += weight * x.y;
  sum.z += weight * x.z;
  sum.w += weight * x.w;
}

// The finished result of one query head.
struct DecodeResult {
  float4 value;  // of four channels
  float2 lse;    // log-sum-exp in base 2, of all rows and of the newest alone
};

// The result for a sum of values whose weights, relative to logit `top`, add up to `total`.
__device__ __forceinline__ DecodeResult normalised(const float4& sum, float2 total, float top) {
  if (total.x == 0.0f) {
    return {make_float4(0.0f, 0.0f, 0.0f, 0.0f), make_float2(-INFINITY, -INFINITY)};
  }
  const float inverse = __fdividef(1.0f, total.x);
  return {make_float4(sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse),
          make_float2(top + log2f(total.x), top + log2f(total.y))};
}

// Inputs of a query head that are known before its rows are attended.
struct DecodeGiven {
  float alpha = 1.0f;
  float estimated_lse = INFINITY;
  float4 mean = make_float4(0.0f, 0.0f, 0.0f, 0.0f);  // of all tokens' values, of four channels

  // `value` is the offset of the four channels among those of all heads; the mean is `share` times
  // their sums.
  __device__ DecodeGiven(const DecodeKernelParams& p, std::int64_t query, std::int64_t value,
                         float share) {
    if (p.alpha != nullptr) alpha = p.alpha[query];
    if (p.estimated_lse != nullptr) estimated_lse = p.estimated_lse[query];
    if (p.sums == nullptr) return;
    const float4 sum = *reinterpret_cast<const float4*>(p.sums + value);
    mean = make_float4(sum.x * share, sum.y * share, sum.z * share, sum.w * share);
  }

  // Alpha once the newest rows, of this log-sum-exp, have their share.
  __device__ float alpha_with(float newest_lse) const {
    if (estimated_lse == INFINITY) return alpha;
    const float highest = fmaxf(estimated_lse, newest_lse);
    const float newest = expf(newest_lse - highest);
    const float estimated = expf(estimated_lse - highest);
    return (alpha * estimated + newest) / (estimated + newest);
  }

  // The mean value stands in for the missing share 1 - alpha.
  __device__ float4 compensate(const float4& x, float alpha) const {
    const float rest = 1.0f - alpha;
    return make_float4(alpha * x.x + rest * mean.x, alpha * x.y + rest * mean.y,
                       alpha * x.z + rest * mean.z, alpha * x.w + rest * mean.w);
  }
};

// Calls body(query) for the queries of a bunch that this finishing warp has. Loops that run once
// are not unrolled, because fetching the instructions would take longer than executing them.
template <typename Shape, typename Body>
__device__ void for_queries(int queries, const Body& body) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp - Shape::kFirstFinishWarp;
#pragma unroll 1
  for (int query = warp; query < queries; query += Shape::kFinishWarps) body(query);
}

// Calls body(channel) for this lane's share of a query, four channels at a time. The first lane has
// channel 0.
template <typename Shape, typename Body>
__device__ void for_channels(const Body& body) {
#pragma unroll 1
  for (int channel = static_cast<int>(threadIdx.x) % kWarp * 4; channel < Shape::kHeadDim;
       channel += 4 * kWarp) {
    body(channel);
  }
}

// Writes results of a bunch of queries. All finishing warps call it; result(query, channel) gives
// each.
template <typename Shape, typename Result>
__device__ void write_results(const DecodeKernelParams& p, const DecodeSegment<Shape>& s, int bunch,
                              int queries, const Result& result) {
  constexpr int kHeadDim = Shape::kHeadDim;
  const std::int64_t first_query = static_cast<std::int64_t>(s.head) * p.group + bunch * kBunch;
  const float share = __fdividef(1.0f, static_cast<float>(s.token.position) + 1.0f);
  for_queries<Shape>(queries, [&](int query) {
    const std::int64_t at = first_query + query;
    float lse = -INFINITY;
    float alpha = 0.0f;
    for_channels<Shape>([&](int channel) {
      const DecodeGiven given(p, at, std::int64_t{s.head} * kHeadDim + channel, share);
      const DecodeResult own = result(query, channel);
      lse = own.lse.x * kLn2;
      alpha = given.alpha_with(own.lse.y * kLn2);
      *reinterpret_cast<float4*>(p.out + at * kHeadDim + channel) =
          p.sums == nullptr ? own.value : given.compensate(own.value, alpha);
    });
    // Every lane has read the old alpha before it is replaced.
    __syncwarp();
    if (threadIdx.x % kWarp != 0) return;
    p.lse[at] = lse;
    if (p.estimated_lse != nullptr) p.alpha[at] = alpha;
  });
}

// The results of a block's warps for one segment.
template <typename Shape>
struct DecodeBlock {
  static constexpr int kWarps = Shape::kDecodeWarps;
  // The warps' threads write four pairs of eight queries at a time: to different banks.
  static constexpr int kStride = Shape::kHeadDim + 8;
  float out[kWarps][kBunch][kStride];
  float highest[kWarps][kBunch];
  float2 sum[kWarps][kBunch];

  __device__ DecodeResult operator()(int query, int channel) const {
    float top = -INFINITY;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, highest[w][query]);
    float2 total = make_float2(0.0f, 0.0f);
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float factor = weight_of(highest[w][query], top);
      total.x += factor * sum[w][query].x;
      total.y += factor * sum[w][query].y;
      add_weighted(value, factor, *reinterpret_cast<const float4*>(&out[w][query][channel]));
    }
    return normalised(value, total, top);
  }
};

// The partials of one head, from `sharers` workers in a row.
template <int kHeadDim>
struct DecodeMerge {
  // Partials that are loaded at the same time.
  static constexpr int kAtOnce = 12;

  const float* partials;  // [sharers, kBunch, head_dim]
  const float2* lses;     // [sharers, kBunch]
  int sharers;

  __device__ DecodeResult operator()(int query, int channel) const {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float2 total = make_float2(0.0f, 0.0f);
    float top = -INFINITY;
    const float* from = partials + query * kHeadDim + channel;
    const float2* from_lse = lses + query;
#pragma unroll 1
    for (int left = sharers; left > 0; left -= kAtOnce) {
      float2 lse[kAtOnce];
      float4 part[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        lse[i] = make_float2(-INFINITY, -INFINITY);
        part[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i >= left) continue;
        lse[i] = __ldcg(from_lse + i * kBunch);
        part[i] = __ldcg(reinterpret_cast<const float4*>(from + i * kBunch * kHeadDim));
      }
      from += kAtOnce * kBunch * kHeadDim;
      from_lse += kAtOnce * kBunch;
      float highest = top;
#pragma unroll
      for (const float2 x : lse) highest = fmaxf(highest, x.x);
      const float factor = weight_of(top, highest);
      total = make_float2(total.x * factor, total.y * factor);
      sum = make_float4(sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = weight_of(lse[i].x, highest);
        total.x += weight;
        total.y += weight_of(lse[i].y, highest);
        add_weighted(sum, weight, part[i]);
      }
      top = highest;
    }
    return normalised(sum, total, top);
  }
};

// The index of a worker's partial of a head. In the order of tiles, worker and head never decrease
// and at least one grows from segment to segment, so their sum is unique.
__device__ __forceinline__ std::int64_t slot_of(const DecodeKernelParams& p, int bunch, int worker,
                                                int head) {
  return static_cast<std::int64_t>(bunch) * (p.workers + p.heads) + worker + head;
}

template <typename Shape>
__device__ void store_partial(const DecodeKernelParams& p, std::int64_t slot, int queries,
                              const DecodeBlock<Shape>& block) {
  for_queries<Shape>(queries, [&](int query) {
    for_channels<Shape>([&](int channel) {
      const DecodeResult own = block(query, channel);
      auto* const to = p.partials + (slot * kBunch + query) * Shape::kHeadDim + channel;
      __stcg(reinterpret_cast<float4*>(to), own.value);
      if (channel == 0) p.partial_lse[slot * kBunch + query] = own.lse;
    });
  });
}

// Counts this block's part of a head; true for the block that comes last, which sees all parts.
template <typename Shape>
__device__ __forceinline__ bool finish_part(std::uint32_t* finished, int sharers) {
  __shared__ bool is_last;
  sync_finish_warps<Shape>();
  if (threadIdx.x == Shape::kFirstFinishWarp * kWarp) {
    is_last = takes_last_ticket(finished, sharers);
    if (is_last) *finished = 0;
  }
  sync_finish_warps<Shape>();
  return is_last;
}

// One warp reports how many rows of a head were on the device.
__device__ __forceinline__ void report_resident(const DecodeKernelParams& p, int head, int rows) {
  if (threadIdx.x % kWarp == 0) p.resident[head] = rows;
}

// Writes the block's results for a segment: outputs, or a partial to merge. One warp `reports` how
// many of its selected rows were on the device.
template <typename Shape>
__device__ void finish_segment(const DecodeKernelParams& p, const DecodeSegment<Shape>& s,
                               int bunch, const DecodeSharers& sharers,
                               const DecodeBlock<Shape>& block, bool reports, int resident) {
  constexpr int kHeadDim = Shape::kHeadDim;
  const int queries = min(kBunch, p.group - bunch * kBunch);
  if (sharers.count == 1) {
    if (reports) report_resident(p, s.head, resident);
    return write_results<Shape>(p, s, bunch, queries, block);
  }
  const std::int64_t own = slot_of(p, bunch, static_cast<int>(blockIdx.x), s.head);
  store_partial(p, own, queries, block);
  if (reports && threadIdx.x % kWarp == 0) __stcg(p.partial_resident + own, resident);
  std::uint32_t* const finished = p.finished + static_cast<std::int64_t>(bunch) * p.heads + s.head;
  if (!finish_part<Shape>(finished, sharers.count)) return;
  const std::int64_t slot = slot_of(p, bunch, sharers.first, s.head);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  // Loaded before the partials, used after them.
  const bool adds = reports && lane < sharers.count;
  int sum = adds ? __ldcg(p.partial_resident + slot + lane) : 0;
  const DecodeMerge<kHeadDim> merge{p.partials + slot * kBunch * kHeadDim,
                                    p.partial_lse + slot * kBunch, sharers.count};
  write_results<Shape>(p, s, bunch, queries, merge);
  if (!reports) return;
  for (int i = lane + kWarp; i < sharers.count; i += kWarp) {
    sum += __ldcg(p.partial_resident + slot + i);
  }
  report_resident(p, s.head, __reduce_add_sync(kAllLanes, sum));
}

}  // namespace sluice::cuda
