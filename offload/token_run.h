// Consecutive tokens of one sequence through the cache, layer by layer: pieces of a prompt,
// corrections, and known tokens whose layers attend densely. Where rows are is known to the host;
// those that are only at home pass through two buffers while attention works on the one before.
#pragma once

#include <cstdint>
#include <vector>

#include "offload/kv_pool.h"
#include "offload/kv_rows.h"

namespace sluice {

class TokenRun {
 public:
  explicit TokenRun(KvPool& pool) : pool_(&pool) {}

  // `begun`: what KvPool::write() returned for these tokens; none if they were made room for
  // together with others.
  void begin(std::int32_t sequence, const StepRange& range, std::int32_t begun);

  // Rows to all places that they have; with `indexed`, to the index and the sums as well.
  void append(int layer, const NewRows& rows, bool indexed);
  // Attention to all rows up to each token. append() of the layer came before, and no other
  // layer's since.
  void attend(int layer, const Queries& queries);

  const StepRange& range() const { return range_; }
  std::int32_t sequence() const { return sequence_; }
  // Rows per KV head that attend() finds in place, and those that it fetches.
  std::int64_t hits() const { return range_.end() - misses_; }
  std::int64_t misses() const { return misses_; }
  // Rows per KV head that append() fetches: what the first page held already, where the device has
  // it no longer.
  std::int64_t fetched_front() const { return fetches_front_ ? front_ : 0; }

 private:
  void place_new_rows(std::int32_t begun);
  void append_piece(int layer, const NewRows& rows, const RowRun& to, const RowRun& home);
  void build_index(int layer);
  void copy_front(int layer);
  void copy_window(int layer);
  void attend_run(int layer, AttendParams& params, const RowRun& run);
  void attend_streamed(int layer, AttendParams& params);

  KvPool* pool_;
  std::int32_t sequence_ = 0;
  StepRange range_;
  std::int64_t front_ = 0;      // rows that the window takes before the new ones
  bool fetches_front_ = false;  // from home
  std::int32_t begun_ = PageSlots::kNone;
  std::vector<RowRun> own_;       // the new rows, and with them what their first page held before
  std::vector<RowRun> home_;      // the new rows at home
  std::vector<RowRun> resident_;  // rows before `own_` that are attended where they are
  std::vector<RowRun> streamed_;  // and those that are not
  std::int64_t misses_ = 0;
};

}  // namespace sluice
