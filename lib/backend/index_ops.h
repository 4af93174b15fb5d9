// Choosing tokens: the key index, estimates and selection. All work on one layer and the tokens of
// a step.
//
// "Reported" is what a caller reads later: it lies in the backend's memory or in host memory that
// the backend allocated, and is read there or copied from there after synchronize(). No operation
// waits for the host to see it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "lib/backend/key_tiles.h"
#include "lib/backend/operation_label.h"
#include "sluice/batch.h"
#include "sluice/policy.h"
#include "sluice/types.h"

namespace sluice {

// A run of consecutive rows of one KV head.
struct RowSpan {
  const std::byte* rows = nullptr;  // [count, row_bytes]
  std::int64_t count = 0;
};

// Builds pages [first_page, first_page + pages) of a sequence's index from their rows.
struct BuildIndexParams {
  static constexpr OperationLabel kLabel = {"build_index", TraceKind::index};
  KvShape shape;
  KeyIndexView index;
  std::int32_t sequence = 0;
  std::int64_t first_page = 0;
  std::int64_t pages = 0;
  std::span<const RowSpan> rows;  // host array [kv_heads]: the rows of these pages
  std::int32_t* bad = nullptr;    // reported [sequences, kv_heads]: set to 1 if a key is NaN or Inf
};

// For each token of a batch that is the last of its page: builds that page from its rows.
struct BuildBatchParams {
  static constexpr OperationLabel kLabel = {"build_index", TraceKind::index};
  KvShape shape;
  KeyIndexView index;
  TokenBatch batch;
  PagedRows rows;
  std::int32_t* bad = nullptr;  // reported [sequences, kv_heads]: set to 1 if a key is NaN or Inf
};

// Positions chosen for every token of a batch, ascending per KV head.
struct SelectionView {
  std::int32_t* positions = nullptr;  // [count, kv_heads, capacity]
  std::int64_t capacity = 0;
  struct HeadSelection* heads = nullptr;  // reported [count, kv_heads]
};

// What became of one KV head of a token.
struct HeadSelection {
  std::int32_t count = 0;  // positions
  std::int32_t cut = 0;    // 1 if a cap or the capacity dropped what the pruner wanted
  std::int32_t pages = 0;  // pages with a position among them
  std::int32_t bad = 0;    // 1 if an estimate was NaN or +Inf, or all were -Inf; count is 0 then
};

// What a scan of tiles notes of whole pages' logits in passing, a small part of their bytes and in
// a form of the backend's own, so that select() and attend_tiles() need not read all of them once
// more. Of a part of a batch it is the same memory, from another row on.
struct LogitDigest {
  std::byte* data = nullptr;  // null: there is none
  std::int64_t rows = 0;      // of [tokens, query_heads] that the memory is for
  std::int64_t pages = 0;     // of a row
  std::int64_t first = 0;     // row
  // If set, select() leaves here what every page weighs without what is selected of it, and
  // attend_tiles() takes it from there. LogitFormat::page_weight_bytes for each KV head and page,
  // aligned to 16.
  std::byte* weights = nullptr;

  static constexpr std::int64_t kPageAlignment = 64;  // of a row's pages

  // Pages that a row of so many logits takes.
  static constexpr std::int64_t pages_of(std::int64_t stride) {
    constexpr std::int64_t kUnit = kPageAlignment * kPageTokens;
    return (stride + kUnit - 1) / kUnit * kPageAlignment;
  }
  // Of logits [rows, stride], in LogitFormat::digest_bytes() bytes that are aligned to 16.
  static LogitDigest in(std::byte* data, std::int64_t rows, std::int64_t stride) {
    return {data, rows, pages_of(stride), 0, nullptr};
  }
};

// How a backend keeps estimates: one that is short of bandwidth rather than of arithmetic does so
// in half precision.
struct LogitFormat {
  DType dtype = DType::f32;
  // Whether select() leaves weights in their place, e^(logit - lse), of all that it looked at, or
  // with a digest what the digest makes such weights of. Else logits survive it.
  bool weighed = true;
  // From so many tokens on, those of tiles are to come with a LogitDigest, which takes so many
  // bytes per row and page.
  std::int64_t digested_from = std::numeric_limits<std::int64_t>::max();
  std::size_t digest_page_bytes = 0;
  // Of LogitDigest::weights; 0: attend_tiles() finds them by itself. They are to be asked for in
  // contexts of [weighed_from, weighed_to) tokens, of which there then is to be a digest, too.
  std::size_t page_weight_bytes = 0;
  std::int64_t weighed_from = 0;
  std::int64_t weighed_to = 0;
  // What select() and attend_tiles() take at most: query heads of a KV head, and tokens of a
  // context, of one with value tiles fewer.
  std::int64_t most_group = std::numeric_limits<std::int64_t>::max();
  std::int64_t most_tokens = std::numeric_limits<std::int64_t>::max();
  std::int64_t most_tile_tokens = std::numeric_limits<std::int64_t>::max();

  // Of the digest of logits [rows, stride].
  std::size_t digest_bytes(std::int64_t rows, std::int64_t stride) const {
    return static_cast<std::size_t>(rows * LogitDigest::pages_of(stride)) * digest_page_bytes;
  }
  bool weighs(std::int64_t tokens) const {
    return page_weight_bytes > 0 && tokens >= weighed_from && tokens < weighed_to;
  }
  // Of its weights, for so many KV heads of tokens.
  std::size_t page_weights_bytes(std::int64_t heads, std::int64_t stride) const {
    return static_cast<std::size_t>(heads * LogitDigest::pages_of(stride)) * page_weight_bytes;
  }
};

// Estimated logits, [tokens, query_heads, stride], in the backend's format.
struct LogitView {
  std::byte* data = nullptr;
  std::int64_t stride = 0;  // a multiple of kLogitAlignment
  // Of each token's whole pages, by int4 and sparq without candidates; or none.
  LogitDigest digest = {};

  // Rows begin where a cache line does, whatever the dtype.
  static constexpr std::int64_t kLogitAlignment = 64;

  float* floats() const { return reinterpret_cast<float*>(data); }
};

// How a backend estimates by itself; scorers choose.
enum class Selector : std::uint8_t {
  exact,   // from the keys of all rows
  int4,    // from tiles, every channel
  sparq,   // from tiles, the query's largest channels
  quest,   // from bounds
  newest,  // only rows of the tokens' own pages, from their keys
};

// Estimates logits in natural units (what softmax takes) for every token of a batch.
//
// A token at position P, whose page begins at F, gets logits of [0, F) through the index, those of
// candidates if there are any, and of [F, P] from their rows. `exact` reads all from their rows.
// `sparq` looks at the `channels` with the largest sum of |q| over the group and divides by
// sqrt(head_dim * |q of these|_1 / |q|_1) instead of sqrt(head_dim); SparQ section 3, equation 8.
// `quest` writes the upper bound of a sub-page to each of its tokens. `newest` leaves [0, F) open.
struct EstimateParams {
  static constexpr OperationLabel kLabel = {"scan", TraceKind::scan};
  const float* q = nullptr;  // [tokens, query_heads, head_dim], `q_stride` floats between tokens
  std::int64_t q_stride = 0;
  KvShape shape;
  TokenBatch batch;
  Selector method = Selector::int4;
  int channels = 0;  // of sparq
  KeyIndexView index;
  PagedRows rows;
  bool skip_newest = false;  // the rows of the token's own page get no logits
  // If set, only these positions are estimated (int4 or exact), each below F, and the rows from F
  // on: the logits of a token's KV head are then those of its selected positions, followed by those
  // of the rows.
  const SelectionView* candidates = nullptr;
  // Reported [count, kv_heads] or null: pages of tiles that were read for candidates.
  std::int32_t* pages_read = nullptr;
  LogitView logits;  // rows of at least as many logits as a token has
};

// How many of a context's tokens: the larger of a budget and twice another, and some more.
struct Quota {
  Budget share;
  Budget least;            // counts if it is limited
  std::int64_t extra = 0;  // besides

  // Never more than `count`, the tokens of the context.
  std::int64_t of(std::int64_t count) const {
    const std::int64_t twice = least.limited() ? 2 * least.of(count) : 0;
    return std::min(count, std::max(share.of(count), twice) + extra);
  }
  static constexpr Quota nothing() { return {{1, 0}, {}, -1}; }
};

// Chooses positions by softmax(logits), for every token of a batch and every KV head. What the
// logits and their digest hold afterwards is left open.
//
// A token's page is the one that holds its own position P, its newest rows are those from the
// page's first on, `page_first`. They are never emitted, for they are attended anyway; if they have
// logits, they take part in the softmax and their weight counts as kept. Always kept are positions
// below `sinks` and from P + 1 - recent on. top_k keeps k positions, the always kept included; of
// those that weigh the same as a backend rounds weights the older. top_p keeps per query head the
// fewest whose weight, with what is always kept, reaches p, then their union; if that exceeds
// `cap`, the heaviest of them by summed weight. alpha is the kept part of the estimated tokens'
// weight, times their share of all.
//
// Without any logits, as in the first page with `skip_newest`, nothing is emitted, alpha is the
// share, 1 if that is null, and lse is -Inf.
struct SelectParams {
  static constexpr OperationLabel kLabel = {"select", TraceKind::select};
  KvShape shape;
  TokenBatch batch;
  // [count, query_heads, stride]. `data` null, without candidates: nothing was estimated; exactly
  // what is always kept and eligible is selected, alpha is the share, 1 if that is null, and lse is
  // not written.
  LogitView logits;
  bool skip_newest = false;  // the newest rows have no logits
  // Positions below page_first, [count, kv_heads, capacity], or null: all of them. Their logits
  // come first, then those of the newest rows.
  const SelectionView* candidates = nullptr;
  Pruner prune = Pruner::top_k;
  Quota k;  // of P + 1 tokens
  float p = 0.0f;
  Quota cap;  // likewise
  std::int64_t sinks = 0;
  std::int64_t recent = 0;
  // By sequence, [sequences, eligible_stride]: 0 leaves a position below page_first out; null: all
  // are in.
  const std::uint8_t* eligible = nullptr;
  std::int64_t eligible_stride = 0;
  SelectionView selected;
  // Reported [count, query_heads] or null: the weight that the candidates and the newest rows carry
  // among all tokens, by whatever proposed them.
  const float* share = nullptr;
  float* alpha = nullptr;  // reported [count, query_heads]: weight kept, the newest rows' included
  // [count, query_heads] or null: log-sum-exp of the logits, where none was bad. Must be set if
  // the digest's weights are asked for.
  float* lse = nullptr;
};

// sums[t] = the softmax weight of row t, summed over probe tokens and query heads. A probe sees the
// rows up to its own position.
struct ColumnSumsParams {
  static constexpr OperationLabel kLabel = {"column_sums", TraceKind::scan};
  const float* q = nullptr;                 // [probes, query_heads, head_dim]
  std::span<const std::int64_t> positions;  // host array [probes]
  KvShape shape;
  std::span<const RowSpan> rows;           // host array [kv_heads], rows from position 0 on
  const std::uint8_t* eligible = nullptr;  // [rows]: 0 leaves a row out; null: all are in
  float* sums = nullptr;                   // reported [rows]; NaN where a logit was NaN
};

// Decides which tokens of a prompt are important: as many as the fewest whose sums carry the share
// `tau` of all, those with the highest mean over the probes that see them, of equals the older; and
// the `newest`. With what may be attended of the tokens before the prompt they are listed.
// Source: ZipVL (He et al. 2024), sections 4.1 and 4.2.
struct ChooseTokensParams {
  static constexpr OperationLabel kLabel = {"choose_tokens", TraceKind::select};
  static constexpr std::int64_t kMostProbes = 128;

  const float* sums = nullptr;  // [end], what column_sums() gave for the probes
  std::int64_t first = 0;       // the prompt's tokens are [first, end)
  std::int64_t end = 0;
  std::span<const std::int64_t> probes;  // host array, ascending; the last is end - 1
  double tau = 1.0;                      // 1: all of the prompt is important
  std::int64_t newest = 0;
  const std::uint8_t* eligible = nullptr;  // [first]: 0 leaves a position out; null: all are in
  std::int64_t block = 1;                  // tokens
  std::uint8_t* listed = nullptr;          // [end]: 1 or 0
  std::int32_t* positions = nullptr;       // [end], so many as are listed: which, ascending
  // [end - first]: how many listed positions lie before the block of a token, whose first token is
  // at a multiple of `block`, and not before the prompt.
  std::int32_t* seen = nullptr;
  // Reported [1]: 1 if a sum of the prompt was NaN or infinite, and what is listed is left open; or
  // else 0.
  std::int32_t* bad = nullptr;
};

}  // namespace sluice
