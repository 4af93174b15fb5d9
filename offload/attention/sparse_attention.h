// Attention of decoded tokens over the rows that a policy chooses.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "lib/backend.h"
#include "offload/attention/counted_reads.h"
#include "offload/attention/estimate_reads.h"
#include "offload/attention/key_index.h"
#include "offload/cache/disk_rows.h"
#include "offload/cache/row_cache.h"
#include "offload/tiers/block_tables.h"
#include "offload/tiers/kv_rows.h"
#include "sluice/batch.h"
#include "sluice/policy.h"
#include "sluice/scorer.h"
#include "sluice/selection.h"

namespace sluice {

// Where selected rows are found that are not resident. Both outlive their user, and null stands for
// none. Without a disk, host memory has every row; with one there is a cache, too.
struct SelectedRows {
  RowCache* cache = nullptr;
  DiskRows* disk = nullptr;
};

class SparseAttention {
 public:
  // Allocates the index and the work space of `layout` in `tier`.
  SparseAttention(Queue& queue, const IndexLayout& layout, const Scorers& scorers, Tier tier,
                  const SelectedRows& selected = {}, const ValueBasis& basis = {});

  KeyIndex& index() { return index_; }
  // Sums of values after each token of the batch, written by append_batch():
  // [batch, kv_heads, head_dim].
  float* token_sums() const { return token_sums_.floats(); }

  // Forgets what choose_early() began in a step that was given up.
  void begin_step();
  // True if a layer under this policy has something to do before its turn: to select, or to bring
  // the rows that its anchor selected.
  bool begins_early(const Policy& policy, int layer) const {
    return policy.early_at(layer) != Early::none && (policy.selects(layer) || cache_ != nullptr);
  }
  // Chooses the rows of a layer that begins_early(), before its own rows were appended, and begins
  // to bring them; attend() then attends to them. `q`: early estimates of its queries, [batch,
  // query_heads, head_dim] with `q_stride` floats between tokens; unused and null in followers. May
  // be called within the queue's branch `layer % 2`, which attend() joins: beside all of the layer
  // before if Early::layer is in force, else beside its feed-forward part.
  void choose_early(const Policy& policy, int layer, const TokenBatch& batch, const float* q,
                    std::int64_t q_stride, const PagedRows& rows);

  // Selects, unless choose_early() did, and attends for every token of the batch. Each token gets
  // the result that it would get alone, because a page serves as an index only to tokens after it.
  void attend(const Policy& policy, int layer, const TokenBatch& batch, const Queries& queries,
              const PagedRows& rows);

  // Selects without attending, for a layer that attends to everything but has followers.
  void select(const Policy& policy, int layer, const TokenBatch& batch, const Queries& queries,
              const PagedRows& rows);

  // Copies the step's report to the host.
  void issue_report();
  // The step that a report is about.
  struct Step {
    const Policy* policy = nullptr;
    std::span<const BatchToken> tokens;   // as the layer has them
    const BlockTables* tables = nullptr;  // where the rows are
    int set = 0;                          // the layer's set in `tables`
  };
  // Adds what the tokens of one sequence did in a layer to the ledger and to `entry`. Call once the
  // report has reached the host. Throws Error{numeric} naming layer and KV head if an estimate was
  // NaN or infinite.
  void finish(const Step& step, int layer, std::int32_t sequence, Ledger& ledger,
              LayerSelection& entry) const;
  // Throws the same Error{numeric} for a NaN or Inf key or value in an indexed page.
  void check_pages(std::int32_t sequence) const;

 private:
  // Tokens of the batch that a layer handles at a time: as many as the work space has estimates
  // for.
  struct Wave {
    int layer = 0;
    std::int64_t first = 0;  // token of the batch
    std::int64_t total = 0;  // tokens of the batch
    TokenBatch batch;
    const float* q = nullptr;
    std::int64_t q_stride = 0;
    PagedRows rows;
    bool skip_newest = false;  // the newest rows take no part in selecting, see newest_apart()
    bool is_early = false;     // chooses before the layer's turn
  };

  // The report of select().
  struct Report {
    Buffer all;
    HeadSelection* candidate_heads = nullptr;  // [layers, batch, kv_heads]
    HeadSelection* heads = nullptr;            // [layers, batch, kv_heads]
    HeadSelection* weighed_heads = nullptr;    // [layers, batch, kv_heads]; null: none choose early
    float* share = nullptr;                    // [layers, batch, query_heads], of the candidates
    float* alpha = nullptr;                    // [layers, batch, query_heads]
    // All [layers, batch, kv_heads]:
    std::int32_t* rescored = nullptr;  // for the candidates: pages of tiles, or keys on the device
    std::int32_t* resident = nullptr;  // selected rows on the device
    std::int32_t* evicted = nullptr;   // rows; written if there is a row cache
    std::int32_t* value_pages = nullptr;  // pages of value tiles; null if there are none
  };
  void allocate_early();
  static Report make_report(Backend& backend, const IndexLayout& layout, Tier tier);

  void for_waves(const Policy& policy, int layer, const TokenBatch& batch, const Queries& queries,
                 const PagedRows& rows, const std::function<void(const Wave&)>& body);
  // Buffers that estimating overwrites. Choosing a whole layer early has its own.
  struct Work {
    Buffer logits;            // [wave, query_heads, context]
    Buffer digest;            // of logits
    Buffer candidate_logits;  // [wave, query_heads, candidates + kPageTokens]
    Buffer candidates;        // [wave, kv_heads, candidates]
  };
  const Work& work(const Wave& wave) const {
    return wave.is_early && early_work_.logits.data() != nullptr ? early_work_ : work_;
  }
  bool is_begun(int layer) const { return begun_[static_cast<std::size_t>(layer)]; }
  void choose(const Policy& policy, const Wave& wave);
  void choose_fixed(const Policy& policy, const Wave& wave);
  void propose(const Policy& policy, const Wave& wave);
  void rescore(const Policy& policy, const Wave& wave);
  void score(const Policy& policy, const Wave& wave, const EstimateParams& estimate);
  // True if the ledger has what the scorer was seen to read, not what it declares.
  bool counts_reads(const Scorer& scorer) const;
  void score_counted(const Scorer& scorer, const Wave& wave, RunScorer& call);
  EstimateParams estimate_params(const Wave& wave) const;
  LogitView logit_view(const Policy& policy, const Wave& wave, bool weighs) const;
  bool weighs_values(const Policy& policy, const Wave& wave) const;
  // Estimates with the layer's own queries what tokens weigh that value tiles stand for.
  void weigh_values(const Policy& policy, const Wave& wave);
  // The fields that all stages share, with the tokens that are always kept.
  SelectParams select_params(const Policy& policy, const Wave& wave) const;
  void prune(const Policy& policy, const Wave& wave, SelectParams params);
  void attend_wave(const Policy& policy, const Wave& wave, int source, const Queries& queries);
  // Looks up the rows that `source` selected in the cache, and begins to bring those on disk.
  void find_rows(const Wave& wave, int source);
  // Waits for the rows that `source` selected and says where they are.
  void place_rows(const Wave& wave, int source, AttendSelectedParams& params);
  FetchWave fetch_of(const Wave& wave, int source) const;
  PlacedRow* places(const Wave& wave) const;
  // Adds the tokens that are not selected, with their values from value tiles of a few bits.
  void attend_values(const Policy& policy, const Wave& wave, const AttendSelectedParams& attended);
  bool newest_apart(const Policy& policy, int layer) const;
  const Scorer& scorer_of(const Policy& policy) const { return scorers_.at(policy.select); }

  SelectionView selection(int layer, std::int64_t token) const;
  SelectionView candidates(const Wave& wave) const;
  // The first entry of a layer's token in arrays by KV head, and in arrays by query head.
  std::int64_t head_entry(int layer, std::int64_t token) const;
  std::int64_t query_entry(int layer, std::int64_t token) const;
  const float* value_sums(const Wave& wave) const;
  // The log-sum-exp of the estimates by which a wave's rows are chosen.
  float* chosen_lse(const Wave& wave) const;
  float* share(int layer, std::int64_t token) const;
  float* alpha(int layer, std::int64_t token) const;
  // Rows and pages of one layer's tokens by cause, summed over tokens and KV heads.
  struct Count {
    EstimateTraffic estimates;
    std::uint64_t hits = 0;
    std::uint64_t misses = 0;
    std::uint64_t evicted = 0;
    std::uint64_t value_pages = 0;
    Traffic from_disk;
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
  void require_rows_read(std::int64_t token) const;

  Queue* queue_;
  IndexLayout layout_;
  Scorers scorers_;
  KeyIndex index_;
  Tier tier_;
  RowCache* cache_;
  DiskRows* disk_;
  Work work_;
  Work early_work_;
  Buffer page_weights_;  // of the digest
  LogitView estimated_;  // all tokens' estimates in the latest wave
  Buffer lse_;           // [wave, query_heads], of the latest wave's logits
  Buffer early_lse_;     // [2, batch, query_heads], see chosen_lse()
  Buffer weighed_;       // [wave, kv_heads] positions and [wave, query_heads] alpha, both unused
  Buffer weighed_alpha_;
  std::vector<bool> begun_;           // [layers]: by choose_early(), not attended yet
  Buffer positions_;                  // [slots, kv_heads, selected]
  Buffer seen_positions_;             // the host's copy of positions_, if positions are reported
  Buffer token_sums_;                 // [batch, kv_heads, head_dim]
  Report report_;                     // in `tier_`
  Report seen_;                       // the host's copy of report_
  Buffer arena_;                      // [kv_heads, arena_rows, row_bytes]
  std::vector<ScorerCount> counted_;  // [layers, batch, kv_heads] in this step; empty at first
};

}  // namespace sluice
