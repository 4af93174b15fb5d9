// Rows of one KV head on their way to the decode kernel, from wherever they lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/attention/tile.h"
#include "lib/backend/index_ops.h"

namespace sluice::cpu {

// A token and KV head of AttendBatchParams or AttendSelectedParams, but for the rows.
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
  tile.dtype = p.shape.rows.element;
  tile.out = p.out + first_query * p.shape.head_dim;
  tile.lse = p.lse + first_query;
  return tile;
}

// Part of an arena.
struct ArenaPart {
  std::byte* data = nullptr;  // [rows, row_bytes]
  std::int64_t rows = 0;
};

// An arena, [kv_heads, rows, row_bytes], in parts for tasks that run at the same time: of each KV
// head as many as there are pages, at most one for each of `items`. No arena has a part of no rows
// for each item.
struct ArenaParts {
  std::byte* data = nullptr;
  std::int64_t rows = 0;
  std::size_t row_bytes = 0;
  std::int64_t count = 0;  // per KV head

  ArenaParts(std::byte* arena, std::int64_t arena_rows, std::size_t bytes, std::int64_t items);
  ArenaPart part(std::int64_t head, std::int64_t number) const;
};

// Rows are added run by run and attended together, in pieces where the arena is too small.
class AttendedRows {
 public:
  // `tile` has everything but rows and how many of them there are.
  AttendedRows(const AttendTile& tile, const ArenaPart& arena) : tile_(tile), arena_(arena) {}

  // Rows that are attended where they lie.
  void add(const std::byte* rows, std::int64_t count);
  // Rows that pass through the arena, if there is one.
  void add_copy(const std::byte* rows, std::int64_t count);
  // Attends to what was added since the last time, and merges.
  void attend();

 private:
  AttendTile tile_;
  ArenaPart arena_;
  std::int64_t used_ = 0;  // rows of the arena
  std::vector<RowSpan> runs_;
};

// Adds rows [first, end) of a sequence: those that the device has where they lie, others by way of
// the arena.
void add_rows(const PagedRows& rows, std::int32_t sequence, std::int64_t head, std::int64_t first,
              std::int64_t end, std::size_t row_bytes, AttendedRows& to);

}  // namespace sluice::cpu
