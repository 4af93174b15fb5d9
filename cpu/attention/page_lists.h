// Rows of the pages that a block of queries attends to, in host memory.
#pragma once

#include "cpu/attention/tile.h"
#include "lib/backend/kv_ops.h"

namespace sluice::cpu {

// Rows of the listed pages of one block of queries and KV head, numbered consecutively across
// pages: row numbers are not positions.
class ListedRows {
 public:
  // The rows of params.rows that block `block` of the queries attends to.
  ListedRows(const AttendParams& params, std::int64_t block, std::int64_t head);

  std::int64_t count() const { return count_; }
  // Rows that token `token` of the chunk sees, not yet clamped to [0, count].
  std::int64_t visible(std::int64_t token) const { return visible_ + token; }
  // Copies rows [first, first + rows) to `to`.
  void copy(std::int64_t first, std::int64_t rows, std::byte* to) const;

 private:
  std::span<const std::int32_t> pages_;
  std::int64_t first_page_;
  const std::byte* rows_;
  std::size_t row_bytes_;
  std::int64_t count_ = 0;
  std::int64_t visible_ = 0;
};

}  // namespace sluice::cpu
