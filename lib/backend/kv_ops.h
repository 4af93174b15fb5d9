// Operations on rows: append, attend, gather.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "lib/backend/index_ops.h"
#include "lib/backend/operation_label.h"
#include "lib/backend/page_ops.h"
#include "lib/backend/row_cache.h"
#include "sluice/batch.h"
#include "sluice/types.h"

namespace sluice {

// Turns keys and values into rows: K then V, in the cache's dtype.
struct AppendParams {
  static constexpr OperationLabel kLabel = {"append", TraceKind::append};
  const float* k = nullptr;  // [tokens, kv_heads, head_dim], `stride` floats from token to token
  const float* v = nullptr;  // [tokens, kv_heads, head_dim], same stride
  std::int64_t tokens = 0;
  std::int64_t stride = 0;
  KvShape shape;
  std::span<std::byte* const> rows;  // host array [kv_heads]: destination of each head's first row
  // Host array [kv_heads] or empty: host memory to which the same rows are written through.
  std::span<std::byte* const> host = {};
};

// The same for the tokens of a batch: each row is written to every tier in which its page has a
// slot. Values are added to running sums token by token, rounded as they are in the rows.
struct AppendBatchParams {
  static constexpr OperationLabel kLabel = {"append", TraceKind::append};
  const float* k = nullptr;  // [count, kv_heads, head_dim], `stride` floats from token to token
  const float* v = nullptr;  // [count, kv_heads, head_dim], same stride
  std::int64_t stride = 0;
  KvShape shape;
  TokenBatch batch;
  PagedRows rows;
  float* sums = nullptr;        // [sequences, kv_heads, head_dim], or null
  float* token_sums = nullptr;  // [count, kv_heads, head_dim]: the sums as each token sees them,
                                // itself included; or null, as it has to be without `sums`
};

// Attention of queries over one run of rows per KV head, as a partial: the output over these rows
// and the log-sum-exp of their logits. Partials over disjoint rows merge into attention over all.
// Source: FlashDecoding; Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
struct AttendParams {
  static constexpr OperationLabel kLabel = {"attend to a run of rows", TraceKind::attend};
  const float* q = nullptr;  // [tokens, query_heads, head_dim], `q_stride` floats between tokens
  std::int64_t tokens = 0;
  std::int64_t q_stride = 0;
  std::int64_t first_query_position = 0;
  KvShape shape;
  std::span<const RowSpan> rows;        // host array [kv_heads]
  std::int64_t first_row_position = 0;  // rows after a query's position are masked for it
  // [tokens]: token t sees the rows at positions below seen[t], which never decreases from token to
  // token; null: up to its own position.
  const std::int32_t* seen = nullptr;
  // > 0: each token sees only the newest `window` of the rows up to its own position; without
  // `seen` and lists. 0: all of them.
  std::int64_t window = 0;
  // Lists of the pages whose rows a block of queries sees; without lists, all rows. With lists,
  // first_row_position is that of a page's first row and `seen` is null.
  PageLists listed;
  float scale = 0.0f;    // of the logits, 1 / sqrt(head_dim); positive
  float* out = nullptr;  // [tokens, query_heads, head_dim]
  float* lse = nullptr;  // [tokens, query_heads]; -inf where no row was visible
  bool merge = false;    // merge with the partial already in out and lse
};

// The first row that a token sees through a window of the newest rows; 0: it sees all of them.
constexpr std::int64_t first_in(std::int64_t window, std::int64_t position) {
  return window > 0 && position >= window ? position + 1 - window : 0;
}

// Positions [first, end) of a token's sequence to which an operation does not attend.
struct PositionGap {
  std::int32_t first = 0;
  std::int32_t end = 0;

  constexpr std::int64_t count() const { return end - first; }
};

// Attention of decoded tokens to all rows of their sequences up to their own, except their gaps, or
// to the newest of them.
//
// A backend that computes in host memory has a bounded part of it as its device: rows that are not
// resident there are copied to `arena` before they are attended. Without an arena, and on other
// backends, they are attended where they lie.
struct AttendBatchParams {
  static constexpr OperationLabel kLabel = {"attend to all rows", TraceKind::attend};
  const float* q = nullptr;  // [count, query_heads, head_dim], `q_stride` floats between tokens
  std::int64_t q_stride = 0;
  KvShape shape;
  TokenBatch batch;
  PagedRows rows;
  // > 0: to the newest `window` rows; without gaps. 0: to all.
  std::int64_t window = 0;
  // [count] or null: no gaps. Whole pages before the token's own, to which another operation
  // attends. The backend's memory, written before the step as the tokens are.
  const PositionGap* gaps = nullptr;
  // Attends to nothing but the rows in the gaps, which may be empty. Only on backends that compute
  // in host memory.
  bool in_gaps = false;
  float scale = 0.0f;
  float* out = nullptr;        // [count, query_heads, head_dim]
  float* lse = nullptr;        // [count, query_heads]
  std::byte* arena = nullptr;  // [kv_heads, arena_rows, row_bytes] or null
  std::int64_t arena_rows = 0;

  // Callable only where the batch's tokens and `gaps` can be dereferenced. A window leaves a gap
  // before it, which may end inside a page.
  constexpr PositionGap gap(std::int64_t token) const {
    if (window > 0)
      return {0, static_cast<std::int32_t>(first_in(window, batch.tokens[token].position))};
    return gaps == nullptr ? PositionGap() : gaps[token];
  }
  // Rows of every KV head that a token attends to.
  constexpr std::int64_t count(std::int64_t token) const {
    return in_gaps ? gap(token).count() : batch.tokens[token].count() - gap(token).count();
  }
};

// Attention of decoded tokens to selected rows and to the newest, the rows of their own pages.
//
// Selected positions are below their token's page_first(); a token in the first page has none. A
// backend that computes in host memory may copy rows to `arena`, arena_rows at a time, and attend
// to them there; see AttendBatchParams.
struct AttendSelectedParams {
  static constexpr OperationLabel kLabel = {"attend to selected rows", TraceKind::attend};
  const float* q = nullptr;  // [count, query_heads, head_dim], `q_stride` floats between tokens
  std::int64_t q_stride = 0;
  KvShape shape;
  TokenBatch batch;
  SelectionView selected;  // positions [count, kv_heads, capacity], heads [count, kv_heads]
  // Reported [count, kv_heads] or null: selected rows read from the device.
  std::int32_t* resident = nullptr;
  PagedRows rows;
  // [count, kv_heads, selected.capacity], the result of find_rows() in `cache`; or null: rows are
  // found by the page tables alone.
  const PlacedRow* places = nullptr;
  RowCacheView cache;
  // [count, query_heads], as select() reported it; or null if both estimated_lse and value_sums
  // are.
  float* alpha = nullptr;
  // [count, query_heads], the lse that select() reported, if the newest rows had no logits then;
  // else null. alpha, a share of the estimated tokens' weight, becomes a share of their and the
  // newest rows' weight together; NaN where a logit of the newest rows is NaN or +Inf.
  const float* estimated_lse = nullptr;
  // [count, kv_heads, head_dim] or null: sums of the values of all tokens that a token sees. Their
  // mean stands for the tokens that are not attended: an output becomes
  // alpha * output + (1 - alpha) * sums / count(); SparQ section 3, equation 9.
  const float* value_sums = nullptr;
  std::byte* arena = nullptr;  // [kv_heads, arena_rows, row_bytes] or null
  std::int64_t arena_rows = 0;
  float scale = 0.0f;
  float* out = nullptr;  // [count, query_heads, head_dim]
  float* lse = nullptr;  // [count, query_heads]
};

// Looks up the selected rows of a layer: on the device by the page tables, else in the cache, else
// in host memory. A hit in the cache heats its row. A miss gets a way, in the order of the batch
// and of positions, if its set has one that is empty or colder than the row; attend_selected() has
// to follow, because it fills that way. A row that several tokens selected gets one way.
struct FindRowsParams {
  static constexpr OperationLabel kLabel = {"find rows", TraceKind::select};
  KvShape shape;
  TokenBatch batch;
  SelectionView selected;
  PagedRows rows;
  int layer = 0;
  RowCacheView cache;
  PlacedRow* places = nullptr;  // [count, kv_heads, selected.capacity]
  // Reported [count, kv_heads] or null: rows that were evicted for those that a token selected.
  std::int32_t* evicted = nullptr;
};

// Empties the ways of rows [first, first + count) of host memory, of all layers and KV heads; or,
// with `all`, every way, as a new cache needs.
struct ForgetRowsParams {
  static constexpr OperationLabel kLabel = {"forget rows", TraceKind::copy};
  KvShape shape;
  RowCacheView cache;
  bool all = false;
  std::int64_t first = 0;
  std::int64_t count = 0;
};

// Copies rows of one sequence, found by position, to contiguous memory.
struct GatherParams {
  static constexpr OperationLabel kLabel = {"gather", TraceKind::gather};
  KvShape shape;
  PagedRows rows;
  std::int32_t sequence = 0;
  const std::int32_t* positions = nullptr;  // [count], ascending, the same for all heads
  std::int64_t count = 0;
  std::byte* to = nullptr;  // [kv_heads, to_rows, row_bytes]
  std::int64_t to_rows = 0;
};

// Copies tokens of a chunk, found by position, to contiguous memory.
struct PackTokensParams {
  static constexpr OperationLabel kLabel = {"pack tokens", TraceKind::copy};
  const std::int32_t* positions = nullptr;  // [count], ascending, in the chunk
  std::int64_t count = 0;
  std::int64_t first = 0;        // position of the chunk's first token
  std::int64_t width = 0;        // floats per token
  const float* piece = nullptr;  // [tokens, width], `stride` floats between tokens
  std::int64_t stride = 0;
  float* packed = nullptr;  // [count, width]
};

// Copies packed tokens back to their positions in the chunk.
struct UnpackTokensParams {
  static constexpr OperationLabel kLabel = {"unpack tokens", TraceKind::copy};
  const std::int32_t* positions = nullptr;  // [count], ascending, in the chunk
  std::int64_t count = 0;
  std::int64_t first = 0;
  std::int64_t tokens = 0;  // of the chunk
  std::int64_t width = 0;
  const float* packed = nullptr;  // [count, width]
  float* piece = nullptr;         // [tokens, width]
  bool clear = false;             // first sets all of the chunk to zero
};

// Adds the values of rows to sums, or subtracts them.
struct SumValuesParams {
  static constexpr OperationLabel kLabel = {"sum_values", TraceKind::index};
  KvShape shape;
  std::span<const RowSpan> rows;  // host array [kv_heads]
  float* sums = nullptr;          // [kv_heads, head_dim]
  bool subtract = false;
};

}  // namespace sluice
