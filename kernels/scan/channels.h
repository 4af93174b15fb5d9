// One scan pass: the query heads it serves, its channels and its pages.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lib/backend/index_ops.h"

namespace sluice::cuda {

// Tokens per launch; larger batches take several launches.
inline constexpr int kScanTokens = 64;

// Query heads per KV head and pass; larger groups take several passes.
inline constexpr int kMaxQueries = 16;

// One pass over the keys of every KV head, for up to kMaxQueries of its query heads.
struct ScanPass {
  const EstimateParams* estimate = nullptr;
  int first_query = 0;  // within a KV head's group
  int queries = 0;
};

// Channels used for logits: SparQ uses `channels` of them, other methods all.
inline int channels_of(const EstimateParams& p) {
  return p.method == Selector::sparq ? std::min(p.channels, p.shape.head_dim) : p.shape.head_dim;
}

// Upper bound of the whole pages before a token's own page.
inline std::int64_t most_pages(const TokenBatch& batch) {
  return std::max<std::int64_t>(batch.capacity - 1, 0) / kPageTokens;
}

}  // namespace sluice::cuda
