// Consecutive tokens of one sequence through the cache, layer by layer: chunks of a prompt,
// corrections, and known tokens whose layers attend densely. The host knows where rows are; rows
// only in host memory stream through two buffers while attention works on the one before.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "offload/step/kv_pool.h"
#include "offload/tiers/kv_rows.h"
#include "sluice/ledger.h"

namespace sluice {

class TokenRun {
 public:
  explicit TokenRun(KvPool& pool) : pool_(&pool) {}

  // `begun`: the result of KvPool::write() for these tokens; empty if room was made for them
  // together with others.
  void begin(std::int32_t sequence, const StepRange& range, const std::vector<std::int32_t>& begun);

  // The same for one layer of a pool with ragged tables, by rows; KvPool::write_rows() made room
  // for them. Only append() may follow.
  void begin_rows(std::int32_t sequence, int layer, const StepRange& rows,
                  const std::vector<std::int32_t>& begun);

  // Writes rows to all their places; with `indexed`, adds them to the index and the sums as well.
  // Copies to host memory may be under way until attend() or KvPool::settle().
  void append(int layer, const NewRows& rows, bool indexed);
  // Counts what the append of a layer moved, except the new rows, which count with their step.
  void record_appended(int layer, Ledger& ledger);
  // Attends to all rows up to each token or, with a share below 1, to rows of pages that carry this
  // share of the weight. The latest append() was this layer's.
  void attend(int layer, const Queries& queries, double share = 1.0);

  std::int32_t sequence() const { return sequence_; }
  // Rows per KV head of a layer that attend() finds in place, and those that it fetches.
  std::int64_t hits(int layer);
  std::int64_t misses(int layer);
  std::int64_t misses_on_disk(int layer);  // of these
  // Hits of one KV head in pages that are not 0 in `listed`.
  std::int64_t hits_among(int layer, std::span<const std::uint32_t> listed);

 private:
  // The places of rows in the layers of a set.
  struct Places {
    StepRange range;             // the new rows
    std::vector<RowRun> host;    // the new rows in host memory
    std::int64_t front = 0;      // rows that the window takes before the new ones
    bool fetches_front = false;  // from host memory
    std::int32_t begun = PageSlots::kNone;
    std::vector<RowRun> own;       // the new rows, after rows that their first page held before
    std::vector<RowRun> resident;  // rows before `own` that are attended where they are
    std::vector<RowRun> streamed;  // rows before `own` that pass through the buffers
  };

  const Places& of(int layer);
  // The first row of a layer that a token of the range sees.
  std::int64_t first_row(int layer) {
    return first_in(pool_->plan().window(layer), of(layer).range.first);
  }
  Places place(int set, const StepRange& rows) const;
  void place_new_rows(int set, Places& places) const;
  void append_piece(int layer, const NewRows& rows, const RowRun& to, const RowRun& host);
  void copy_ready(int layer, std::span<const RowSpan> ready, const RowRun& to,
                  std::span<std::byte* const> heads);
  void build_index(int layer, bool indexed);
  void copy_front(int layer);
  void copy_window(int layer);
  void write_pages(int layer);
  void attend_run(int layer, AttendParams& params, const RowRun& run);
  std::vector<RowRun> pieces(int layer);
  void attend_streamed(int layer, AttendParams& params);

  KvPool* pool_;
  std::int32_t sequence_ = 0;
  StepRange range_;                            // tokens
  std::vector<std::int32_t> begun_;            // by set of layers, or empty
  std::vector<KvPool::Written> written_;       // by layer: what append() wrote, above a disk
  std::vector<std::optional<Places>> places_;  // by set of layers; set by the first of its layers
};

}  // namespace sluice
