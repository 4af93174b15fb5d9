// Scores one page of key tiles of 1 to 4 bits, or raw rows, against the queries of a KV head.
#pragma once

#include <cstdint>
#include <span>

#include "cpu/scan/key_index.h"

namespace sluice::cpu {

// Most query heads that share one pass over a page.
inline constexpr int kMaxBunch = 4;

// One page as a scan reads it.
struct PageScan {
  TilePage page;
  int bits = 4;
  const ChannelList* channels = nullptr;
  const std::byte* next = nullptr;  // tile of the page read next, to be prefetched
};

// Folds up to kMaxBunch queries, `stride` floats apart and scaled by a factor each, into a page's
// scales and zeros.
void fold_queries(const float* q, std::int64_t stride, std::span<const float> factors,
                  const PageScan& scan, PageQuery* folded);

// logits[h][t] = folded[h].factor * dot + folded[h].offset for the page's kPageTokens tokens and
// up to kMaxBunch queries.
void score_page(const PageScan& scan, std::span<const PageQuery> folded,
                std::span<float* const> logits);

// logits[t] = factor * q . key over `channels` of rows [0, count); consecutive `rows` are row_bytes
// apart.
struct RowScan {
  const std::byte* rows = nullptr;
  std::int64_t count = 0;
  std::size_t row_bytes = 0;
  PartFormat format;  // of keys
  int head_dim = 0;
};
void score_rows(const RowScan& scan, const float* q, float factor, const ChannelList& channels,
                float* logits);

// logits[s * kBoundTokens + t] = factor * sum over channels of max(q * min, q * max), the same for
// all tokens t of sub-page s; `bounds` are one page's bounds in the layout of PageBounds.
void score_bounds(const std::uint16_t* bounds, int head_dim, const float* q, float factor,
                  float* logits);

}  // namespace sluice::cpu
