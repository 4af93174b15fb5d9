// The index of a pool: a few bits per key, so that weights can be estimated without reading rows;
// and sums of values and value tiles, for rows that are not attended.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lib/backend.h"
#include "offload/plan/index_layout.h"
#include "offload/tiers/kv_rows.h"
#include "sluice/batch.h"
#include "sluice/scorer.h"

namespace sluice {

// The components of values that value tiles of half the channels hold; it outlives its users.
struct ValueBasis {
  const float* data = nullptr;  // [layers, kv_heads, head_dim / 2, head_dim], in the compute tier
  std::uint64_t hash = 0;       // of the numbers: tiles made by another mean something else
};

class KeyIndex {
 public:
  // Allocates everything that `layout` asks for, in `tier`. `basis`: if layout.halves_values().
  KeyIndex(Queue& queue, const IndexLayout& layout, const Scorers& scorers, Tier tier,
           const ValueBasis& basis = {});

  // `slots`: the tile slots of every sequence, in the backend's memory: of every layer if tables
  // are ragged, else the same for all; [layers, sequences, sequence_tiles()].
  void use_table(const std::int32_t* slots) { table_ = slots; }

  // Indexes `pages` pages of a sequence that became whole. `rows`: per KV head, from `first_page`
  // on.
  void build(int layer, std::int32_t sequence, std::int64_t first_page, std::int64_t pages,
             std::span<const RowSpan> rows);
  // Indexes the pages that tokens of the batch complete.
  void build(int layer, const TokenBatch& batch, const PagedRows& rows);
  // Shows a prompt's queries, of tokens [first, first + count), to the scorers that observe them.
  // `rows`: of these tokens, too. Returns what the scorers read, of all KV heads.
  ScorerCount observe(int layer, std::int32_t sequence, std::int64_t first, std::int64_t count,
                      const Queries& queries, const PagedRows& rows);
  // Adds rows to a sequence's sums of values, or subtracts them.
  void add_values(int layer, std::int32_t sequence, std::span<const RowSpan> rows, bool subtract);
  // Resets a sequence that begins anew: zeroes its sums of values and the scorers' notes on it.
  void clear_values(std::int32_t sequence);

  // Removes tokens [length, from) of a sequence from the scorers' notes; their rows are still
  // there. Sums of values are not changed: add_values() does that.
  void truncate(int layer, std::int32_t sequence, std::int64_t from, std::int64_t length,
                const PagedRows& rows);
  // Copies a sequence's sums of values and the scorers' notes to another sequence.
  void copy_values(std::int32_t from, std::int32_t to);
  // Copies a sequence's sums of values for restore_sums(), over the copy before. Returns false if
  // there is no room for a copy, because steps have one token.
  bool keep_sums(std::int32_t sequence);
  // Sets a sequence's sums in a layer to the copy.
  void restore_sums(int layer, std::int32_t sequence);
  // Copies a tile in a layer's index.
  void copy_tile(int layer, std::int32_t from, std::int32_t to);

  // What tells whether tiles and sums of another index mean the same here; empty if they cannot be
  // taken elsewhere, because a scorer has memory of its own.
  std::string kind() const;
  // Bytes of a tile of all KV heads in a layer, and of a sequence's sums there.
  std::size_t tile_bytes(int layer) const;
  std::size_t layer_sum_bytes(int layer) const;
  // Copies that bring a tile to `out`, [tile_bytes(layer)], or set it to what
  // is there. Memory is used until the queue is idle.
  void save_tile(int layer, std::int32_t slot, std::byte* out);
  void load_tile(int layer, std::int32_t slot, const std::byte* saved);
  // The same for a tile in all layers, one after the other.
  void save_tile(std::int32_t slot, std::byte* out);
  void load_tile(std::int32_t slot, const std::byte* saved);
  // The same for a sequence's sums, [layer_sum_bytes(layer)].
  void save_sums(int layer, std::int32_t sequence, std::byte* out);
  void load_sums(int layer, std::int32_t sequence, const std::byte* saved);

  int layers() const { return static_cast<int>(layers_.size()); }
  // True if a scorer has memory of its own for pages, which it may read when tokens are forgotten.
  bool has_own_pages() const;

  KeyIndexView view(int layer) const;
  // A view without pages if the layer keeps no value tiles.
  ValueTilesView values(int layer) const;
  // The context of a scorer's call besides its arguments; its memory has no parts if the scorer
  // needs none.
  ScorerCall call(const Policy& policy, int layer) const;
  // [sequences, kv_heads, head_dim], or null if the layer keeps none.
  float* value_sums(int layer) const;

  // report_bad() copies build()'s flags to the host. Once the queue has done that, bad_page() gives
  // the first layer and KV head of a sequence that had a NaN or Inf in a key or value; layer -1:
  // none.
  void report_bad();
  struct BadPage {
    int layer = -1;
    int head = 0;
    bool is_value = false;  // true: in a value, false: in a key
  };
  BadPage bad_page(std::int32_t sequence) const;
  // Clears the flags of a sequence that begins anew.
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
    std::int32_t* bad = nullptr;  // [sequences, kv_heads] in bad_; null if keys are not checked
    std::int32_t* bad_values = nullptr;  // the same for values
  };
  void allocate_own(const LayerIndex& wanted, const LayerIndexBytes& bytes, Tier tier,
                    Layer& layer);
  ScorerCall call(const Own& own, int layer) const;
  void build_own(int layer, const WholePages& pages);
  // Calls visit(memory, bytes) for every buffer with a fixed number of bytes per sequence.
  template <typename Visit>
  void for_each_of_sequences(const Visit& visit) const;
  // Calls visit(memory, bytes) for every buffer of a layer that has tiles:
  // [kv_heads, slots, bytes].
  template <typename Visit>
  void for_each_of_tiles(int layer, const Visit& visit) const;
  // Adds copies of a layer's tile to or from `saved` to `ops`, and returns the end of its part.
  std::byte* add_saves(int layer, std::int32_t slot, std::byte* saved,
                       std::vector<CopyOp>& ops) const;
  const std::byte* add_loads(int layer, std::int32_t slot, const std::byte* saved,
                             std::vector<CopyOp>& ops) const;
  std::size_t sum_bytes() const;
  std::byte* sums_of(const Layer& layer, std::int64_t sequence) const {
    return layer.sums.data() + static_cast<std::size_t>(sequence) * sum_bytes();
  }
  KeyTiles tiles(const LayerIndex& layer) const;
  const std::int32_t* table(int layer) const;  // [sequences, sequence_tiles()]
  std::size_t flags() const;                   // bad-page flags of one layer

  Queue* queue_;
  IndexLayout layout_;
  Scorers scorers_;
  ValueBasis basis_;
  std::vector<Layer> layers_;
  const std::int32_t* table_ = nullptr;
  Buffer bad_;       // [layers, sequences, kv_heads] for keys; again for values if tiles keep them
  Buffer seen_bad_;  // the host's copy of bad_
};

}  // namespace sluice
