// Prefill among the important tokens of a prompt only. Source: ZipVL (He et al. 2024), sections 4.1
// and 4.2. A layer sees the whole prompt before its attention runs, so the caller goes layer by
// layer: append and collect all pieces, choose, then attend to all pieces.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/backend/memory.h"
#include "lib/backend/queue.h"
#include "offload/kv_rows.h"
#include "offload/sparse_attention.h"
#include "sluice/policy.h"

namespace sluice {

class KvPool;

// What ImportantTokens allocates for prompts of up to `context` tokens.
struct ImportantTokenBytes {
  ImportantTokenBytes(const KvShape& shape, std::int64_t context, std::int64_t sequences);

  std::size_t probe_queries;
  std::size_t positions;
  std::size_t queries;
  std::size_t out;
  std::size_t lse;
  std::size_t arena;
  std::size_t zeros;
  std::size_t masks;
  std::size_t sums;  // host memory

  // Where attention looks, and in host memory, which has a copy of the masks.
  std::uint64_t work() const;
  std::uint64_t host() const { return sums + masks; }
};

class ImportantTokens {
 public:
  // Work space for prompts of up to `context` tokens, in `tier`.
  ImportantTokens(Queue& queue, const KvShape& shape, std::int64_t context, std::int64_t sequences,
                  Tier tier);

  // A prompt of a sequence after `prompt.first` earlier tokens. Probes are its 64 newest tokens and
  // 64 others, the same ones in every layer and run.
  void begin(std::int32_t sequence, const StepRange& prompt);
  // Keeps the queries of the piece's probes.
  void collect(const StepRange& piece, const Queries& queries);
  // Decides which tokens of the prompt are important to `layer`: as many as carry the share tau of
  // the probes' attention, those with the highest mean score. The newest 64 are always among them,
  // for what comes next hangs on them. With `evict` the others are never attended again. Throws
  // Error{unsupported} if the rows of the sequence, or of those that it was forked from, do not
  // follow each other.
  void choose(int layer, const SparsePrefill& how, const KvPool& pool);
  // Evicting, as the paper does: attention of the piece's important tokens to the important tokens
  // up to them; the others' is zero. Demoting: attention of all tokens to their block of 512, up to
  // themselves, and to the important tokens before it, because a token whose attention is zero in
  // some layers has lost what later layers would find in it, and keeping its rows does not bring
  // that back. What came before the prompt is attended in either case. Counts the rows read.
  void attend(int layer, const SparsePrefill& how, const StepRange& piece, const Queries& queries,
              const KvPool& pool, Ledger& ledger);

  // Whether tokens were evicted, of any sequence; then, which of them may still be attended.
  bool has_evicted() const { return evicted_; }
  Mask mask(int layer) const;
  // Tokens of a sequence from `length` on are forgotten; new ones in their place may be attended.
  void rewind(std::int32_t sequence, std::int64_t length);
  // What one sequence's tokens may attend to becomes another's.
  void copy(std::int32_t from, std::int32_t to);

 private:
  std::vector<float> column_sums(int layer, const KvPool& pool);
  std::size_t mask_offset(int layer, std::int32_t sequence) const {
    return static_cast<std::size_t>((layer * sequences_ + sequence) * context_);
  }
  std::uint8_t* eligible(int layer, std::int32_t sequence) {
    return reinterpret_cast<std::uint8_t*>(eligible_.data()) + mask_offset(layer, sequence);
  }
  // Brings [first, end) of a sequence's mask to where attention looks.
  void publish(int layer, std::int32_t sequence, std::int64_t first, std::int64_t end);

  // What a piece attends to: query token i of the part sees keys [0, first_query + i].
  struct Part {
    std::vector<std::int32_t> keys;     // positions, ascending
    std::vector<std::int64_t> queries;  // in the block
    std::int64_t first_query = 0;
  };
  Part whole_block(const StepRange& block) const;
  Part important_part(const StepRange& block) const;
  void attend_block(int layer, const Part& part, const StepRange& block, const Queries& queries,
                    const KvPool& pool, Ledger& ledger);
  void record(int layer, const std::vector<std::int32_t>& keys, const KvPool& pool,
              Ledger& ledger) const;
  void put_keys(const std::vector<std::int32_t>& keys);
  void copy_queries(const Part& part, const StepRange& block, const Queries& queries);

  Queue* queue_;
  KvShape shape_;
  std::int64_t context_;
  std::int64_t sequences_;
  std::int32_t sequence_ = 0;
  StepRange prompt_;
  std::vector<std::int64_t> probes_;     // positions, ascending
  std::vector<std::int32_t> keys_;       // positions that may be attended in this layer, ascending
  std::vector<std::uint8_t> important_;  // [prompt.tokens]
  std::vector<CopyOp> out_ops_;          // of the block being attended
  bool evicted_ = false;
  Buffer probe_queries_;  // [probes, query_heads, head_dim]
  Buffer sums_;           // reported [context]
  Buffer positions_;      // [kv_heads, context]
  Buffer queries_;        // [kBlock, query_heads, head_dim]
  Buffer out_;            // likewise
  Buffer lse_;            // [kBlock, query_heads]
  Buffer arena_;          // [kv_heads, kArenaRows, row_bytes]
  Buffer zeros_;          // [query_heads, head_dim]
  Buffer eligible_;       // host memory, [layers, sequences, context]
  Buffer masks_;          // a copy of it in `tier`
};

}  // namespace sluice
