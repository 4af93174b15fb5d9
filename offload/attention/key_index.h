// The index of a pool: what is kept of every key so that weights can be estimated without reading
// rows; and of values, for rows that are not attended: their sums, and value tiles.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lib/backend.h"
#include "offload/plan/index_layout.h"
#include "sluice/batch.h"
#include "sluice/scorer.h"

namespace sluice {

class KeyIndex {
 public:
  // Allocates everything that `layout` asks for, in `tier`.
  KeyIndex(Queue& queue, const IndexLayout& layout, const Scorers& scorers, Tier tier);

  // Where the tiles of sequences are: the backend's memory, [sequences, sequence_tiles()].
  void use_table(const std::int32_t* slots) { table_ = slots; }

  // Pages of a sequence that became whole: first_page and the rows of every KV head from there on.
  void build(int layer, std::int32_t sequence, std::int64_t first_page, std::int64_t pages,
             std::span<const RowSpan> rows);
  // Pages that tokens of the batch complete.
  void build(int layer, const TokenBatch& batch, const PagedRows& rows);
  // Adds rows to a sequence's sums of values, or takes them out again.
  void add_values(int layer, std::int32_t sequence, std::span<const RowSpan> rows, bool subtract);
  // What a sequence has that begins anew: sums of no values at all, and nothing that scorers note.
  void clear_values(std::int32_t sequence);

  // Forgets tokens [length, from) of a sequence, whose rows are still there: what scorers note of
  // sequences. Sums of values are add_values()'s.
  void truncate(int layer, std::int32_t sequence, std::int64_t from, std::int64_t length,
                const PagedRows& rows);
  // What one sequence has becomes another's: its sums of values, and what scorers note.
  void copy_values(std::int32_t from, std::int32_t to);
  // A tile of every layer.
  void copy_tile(std::int32_t from, std::int32_t to);

  KeyIndexView view(int layer) const;
  // No pages if the layer keeps none.
  ValueTilesView values(int layer) const;
  // What a scorer is told besides what it is called for; its memory has no parts if it needs none.
  ScorerCall call(const Policy& policy, int layer) const;
  // [sequences, kv_heads, head_dim], or null if the layer keeps none.
  float* value_sums(int layer) const;

  // Asks for what build() found, and, once that is done, tells of it: the first KV head of a layer
  // of a sequence that had a key or a value which is NaN or Inf, or no layer at all.
  void report_bad();
  struct BadPage {
    int layer = -1;
    int head = 0;
    bool is_value = false;  // else a key
  };
  BadPage bad_page(std::int32_t sequence) const;
  // A sequence that begins anew has none.
  void clear_bad(std::int32_t sequence);

 private:
  struct Own {
    ScorerUse use;
    const Scorer* scorer = nullptr;
    OwnIndex index;
    Buffer pages;      // [kv_heads, tiles, kTilePages, page_bytes]
    Buffer sequences;  // [sequences, sequence_bytes]
  };
  struct Layer {
    Buffer codes;
    Buffer scales;
    Buffer bounds;
    Buffer values;
    Buffer sums;
    std::vector<Own> own;
    std::int32_t* bad = nullptr;  // [sequences, kv_heads], of bad_; null if keys are not looked at
    std::int32_t* bad_values = nullptr;  // likewise
  };
  void allocate_own(const LayerIndex& wanted, const LayerIndexBytes& bytes, Tier tier,
                    Layer& layer);
  ScorerCall call(const Own& own, int layer) const;
  void build_own(int layer, const WholePages& pages);
  // Calls visit(memory, bytes) for what every sequence has so much of.
  template <typename Visit>
  void for_each_of_sequences(const Visit& visit) const;
  std::size_t sum_bytes() const;
  KeyTiles tiles(const LayerIndex& layer) const;
  std::size_t flags() const;  // of one layer, that its pages are bad

  Queue* queue_;
  IndexLayout layout_;
  Scorers scorers_;
  std::vector<Layer> layers_;
  const std::int32_t* table_ = nullptr;
  Buffer bad_;       // [layers, sequences, kv_heads] of keys, and the same of values if there are
  Buffer seen_bad_;  // the host's copy of it
};

}  // namespace sluice
