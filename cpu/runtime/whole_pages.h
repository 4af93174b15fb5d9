// Whole pages of rows, from which an index or value tiles are built.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/runtime/threads.h"
#include "sluice/batch.h"

namespace sluice::cpu {

// A page of one KV head.
struct WholePage {
  std::int64_t sequence = 0;
  std::int64_t head = 0;
  std::int64_t number = 0;          // among the pages of the sequence
  const std::byte* rows = nullptr;  // [kPageTokens, row_bytes]
};

// Pages of a run, for every KV head. `Params`: BuildIndexParams or BuildValuesParams.
template <typename Params>
std::vector<WholePage> pages_of_run(const Params& p) {
  const std::size_t page_bytes = kPageTokens * p.shape.row_bytes();
  std::vector<WholePage> pages;
  for (std::int64_t i = 0; i < p.pages; ++i) {
    for (std::int64_t head = 0; head < p.shape.kv_heads; ++head) {
      const std::byte* const rows = p.rows[static_cast<std::size_t>(head)].rows;
      pages.push_back(
          {p.sequence, head, p.first_page + i, rows + static_cast<std::size_t>(i) * page_bytes});
    }
  }
  return pages;
}

// Pages that a token of the batch completes, for every KV head. `Params`: BuildBatchParams or
// BuildValuesBatchParams.
template <typename Params>
std::vector<WholePage> pages_of_batch(const Params& p) {
  const auto row_bytes = static_cast<std::int64_t>(p.shape.row_bytes());
  std::vector<WholePage> pages;
  for (std::int64_t i = 0; i < p.batch.count; ++i) {
    const BatchToken& token = p.batch.tokens[i];
    if (token.count() % kPageTokens != 0) continue;
    for (std::int64_t head = 0; head < p.shape.kv_heads; ++head) {
      pages.push_back({token.sequence, head, token.pages(),
                       p.rows.row(token.sequence, head, token.page_first(), row_bytes)});
    }
  }
  return pages;
}

// Builds each page by build(page). Sets params.bad of the sequence and KV head where build()
// returns false, because an element of the rows is NaN or Inf.
template <typename Params, typename Build>
void build_pages(const Params& params, const std::vector<WholePage>& pages, Threads& threads,
                 const Build& build) {
  const auto count = static_cast<std::int64_t>(pages.size());
  const auto row_bytes = static_cast<std::int64_t>(params.shape.row_bytes());
  threads.for_each(
      count,
      [&](std::int64_t task) {
        const WholePage& page = pages[static_cast<std::size_t>(task)];
        if (!build(page)) params.bad[page.sequence * params.shape.kv_heads + page.head] = 1;
      },
      count * kPageTokens * row_bytes);
}

// The same on the calling thread, one page after the other.
template <typename Params, typename Build>
void build_pages(const Params& params, const std::vector<WholePage>& pages, const Build& build) {
  for (const WholePage& page : pages) {
    if (!build(page)) params.bad[page.sequence * params.shape.kv_heads + page.head] = 1;
  }
}

}  // namespace sluice::cpu
