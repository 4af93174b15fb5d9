// Prefill that attends to some pages only: the mean keys of pages, and the choice of the pages that
// a block of queries attends to.
//
// Queries of adjacent tokens attend to similar tokens, so their mean and the mean of a page's keys
// suffice to tell which pages none of them needs.
// Source: block-sparse heads of MInference (Jiang et al. 2024), section 3; their number, the fewest
// pages that carry a share of the weight, is from FlexPrefill (Lai et al. 2025), section 4.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "lib/backend/operation_label.h"
#include "sluice/batch.h"
#include "sluice/scorer.h"
#include "sluice/types.h"

namespace sluice {

// Means of the keys of whole pages, in bf16.
struct PageMeansView {
  std::uint16_t* means = nullptr;  // [sequences, kv_heads, pages, head_dim]
  std::int64_t pages = 0;          // most pages of a sequence

  constexpr std::uint16_t* of(const KvShape& shape, std::int64_t sequence, std::int64_t head,
                              std::int64_t page) const {
    return means + ((sequence * shape.kv_heads + head) * pages + page) * shape.head_dim;
  }
};

struct PageMeansParams {
  static constexpr OperationLabel kLabel = {"page_means", TraceKind::index};
  KvShape shape;
  WholePages pages;  // pages of a run, or those that tokens of a batch complete
  PageMeansView to;
};

// Pages that each block of a chunk's queries attends to, ascending, per KV head.
struct PageLists {
  static constexpr std::int64_t kBlock = 128;  // query tokens, counted from the chunk's first

  std::int32_t* pages = nullptr;   // [kv_heads, blocks, capacity], the first `counts` of each
  std::int32_t* counts = nullptr;  // [kv_heads, blocks]
  std::int64_t blocks = 0;
  std::int64_t capacity = 0;

  static constexpr std::int64_t blocks_of(std::int64_t tokens) {
    return (tokens + kBlock - 1) / kBlock;
  }
  constexpr bool exist() const { return pages != nullptr; }
  // Callable only where `pages` and `counts` can be dereferenced.
  constexpr std::span<std::int32_t> of(std::int64_t head, std::int64_t block) const {
    const std::int64_t entry = head * blocks + block;
    return {pages + entry * capacity, static_cast<std::size_t>(counts[entry])};
  }
};

// Chooses the page lists of a chunk of one sequence's tokens.
//
// A block lists the pages of its own tokens, the page before them and the first page. Of the pages
// that end before the block, it lists the fewest that carry `share` of their weight, and all that
// weigh the same as the lightest of these. A page's weight is the softmax, over the pages before
// the block, of the scaled product of its mean key and the mean of the block's queries; a KV head
// sums it over its query heads. If a weight is NaN, all pages are listed.
struct ChoosePagesParams {
  static constexpr OperationLabel kLabel = {"choose_pages", TraceKind::select};
  const float* q = nullptr;  // [tokens, query_heads, head_dim], `q_stride` floats between tokens
  std::int64_t tokens = 0;
  std::int64_t q_stride = 0;
  std::int64_t first = 0;  // position of the first query
  std::int32_t sequence = 0;
  KvShape shape;
  float scale = 0.0f;  // of the logits
  double share = 1.0;  // 1: all pages
  PageMeansView means;
  PageLists lists;
  std::uint32_t* listed = nullptr;  // reported [kv_heads, means.pages]: blocks that list a page
};

}  // namespace sluice
