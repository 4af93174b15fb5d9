// Consecutive tokens of one sequence through the cache, layer by layer: pieces of a prompt,
// corrections, and known tokens whose layers attend densely. Where rows are is known to the host;
// those that are only at home pass through two buffers while attention works on the one before.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "offload/step/kv_pool.h"
#include "offload/tiers/kv_rows.h"

namespace sluice {

class TokenRun {
 public:
  explicit TokenRun(KvPool& pool) : pool_(&pool) {}

  // `begun`: what KvPool::write() returned for these tokens; empty if they were made room for
  // together with others.
  void begin(std::int32_t sequence, const StepRange& range, const std::vector<std::int32_t>& begun);

  // Rows to all places that they have; with `indexed`, to the index and the sums as well. They may
  // be on their way home until attend() or KvPool::settle().
  void append(int layer, const NewRows& rows, bool indexed);
  // Attention to all rows up to each token or, with a share below 1, to those of pages that carry
  // this share of the weight. append() of the layer came before, and no other layer's since.
  void attend(int layer, const Queries& queries, double share = 1.0);

  const StepRange& range() const { return range_; }
  std::int32_t sequence() const { return sequence_; }
  // Rows per KV head of a layer that attend() finds in place, and those that it fetches.
  std::int64_t hits(int layer) { return range_.end() - misses(layer); }
  std::int64_t misses(int layer) { return of(layer).misses; }
  // Of one KV head, those found in place whose page is not 0 in `listed`.
  std::int64_t hits_among(int layer, std::span<const std::uint32_t> listed);
  // Rows per KV head of a layer that append() fetches: what the first page held already, where the
  // device has it no longer.
  std::int64_t fetched_front(int layer) { return of(layer).fetches_front ? of(layer).front : 0; }

 private:
  // Where the layers of a set have the rows.
  struct Places {
    std::int64_t front = 0;      // rows that the window takes before the new ones
    bool fetches_front = false;  // from home
    std::int32_t begun = PageSlots::kNone;
    std::vector<RowRun> own;       // the new rows, and with them what their first page held before
    std::vector<RowRun> resident;  // rows before `own` that are attended where they are
    std::vector<RowRun> streamed;  // and those that are not
    std::int64_t misses = 0;
  };

  const Places& of(int layer);
  Places place(int set) const;
  void place_new_rows(int set, Places& places) const;
  void append_piece(int layer, const NewRows& rows, const RowRun& to, const RowRun& home);
  void build_index(int layer, bool indexed);
  void copy_front(int layer);
  void copy_window(int layer);
  void attend_run(int layer, AttendParams& params, const RowRun& run);
  void attend_streamed(int layer, AttendParams& params);

  KvPool* pool_;
  std::int32_t sequence_ = 0;
  StepRange range_;
  std::vector<RowRun> home_;                   // the new rows at home
  std::vector<std::int32_t> begun_;            // by set of layers, or empty
  std::vector<std::optional<Places>> places_;  // by set of layers, once one of them is there
};

}  // namespace sluice
