// Collects rows of one KV head, from the device or host memory, for the decode kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/attention/tile.h"
#include "lib/backend/index_ops.h"

namespace sluice::cpu {

// The tile of one token and KV head of AttendBatchParams or AttendSelectedParams, without its rows.
template <typename Params>
AttendTile decode_tile_of(const Params& p, std::int64_t token, std::int64_t head) {
  const std::int64_t first_head = head * p.shape.group();
  const std::int64_t first_query = token * p.shape.query_heads + first_head;
  AttendTile tile;
  tile.q = p.q + token * p.q_stride + first_head * p.shape.head_dim;
  tile.queries = tile.group = p.shape.group();
  tile.head_dim = p.shape.head_dim;
  tile.scale = p.scale;
  tile.row_bytes = p.shape.row_bytes();
  tile.format = p.shape.rows;
  tile.out = p.out + first_query * p.shape.head_dim;
  tile.lse = p.lse + first_query;
  return tile;
}

// Part of an arena.
struct ArenaPart {
  std::byte* data = nullptr;  // [rows, row_bytes]
  std::int64_t rows = 0;
};

// An arena, [kv_heads, rows, row_bytes], divided among tasks that run at the same time. Each KV
// head has one part per page of rows, at least 1 and at most `items`. A null arena has one empty
// part per item.
struct ArenaParts {
  std::byte* data = nullptr;
  std::int64_t rows = 0;
  std::size_t row_bytes = 0;
  std::int64_t count = 0;  // per KV head

  ArenaParts(std::byte* arena, std::int64_t arena_rows, std::size_t bytes, std::int64_t items);
  ArenaPart part(std::int64_t head, std::int64_t number) const;
};

// Rows are added run by run and attended together, or in several batches where the arena is too
// small.
class AttendedRows {
 public:
  // `tile` is complete except for `rows` and `count`.
  AttendedRows(const AttendTile& tile, const ArenaPart& arena) : tile_(tile), arena_(arena) {}

  // Adds rows that are attended in place.
  void add(const std::byte* rows, std::int64_t count);
  // Adds rows that are copied to the arena first; without an arena they are attended in place.
  void add_copy(const std::byte* rows, std::int64_t count);
  // Attends to the rows added since the last call and merges the result into the output.
  void attend();

 private:
  AttendTile tile_;
  ArenaPart arena_;
  std::int64_t used_ = 0;  // rows of the arena
  std::vector<RowSpan> runs_;
};

// Adds rows [first, end) of a sequence: resident rows in place, others through the arena.
void add_rows(const PagedRows& rows, std::int32_t sequence, std::int64_t head, std::int64_t first,
              std::int64_t end, std::size_t row_bytes, AttendedRows& to);

}  // namespace sluice::cpu
