// Prefill among the important tokens of a prompt only. Source: ZipVL (He et al. 2024), sections 4.1
// and 4.2. A layer sees the whole prompt before its attention runs, so the caller goes layer by
// layer: append and collect all chunks, choose, then attend to all chunks.
//
// The backend chooses; the host waits for it once per layer, because it needs the number of rows.
// Important rows are gathered once, and then attended like any run of rows.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/backend/memory.h"
#include "lib/backend/queue.h"
#include "offload/attention/listed_tokens.h"
#include "offload/attention/sparse_attention.h"
#include "offload/plan/prefill_bytes.h"
#include "offload/tiers/kv_rows.h"
#include "sluice/policy.h"

namespace sluice {

class KvPool;

class ImportantTokens {
 public:
  // Allocates in `tier` the work space that the layout plans, and `row_bytes` bytes for rows.
  ImportantTokens(Queue& queue, const IndexLayout& layout, std::uint64_t row_bytes, Tier tier);

  // Begins a prompt of a sequence after `prompt.first` earlier tokens. Probes are its 64 newest
  // tokens and 64 random others, the same ones in every layer and run.
  void begin(std::int32_t sequence, const StepRange& prompt, const KvPool& pool);
  // Keeps the queries of the chunk's probes.
  void collect(const StepRange& piece, const Queries& queries);
  // Chooses the tokens of the prompt that are important to `layer`: those with the highest mean
  // score that carry the share tau of the probes' attention. The newest 64 are always among them,
  // because the next tokens depend on them. With `evict` the others are never attended again.
  // Waits for the queue. Throws Error{unsupported} if the rows of the sequence, or of those that it
  // was forked from, are not contiguous, and Error{numeric} if a score is NaN.
  void choose(int layer, const SparsePrefill& how, const KvPool& pool);
  // Attention of one chunk. Evicting, as in the paper: important tokens attend to the important
  // tokens up to them; the other tokens' attention is zero. Demoting: all tokens attend to their
  // block of 512, up to themselves, and to the important tokens before it, because a token whose
  // attention is zero in some layers has lost what later layers would find in it, and keeping its
  // rows does not bring that back. Tokens before the prompt are attended in either case.
  //
  // The ledger counts rows that cross as misses (important rows when they are gathered), and the
  // rows that each chunk attends to as hits, except misses of its own blocks.
  void attend(int layer, const SparsePrefill& how, const StepRange& piece, const Queries& queries,
              const KvPool& pool, Ledger& ledger);

  // Eviction in any sequence, in one sequence, and the tokens that may still be attended.
  bool has_evicted() const { return evicted_; }
  bool has_evicted_of(std::int32_t sequence) const;
  Mask mask(int layer) const;
  // Forgets the mask of a sequence from `length` on: new tokens there may be attended.
  void rewind(std::int32_t sequence, std::int64_t length);
  // Copies one sequence's mask to another.
  void copy(std::int32_t from, std::int32_t to);

 private:
  // The run of all rows up to the prompt's end; an empty run if they are not contiguous.
  RowRun all_rows(const KvPool& pool, int set) const;
  void sum_columns(int layer, const KvPool& pool);
  void keep_mask(int layer);
  std::size_t mask_offset(int layer, std::int32_t sequence) const {
    return static_cast<std::size_t>((layer * sequences_ + sequence) * context_);
  }
  std::uint8_t* eligible(int layer, std::int32_t sequence) const {
    return reinterpret_cast<std::uint8_t*>(eligible_.data()) + mask_offset(layer, sequence);
  }
  // Null if every token of the sequence may be attended.
  const std::uint8_t* eligible_on_backend(int layer) const;
  // Copies [first, end) of a sequence's mask to where attention reads it.
  void publish(int layer, std::int32_t sequence, std::int64_t first, std::int64_t end);

  // The first position of a token's block, or of the prompt if that is later.
  std::int64_t block_begin(std::int64_t position) const;
  void attend_blocks(int layer, const StepRange& piece, const Queries& queries, const KvPool& pool,
                     Ledger& ledger);
  void attend_run(int layer, AttendParams& params, const RowRun& run, const KvPool& pool,
                  Ledger& ledger);
  void attend_before(int layer, const StepRange& piece, const Queries& queries, const KvPool& pool,
                     Ledger& ledger);
  void attend_important(int layer, const StepRange& piece, const Queries& queries,
                        const KvPool& pool, Ledger& ledger);
  void count_hits(int layer, std::int64_t rows, const KvPool& pool, Ledger& ledger) const;
  void attend_listed(int layer, AttendParams& params, std::int64_t count, const KvPool& pool,
                     Ledger& ledger);
  void bring(int layer, std::int64_t first, std::int64_t count, const KvPool& pool, Ledger& ledger);
  std::vector<RowSpan> brought(std::int64_t count) const;
  const std::int32_t* positions() const {
    return reinterpret_cast<const std::int32_t*>(positions_.data());
  }

  Queue* queue_;
  KvShape shape_;
  std::int64_t context_;
  std::int64_t sequences_;
  std::int64_t arena_rows_;
  std::int32_t sequence_ = 0;
  StepRange prompt_;
  std::vector<std::int64_t> probes_;  // positions, ascending
  ListedTokens listed_tokens_;        // tokens that may be attended in this layer
  std::int64_t brought_ = -1;         // number of the first listed row in the arena; -1: none
  bool evicted_ = false;
  Buffer probe_queries_;  // [probes, query_heads, head_dim]
  Buffer sums_;           // [context]
  Buffer listed_;         // [context]
  Buffer positions_;      // [context]
  Buffer seen_;           // [context]
  Buffer packed_q_;       // [kPackedTokens, query_heads, head_dim]
  Buffer packed_out_;     // [kPackedTokens, query_heads, head_dim]
  Buffer packed_lse_;     // [kPackedTokens, query_heads]
  Buffer arena_;          // [kv_heads, arena_rows, row_bytes]
  Buffer host_listed_;    // host memory, [context]
  Buffer eligible_;       // host memory, [layers, sequences, context]
  Buffer masks_;          // a copy of eligible_ in `tier`
  Buffer bad_;            // [1], reported
};

}  // namespace sluice
