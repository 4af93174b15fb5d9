// What scans of a call are told: which of its query heads they serve.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lib/backend/index_ops.h"

namespace sluice::cuda {

// Tokens of one launch; larger batches take several.
inline constexpr int kScanTokens = 64;

// Query heads of a KV head that one pass serves; larger groups take several.
inline constexpr int kMaxQueries = 16;

// One pass over the keys of every KV head, for up to kMaxQueries of its query heads.
struct ScanPass {
  const EstimateParams* estimate = nullptr;
  int first_query = 0;  // of the query heads of a KV head
  int queries = 0;
};

// Channels that count.
inline int channels_of(const EstimateParams& p) {
  return p.method == Selector::sparq ? std::min(p.channels, p.shape.head_dim) : p.shape.head_dim;
}

// Whole pages before its own that a token of a batch may have.
inline std::int64_t most_pages(const TokenBatch& batch) {
  return std::max<std::int64_t>(batch.capacity - 1, 0) / kPageTokens;
}

}  // namespace sluice::cuda
