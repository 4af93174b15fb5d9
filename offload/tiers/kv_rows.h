// Rows of one sequence: those of a step, and runs of them that follow each other in memory.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lib/backend/kv_ops.h"
#include "offload/tiers/block_tables.h"
#include "sluice/ledger.h"

namespace sluice {

// The rows of one step: positions [first, first + tokens).
struct StepRange {
  std::int64_t first = 0;
  std::int64_t tokens = 0;
  std::int64_t end() const { return first + tokens; }
};

// What a message says is wrong where keys or values of such rows are no numbers.
std::string damage_of(const KvShape& shape);

// New rows of one layer, before they are rows. Pointers are the backend's.
struct NewRows {
  const float* k = nullptr;  // [tokens, kv_heads, head_dim], `stride` floats from token to token
  const float* v = nullptr;  // likewise
  std::int64_t stride = 0;
};

// Queries of one step in one layer, and where their attention goes. Pointers are the backend's.
struct Queries {
  const float* q = nullptr;  // [tokens, query_heads, head_dim], `stride` floats between tokens
  std::int64_t stride = 0;
  float* out = nullptr;  // [tokens, query_heads, head_dim]
  float* lse = nullptr;  // [tokens, query_heads]
};

enum class RowPlace : std::uint8_t { device, home, window };

// Positions [first, first + count), whose rows follow each other in every region of a place.
struct RowRun {
  RowPlace place = RowPlace::home;
  std::int64_t first = 0;
  std::int64_t count = 0;
  std::int64_t number = 0;  // of the first row in its region

  std::int64_t end() const { return first + count; }
  // The part with positions [from, to).
  RowRun part(std::int64_t from, std::int64_t to) const {
    return {place, from, to - from, number + from - first};
  }
};

// Rows [first, end) of a sequence at home.
std::vector<RowRun> home_runs(const BlockTables& tables, std::int32_t sequence, std::int64_t first,
                              std::int64_t end);
// The same in the layers of a set, on the device where they are there.
std::vector<RowRun> nearest_runs(const BlockTables& tables, std::int32_t sequence,
                                 std::int64_t first, std::int64_t end, int set);

// Rows [0, end) of a sequence in the layers of a set, if they follow each other, on the device or,
// `in_place` first of all, at home; else a run of none.
RowRun whole_run(const BlockTables& tables, std::int32_t sequence, std::int64_t end, int set,
                 bool in_place);

// Pages of a sequence from first_page on, whose rows follow each other in every KV head.
WholePages run_of(std::int32_t sequence, std::int64_t first_page, std::int64_t pages,
                  std::span<const RowSpan> rows);

// Fills the fields of AttendParams that do not depend on where the rows are.
AttendParams attend_params(const KvShape& shape, const StepRange& step, const Queries& queries);

// What `tokens` rows of every KV head of a layer amount to.
Traffic traffic_of(const KvShape& shape, std::int64_t tokens);

}  // namespace sluice
