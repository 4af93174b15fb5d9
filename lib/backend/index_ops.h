// Token selection: the key index, estimates and pruning. Each operation works on one layer and the
// tokens of a step.
//
// "Reported" results are read by the caller later: they lie in the backend's memory or in host
// memory that the backend allocated, and are read or copied there after synchronize(). No operation
// waits for the host to see them.
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

// A run of consecutive rows of one KV head. In an operation the runs of all heads have the same
// length and lie at equal distances, as they do in every tier and buffer.
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

// Builds, for each token of a batch that is the last of its page, that page from its rows.
struct BuildBatchParams {
  static constexpr OperationLabel kLabel = {"build_index", TraceKind::index};
  KvShape shape;
  KeyIndexView index;
  TokenBatch batch;
  PagedRows rows;
  std::int32_t* bad = nullptr;  // reported [sequences, kv_heads]: set to 1 if a key is NaN or Inf
};

// Selected positions of every token of a batch, ascending per KV head.
struct SelectionView {
  std::int32_t* positions = nullptr;      // [count, kv_heads, capacity]
  std::int64_t capacity = 0;              // at least as many as select() may keep
  struct HeadSelection* heads = nullptr;  // reported [count, kv_heads]
};

// The selection of one KV head of a token.
struct HeadSelection {
  std::int32_t count = 0;  // positions
  std::int32_t cut = 0;    // 1 if a cap dropped positions that the pruner wanted
  std::int32_t pages = 0;  // pages that hold a selected position
  std::int32_t bad = 0;    // 1 if an estimate was NaN or +Inf, or all were -Inf; count is 0 then
};

// A summary of whole pages' logits that a scan of tiles writes in passing, so that select() and
// attend_tiles() need not read all logits again. It takes a small part of their bytes; its format
// is the backend's. A part of a batch uses the same memory from another row on.
struct LogitDigest {
  std::byte* data = nullptr;  // null: no digest
  std::int64_t rows = 0;      // rows of [tokens, query_heads] that the memory holds
  std::int64_t pages = 0;     // pages per row
  std::int64_t first = 0;     // first row
  // The weight of every page without its selected tokens, or null. select() writes it and
  // attend_tiles() reads it. LogitFormat::page_weight_bytes for each KV head and page, aligned to
  // 16.
  std::byte* weights = nullptr;

  static constexpr std::int64_t kPageAlignment = 64;  // a row's pages are a multiple

  // Pages that a row of `stride` logits takes.
  static constexpr std::int64_t pages_of(std::int64_t stride) {
    constexpr std::int64_t kUnit = kPageAlignment * kPageTokens;
    return (stride + kUnit - 1) / kUnit * kPageAlignment;
  }
  // A digest of logits [rows, stride] in `data`: LogitFormat::digest_bytes(), aligned to 16.
  static LogitDigest in(std::byte* data, std::int64_t rows, std::int64_t stride) {
    return {data, rows, pages_of(stride), 0, nullptr};
  }
};

// The format in which a backend keeps estimates: half precision if it is short of bandwidth rather
// than of arithmetic.
struct LogitFormat {
  DType dtype = DType::f32;
  // True: select() overwrites every logit that it read with its weight e^(logit - lse) or, with a
  // digest, with a value that the digest turns into such a weight. False: logits survive select().
  bool weighed = true;
  // From `digested_from` tokens on, logits estimated from tiles need a LogitDigest, which takes
  // `digest_page_bytes` per row and page.
  std::int64_t digested_from = std::numeric_limits<std::int64_t>::max();
  std::size_t digest_page_bytes = 0;
  // Bytes of LogitDigest::weights per KV head and page; 0: attend_tiles() computes them itself. Set
  // them in contexts of [weighed_from, weighed_to) tokens, which then need a digest, too.
  std::size_t page_weight_bytes = 0;
  std::int64_t weighed_from = 0;
  std::int64_t weighed_to = 0;
  // Limits of select() and attend_tiles(): query heads per KV head, tokens of a context, and tokens
  // of a context with value tiles, which are fewer.
  std::int64_t most_group = std::numeric_limits<std::int64_t>::max();
  std::int64_t most_tokens = std::numeric_limits<std::int64_t>::max();
  std::int64_t most_tile_tokens = std::numeric_limits<std::int64_t>::max();

  // Bytes of the digest of logits [rows, stride].
  std::size_t digest_bytes(std::int64_t rows, std::int64_t stride) const {
    return static_cast<std::size_t>(rows * LogitDigest::pages_of(stride)) * digest_page_bytes;
  }
  bool weighs(std::int64_t tokens) const {
    return page_weight_bytes > 0 && tokens >= weighed_from && tokens < weighed_to;
  }
  // Bytes of the digest's weights, `heads` = tokens * KV heads.
  std::size_t page_weights_bytes(std::int64_t heads, std::int64_t stride) const {
    return static_cast<std::size_t>(heads * LogitDigest::pages_of(stride)) * page_weight_bytes;
  }
};

// Estimated logits, [tokens, query_heads, stride], in the backend's format.
struct LogitView {
  std::byte* data = nullptr;
  std::int64_t stride = 0;  // a multiple of kLogitAlignment
  // The digest of each token's whole pages, or none. Written by int4 and sparq without candidates.
  LogitDigest digest = {};

  // Rows begin at a cache line in every dtype.
  static constexpr std::int64_t kLogitAlignment = 64;

  float* floats() const { return reinterpret_cast<float*>(data); }
};

// The estimates that a backend has code for; a scorer chooses one.
enum class Selector : std::uint8_t {
  exact,   // from the keys of all rows
  int4,    // from tiles, every channel
  sparq,   // from tiles, the query's largest channels
  quest,   // from bounds
  newest,  // from the keys of the tokens' own pages, nothing else
};

// Estimates logits in natural units (what softmax takes) for every token of a batch.
//
// Queries are rotated for rotated tiles, which `sparq` cannot read.
//
// A token at position P, whose page begins at F, gets logits of [0, F) (of the candidates only, if
// there are any) from the index, and of [F, P] from their rows. `exact` reads all rows. `sparq`
// reads the `channels` with the largest sum of |q| over the group and divides by
// sqrt(head_dim * |q of these|_1 / |q|_1) instead of sqrt(head_dim); SparQ section 3, equation 8.
// `quest` writes the upper bound of a sub-page to each of its tokens. `newest` leaves [0, F)
// unspecified.
struct EstimateParams {
  static constexpr OperationLabel kLabel = {"scan", TraceKind::scan};
  const float* q = nullptr;  // [tokens, query_heads, head_dim], `q_stride` floats between tokens
  std::int64_t q_stride = 0;
  KvShape shape;
  TokenBatch batch;
  Selector method = Selector::int4;
  int channels = 0;  // read by sparq
  KeyIndexView index;
  PagedRows rows;
  bool skip_newest = false;  // the rows of the token's own page get no logits
  // If set, int4 or exact estimates only these positions, each below F, and the rows from F on: a
  // token's KV head has the logits of its selected positions, followed by those of the rows.
  const SelectionView* candidates = nullptr;
  // Reported [count, kv_heads] or null: pages of tiles read for candidates.
  std::int32_t* pages_read = nullptr;
  // Reported [count, kv_heads] or null: candidates of `exact` whose rows are on the device.
  std::int32_t* resident = nullptr;
  LogitView logits;  // `stride` is at least the number of a token's logits
};

// A number of tokens of a context: max(share, 2 * least) + extra.
struct Quota {
  Budget share;
  Budget least;            // ignored if it is unlimited
  std::int64_t extra = 0;  // tokens

  // At most `count`, the tokens of the context.
  std::int64_t of(std::int64_t count) const {
    const std::int64_t twice = least.limited() ? 2 * least.of(count) : 0;
    return std::min(count, std::max(share.of(count), twice) + extra);
  }
  static constexpr Quota nothing() { return {{1, 0}, {}, -1}; }
};

// Chooses positions by softmax(logits), for every token of a batch and every KV head. The contents
// of the logits and their digest are unspecified afterwards.
//
// The newest rows of a token at position P are those of its own page, [page_first, P]. They are
// never emitted, because they are attended anyway; if they have logits, they take part in the
// softmax and their weight counts as kept. Positions below `sinks` and from P + 1 - recent on are
// always kept. top_k keeps k positions, those always kept included; if weights are equal, as the
// backend rounds them, it keeps the older position. top_p keeps, per query head, the fewest
// positions whose weight, with those always kept, reaches p; the selection is their union or, if
// that exceeds `cap`, the heaviest of the union by summed weight. alpha is the kept part of the
// estimated tokens' weight, times `share`.
//
// If a token has no logits, as in the first page with `skip_newest`, nothing is emitted, alpha is
// the share (1 if `share` is null) and lse is -Inf.
struct SelectParams {
  static constexpr OperationLabel kLabel = {"select", TraceKind::select};
  KvShape shape;
  TokenBatch batch;
  // [count, query_heads, stride]. `data` is null if nothing was estimated; there are no candidates
  // and no share then, exactly the positions that are always kept are selected, alpha is 1 and lse
  // is not written.
  LogitView logits;
  bool skip_newest = false;  // the newest rows have no logits
  // Positions below page_first, [count, kv_heads, capacity]; null: all of them. Their logits come
  // first, then those of the newest rows.
  const SelectionView* candidates = nullptr;
  Pruner prune = Pruner::top_k;
  Quota k;  // of P + 1 tokens
  float p = 0.0f;
  Quota cap;  // of P + 1 tokens
  std::int64_t sinks = 0;
  std::int64_t recent = 0;
  SelectionView selected;
  // Reported [count, query_heads] or null: the weight of the candidates and the newest rows among
  // all tokens, as estimated by the scorer that proposed the candidates.
  const float* share = nullptr;
  float* alpha = nullptr;  // reported [count, query_heads]: weight kept, the newest rows' included
  // [count, query_heads] or null: log-sum-exp of the logits, unless one was bad. Required if the
  // digest's weights are set.
  float* lse = nullptr;
};

// sums[t] = the softmax weight of row t, summed over probe tokens and query heads. A probe sees the
// rows up to its own position.
struct ColumnSumsParams {
  static constexpr OperationLabel kLabel = {"column_sums", TraceKind::scan};
  const float* q = nullptr;                 // [probes, query_heads, head_dim]
  std::span<const std::int64_t> positions;  // host array [probes]
  KvShape shape;
  std::span<const RowSpan> rows;  // host array [kv_heads], rows from position 0 on
  float* sums = nullptr;          // reported [rows]; NaN where a logit was NaN
};

// Chooses the important tokens of a prompt. Their number is the smallest for which some tokens'
// sums carry the share `tau` of the total. They are the tokens with the highest mean over the
// probes that see them, the older if means are equal, plus the kNewest newest. They are listed
// together with all tokens before the prompt.
// Source: ZipVL (He et al. 2024), sections 4.1 and 4.2.
struct ChooseTokensParams {
  static constexpr OperationLabel kLabel = {"choose_tokens", TraceKind::select};
  static constexpr std::int64_t kMostProbes = 128;
  static constexpr std::int64_t kNewest = 64;  // tokens
  static constexpr std::int64_t kBlock = 512;  // tokens

  const float* sums = nullptr;  // [end], the result of column_sums() for the probes
  std::int64_t first = 0;       // the prompt's tokens are [first, end)
  std::int64_t end = 0;
  std::span<const std::int64_t> probes;  // host array, ascending; the last is end - 1
  double tau = 1.0;                      // 1: all of the prompt is important
  std::uint8_t* listed = nullptr;        // [end]: 1 or 0
  std::int32_t* positions = nullptr;     // [end]: the listed positions, ascending
  // [end - first]: for each token, the number of listed positions before its block. Blocks begin at
  // multiples of kBlock, but not before the prompt.
  std::int32_t* seen = nullptr;
  // Reported [1]: 1 if a sum of the prompt was NaN or infinite, and the list is unspecified then;
  // else 0.
  std::int32_t* bad = nullptr;
};

}  // namespace sluice
