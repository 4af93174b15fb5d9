// What a step does with rows: append them, attend to them, gather them.
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
  const float* v = nullptr;  // likewise
  std::int64_t tokens = 0;
  std::int64_t stride = 0;
  KvShape shape;
  std::span<std::byte* const> rows;  // host array [kv_heads]: where each head's first row goes
  // Host array [kv_heads] or empty: host memory that gets the same rows, written through.
  std::span<std::byte* const> home = {};
};

// The same for the tokens of a batch: each row goes to every place that its page has. Values are
// added to running sums as the rows have them, rounded, token by token.
struct AppendBatchParams {
  static constexpr OperationLabel kLabel = {"append", TraceKind::append};
  const float* k = nullptr;  // [count, kv_heads, head_dim], `stride` floats from token to token
  const float* v = nullptr;  // likewise
  std::int64_t stride = 0;
  KvShape shape;
  TokenBatch batch;
  PagedRows rows;
  float* sums = nullptr;        // [sequences, kv_heads, head_dim], or null
  float* token_sums = nullptr;  // [count, kv_heads, head_dim]: the sums as each token sees them,
                                // itself included; or null, as it is without `sums`
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
  // [tokens] or null: token t sees the rows at positions below seen[t], which does not fall from
  // token to token; null: up to its own position.
  const std::int32_t* seen = nullptr;
  // Blocks of queries see only the rows of their pages; without lists, all rows. With them
  // first_row_position is that of a page's first row, and `seen` is null.
  PageLists listed;
  float scale = 0.0f;    // of the logits, 1 / sqrt(head_dim)
  float* out = nullptr;  // [tokens, query_heads, head_dim]
  float* lse = nullptr;  // [tokens, query_heads]; -inf where no row was visible
  bool merge = false;    // merge with the partial already in out and lse
};

// Positions [first, end) of a token's sequence that somebody else attends to: whole pages before
// its own.
struct PositionGap {
  std::int32_t first = 0;
  std::int32_t end = 0;

  constexpr std::int64_t count() const { return end - first; }
};

// Attention of decoded tokens to all rows of their sequences up to their own, but for their gaps.
//
// To a backend that computes in host memory the device is a bounded part of it: rows that are only
// at home are copied to `arena` before they are attended. Without an arena, and by other backends,
// they are attended where they lie.
struct AttendBatchParams {
  static constexpr OperationLabel kLabel = {"attend to all rows", TraceKind::attend};
  const float* q = nullptr;  // [count, query_heads, head_dim], `q_stride` floats between tokens
  std::int64_t q_stride = 0;
  KvShape shape;
  TokenBatch batch;
  PagedRows rows;
  // [count] or null: there are none. The backend's memory, written before the step as the tokens
  // are.
  const PositionGap* gaps = nullptr;
  // Attends to what is in the gaps, which may be nothing, and to nothing else. Of backends that
  // compute in host memory.
  bool in_gaps = false;
  float scale = 0.0f;
  float* out = nullptr;        // [count, query_heads, head_dim]
  float* lse = nullptr;        // [count, query_heads]
  std::byte* arena = nullptr;  // [kv_heads, arena_rows, row_bytes] or null
  std::int64_t arena_rows = 0;

  // For those who reach the batch's tokens and gaps.
  constexpr PositionGap gap(std::int64_t token) const {
    return gaps == nullptr ? PositionGap() : gaps[token];
  }
  // Rows of every KV head that a token attends to.
  constexpr std::int64_t count(std::int64_t token) const {
    return in_gaps ? gap(token).count() : batch.tokens[token].count() - gap(token).count();
  }
};

// Attention of decoded tokens to selected rows and to those of their own pages, the newest.
//
// Selected positions lie below their token's page_first(); a token of its sequence's first page has
// none. A backend that computes in host memory may copy rows to `arena`, arena_rows at a time, and
// attend to them there; see AttendBatchParams.
struct AttendSelectedParams {
  static constexpr OperationLabel kLabel = {"attend to selected rows", TraceKind::attend};
  const float* q = nullptr;  // [count, query_heads, head_dim], `q_stride` floats between tokens
  std::int64_t q_stride = 0;
  KvShape shape;
  TokenBatch batch;
  SelectionView selected;  // positions [count, kv_heads, capacity], heads [count, kv_heads]
  // Reported [count, kv_heads] or null: how many of the selected rows were read from the device.
  std::int32_t* resident = nullptr;
  PagedRows rows;
  // [count, kv_heads, selected.capacity], what find_rows() found, and the cache that it looked in;
  // or null: rows are where the tables say.
  const PlacedRow* places = nullptr;
  RowCacheView cache;
  // [count, query_heads], what select() reported; or null if neither of the next two is there.
  float* alpha = nullptr;
  // [count, query_heads] or null. Where the newest had no logits when the others were selected:
  // what select() reported of those. alpha, a share of their weight, becomes the share of theirs
  // and the newest rows' together; NaN where a logit of the newest rows is NaN or +Inf.
  const float* estimated_lse = nullptr;
  // [count, kv_heads, head_dim] or null: sums of the values of all tokens that a token sees. Their
  // mean stands for those that are not attended: an output becomes
  // alpha * output + (1 - alpha) * sums / count(); SparQ section 3, equation 9.
  const float* value_sums = nullptr;
  std::byte* arena = nullptr;  // [kv_heads, arena_rows, row_bytes] or null
  std::int64_t arena_rows = 0;
  float scale = 0.0f;
  float* out = nullptr;  // [count, query_heads, head_dim]
  float* lse = nullptr;  // [count, query_heads]
};

// Finds where the selected rows of a layer are: on the device by the tables of pages, else in the
// cache, else at home. Those in the cache become warmer. Those at home get a way, in the order of
// the batch and of their positions, if their set has one that is empty or colder than they are:
// attend_selected(), which has to follow, fills it. A row that several tokens selected gets one.
struct FindRowsParams {
  static constexpr OperationLabel kLabel = {"find rows", TraceKind::select};
  KvShape shape;
  TokenBatch batch;
  SelectionView selected;
  PagedRows rows;
  int layer = 0;
  RowCacheView cache;
  PlacedRow* places = nullptr;  // [count, kv_heads, selected.capacity]
  // Reported [count, kv_heads] or null: how many rows made room for those that a token selected.
  std::int32_t* evicted = nullptr;
};

// Empties the ways of rows [first, first + count) at home, of all layers and KV heads; or every
// way, whatever it holds, as a new cache's have to be.
struct ForgetRowsParams {
  static constexpr OperationLabel kLabel = {"forget rows", TraceKind::copy};
  KvShape shape;
  RowCacheView cache;
  bool all = false;
  std::int64_t first = 0;
  std::int64_t count = 0;
};

// Copies rows of one sequence, found by position, so that they follow each other.
struct GatherParams {
  static constexpr OperationLabel kLabel = {"gather", TraceKind::gather};
  KvShape shape;
  PagedRows rows;
  std::int32_t sequence = 0;
  const std::int32_t* positions = nullptr;  // [kv_heads, capacity], ascending
  std::int64_t capacity = 0;                // 0: all heads have the same positions
  std::int64_t first = 0;                   // number of each head's first position to copy
  std::span<const std::int64_t> counts;     // host array [kv_heads]: rows to copy
  std::byte* to = nullptr;                  // [kv_heads, to_rows, row_bytes]
  std::int64_t to_rows = 0;
};

// Copies tokens of a piece, found by position, so that they follow each other.
struct PackTokensParams {
  static constexpr OperationLabel kLabel = {"pack tokens", TraceKind::copy};
  const std::int32_t* positions = nullptr;  // [count], ascending, of the piece
  std::int64_t count = 0;
  std::int64_t first = 0;        // position of the piece's first token
  std::int64_t width = 0;        // floats of a token
  const float* piece = nullptr;  // [tokens, width], `stride` floats between tokens
  std::int64_t stride = 0;
  float* packed = nullptr;  // [count, width]
};

// And back to their places.
struct UnpackTokensParams {
  static constexpr OperationLabel kLabel = {"unpack tokens", TraceKind::copy};
  const std::int32_t* positions = nullptr;  // as above
  std::int64_t count = 0;
  std::int64_t first = 0;
  std::int64_t tokens = 0;  // of the piece
  std::int64_t width = 0;
  const float* packed = nullptr;  // [count, width]
  float* piece = nullptr;         // [tokens, width]
  bool clear = false;             // first sets all of the piece to zero
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
