// A call of attend_tiles() by value, and the buffers that its kernels share.
//
// A head is a KV head of a token of the batch: number token * kv_heads + KV head. Launches depend
// on the batch's capacity alone; what follows from a token's position is found on the device.
// Weights are relative to the log-sum-exp that select() reported, so that sums of them just add up.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/runtime/launch.h"
#include "kernels/runtime/page_weights.h"
#include "kernels/runtime/paged.cuh"
#include "kernels/values/tile.cuh"
#include "kernels/values/values.h"
#include "lib/value_tiles.h"
#include "sluice/batch.h"

namespace sluice::cuda {

struct TilesCall {
  const BatchToken* tokens = nullptr;
  const HeadSelection* selections = nullptr;  // reported [heads]
  const __half* logits = nullptr;             // [heads, group, stride]
  std::int64_t stride = 0;
  const float* lse = nullptr;  // [heads, group]
  TilePool values;
  int bits = 0;
  int kv_heads = 0;
  int heads = 0;
  int group = 0;
  int head_dim = 0;
  int channels = 0;              // of a page
  const float* basis = nullptr;  // ValueTiles::basis
  float share = 1.0f;
  const float* value_sums = nullptr;  // [heads, head_dim]
  float* out = nullptr;               // [heads, group, head_dim]
  float* out_lse = nullptr;           // [heads, group]
  bool merge = false;
  std::int32_t* pages_read = nullptr;  // reported [heads] or null
  bool is_beside = false;              // waits for the kernel before only to merge

  // Division of the work.
  std::int32_t most_pages = 0;   // per head
  std::int32_t splits = 0;       // blocks that read pages of a head
  std::int32_t query_parts = 0;  // per group
  std::int32_t readers = 0;      // the first warps of a block, which read pages
  std::int32_t stages = 0;       // pages in shared memory per reading warp

  PageWeights weights;
  float* partials = nullptr;  // scratch: [heads, query_parts, splits, partial_floats()] of blocks
  std::uint32_t* tickets = nullptr;  // [heads, query_parts], zero before and after

  __device__ __forceinline__ BatchToken token_of(int head) const { return tokens[head / kv_heads]; }
  __device__ __forceinline__ const __half* row(int head, int query) const {
    return logits + (std::int64_t{head} * group + query) * stride;
  }
};

// Floats of a block's partial: sums of values [kTileQueries, channels], masses [kTileQueries].
__host__ __device__ constexpr std::int64_t partial_floats(int channels) {
  return kTileQueries * (channels + std::int64_t{1});
}

void run_read(const TilesCall& call, const Launch& launch);

}  // namespace sluice::cuda
