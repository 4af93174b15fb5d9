// What whole pages weigh without what is selected of them: the first step of attend_tiles(), unless
// it was done behind select().
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/runtime/launch.h"
#include "kernels/runtime/page_digest.h"
#include "kernels/runtime/page_weights.h"
#include "lib/backend/index_ops.h"
#include "lib/batch.h"

namespace sluice::cuda {

// A head is a KV head of a token: number token * kv_heads + KV head.
struct WeighCall {
  const BatchToken* tokens = nullptr;
  int kv_heads = 0;
  int heads = 0;
  int group = 0;
  const HeadSelection* selections = nullptr;  // reported [heads]
  const std::int32_t* positions = nullptr;    // [heads, position_capacity]
  std::int64_t position_capacity = 0;
  const __half* logits = nullptr;  // [heads, group, stride]
  std::int64_t stride = 0;
  PageDigest digest;           // or null pointers
  const float* lse = nullptr;  // [heads, group]: what weights are relative to
  std::int64_t capacity = 0;   // tokens of a context
  PageWeights to;              // nothing of heads whose selection is bad

  __device__ __forceinline__ BatchToken token_of(int head) const { return tokens[head / kv_heads]; }
  __device__ __forceinline__ const __half* row(int head, int query) const {
    return logits + (std::int64_t{head} * group + query) * stride;
  }
};

void run_weigh(const WeighCall& call, const Launch& launch);

}  // namespace sluice::cuda
