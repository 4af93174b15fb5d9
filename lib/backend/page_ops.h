// Prefill that attends to some pages only: the mean keys of pages, and the choice of the pages that
// a block of queries attends to.
//
// Queries of adjacent tokens attend to similar tokens, so their mean and the mean of a page's keys
// suffice to tell which pages none of them needs.
// Source: block-sparse heads of MInference (Jiang et al. 2024), section 3; as many as carry a share
// of the weight as in FlexPrefill (Lai et al. 2025), section 4.
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
  std::int64_t pages = 0;          // that a sequence may have

  constexpr std::uint16_t* of(const KvShape& shape, std::int64_t sequence, std::int64_t head,
                              std::int64_t page) const {
    return means + ((sequence * shape.kv_heads + head) * pages + page) * shape.head_dim;
  }
};

struct PageMeansParams {
  static constexpr OperationLabel kLabel = {"page_means", TraceKind::index};
  KvShape shape;
  WholePages pages;  // of a run, or that tokens of a batch are the last of
  PageMeansView to;
};

// Pages that each block of a chunk's queries attends to, ascending, per KV head.
struct PageLists {
  static constexpr std::int64_t kBlock = 128;  // query tokens, counted from the chunk's first

  std::int32_t* pages = nullptr;   // [kv_heads, blocks, capacity], `counts` of them
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

// Lists for a chunk of one sequence's tokens.
//
// The pages of a block's own tokens are listed, the page before them and the first page. Of all
// pages that end before the block, those are listed that are as heavy as the lightest of the fewest
// that carry `share` of the weight. A page's weight is the softmax, over these pages, of the scaled
// product of its mean key and the mean of the block's queries; of a KV head, the sum over its query
// heads. If a weight is NaN, all pages are listed.
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
  std::uint32_t* listed = nullptr;  // reported [kv_heads, means.pages]: how many blocks list a page
};

}  // namespace sluice
