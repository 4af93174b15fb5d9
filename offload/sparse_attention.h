// Attention of decoded tokens over the rows that a policy chooses.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/backend.h"
#include "offload/key_index.h"
#include "offload/kv_store.h"
#include "sluice/policy.h"
#include "sluice/selection.h"

namespace sluice {

// Which tokens may be attended, [context] bytes with a 0 for those that may not; null: all may.
struct Eligible {
  const std::uint8_t* device = nullptr;
  const std::uint8_t* host = nullptr;
};

class SparseAttention {
 public:
  // Allocates the index and the work space of `layout` in `tier`.
  SparseAttention(Backend& backend, const IndexLayout& layout, Tier tier);

  void begin(const StepRange& step);

  // Takes note of the step's new rows of a layer, which the store already has: values of a step
  // that attends densely are summed here, those of one that selects token by token in attend().
  void append(int layer, const StepRange& step, KvStore& store, bool dense);

  // Forgets rows [from, to).
  void forget(std::int64_t from, std::int64_t to, KvStore& store);

  // Selects and attends for every token of the step. Each sees what it would see if it were
  // decoded alone: a page serves as an index only to tokens after it. Tokens that are not eligible
  // are never chosen.
  void attend(const Policy& policy, int layer, const StepRange& step, const Queries& queries,
              KvStore& store, const Eligible& eligible);

  // Waits for the step; what was selected goes to the ledger and into the result. Throws
  // Error{numeric} naming layer and KV head if an estimate was NaN or infinite.
  StepSelection finish(const StepRange& step, KvStore& store, Ledger& ledger);

 private:
  // One query token of the step in one layer.
  struct Token {
    int layer = 0;
    std::int64_t index = 0;     // in the step
    std::int64_t position = 0;  // it sees the rows up to here
    const float* q = nullptr;   // [query_heads, head_dim]
    float* out = nullptr;
    float* lse = nullptr;
    Eligible eligible;
    bool newest_apart = false;  // the newest rows take no part in selecting, see newest_apart()
    bool compensates = false;   // the mean value stands for what is not attended

    std::int64_t count() const { return position + 1; }
    std::int64_t pages() const { return position / kPageTokens; }
    std::int64_t tail_first() const { return pages() * kPageTokens; }
    std::int64_t tail() const { return count() - tail_first(); }
  };

  // What finish() reports about a layer.
  struct LayerRecord {
    int source = -1;  // the layer whose selection was used
    Policy const* policy = nullptr;
  };

  // What select() reports.
  struct Report {
    Buffer all;
    HeadSelection* candidate_heads = nullptr;  // [layers, batch, kv_heads]
    HeadSelection* heads = nullptr;            // likewise
    float* share = nullptr;                    // [layers, batch, query_heads], of the candidates
    float* alpha = nullptr;                    // likewise
  };
  static Report make_report(Backend& backend, const IndexLayout& layout, Tier tier);

  void choose(const Policy& policy, const Token& token, KvStore& store);
  void choose_fixed(const Policy& policy, const Token& token);
  void propose(const Policy& policy, const Token& token, KvStore& store);
  void rescore(const Policy& policy, const Token& token, KvStore& store);
  // Whatever the stage: what is always kept, and what may be.
  SelectParams select_params(const Policy& policy, const Token& token) const;
  void prune(const Policy& policy, const Token& token, SelectParams params);
  void attend_token(const Token& token, int source, KvStore& store);
  bool newest_apart(const Policy& policy, const Token& token) const;

  std::vector<RowSpan> tail_rows(const Token& token, KvStore& store) const;
  std::vector<RowSpan> all_rows(const Token& token, KvStore& store, std::int64_t count) const;
  SelectionView selection(int layer, std::int64_t token) const;
  SelectionView candidates(int layer, std::int64_t token) const;
  // Where a layer's token has its entries among those of KV heads and query heads.
  std::int64_t head_entry(int layer, std::int64_t token) const;
  std::int64_t query_entry(int layer, std::int64_t token) const;
  float* share(int layer, std::int64_t token) const;
  float* alpha(int layer, std::int64_t token) const;
  // What one layer's tokens did, per cause; summed over tokens and KV heads.
  struct Count {
    Traffic index;
    std::uint64_t hits = 0;
    std::uint64_t misses = 0;
  };
  Count count(const Policy& policy, int layer, int source, const StepRange& step,
              LayerSelection& entry) const;
  void require_number(bool is_number, int layer, int head) const;
  Traffic scanned(const Policy& policy, std::int64_t position) const;

  Backend* backend_;
  IndexLayout layout_;
  KeyIndex index_;
  Tier tier_;
  Buffer logits_;            // [query_heads, context]
  Buffer digest_;            // of these logits
  Buffer candidate_logits_;  // [query_heads, candidates + kPageTokens]
  Buffer lse_;               // [query_heads], of the latest token's logits
  Buffer positions_;         // [slots, kv_heads, selected]
  Buffer candidates_;        // [kv_heads, candidates]
  Report report_;            // in `tier_`
  Report seen_;              // the host's copy of it, after finish()
  Buffer arena_;             // [kv_heads, arena_rows, row_bytes]
  int latest_ = -1;          // the layer that selected last in this step
  std::vector<LayerRecord> records_;
};

}  // namespace sluice
