// Value tiles: the values of whole pages in 1 to 4 bits, kept beside the key index, and
// attention over them. Selected rows are fetched and attended exactly; all other tokens are
// attended from data on the device: the weights that select() used, and these values. Pages that
// carry hardly any weight are not read; the mean value stands for them.
//
// See lib/backend/index_ops.h for the memory behind pointers and the meaning of "reported".
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "lib/backend/index_ops.h"
#include "lib/backend/operation_label.h"
#include "sluice/batch.h"
#include "sluice/types.h"

namespace sluice {

// Values of whole pages of every KV head, quantised per channel over the 128 tokens of a page:
// value = zero + scale * code, code in [0, 2^bits). Codes are chosen by the range of the channel;
// with one bit, zero and scale are then fitted to them (lib/code_fit.h), so that they stand for the
// means of the lower and the upper half.
//
// With a basis, half as many numbers stand for a value: the channels of a page are the value's
// products with the basis' vectors, orthonormal and half as many as a value has channels. What a
// value has beside them is taken from the mean value: a sum of values with weights w is
// B^T (sum w * coded - W * B mean) + W * mean, W the sum of the weights. The basis holds the
// largest principal components of what a model's value projection can give (engine/value_basis.h).
//
// A page has scales and zeros, f16 [2, channels], then words of codes, u32 [4 bits, channels].
// A word has 32 / bits neighbouring tokens of one channel: tokens 2 i and 2 i + 1 begin at bits
// bits * i and 16 + bits * i, so that one mask leaves a pair as two 16-bit numbers; the words of
// neighbouring channels are adjacent. At 3 bits, the lower two bits are stored as 2-bit codes are;
// the highest bits follow, 32 tokens to a word (see high_place()). Channels are a multiple of 4.
//
// Pages have the slots of the key index: two neighbouring pages share a slot.
struct ValueTiles {
  int bits = 2;
  std::byte* pages = nullptr;  // [kv_heads, slots, kTilePages, page_bytes()], aligned to 16
  std::int64_t slots = 0;      // per KV head
  // [kv_heads, head_dim / 2, head_dim], or null: pages hold all channels of values.
  const float* basis = nullptr;

  // Channels of a page.
  static constexpr int channels(int head_dim, bool has_basis) {
    return has_basis ? head_dim / 2 : head_dim;
  }
  int channels(int head_dim) const { return channels(head_dim, basis != nullptr); }
  // [head_dim / 2, head_dim]
  const float* basis_of(int head_dim, std::int64_t head) const {
    return basis + head * basis_floats(head_dim);
  }
  // Numbers of one KV head's basis.
  static constexpr std::int64_t basis_floats(int head_dim) {
    return std::int64_t{head_dim / 2} * head_dim;
  }

  // Bytes of one page of one KV head. With 128 channels: 20, 36, 52 or 68 bytes per token.
  static constexpr std::size_t page_bytes(int bits, int channels) {
    return scales_bytes(channels) + static_cast<std::size_t>(kPageTokens / 8 * bits * channels);
  }
  std::size_t page_bytes(int head_dim) const { return page_bytes(bits, channels(head_dim)); }
  // Bytes of all pages.
  std::size_t bytes(int kv_heads, int head_dim) const {
    return static_cast<std::size_t>(kv_heads * slots) * kTilePages * page_bytes(head_dim);
  }
  std::byte* page(int head_dim, std::int64_t head, std::int64_t slot, std::int64_t number) const {
    const std::int64_t at = (head * slots + slot) * kTilePages + number % kTilePages;
    return pages + static_cast<std::size_t>(at) * page_bytes(head_dim);
  }
  // A page's scales, then its zeros, [2, channels].
  static std::uint16_t* scales(std::byte* page) { return reinterpret_cast<std::uint16_t*>(page); }
  static std::uint32_t* words(std::byte* page, int channels) {
    return reinterpret_cast<std::uint32_t*>(page + scales_bytes(channels));
  }

  // The first bit of a token's code: the word within its channel and the bit in that word.
  struct Place {
    int word;
    int shift;
  };
  // Bits of a code that low_place() locates: all, except the highest of three.
  static constexpr int low_bits(int bits) { return bits == 3 ? 2 : bits; }
  static constexpr Place low_place(int bits, int token) {
    const int tokens = 32 / low_bits(bits);
    return {token / tokens, token % tokens / 2 * low_bits(bits) + token % 2 * 16};
  }
  // The place of the highest of three bits. Pair 4 a + b of a word has bit 2 b + a % 2 + 8 (a / 2)
  // and the bit 16 above it, so that pairs whose lower bits need the same shift share a shift here,
  // too.
  static constexpr Place high_place(int token) {
    const int pair = token % 32 / 2;
    return {kPageTokens / 16 + token / 32,
            pair % 4 * 2 + pair / 4 % 2 + pair / 8 * 8 + token % 2 * 16};
  }

  // The part of the range between a channel's smallest and largest value that codes span, around
  // its middle; values outside get the outermost codes. With few codes, finer steps gain more than
  // the clipped values lose: in sluice-22m's attention, layer by layer, the squared error is 0.53
  // (2 bits), 0.81 (3 bits) and 0.94 (4 bits) of that of whole ranges.
  static constexpr float kept_range(int bits) {
    return bits == 1 ? 0.5f : bits == 2 ? 0.75f : bits == 3 ? 0.9f : 0.95f;
  }
  // Returns true if zero and scale are fitted to the codes.
  static constexpr bool fitted(int bits) { return bits == 1; }
  // The part clipped at either end, and a step, both in units of the whole range.
  static constexpr float margin(int bits) { return (1.0f - kept_range(bits)) / 2.0f; }
  static constexpr float step(int bits) {
    return kept_range(bits) / static_cast<float>((1 << bits) - 1);
  }

 private:
  static constexpr std::size_t scales_bytes(int channels) {
    return static_cast<std::size_t>(channels) * 2 * sizeof(std::uint16_t);
  }
};

// The value tiles of one layer, for all sequences of a pool.
struct ValueTilesView {
  ValueTiles tiles;
  const std::int32_t* slots = nullptr;  // the key index's [sequences, table_stride]
  std::int64_t table_stride = 0;

  // The slot of a page. Callable only where `slots` can be dereferenced.
  std::int64_t slot(std::int64_t sequence, std::int64_t page) const {
    return slots[sequence * table_stride + page / kTilePages];
  }
};

// Builds the values of pages [first_page, first_page + pages) of a sequence from their rows.
struct BuildValuesParams {
  static constexpr OperationLabel kLabel = {"build_values", TraceKind::index};
  KvShape shape;
  ValueTilesView values;
  std::int32_t sequence = 0;
  std::int64_t first_page = 0;
  std::int64_t pages = 0;
  std::span<const RowSpan> rows;  // host array [kv_heads]: the rows of these pages
  std::int32_t* bad = nullptr;    // reported [sequences, kv_heads]: set to 1 if a value is NaN or
                                  // Inf; that page is not written then
};

// Builds, for each token of a batch that is the last of its page, that page from its rows.
struct BuildValuesBatchParams {
  static constexpr OperationLabel kLabel = {"build_values", TraceKind::index};
  KvShape shape;
  ValueTilesView values;
  TokenBatch batch;
  PagedRows rows;
  std::int32_t* bad = nullptr;  // reported [sequences, kv_heads], as in BuildValuesParams
};

// Attention of decoded tokens to the unselected tokens of their whole pages, [0, page_first()), as
// a partial that merges with the one over the selected and the newest rows.
//
// A token weighs e^logit; a page weighs the sum over its unselected tokens and the KV head's query
// heads, each relative to estimated_lse. Per KV head the fewest, heaviest pages that carry `share`
// of all pages' weight are read; pages whose weights agree in sign, exponent and the highest 7
// mantissa bits are read together or not at all. With a share of 1 all pages are read. The mean
// value gets the weight of the pages that are not read. A KV head whose selection is bad attends to
// nothing; without whole pages the partial is empty, lse -Inf.
struct AttendTilesParams {
  static constexpr OperationLabel kLabel = {"attend to value tiles", TraceKind::attend};
  KvShape shape;
  TokenBatch batch;
  // [count, query_heads, stride] of [0, page_first()), without candidates: as estimate() wrote
  // them, or e^(logit - estimated_lse) in f32 if `weighed`, or with a digest as the backend's
  // select() leaves them, see LogitFormat. Their contents are unspecified afterwards. A digest is
  // used if there is one, as select() leaves it, its weights included.
  LogitView logits;
  bool weighed = false;
  const float* estimated_lse = nullptr;  // [count, query_heads], as select() reported it
  SelectionView selected;                // excluded
  ValueTilesView values;
  float share = 0.9f;                 // of the weight, in pages that are read; in (0, 1]
  const float* value_sums = nullptr;  // [count, kv_heads, head_dim]: of all tokens a token sees
  float* out = nullptr;               // [count, query_heads, head_dim]
  float* lse = nullptr;               // [count, query_heads]; -Inf where nothing was attended
  bool merge = false;                 // merge with the partial already in out and lse
  // Reported [count, kv_heads] or null: pages read, counted once per part of the query heads if a
  // backend takes them in parts.
  std::int32_t* pages_read = nullptr;
};

// Merges two partials over disjoint rows that were computed side by side into attention over all of
// them.
struct MergePartialsParams {
  static constexpr OperationLabel kLabel = {"merge partials", TraceKind::attend};
  std::int64_t rows = 0;  // tokens * query heads
  int head_dim = 0;
  const float* from = nullptr;      // [rows, head_dim]
  const float* from_lse = nullptr;  // [rows]
  float* out = nullptr;             // [rows, head_dim], read and written
  float* lse = nullptr;             // [rows], read and written
};

// Throws Error{usage} for `bits` that value tiles cannot have or a `share` outside (0, 1], and
// Error{unsupported} for a head_dim above 256 or that is not a multiple of 4, with a basis of 8.
void check_value_tiles(int bits, int head_dim, float share, bool has_basis = false);

}  // namespace sluice
