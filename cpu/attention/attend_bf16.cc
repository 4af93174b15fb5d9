#include "cpu/attention/attend_bf16.h"

#if !defined(__x86_64__)

#include "lib/check.h"

namespace sluice::cpu {

void attend_bf16(const AttendTile& /*tile*/, const Bf16Products& /*products*/) {
  check(false, "no products of bf16 on this processor");
}

std::size_t bf16_scratch(const AttendTile& /*tile*/) { return 0; }

}  // namespace sluice::cpu

#else

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <optional>

#include "cpu/runtime/intrinsics.h"
#include "lib/bytes.h"
#include "sluice/half.h"
#include "sluice/row_code.h"

namespace sluice::cpu {
namespace {

constexpr std::size_t kSide = kTileSide;
constexpr std::size_t kDepth = kTileDepth;
constexpr std::size_t kPanel = 2 * kSide;  // queries that share each load of K and V
constexpr std::size_t kBlockRows = kBf16Rows;

// The scratch of one tile of queries. All sub-tiles are contiguous, 1 KiB.
struct PanelState {
  std::size_t columns = 0;           // query tiles of kSide, even
  std::size_t head_dim = 0;          // padded to kDepth
  std::uint16_t* q = nullptr;        // [columns, head_dim / kDepth] tiles: [pair, query, 2]
  float* values = nullptr;           // [columns, head_dim, kSide], see SoftmaxState
  float* highest = nullptr;          // [columns, kSide]
  float* sums = nullptr;             // [columns, kSide]
  float* scores = nullptr;           // [2, kBlockRows, kSide]
  std::uint16_t* weights = nullptr;  // [2, kBlockRows / kDepth] tiles: [row pair, query, 2]
  // [head_dim / kSide, kBlockRows / kDepth] tiles: [channel, row]
  std::uint16_t* values_t = nullptr;
  std::uint16_t* padded = nullptr;  // [kBlockRows, 2, head_dim]
  float* key_scales = nullptr;      // [kBlockRows], of coded rows; codes are multiplied unscaled
  float* value_scales = nullptr;    // [kBlockRows], behind key_scales
  float scale = 0.0f;               // of the scores, in base 2, positive
};

// One block of rows, a multiple of kDepth, with head_dim readable channels each.
struct Block {
  const std::uint16_t* k = nullptr;
  const std::uint16_t* v = nullptr;
  std::size_t stride = 0;  // elements
  std::size_t rows = 0;
  std::int64_t first = 0;
};

// Sizes only; pointers stay null.
PanelState sizes_of(const AttendTile& tile) {
  PanelState s;
  s.columns = round_up(static_cast<std::size_t>(tile.queries), kPanel) / kSide;
  s.head_dim = round_up(static_cast<std::size_t>(tile.head_dim), kDepth);
  return s;
}

// Size in floats; two bf16 take one.
std::size_t scratch_floats(const PanelState& s) {
  const std::size_t lanes = s.columns * kSide;
  const std::size_t matrix = lanes * s.head_dim;
  const std::size_t rows = kBlockRows * s.head_dim;
  return matrix + matrix / 2 + 2 * lanes + kBlockRows * (kPanel + kSide) + rows / 2 + rows +
         2 * kBlockRows;
}

PanelState make_state(const AttendTile& tile) {
  PanelState s = sizes_of(tile);
  const auto queries = static_cast<std::size_t>(tile.queries);
  const auto d = static_cast<std::size_t>(tile.head_dim);
  const std::size_t lanes = s.columns * kSide;
  const std::size_t matrix = lanes * s.head_dim;
  const std::size_t rows = kBlockRows * s.head_dim;
  float* const scratch = thread_scratch(Scratch::tile, scratch_floats(s));
  s.values = scratch;
  s.sums = s.values + matrix;
  s.highest = s.sums + lanes;
  s.scores = s.highest + lanes;
  s.q = reinterpret_cast<std::uint16_t*>(s.scores + kBlockRows * kPanel);
  s.weights = s.q + matrix;
  s.values_t = s.weights + kBlockRows * kPanel;
  s.padded = s.values_t + rows;
  s.key_scales = reinterpret_cast<float*>(s.padded + 2 * rows);
  s.value_scales = s.key_scales + kBlockRows;
  std::fill_n(s.values, matrix + lanes, 0.0f);
  std::fill_n(s.highest, lanes, -std::numeric_limits<float>::infinity());
  std::fill_n(s.q, matrix, std::uint16_t{0});
  s.scale = std::abs(tile.scale) * std::numbers::log2e_v<float>;
  const float sign = tile.scale < 0 ? -1.0f : 1.0f;
  for (std::size_t m = 0; m < queries; ++m) {
    const float* const from = tile.query(static_cast<int>(m));
    std::uint16_t* const to = s.q + m / kSide * kSide * s.head_dim + m % kSide * 2;
    for (std::size_t c = 0; c < d; ++c) to[c / 2 * kPanel + c % 2] = float_to_bf16(sign * from[c]);
  }
  return s;
}

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")

// Converts the codes of a key or value [head_dim] to bf16, which is exact.
void widen_codes(const std::byte* codes, std::size_t head_dim, std::uint16_t* to) {
  for (std::size_t c = 0; c < head_dim; c += kSide) {
    const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + c));
    const __m256bh wide = _mm512_cvtneps_pbh(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(some)));
    std::memcpy(to + c, &wide, sizeof wide);
  }
}

// Converts a value in int4 [head_dim] to bf16, which is exact, scales included.
void widen_int4(const std::byte* value, std::size_t head_dim, std::uint16_t* to) {
  for (std::size_t c = 0; c < head_dim; c += kSide) {
    const std::size_t group = c / kInt4Group;
    const __m512i both = _mm512_cvtepi8_epi32(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(value + group * kSide)));
    const __m512i own = c % kInt4Group == 0 ? _mm512_srai_epi32(_mm512_slli_epi32(both, 28), 28)
                                            : _mm512_srai_epi32(both, 4);
    const __m512 scale = _mm512_set1_ps(int4_scale(value, static_cast<std::int64_t>(group)));
    const __m256bh wide = _mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_cvtepi32_ps(own), scale));
    std::memcpy(to + c, &wide, sizeof wide);
  }
}

#pragma GCC pop_options

// Copies the key or value [head_dim] that begins at `part` as bf16. Returns its scale: codes of
// int8 are copied without.
float copy_bf16(PartCode code, const std::byte* part, std::size_t head_dim, std::uint16_t* to) {
  if (code == PartCode::int8) {
    widen_codes(part, head_dim, to);
    return scale_of(part);
  }
  if (code == PartCode::int4) {
    widen_int4(part, head_dim, to);
    return 1.0f;
  }
  std::memcpy(to, part, head_dim * sizeof *to);
  return 1.0f;
}

// Rows [first, first + rows) in place, or a zero-padded copy of bf16 if they are not whole tiles of
// it.
Block make_block(const AttendTile& tile, const PanelState& s, std::int64_t first,
                 std::size_t rows) {
  const std::byte* const k = tile.rows + static_cast<std::size_t>(first) * tile.row_bytes;
  const auto d = static_cast<std::size_t>(tile.head_dim);
  const std::size_t whole = round_up(rows, kDepth);
  if (!tile.format.is_coded() && d == s.head_dim && whole == rows) {
    const auto* const elements = reinterpret_cast<const std::uint16_t*>(k);
    return {elements, elements + d, tile.row_bytes / sizeof(std::uint16_t), rows, first};
  }
  const std::size_t stride = 2 * s.head_dim;
  std::fill_n(s.padded, whole * stride, std::uint16_t{0});
  std::fill_n(s.key_scales, 2 * kBlockRows, 0.0f);
  for (std::size_t r = 0; r < rows; ++r) {
    const std::byte* const row = k + r * tile.row_bytes;
    std::uint16_t* const to = s.padded + r * stride;
    s.key_scales[r] = copy_bf16(tile.format.key().code, row, d, to);
    s.value_scales[r] =
        copy_bf16(tile.format.value().code, row + tile.value_offset(), d, to + s.head_dim);
  }
  return {s.padded, s.padded + s.head_dim, stride, whole, first};
}

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")

// to[channel][row] = V[row][channel] for kSide channels of kDepth rows.
void transpose_tile(const std::uint16_t* v, std::size_t stride, std::uint16_t* to) {
  const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  __m512i a[kSide];
  __m512i b[kSide];
  for (std::size_t i = 0; i < kSide; ++i) {  // lane c: rows 2i and 2i + 1 of channel c
    const auto* const even = reinterpret_cast<const __m256i*>(v + 2 * i * stride);
    const auto* const odd = reinterpret_cast<const __m256i*>(v + (2 * i + 1) * stride);
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(even)),
                                            _mm256_loadu_si256(odd), 1);
    a[i] = _mm512_permutexvar_epi16(pairs, both);
  }
  // A 16 x 16 transpose of 32-bit lanes: within 4 x 4 blocks, then of the blocks.
  for (std::size_t i = 0; i < kSide; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (std::size_t i = 0; i < kSide; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  for (std::size_t i = 0; i < 4; ++i) {  // a[4j + i]: channels i, 4 + i, 8 + i, 12 + i of quad j
    const __m512i low01 = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88);
    const __m512i low23 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
    const __m512i high01 = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
    const __m512i high23 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
    b[i] = _mm512_shuffle_i32x4(low01, low23, 0x88);
    b[8 + i] = _mm512_shuffle_i32x4(low01, low23, 0xdd);
    b[4 + i] = _mm512_shuffle_i32x4(high01, high23, 0x88);
    b[12 + i] = _mm512_shuffle_i32x4(high01, high23, 0xdd);
  }
  for (std::size_t i = 0; i < kSide; ++i) _mm512_store_si512(to + i * kDepth, b[i]);
}

void transpose_values(const PanelState& s, const Block& block) {
  constexpr std::size_t kTiles = kBlockRows / kDepth;
  for (std::size_t c = 0; c < s.head_dim; c += kSide) {
    for (std::size_t r = 0; r < block.rows; r += kDepth) {
      transpose_tile(block.v + r * block.stride + c, block.stride,
                     s.values_t + (c / kSide * kTiles + r / kDepth) * kTileElements);
    }
  }
}

// 2^x for any x <= 0 with an error of 2^-13, well below the 2^-8 of bf16: 2^x = 2^floor(x) 2^f, and
// on [0, 1) 2^f is interpolated in four Chebyshev nodes.
inline __m512 exp2_of(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
  __m512 y = _mm512_set1_ps(7.896725704e-2f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.246931558e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.963247711e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.999002882e-1f));
  return _mm512_scalef_ps(y, x);
}

// Masks the scores of rows that a query does not see.
void mask_column(const AttendTile& tile, std::size_t column, const Block& block, std::size_t rows,
                 float* scores) {
  alignas(64) std::int32_t seen[kSide];
  alignas(64) std::int32_t begins[kSide];
  for (std::size_t i = 0; i < kSide; ++i) {
    const int m = std::min(static_cast<int>(column * kSide + i), tile.queries - 1);
    const auto in_block = [&](std::int64_t row) {
      return static_cast<std::int32_t>(
          std::clamp<std::int64_t>(row - block.first, 0, static_cast<std::int64_t>(rows)));
    };
    seen[i] = in_block(tile.visible_to(m));
    begins[i] = in_block(tile.first_of(m));
  }
  const __m512i limit = _mm512_load_si512(seen);
  const __m512 hidden = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  const auto first = static_cast<std::size_t>(*std::min_element(seen, seen + kSide));
  for (std::size_t r = first; r < rows; ++r) {
    const __mmask16 hide =
        _mm512_cmple_epi32_mask(limit, _mm512_set1_epi32(static_cast<std::int32_t>(r)));
    _mm512_mask_store_ps(scores + r * kSide, hide, hidden);
  }
  const __m512i begin = _mm512_load_si512(begins);
  const auto latest = static_cast<std::size_t>(*std::max_element(begins, begins + kSide));
  for (std::size_t r = 0; r < latest; ++r) {
    const __mmask16 hide =
        _mm512_cmpgt_epi32_mask(begin, _mm512_set1_epi32(static_cast<std::int32_t>(r)));
    _mm512_mask_store_ps(scores + r * kSide, hide, hidden);
  }
}

// Raises the maxima of a column to those of its scores and rescales its sums. Returns the reference
// for the weights.
__m512 raise_maxima(const PanelState& s, std::size_t column, const float* scores,
                    std::size_t rows) {
  const __m512 none = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512 even = none;
  __m512 odd = none;
  for (std::size_t r = 0; r < rows; r += 2) {
    even = _mm512_max_ps(even, _mm512_load_ps(scores + r * kSide));
    odd = _mm512_max_ps(odd, _mm512_load_ps(scores + (r + 1) * kSide));
  }
  float* const highest = s.highest + column * kSide;
  const __m512 old = _mm512_load_ps(highest);
  const __m512 now = _mm512_max_ps(_mm512_max_ps(even, odd), old);
  const __mmask16 empty = _mm512_cmpeq_ps_mask(now, none);
  const __m512 reference = _mm512_mask_mov_ps(now, empty, _mm512_setzero_ps());
  if (_mm512_cmpneq_ps_mask(now, old) == 0) return reference;
  const __m512 scale = _mm512_set1_ps(s.scale);
  const __m512 factor = exp2_of(_mm512_mul_ps(_mm512_sub_ps(old, reference), scale));
  _mm512_store_ps(highest, now);
  float* const sums = s.sums + column * kSide;
  _mm512_store_ps(sums, _mm512_mul_ps(_mm512_load_ps(sums), factor));
  float* const values = s.values + column * s.head_dim * kSide;
  for (std::size_t c = 0; c < s.head_dim; ++c) {
    float* const value = values + c * kSide;
    _mm512_store_ps(value, _mm512_mul_ps(_mm512_load_ps(value), factor));
  }
  return reference;
}

// Multiplies the scores of a column by the scales of the keys.
void scale_column(const PanelState& s, float* scores, std::size_t rows) {
  for (std::size_t r = 0; r < rows; ++r) {
    const __m512 score = _mm512_load_ps(scores + r * kSide);
    _mm512_store_ps(scores + r * kSide, _mm512_mul_ps(score, _mm512_set1_ps(s.key_scales[r])));
  }
}

// Turns the scores of a column into weights: bf16 for the product with V, times the scales of the
// values if rows are coded, and summed in fp32.
void weigh_column(const PanelState& s, std::size_t column, const float* scores, std::size_t rows,
                  bool coded, std::uint16_t* weights) {
  const __m512 reference = raise_maxima(s, column, scores, rows);
  const __m512 scale = _mm512_set1_ps(s.scale);
  const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  float* const sums = s.sums + column * kSide;
  __m512 even_sum = _mm512_load_ps(sums);
  __m512 odd_sum = _mm512_setzero_ps();
  for (std::size_t r = 0; r < rows; r += 2) {
    const __m512 even_score = _mm512_load_ps(scores + r * kSide);
    const __m512 odd_score = _mm512_load_ps(scores + (r + 1) * kSide);
    __m512 even = exp2_of(_mm512_mul_ps(_mm512_sub_ps(even_score, reference), scale));
    __m512 odd = exp2_of(_mm512_mul_ps(_mm512_sub_ps(odd_score, reference), scale));
    even_sum = _mm512_add_ps(even_sum, even);
    odd_sum = _mm512_add_ps(odd_sum, odd);
    if (coded) {
      even = _mm512_mul_ps(even, _mm512_set1_ps(s.value_scales[r]));
      odd = _mm512_mul_ps(odd, _mm512_set1_ps(s.value_scales[r + 1]));
    }
    const auto rounded = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
    _mm512_store_si512(weights + r * kSide, _mm512_permutexvar_epi16(pairs, rounded));
  }
  _mm512_store_ps(sums, _mm512_add_ps(even_sum, odd_sum));
}

void attend_panel(const AttendTile& tile, const PanelState& s, const Block& block,
                  std::size_t panel, const Bf16Products& products) {
  const int last = std::min(static_cast<int>((panel + 1) * kPanel), tile.queries) - 1;
  const std::int64_t seen = tile.visible_to(last) - block.first;
  const std::int64_t begin = tile.first_of(static_cast<int>(panel * kPanel)) - block.first;
  if (seen <= 0 || begin >= static_cast<std::int64_t>(block.rows)) return;
  const std::size_t rows = std::min(block.rows, round_up(static_cast<std::size_t>(seen), kDepth));
  const std::size_t first = 2 * panel;
  const std::size_t matrix = first * kSide * s.head_dim;
  products.keys({block.k, block.stride, rows, s.head_dim, s.q + matrix, s.scores});
  const std::int64_t seen_by_all = tile.visible_to(static_cast<int>(panel * kPanel)) - block.first;
  for (std::size_t i = 0; i < 2; ++i) {
    float* const scores = s.scores + i * kBlockRows * kSide;
    if (tile.format.is_coded()) scale_column(s, scores, rows);
    if (seen_by_all < static_cast<std::int64_t>(rows) || block.first < tile.first_of(last)) {
      mask_column(tile, first + i, block, rows, scores);
    }
    weigh_column(s, first + i, scores, rows, tile.format.is_coded(),
                 s.weights + i * kBlockRows * kSide);
  }
  products.values({s.values_t, rows, s.head_dim, s.weights, s.values + matrix});
}

// Prefetches panel `panel`'s share of the rows after `first` into L2, so that they arrive while
// this block is computed.
void prefetch_share(const AttendTile& tile, const PanelState& s, std::int64_t first,
                    std::size_t panel) {
  if (first >= tile.count) return;
  const auto rows = std::min(kBlockRows, static_cast<std::size_t>(tile.count - first));
  const std::byte* const from = tile.rows + static_cast<std::size_t>(first) * tile.row_bytes;
  const std::size_t lines = rows * tile.row_bytes / kRowAlignment;
  const std::size_t panels = s.columns / 2;
  for (std::size_t i = lines * panel / panels; i < lines * (panel + 1) / panels; ++i) {
    _mm_prefetch(from + i * kRowAlignment, _MM_HINT_T1);
  }
}

void attend_blocks(const AttendTile& tile, const PanelState& s, const Bf16Products& products) {
  const std::int64_t count = tile.visible_to(tile.queries - 1);
  constexpr auto kStep = static_cast<std::int64_t>(kBlockRows);
  for (std::int64_t first = 0; first < count; first += kStep) {
    const auto rows = static_cast<std::size_t>(std::min(kStep, count - first));
    const Block block = make_block(tile, s, first, rows);
    transpose_values(s, block);
    for (std::size_t panel = 0; 2 * panel < s.columns; ++panel) {
      prefetch_share(tile, s, first + kStep, panel);
      attend_panel(tile, s, block, panel, products);
    }
  }
}

#pragma GCC pop_options

}  // namespace

std::size_t bf16_scratch(const AttendTile& tile) { return scratch_floats(sizes_of(tile)); }

void attend_bf16(const AttendTile& tile, const Bf16Products& products) {
  const PanelState s = make_state(tile);
  {
    std::optional<AmxTiles> tiles;
    if (products.uses_tiles) tiles.emplace();
    attend_blocks(tile, s, products);
  }
  for (int m = 0; m < tile.queries; ++m) {
    const auto i = static_cast<std::size_t>(m);
    const float* const values = s.values + i / kSide * kSide * s.head_dim + i % kSide;
    finish_query(tile, m, {values, kSide, s.highest[i] * s.scale, s.sums[i]});
  }
}

}  // namespace sluice::cpu

#endif
