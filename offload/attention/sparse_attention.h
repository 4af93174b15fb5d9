// Attention of decoded tokens over the rows that a policy chooses.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "lib/backend.h"
#include "offload/attention/estimate_reads.h"
#include "offload/attention/key_index.h"
#include "offload/cache/row_cache.h"
#include "offload/tiers/block_tables.h"
#include "offload/tiers/kv_rows.h"
#include "sluice/batch.h"
#include "sluice/policy.h"
#include "sluice/scorer.h"
#include "sluice/selection.h"

namespace sluice {

// Which tokens may be attended, the backend's memory: 0 for those that may not; null: all may.
struct Mask {
  const std::uint8_t* tokens = nullptr;  // [sequences, stride]
  std::int64_t stride = 0;
};

class SparseAttention {
 public:
  // Allocates the index and the work space of `layout` in `tier`. `cache`, if there is one, lives
  // as long.
  SparseAttention(Queue& queue, const IndexLayout& layout, const Scorers& scorers, Tier tier,
                  RowCache* cache = nullptr);

  KeyIndex& index() { return index_; }
  // Where append_batch() puts what the sums of values are after each token of the batch:
  // [batch, kv_heads, head_dim].
  float* token_sums() const { return token_sums_.floats(); }

  // Selects and attends for every token of the batch. Each sees what it would see alone: a page
  // serves as an index only to tokens after it. Masked tokens are never chosen.
  void attend(const Policy& policy, int layer, const TokenBatch& batch, const Queries& queries,
              const PagedRows& rows, const Mask& mask);

  // Selects only, for layers that follow one which attends to everything.
  void select(const Policy& policy, int layer, const TokenBatch& batch, const Queries& queries,
              const PagedRows& rows);

  // Asks for what the step reports.
  void issue_report();
  // What a step was.
  struct Step {
    const Policy* policy = nullptr;
    bool evicts = false;  // tokens are masked
    std::span<const BatchToken> tokens;
    const BlockTables* tables = nullptr;  // where the rows are
    int set = 0;                          // of the tables, that the layer is of
  };
  // Once the report is there: what the tokens of one sequence did in a layer goes to the ledger and
  // into `entry`. Throws Error{numeric} naming layer and KV head if an estimate was NaN or
  // infinite.
  void finish(const Step& step, int layer, std::int32_t sequence, Ledger& ledger,
              LayerSelection& entry) const;
  // Throws the same for a key or value that a page of the index was built from.
  void check_pages(std::int32_t sequence) const;

 private:
  // A layer's part of a step: some tokens of the batch, those whose estimates fit at a time.
  struct Wave {
    int layer = 0;
    std::int64_t first = 0;  // token of the batch
    TokenBatch batch;
    const float* q = nullptr;
    std::int64_t q_stride = 0;
    PagedRows rows;
    Mask mask;
    bool skip_newest = false;  // the newest rows take no part in selecting, see newest_apart()
  };

  // What select() reports.
  struct Report {
    Buffer all;
    HeadSelection* candidate_heads = nullptr;  // [layers, batch, kv_heads]
    HeadSelection* heads = nullptr;            // likewise
    float* share = nullptr;                    // [layers, batch, query_heads], of the candidates
    float* alpha = nullptr;                    // likewise
    std::int32_t* pages_read = nullptr;        // [layers, batch, kv_heads], for the candidates
    std::int32_t* resident = nullptr;          // likewise, of the selected rows those on the device
    std::int32_t* evicted = nullptr;           // likewise, written if there is a row cache
    std::int32_t* value_pages = nullptr;       // likewise, of value tiles; or none
  };
  static Report make_report(Backend& backend, const IndexLayout& layout, Tier tier);

  void for_waves(const Policy& policy, int layer, const TokenBatch& batch, const Queries& queries,
                 const PagedRows& rows, const Mask& mask,
                 const std::function<void(const Wave&)>& body);
  void choose(const Policy& policy, const Wave& wave);
  void choose_fixed(const Policy& policy, const Wave& wave);
  void propose(const Policy& policy, const Wave& wave);
  void rescore(const Policy& policy, const Wave& wave);
  void score(const Policy& policy, const Wave& wave, const EstimateParams& estimate);
  EstimateParams estimate_params(const Wave& wave) const;
  // Whatever the stage: what is always kept, and what may be.
  SelectParams select_params(const Policy& policy, const Wave& wave) const;
  void prune(const Policy& policy, const Wave& wave, SelectParams params);
  void attend_wave(const Policy& policy, const Wave& wave, int source, const Queries& queries);
  // Looks for the selected rows in the cache.
  void find_rows(const Wave& wave, AttendSelectedParams& params);
  // Adds what is not selected, by its values in a few bits.
  void attend_values(const Policy& policy, const Wave& wave, const AttendSelectedParams& attended);
  bool newest_apart(const Policy& policy, int layer, bool masked) const;
  const Scorer& scorer_of(const Policy& policy) const { return scorers_.at(policy.select); }

  SelectionView selection(int layer, std::int64_t token) const;
  SelectionView candidates(int layer, std::int64_t token) const;
  // Where a layer's token has its entries among those of KV heads and query heads.
  std::int64_t head_entry(int layer, std::int64_t token) const;
  std::int64_t query_entry(int layer, std::int64_t token) const;
  const float* value_sums(const Wave& wave) const;
  float* share(int layer, std::int64_t token) const;
  float* alpha(int layer, std::int64_t token) const;
  // What one layer's tokens did, per cause; summed over tokens and KV heads.
  struct Count {
    EstimateTraffic estimates;
    std::uint64_t hits = 0;
    std::uint64_t misses = 0;
    std::uint64_t evicted = 0;
    std::uint64_t value_pages = 0;
    std::int64_t tokens = 0;
  };
  void count_rows(int layer, int source, std::int64_t number, const BatchToken& token, Count& count,
                  LayerSelection& entry) const;
  void count_estimates(const Step& step, int layer, std::int64_t number, Count& count) const;
  void count_alpha(int source, std::int64_t number, LayerSelection& entry) const;
  void record_rows(int layer, const Count& count, Ledger& ledger) const;
  void record_index(int layer, const Count& count, Ledger& ledger) const;
  void report_positions(int source, std::int64_t number, LayerSelection& entry) const;
  void require_number(bool is_number, int layer, int head) const;

  Queue* queue_;
  IndexLayout layout_;
  Scorers scorers_;
  KeyIndex index_;
  Tier tier_;
  RowCache* cache_;
  Buffer logits_;            // [wave, query_heads, context]
  Buffer digest_;            // of these logits
  Buffer page_weights_;      // of the digest
  Buffer candidate_logits_;  // [wave, query_heads, candidates + kPageTokens]
  LogitView estimated_;      // what the latest wave's estimates became, of all tokens
  Buffer lse_;               // [wave, query_heads], of the latest wave's logits
  Buffer positions_;         // [slots, kv_heads, selected]
  Buffer seen_positions_;    // the host's copy of it, where positions are reported
  Buffer candidates_;        // [wave, kv_heads, candidates]
  Buffer token_sums_;        // [batch, kv_heads, head_dim]
  Report report_;            // in `tier_`
  Report seen_;              // the host's copy of it
  Buffer arena_;             // [kv_heads, arena_rows, row_bytes]
};

}  // namespace sluice
