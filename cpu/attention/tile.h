// Unit of work of the attention kernels, and how its results are written.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sluice/types.h"

namespace sluice::cpu {

// Queries of one KV head against one run of its rows. Query m is head m % group of the group at
// token m / group.
struct AttendTile {
  const float* q = nullptr;  // [tokens, ..., group, head_dim], `q_stride` floats between tokens
  std::int64_t q_stride = 0;
  int queries = 0;  // tokens * group
  int group = 1;
  int head_dim = 0;
  float scale = 0.0f;

  const std::byte* rows = nullptr;  // [count, row_bytes]
  std::size_t row_bytes = 0;
  RowFormat format;
  std::int64_t count = 0;
  // Token t sees `visible` + t rows or, if `seen` is not null, `visible` + seen[t]. `visible` may
  // be < 0 or > count.
  std::int64_t visible = 0;
  const std::int32_t* seen = nullptr;  // [tokens] or null
  // > 0: of those rows each token sees the last `window`; `seen` is null.
  std::int64_t window = 0;

  float* out = nullptr;  // [tokens, ..., group, head_dim], `out_stride` floats between tokens
  std::int64_t out_stride = 0;
  float* lse = nullptr;  // [tokens, ..., group], `lse_stride` floats between tokens
  std::int64_t lse_stride = 0;
  bool merge = false;

  std::size_t value_offset() const { return format.value_offset(head_dim); }
  const float* query(int m) const {
    return q + m / group * q_stride + static_cast<std::int64_t>(m % group) * head_dim;
  }
  // Rows [0, visible_to(m)) are visible to query m; grows with m.
  std::int64_t visible_to(int m) const;
  // Rows before first_of(m) are hidden from query m; grows with m.
  std::int64_t first_of(int m) const;
};

// Online softmax state in base 2: `values` are sums of v * 2^(logit - highest), with `stride`
// floats from channel to channel, and `sum` is the sum of 2^(logit - highest).
struct SoftmaxState {
  const float* values = nullptr;
  std::size_t stride = 1;
  float highest = 0.0f;
  float sum = 0.0f;  // 0 if no row was visible
};

// Writes query m's partial, or merges it with the one already there.
void finish_query(const AttendTile& tile, int m, const SoftmaxState& state);

// Merges the partial (values [head_dim], lse) into (out, *out_lse) of a disjoint set of rows.
void merge_partial(const float* values, float lse, int head_dim, float* out, float* out_lse);

enum class Scratch : std::uint8_t { tile, partials, rows };

// At least `floats` floats of the calling thread, 64-byte aligned, valid until its next call for
// the same use. Tile sizes depend only on block sizes and head_dim, so the memory is bounded and
// reused.
float* thread_scratch(Scratch use, std::size_t floats);

}  // namespace sluice::cpu
