// From what warps found to outputs: combined in the block, merged between blocks.
#pragma once

#include "kernels/decode_work.cuh"

namespace sluice::cuda {

// exp2(x - y), and 0 for x = -inf whatever y is.
__device__ __forceinline__ float weight_of(float x, float y) {
  return x == -INFINITY ? 0.0f : exp2f(x - y);
}

// A result of one query head that is finished.
struct DecodeResult {
  float4 value;  // of four channels
  float2 lse;    // log-sum-exp in base 2, of all rows and of the newest alone
};

// a x + b y, but for what has no weight.
__device__ __forceinline__ float4 mix(float a, const float4& x, float b, const float4& y) {
  const auto one = [&](float p, float q) {
    return (a == 0.0f ? 0.0f : a * p) + (b == 0.0f ? 0.0f : b * q);
  };
  return make_float4(one(x.x, y.x), one(x.y, y.y), one(x.z, y.z), one(x.w, y.w));
}

// What a sum of values is whose weights, relative to logit `top`, are `total` together.
__device__ __forceinline__ DecodeResult normalised(const float4& sum, float2 total, float top) {
  if (total.x == 0.0f) {
    return {make_float4(0.0f, 0.0f, 0.0f, 0.0f), make_float2(-INFINITY, -INFINITY)};
  }
  const float inverse = 1.0f / total.x;
  return {make_float4(sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse),
          make_float2(top + log2f(total.x), top + log2f(total.y))};
}

// What is known of a query head before its rows are attended.
struct DecodeGiven {
  float alpha = 1.0f;
  float estimated_lse = INFINITY;
  float4 mean = make_float4(0.0f, 0.0f, 0.0f, 0.0f);  // of all tokens' values, of four channels

  __device__ DecodeGiven(const DecodeKernelParams& p, std::int64_t query, int head_dim,
                         int channel) {
    if (p.alpha != nullptr) alpha = p.alpha[query];
    if (p.estimated_lse != nullptr) estimated_lse = p.estimated_lse[query];
    if (p.sums == nullptr) return;
    const std::int64_t at = query / p.group * head_dim + channel;
    const float4 sum = *reinterpret_cast<const float4*>(p.sums + at);
    const float share = 1.0f / p.summed;
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

  // The mean stands for what alpha lacks.
  __device__ float4 compensate(const float4& x, float alpha) const {
    const float rest = 1.0f - alpha;
    return make_float4(alpha * x.x + rest * mean.x, alpha * x.y + rest * mean.y,
                       alpha * x.z + rest * mean.z, alpha * x.w + rest * mean.w);
  }
};

// Calls body(round, query, channel) for this thread's share of a bunch of queries, four channels at
// a time.
template <int kHeadDim, typename Body>
__device__ void for_results(int queries, const Body& body) {
  using Shape = DecodeShape<kHeadDim>;
  constexpr int kQuads = kHeadDim / 4;
  constexpr int kThreads = Shape::kFinishThreads;
  const int thread = static_cast<int>(threadIdx.x) - Shape::kFirstFinishWarp * kWarp;
#pragma unroll
  for (int round = 0; round < (kBunch * kQuads + kThreads - 1) / kThreads; ++round) {
    const int i = thread + round * kThreads;
    if (i < queries * kQuads) body(round, i / kQuads, i % kQuads * 4);
  }
}

// Writes results of a bunch of queries, or merges them with what is there. All finishing warps call
// it; result(query, channel) gives each.
template <int kHeadDim, typename Result>
__device__ void write_results(const DecodeKernelParams& p, std::int64_t first_query, int queries,
                              const Result& result) {
  constexpr int kThreads = DecodeShape<kHeadDim>::kFinishThreads;
  float new_lse[(kBunch * kHeadDim / 4 + kThreads - 1) / kThreads];
  float new_alpha[(kBunch * kHeadDim / 4 + kThreads - 1) / kThreads];
  for_results<kHeadDim>(queries, [&](int round, int query, int channel) {
    const DecodeGiven given(p, first_query + query, kHeadDim, channel);
    const DecodeResult own = result(query, channel);
    const float lse = own.lse.x * kLn2;
    auto& out = *reinterpret_cast<float4*>(p.out + (first_query + query) * kHeadDim + channel);
    new_lse[round] = lse;
    if (!p.merge) {
      new_alpha[round] = given.alpha_with(own.lse.y * kLn2);
      out = p.sums == nullptr ? own.value : given.compensate(own.value, new_alpha[round]);
      return;
    }
    const float old = p.lse[first_query + query];
    new_lse[round] = old;
    if (own.lse.x == -INFINITY) return;
    const float highest = fmaxf(old, lse);
    const float a = old == -INFINITY ? 0.0f : expf(old - highest);
    const float b = expf(lse - highest);
    out = mix(a / (a + b), out, b / (a + b), own.value);
    new_lse[round] = highest + logf(a + b);
  });
  // Every thread has read the old log-sum-exp and alpha before one of them replaces it.
  sync_finish_warps<kHeadDim>();
  for_results<kHeadDim>(queries, [&](int round, int query, int channel) {
    if (channel != 0) return;
    p.lse[first_query + query] = new_lse[round];
    if (p.estimated_lse != nullptr) p.alpha[first_query + query] = new_alpha[round];
  });
}

// What the warps of a block found of one segment.
template <int kHeadDim>
struct DecodeBlock {
  // The warps' threads write four pairs of eight queries at a time: to different banks.
  static constexpr int kStride = kHeadDim + 8;
  float out[kDecodeWarps][kBunch][kStride];
  float highest[kDecodeWarps][kBunch];
  float2 sum[kDecodeWarps][kBunch];

  __device__ DecodeResult operator()(int query, int channel) const {
    float top = -INFINITY;
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) top = fmaxf(top, highest[w][query]);
    float2 total = make_float2(0.0f, 0.0f);
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) {
      const float factor = weight_of(highest[w][query], top);
      total.x += factor * sum[w][query].x;
      total.y += factor * sum[w][query].y;
      value = mix(1.0f, value, factor, *reinterpret_cast<const float4*>(&out[w][query][channel]));
    }
    return normalised(value, total, top);
  }
};

// The partials of one head, from `sharers` workers in a row.
template <int kHeadDim>
struct DecodeMerge {
  // So many are under way together.
  static constexpr int kAtOnce = 24;

  const float* partials;  // [sharers, kBunch, head_dim]
  const float2* lses;     // [sharers, kBunch]
  int sharers;

  __device__ DecodeResult operator()(int query, int channel) const {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float2 total = make_float2(0.0f, 0.0f);
    float top = -INFINITY;
    for (int first = 0; first < sharers; first += kAtOnce) {
      float2 lse[kAtOnce];
      float4 part[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const std::int64_t at = static_cast<std::int64_t>(first + i) * kBunch + query;
        const bool exists = first + i < sharers;
        const auto* const own = reinterpret_cast<const float4*>(partials + at * kHeadDim + channel);
        lse[i] = exists ? __ldcg(lses + at) : make_float2(-INFINITY, -INFINITY);
        part[i] = exists ? __ldcg(own) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
      float highest = top;
#pragma unroll
      for (const float2 x : lse) highest = fmaxf(highest, x.x);
      const float factor = weight_of(top, highest);
      total = make_float2(total.x * factor, total.y * factor);
      sum = mix(factor, sum, 0.0f, sum);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = weight_of(lse[i].x, highest);
        total.x += weight;
        total.y += weight_of(lse[i].y, highest);
        sum = mix(1.0f, sum, weight, part[i]);
      }
      top = highest;
    }
    return normalised(sum, total, top);
  }
};

// Where a worker's partial of a head is: both only grow from segment to segment, so their sum names
// a slot.
__device__ __forceinline__ std::int64_t slot_of(const DecodeKernelParams& p, int bunch, int worker,
                                                int head) {
  return static_cast<std::int64_t>(bunch) * (p.workers + p.kv_heads) + worker + head;
}

template <int kHeadDim>
__device__ void store_partial(const DecodeKernelParams& p, std::int64_t slot, int queries,
                              const DecodeBlock<kHeadDim>& block) {
  for_results<kHeadDim>(queries, [&](int, int query, int channel) {
    const DecodeResult own = block(query, channel);
    auto* const to = p.partials + (slot * kBunch + query) * kHeadDim + channel;
    *reinterpret_cast<float4*>(to) = own.value;
    if (channel == 0) p.partial_lse[slot * kBunch + query] = own.lse;
  });
}

// Counts this block's part of a head; true for the block that comes last, which sees all parts.
template <int kHeadDim>
__device__ __forceinline__ bool finish_part(std::uint32_t* finished, int sharers) {
  __shared__ bool is_last;
  sync_finish_warps<kHeadDim>();
  if (threadIdx.x == DecodeShape<kHeadDim>::kFirstFinishWarp * kWarp) {
    // Gives what all threads stored before the barrier, and takes what other blocks gave.
    std::uint32_t before = 0;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;\n"
                 : "=r"(before)
                 : "l"(finished)
                 : "memory");
    is_last = before + 1 == static_cast<std::uint32_t>(sharers);
    if (is_last) *finished = 0;
  }
  sync_finish_warps<kHeadDim>();
  return is_last;
}

// Brings what the block found of a segment to where it belongs.
template <int kHeadDim>
__device__ void finish_segment(const DecodeKernelParams& p, const DecodeWork& work,
                               const DecodeSegment& segment, int bunch,
                               const DecodeBlock<kHeadDim>& block) {
  const int queries = min(kBunch, p.group - bunch * kBunch);
  const int head = segment.head;
  const std::int64_t first_query = static_cast<std::int64_t>(head) * p.group + bunch * kBunch;
  if (segment.is_whole()) {
    return write_results<kHeadDim>(p, first_query, queries, block);
  }
  store_partial(p, slot_of(p, bunch, static_cast<int>(blockIdx.x), head), queries, block);
  const int before = work.before(head);
  const int first_worker = work.worker_of(before);
  const int sharers = work.worker_of(before + segment.tiles - 1) - first_worker + 1;
  if (!finish_part<kHeadDim>(p.finished + static_cast<std::int64_t>(bunch) * p.kv_heads + head,
                             sharers)) {
    return;
  }
  const std::int64_t slot = slot_of(p, bunch, first_worker, head);
  const DecodeMerge<kHeadDim> merge{p.partials + slot * kBunch * kHeadDim,
                                    p.partial_lse + slot * kBunch, sharers};
  write_results<kHeadDim>(p, first_query, queries, merge);
}

// One warp reports how many rows of a head were where they already lay.
__device__ __forceinline__ void report_resident(const DecodeKernelParams& p, int head) {
  const int count =
      count_below(p.positions + head * p.capacity, p.heads[head].count, p.resident[head]);
  if (threadIdx.x % kWarp == 0) p.heads[head].resident = count;
}

}  // namespace sluice::cuda
