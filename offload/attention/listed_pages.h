// Prefill that attends to some pages only (`prefill=pages(SHARE)`): means of the keys of every
// sequence's pages, kept beside the rows, and for one piece of a prompt at a time the pages that
// its blocks of queries attend to. See lib/backend/page_ops.h.
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

  // Pages that a step made whole.
  void build(int layer, const WholePages& pages);
  // What one sequence has becomes another's.
  void copy(std::int32_t from, std::int32_t to);

  // Lists for the queries of a step, from what build() made of their own pages and of those before.
  // They last until the next call.
  PageLists choose(int layer, std::int32_t sequence, const StepRange& step, const Queries& queries,
                   double share);
  // Brings what the step's choices listed to the host, which has it once the queue is idle.
  void issue_report();
  // By page: how many blocks of queries of a layer's last choice it was listed for, of a KV head.
  std::span<const std::uint32_t> listed(int layer, int head) const;

 private:
  std::size_t means_of_sequence() const;  // bytes in one layer
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
  Buffer host_listed_;  // host memory, likewise
};

}  // namespace sluice
