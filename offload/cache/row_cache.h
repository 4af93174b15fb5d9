// The memory of a row cache, and its invalidation when rows in host memory change.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "lib/backend.h"
#include "lib/backend/row_cache.h"
#include "offload/plan/planner.h"
#include "offload/tiers/block_tables.h"

namespace sluice {

// Called with the first and the number of blocks whose cached rows are no longer valid.
using ForgetBlocks = std::function<void(std::int64_t first, std::int64_t blocks)>;

class RowCache {
 public:
  // Allocates plan.cache_rows rows per KV head. Work is issued to `queue`.
  RowCache(Queue& queue, const KvPlan& plan);

  RowCacheView view() const;
  // The layer by which rows are named: ragged tables number the rows of all layers together.
  int name_of(int layer) const { return ragged_ ? 0 : layer; }

  // [tokens of a wave, kv_heads, selected]: the places of a layer's selected rows. If layers choose
  // early, [tokens of the batch, kv_heads, selected], and neighbouring layers have different
  // places.
  PlacedRow* places(int layer) const {
    auto* const places = reinterpret_cast<PlacedRow*>(places_.data());
    return takes_turns_ && layer % 2 == 1 ? places + shape_.kv_heads * (placed_rows_ / 2) : places;
  }

  // Call when a step begins.
  void advance();
  // Brackets a find_rows() and the attend_selected() that fills its ways. If that end never comes,
  // the next step begins with an empty cache. The brackets of two layers may overlap.
  void begin_filling() { ++filling_; }
  void end_filling() { --filling_; }
  // Call before rows [first, end) of a sequence are written in a table's sets; their blocks are in
  // the tables. No step selects them until a page later than theirs begins. `also` forgets them
  // elsewhere.
  void write(const BlockTables& tables, std::int32_t sequence, int set, std::int64_t first,
             std::int64_t end, const ForgetBlocks& also = {});
  // Forgets everything.
  void clear();

 private:
  void forget(std::int64_t first_block, std::int64_t blocks);

  Queue* queue_;
  KvShape shape_;
  std::int64_t sets_;
  std::int64_t host_rows_;
  std::int32_t now_ = 0;
  std::int64_t placed_rows_;
  bool takes_turns_;
  bool ragged_;
  int filling_ = 0;               // brackets that are open
  Buffer rows_;                   // [kv_heads, ways, row_bytes]
  Buffer tags_;                   // [kv_heads, ways]
  Buffer heat_;                   // [kv_heads, ways]
  Buffer clock_;                  // now_, where the backend reads it
  Buffer places_;                 // see places()
  std::vector<bool> selectable_;  // by block: its rows may be in the cache
};

}  // namespace sluice
