// Prefill among the important tokens of a prompt only. Source: ZipVL (He et al. 2024), sections 4.1
// and 4.2. A layer sees the whole prompt before its attention runs, so the caller goes layer by
// layer: append and collect all chunks, choose, then attend to all chunks.
//
// The backend chooses; the host waits for it once per layer, because it needs the number of rows.
// Important rows are gathered once, and then attended like any run of rows.
//
// In a plan with ragged tables (some policy evicts) a layer's rows, those of earlier tokens and
// then those of the prompt, are staged in one buffer, because only the layer's choice tells which
// of them get pages. The caller then writes those, see rows_to_write(). Other plans write rows to
// their pages as they come.
//
// Positions are those of rows in the layer: after an eviction fewer than those of tokens.
#pragma once

#include <cstdint>
#include <span>
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
  // Allocates in `tier` the work space that the layout plans, and rows.compact and rows.prompt
  // bytes for rows.
  ImportantTokens(Queue& queue, const IndexLayout& layout, const DeviceRowBytes& rows, Tier tier);

  // Begins a prompt of a sequence: tokens `prompt`. Probes are its 64 newest tokens and 64 random
  // others, the same ones in every layer and run. Throws Error{unsupported} if the rows are not
  // staged and those of the sequence, or of those that it was forked from, are not contiguous.
  void begin(std::int32_t sequence, const StepRange& prompt, const KvPool& pool);
  // Begins a layer; stages its rows of earlier tokens, and counts those that cross for it.
  void begin_layer(int layer, const KvPool& pool, Ledger& ledger);
  bool stages() const { return staged_.data() != nullptr; }
  // Stages a chunk's rows.
  void stage(const StepRange& piece, const NewRows& rows);
  // Keeps the queries of the chunk's probes.
  void collect(const StepRange& piece, const Queries& queries);
  // Chooses the tokens of the prompt that are important to the layer: those with the highest mean
  // score that carry the share tau of the probes' attention. The newest 64 are always among them,
  // because the next tokens depend on them. Waits for the queue. Throws Error{numeric} if a score
  // is NaN.
  void choose(const SparsePrefill& how, const KvPool& pool);
  // By row of the layer: 1 if it is important or of an earlier token, else 0.
  std::span<const std::uint8_t> listed() const {
    return {reinterpret_cast<const std::uint8_t*>(host_listed_.data()),
            static_cast<std::size_t>(local_.end())};
  }
  // Rows that the layer has of earlier tokens, and those that it has in the end: evicting, without
  // the rows of tokens that are not important.
  std::int64_t rows_before() const { return local_.first; }
  std::int64_t rows_in_all(const SparsePrefill& how) const {
    return how.evict ? listed_tokens_.count() : local_.end();
  }
  // Of the rows that are to be written, those from `first` on that lie together, at most `most`.
  // Valid until the next call.
  std::vector<RowSpan> rows_to_write(const SparsePrefill& how, std::int64_t first,
                                     std::int64_t most, const KvPool& pool, Ledger& ledger);
  // Attention of one chunk. Evicting, as in the paper: important tokens attend to the important
  // tokens up to them; the other tokens' attention is zero. Demoting: all tokens attend to their
  // block of 512, up to themselves, and to the important tokens before it, because a token whose
  // attention is zero in some layers has lost what later layers would find in it, and keeping its
  // rows does not bring that back. Tokens before the prompt are attended in either case.
  //
  // The ledger counts rows that cross as misses (important rows when they are gathered), and the
  // rows that each chunk attends to as hits, except misses of its own blocks.
  void attend(const SparsePrefill& how, const StepRange& piece, const Queries& queries,
              const KvPool& pool, Ledger& ledger);

 private:
  // A chunk's rows in the layer.
  StepRange local(const StepRange& piece) const {
    return {piece.first - prompt_.first + local_.first, piece.tokens};
  }
  // The run of all rows up to the prompt's end; an empty run if they are not contiguous.
  RowRun all_rows(const KvPool& pool, int set) const;
  std::byte* staged_row(int head, std::int64_t row) const;
  std::vector<RowSpan> staged(std::int64_t first, std::int64_t count) const;
  PagedRows rows(const KvPool& pool) const;
  void sum_columns(const KvPool& pool);

  // The first position of a token's block, or of the prompt if that is later.
  std::int64_t block_begin(std::int64_t position) const;
  void attend_blocks(const StepRange& piece, const Queries& queries, const KvPool& pool,
                     Ledger& ledger);
  void attend_run(AttendParams& params, const RowRun& run, const KvPool& pool, Ledger& ledger);
  void attend_staged(AttendParams& params, std::int64_t first, std::int64_t end, const KvPool& pool,
                     Ledger& ledger);
  void attend_before(const StepRange& piece, const Queries& queries, const KvPool& pool,
                     Ledger& ledger);
  void attend_important(const StepRange& piece, const Queries& queries, const KvPool& pool,
                        Ledger& ledger);
  void count_hits(std::int64_t rows, const KvPool& pool, Ledger& ledger) const;
  void attend_listed(AttendParams& params, std::int64_t count, const KvPool& pool, Ledger& ledger);
  void bring(std::int64_t first, std::int64_t count, const KvPool& pool, Ledger& ledger);
  std::vector<RowSpan> brought(std::int64_t first, std::int64_t count) const;
  const std::int32_t* positions() const {
    return reinterpret_cast<const std::int32_t*>(positions_.data());
  }

  Queue* queue_;
  KvShape shape_;
  std::int64_t arena_rows_;
  std::int64_t staged_rows_;
  std::int32_t sequence_ = 0;
  StepRange prompt_;  // tokens
  int layer_ = 0;
  StepRange local_;                   // the prompt's rows in the layer
  std::vector<std::int64_t> probes_;  // from the prompt's first token on, ascending
  ListedTokens listed_tokens_;        // tokens that may be attended in this layer
  std::int64_t brought_ = -1;         // number of the first listed row in the arena; -1: none
  Buffer probe_queries_;              // [probes, query_heads, head_dim]
  Buffer sums_;                       // [context]
  Buffer listed_;                     // [context]
  Buffer positions_;                  // [context]
  Buffer seen_;                       // [context]
  Buffer packed_q_;                   // [kPackedTokens, query_heads, head_dim]
  Buffer packed_out_;                 // [kPackedTokens, query_heads, head_dim]
  Buffer packed_lse_;                 // [kPackedTokens, query_heads]
  Buffer arena_;                      // [kv_heads, arena_rows, row_bytes]
  Buffer staged_;       // [kv_heads, staged_rows, row_bytes]; null: rows are not staged
  Buffer table_;        // PageSlots [pages of staged_], each page in its own place
  Buffer host_listed_;  // host memory, [context]
  Buffer bad_;          // [1], reported
};

}  // namespace sluice
