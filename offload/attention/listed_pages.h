// Prefill that attends to some pages only (`prefill=pages(SHARE)`): the mean key of every page of
// every sequence, kept beside the rows, and for one chunk of a prompt at a time the pages that its
// blocks of queries attend to. See lib/backend/page_ops.h.
#pragma once

#include <cstdint>
#include <span>

#include "lib/backend.h"
#include "offload/plan/prefill_bytes.h"
#include "offload/tiers/kv_rows.h"
#include "sluice/kv_cache.h"

namespace sluice {

class ListedPages {
 public:
  ListedPages(Queue& queue, const KvPlan& plan, Tier tier);

  // Computes the mean keys of pages that a step made whole.
  void build(int layer, const WholePages& pages);
  // Copies a sequence's mean keys to another sequence.
  void copy(std::int32_t from, std::int32_t to);

  // Page lists for the queries of a step, chosen by the means that build() made of their own pages
  // and of those before. Valid until the next call.
  PageLists choose(int layer, std::int32_t sequence, const StepRange& step, const Queries& queries,
                   double share);
  // Copies the step's counts of listed pages to the host, which has them once the queue is idle.
  void issue_report();
  // By page: the number of query blocks that listed it in a layer's last choice, for one KV head.
  std::span<const std::uint32_t> listed(int layer, int head) const;

 private:
  std::size_t means_of_sequence() const;  // bytes per layer
  PageMeansView means(int layer) const;

  Queue* queue_;
  KvShape shape_;
  std::int64_t sequences_;
  std::int64_t pages_of_sequence_;
  std::int64_t blocks_;
  Buffer means_;        // bf16 [layers, sequences, kv_heads, pages, head_dim]
  Buffer pages_;        // [kv_heads, blocks, pages]
  Buffer counts_;       // [kv_heads, blocks]
  Buffer listed_;       // [layers, kv_heads, pages]
  Buffer host_listed_;  // host memory, [layers, kv_heads, pages]
};

}  // namespace sluice
