// Rows of one sequence: the rows of a step, and runs of rows that are contiguous in memory.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lib/backend/kv_ops.h"
#include "offload/tiers/block_tables.h"
#include "sluice/ledger.h"

namespace sluice {

// The rows of one step, or of its tokens in one layer: positions [first, first + tokens).
struct StepRange {
  std::int64_t first = 0;
  std::int64_t tokens = 0;
  std::int64_t end() const { return first + tokens; }
};

// Text of an error message for rows of this shape with NaN or Inf in keys or values.
std::string damage_of(const KvShape& shape);

// Keys and values of one layer that become rows. Pointers are the backend's.
struct NewRows {
  const float* k = nullptr;  // [tokens, kv_heads, head_dim], `stride` floats from token to token
  const float* v = nullptr;  // [tokens, kv_heads, head_dim]
  std::int64_t stride = 0;
  // [kv_heads], or empty: rows as they were before, where the queue can copy from, instead of k and
  // v. Coding their elements again would give other codes. Only in runs of a sequence's tokens.
  std::span<const RowSpan> ready = {};
};

// Queries of one step in one layer, and the outputs of their attention. Pointers are the backend's.
struct Queries {
  const float* q = nullptr;  // [tokens, query_heads, head_dim], `stride` floats between tokens
  std::int64_t stride = 0;
  float* out = nullptr;  // [tokens, query_heads, head_dim]
  float* lse = nullptr;  // [tokens, query_heads]
};

enum class RowPlace : std::uint8_t { device, host, window };

// Positions [first, first + count), whose rows are contiguous in every region of a place.
struct RowRun {
  RowPlace place = RowPlace::host;
  std::int64_t first = 0;
  std::int64_t count = 0;
  std::int64_t number = 0;  // of the first row in its region

  std::int64_t end() const { return first + count; }
  // The part with positions [from, to).
  RowRun part(std::int64_t from, std::int64_t to) const {
    return {place, from, to - from, number + from - first};
  }
};

// All of these take rows of a set's table, which are tokens unless tables are ragged.

// Rows [first, end) of a sequence in host memory.
std::vector<RowRun> host_runs(const BlockTables& tables, std::int32_t sequence, std::int64_t first,
                              std::int64_t end, int set);
// Rows [first, end) in the layers of a set: on the device if resident there, else in host memory.
std::vector<RowRun> nearest_runs(const BlockTables& tables, std::int32_t sequence,
                                 std::int64_t first, std::int64_t end, int set);

// Rows [0, end) of a sequence in the layers of a set as one run, if they are contiguous on the
// device (not tried if `in_place`) or in host memory; else an empty run.
RowRun whole_run(const BlockTables& tables, std::int32_t sequence, std::int64_t end, int set,
                 bool in_place);

// Pages of a sequence from first_page on, whose rows are contiguous in every KV head.
WholePages run_of(std::int32_t sequence, std::int64_t first_page, std::int64_t pages,
                  std::span<const RowSpan> rows);

// Fills the fields of AttendParams that do not depend on where the rows are.
AttendParams attend_params(const KvShape& shape, const StepRange& step, const Queries& queries);

// Traffic of `tokens` rows in every KV head of a layer.
Traffic traffic_of(const KvShape& shape, std::int64_t tokens);

}  // namespace sluice
