// Arguments of select() by value, and the derived values of one head.
//
// A head is a KV head of a token of the batch, numbered token * kv_heads + KV head. Launches depend
// only on the batch's capacity; values that depend on a token's position are derived in the
// kernels, from the token in device memory.
#pragma once

#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "kernels/runtime/device_math.cuh"
#include "kernels/runtime/page_digest.h"
#include "kernels/runtime/page_weights.h"
#include "lib/backend/index_ops.h"
#include "sluice/batch.h"

namespace sluice::cuda {

// A Quota in 32-bit numbers; a context has at most 2^31 tokens.
struct TokenQuota {
  struct Part {
    std::uint32_t tokens = 0;   // if the divisor is 0
    std::uint32_t divisor = 0;  // at most 2^31

    __device__ __forceinline__ std::uint32_t of(std::uint32_t count) const {
      return divisor == 0 ? min(tokens, count) : (count + (divisor - 1)) / divisor;
    }
  };
  Part share;
  Part least;
  std::int32_t extra = 0;  // -1 with a share of one token is Quota::nothing()

  __device__ __forceinline__ std::int32_t of(std::uint32_t count) const {
    const std::int64_t twice = std::int64_t{2} * least.of(count);
    const std::int64_t wanted = max(std::int64_t{share.of(count)}, twice) + extra;
    return static_cast<std::int32_t>(min(wanted, std::int64_t{min(count, 0x7fffffffu)}));
  }
};

// SelectParams by value, or their part for a range of heads.
struct SelectCall {
  const BatchToken* tokens = nullptr;  // of all heads
  std::int32_t kv_heads = 0;
  std::int32_t first_head = 0;  // of the range, among all heads
  std::int32_t head_count = 0;
  std::int32_t group = 0;
  const __half* logits = nullptr;  // [heads, group, stride]; rows begin at multiples of 16 bytes
  std::int64_t stride = 0;
  bool skip_newest = false;            // the newest rows have no logits
  PageDigest digest;                   // of all whole pages, or null pointers
  std::int32_t entries = 0;            // logits per row at most
  const std::int32_t* list = nullptr;  // [heads, list_capacity] or null
  std::int64_t list_capacity = 0;
  const HeadSelection* list_heads = nullptr;  // reported [heads]
  bool is_top_p = false;
  bool has_grades = false;  // a cut by grades may be needed
  float p = 0.0f;
  // Nats below a row's log-sum-exp; top_p ignores lighter logits.
  float bin_range = 0.0f;
  TokenQuota quota;              // k or the cap
  std::int32_t most_keep = 0;    // the most that the quota gives
  std::int32_t most_forced = 0;  // most tokens that are always kept
  std::int64_t sinks = 0;
  std::int64_t recent = 0;
  std::int32_t* positions = nullptr;  // [heads, capacity]
  std::int64_t capacity = 0;
  HeadSelection* heads = nullptr;  // reported [heads]
  const float* share = nullptr;    // reported [heads, group] or null
  float* alpha = nullptr;          // reported [heads, group]
  float* lse = nullptr;            // [heads, group] or null
  PageWeights page_weights;        // to write, or null pointers

  __device__ const __half* row(int head, int g) const {
    return logits + (static_cast<std::int64_t>(head) * group + g) * stride;
  }
  __device__ const std::int32_t* head_list(int head) const {
    return list == nullptr ? nullptr : list + head * list_capacity;
  }
};

// Values derived from a head's token, known before the previous kernel has ended.
struct TokenBounds {
  std::int32_t page_first = 0;
  std::int32_t newest = 0;  // rows with logits from `page_first` on
  // Positions in [low, high) are not always kept.
  std::int32_t low = 0;
  std::int32_t high = 0;
  std::int32_t keep = 0;  // k or the cap
};

__device__ __forceinline__ TokenBounds bounds_of(const SelectCall& c, int head) {
  const BatchToken token = c.tokens[(c.first_head + head) / c.kv_heads];
  TokenBounds b;
  b.page_first = token.position / kPageTokens * kPageTokens;
  if (!c.skip_newest) b.newest = token.position - b.page_first + 1;
  const std::int64_t first = b.page_first;
  const std::int64_t recent_first = std::int64_t{token.position} + 1 - c.recent;
  b.low = static_cast<std::int32_t>(min(c.sinks, first));
  b.high = max(b.low, static_cast<std::int32_t>(max(min(recent_first, first), std::int64_t{0})));
  b.keep = c.quota.of(static_cast<std::uint32_t>(token.position) + 1u);
  return b;
}

// The entries of one head. [0, emit) may be kept, of these [0, low) and [high, emit) always are;
// [emit, total) are the tail.
struct Extent {
  std::int32_t total = 0;
  std::int32_t emit = 0;
  std::int32_t low = 0;
  std::int32_t high = 0;
  std::int32_t keep = 0;  // k or the cap

  // The number of entries that are always kept.
  __device__ std::int32_t forced() const { return low + emit - high; }
};

// Called by one whole warp, after the previous kernel has ended.
__device__ inline Extent extent_of(const SelectCall& c, int head, const TokenBounds& token) {
  Extent e;
  e.keep = token.keep;
  if (c.list != nullptr) {
    const std::int32_t count =
        *static_cast<const volatile std::int32_t*>(&c.list_heads[head].count);
    e.emit = min(max(count, 0), static_cast<std::int32_t>(c.list_capacity));
    const std::int32_t* const list = c.head_list(head);
    e.low = count_below(list, e.emit, token.low);
    e.high = max(e.low, count_below(list, e.emit, token.high));
  } else {
    e.emit = token.page_first;
    e.low = token.low;
    e.high = token.high;
  }
  e.total = e.emit + token.newest;
  return e;
}

// Called by one thread: the share of all tokens' weight that the row's logits carry.
__device__ __forceinline__ float share_of(const SelectCall& c, std::int64_t row) {
  return c.share == nullptr ? 1.0f : *static_cast<const volatile float*>(c.share + row);
}

// Called by a block: reports a head that keeps nothing, because a logit is NaN or there are none.
__device__ inline void report_none(const SelectCall& c, int head, bool is_bad) {
  for (auto g = static_cast<int>(threadIdx.x); g < c.group; g += static_cast<int>(blockDim.x)) {
    const std::int64_t row = static_cast<std::int64_t>(head) * c.group + g;
    c.alpha[row] = is_bad ? 0.0f : share_of(c, row);
    if (!is_bad && c.lse != nullptr) c.lse[row] = -INFINITY;
  }
  if (threadIdx.x != 0) return;
  HeadSelection result;
  result.bad = is_bad ? 1 : 0;
  c.heads[head] = result;
}

}  // namespace sluice::cuda
