// The decode kernel, once per instruction set; included by decode.cc only.
//
// Queries are processed in bunches of kQ. kR = kLanes / kQ rows are scored against a bunch at a
// time, because these kLanes dot products reduce together to one vector of scores. Scores are
// [row][query of the bunch]: lane r * kQ + g is query g of row r.
#if defined(SLUICE_CPU_ATTENTION_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLUICE_CPU_ATTENTION_DECODE_INL_H_
#undef SLUICE_CPU_ATTENTION_DECODE_INL_H_
#else
#define SLUICE_CPU_ATTENTION_DECODE_INL_H_
#endif

#include <hwy/cache_control.h>

#include <algorithm>
#include <numbers>
#include <span>

#include "cpu/attention/tile.h"
#include "cpu/runtime/simd-inl.h"
#include "lib/backend/index_ops.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::cpu {
namespace HWY_NAMESPACE {
namespace {

// Block size, one memory page: K and V of a block are read one after the other, and the hardware
// prefetcher, which works page by page, still sees one stream. Measured against larger blocks, with
// and without software prefetch: 12.6 instead of 9.5 GB/s where memory gives 13.3.
constexpr std::size_t kBlockBytes = 4096;
constexpr std::size_t kMaxBlockRows = 64;

// Software prefetch distance; it covers the step from one memory page to the next.
constexpr std::size_t kAheadBytes = 2048;

// Most queries per bunch whose accumulators fit the registers.
constexpr int kMaxBunch = kLanes == 16 ? 8 : kLanes == 8 ? 4 : 1;

// The scratch of one tile. `queries` and `head_dim` are padded to whole bunches and vectors.
struct DecodeState {
  std::size_t queries = 0;
  std::size_t head_dim = 0;
  std::size_t block_rows = 0;  // a multiple of kR
  float* q = nullptr;          // [queries, head_dim], times scale / ln 2
  float* values = nullptr;     // [queries, head_dim], see SoftmaxState
  float* highest = nullptr;    // [queries]
  float* sums = nullptr;       // [bunches, kLanes], to be summed over the kR lanes of a query
  float* scores = nullptr;     // [bunch rows / kR, kLanes]
  float* unpacked = nullptr;   // [block_rows, 2, head_dim], where rows are not whole vectors
};

// Per block of 4 lanes: the sums of a, b, c and d over that block's lanes.
#if HWY_TARGET != HWY_SCALAR
HWY_INLINE VF sum_of_4(VF a, VF b, VF c, VF d) {
  const DF df;
  const hn::Repartition<double, DF> dd;
  const auto ab =
      hn::BitCast(dd, hn::Add(hn::InterleaveLower(df, a, b), hn::InterleaveUpper(df, a, b)));
  const auto cd =
      hn::BitCast(dd, hn::Add(hn::InterleaveLower(df, c, d), hn::InterleaveUpper(df, c, d)));
  return hn::Add(hn::BitCast(df, hn::InterleaveLower(dd, ab, cd)),
                 hn::BitCast(df, hn::InterleaveUpper(dd, ab, cd)));
}
#endif

// Lane i is the sum of the lanes of v[i], i < kLanes.
HWY_INLINE VF sum_of_lanes(const VF* v) {
#if HWY_TARGET == HWY_SCALAR
  return v[0];
#else
  const DF df;
  const VF a = sum_of_4(v[0], v[1], v[2], v[3]);
  if constexpr (kLanes == 4) {
    return a;
  } else {
    const VF b = sum_of_4(v[4], v[5], v[6], v[7]);
    if constexpr (kLanes == 8) {
      return hn::Add(hn::ConcatLowerLower(df, b, a), hn::ConcatUpperUpper(df, b, a));
    } else {
      const VF c = sum_of_4(v[8], v[9], v[10], v[11]);
      const VF d = sum_of_4(v[12], v[13], v[14], v[15]);
      // Block sums as a a c c and b b d d, then the other block of each pair.
      const VF ac = hn::Add(hn::ConcatLowerLower(df, c, a), hn::ConcatUpperUpper(df, c, a));
      const VF bd = hn::Add(hn::ConcatLowerLower(df, d, b), hn::ConcatUpperUpper(df, d, b));
      return hn::Add(hn::OddEvenBlocks(bd, ac), hn::SwapAdjacentBlocks(hn::OddEvenBlocks(ac, bd)));
    }
  }
#endif
}

// Prefetches bytes [from, from + bytes) of a later block.
HWY_INLINE void prefetch(const RowBlock& block, const void* from, std::size_t bytes) {
  const std::byte* const later = static_cast<const std::byte*>(from) + block.ahead;
  for (std::size_t i = 0; i < bytes; i += kRowAlignment) hwy::Prefetch(later + i);
}

// Scores of one bunch against the rows of a block.
template <int kQ, typename T>
HWY_NOINLINE void score_rows(const RowBlock& block, const float* HWY_RESTRICT q, std::size_t d,
                             float* HWY_RESTRICT scores) {
  constexpr std::size_t kR = kLanes / kQ;
  const DF df;
  for (std::size_t first = 0; first < block.rows; first += kR) {
    const T* keys[kR];
    for (std::size_t r = 0; r < kR; ++r) keys[r] = block.key<T>(first + r);
    VF sums[kLanes];
    for (std::size_t i = 0; i < kLanes; ++i) sums[i] = hn::Zero(df);
    for (std::size_t c = 0; c < d; c += kLanes) {
      VF queries[kQ];
      for (std::size_t g = 0; g < kQ; ++g) queries[g] = hn::Load(df, q + g * d + c);
      for (std::size_t r = 0; r < kR; ++r) {
        const VF key = load_channels(keys[r], c);
        for (std::size_t g = 0; g < kQ; ++g) {
          sums[r * kQ + g] = hn::MulAdd(queries[g], key, sums[r * kQ + g]);
        }
      }
    }
    VF products = sum_of_lanes(sums);
    if constexpr (kHasScale<T>) {
      HWY_ALIGN float scales[kLanes];
      for (std::size_t i = 0; i < kLanes; ++i) scales[i] = scale_of(keys[i / kQ]);
      products = hn::Mul(products, hn::Load(df, scales));
    }
    hn::Store(products, df, scores + first * kQ);
    for (std::size_t r = 0; r < kR; ++r) prefetch(block, keys[r], bytes_of<T>(d));
  }
}

// values[g][c, c + kW vectors) += sum over rows of weight[g][row] * V[row][c, ...).
template <int kQ, int kW, typename T>
HWY_INLINE void add_columns(const RowBlock& block, const float* HWY_RESTRICT weights, std::size_t c,
                            std::size_t d, float* HWY_RESTRICT values) {
  constexpr std::size_t kR = kLanes / kQ;
  const DF df;
  VF sums[kQ * kW];
  for (std::size_t i = 0; i < kQ * kW; ++i) {
    sums[i] = hn::Load(df, values + i / kW * d + c + i % kW * kLanes);
  }
  for (std::size_t first = 0; first < block.rows; first += kR) {
    for (std::size_t r = 0; r < kR; ++r) {
      const T* const row = block.value<T>(first + r);
      prefetch(block, reinterpret_cast<const std::byte*>(row) + bytes_of<T>(c),
               bytes_of<T>(kW * kLanes));
      VF v[kW];
      for (std::size_t w = 0; w < kW; ++w) v[w] = load_channels(row, c + w * kLanes);
      for (std::size_t g = 0; g < kQ; ++g) {
        const VF weight = hn::Set(df, weights[(first + r) * kQ + g]);
        for (std::size_t w = 0; w < kW; ++w) {
          sums[g * kW + w] = hn::MulAdd(weight, v[w], sums[g * kW + w]);
        }
      }
    }
  }
  for (std::size_t i = 0; i < kQ * kW; ++i) {
    hn::Store(sums[i], df, values + i / kW * d + c + i % kW * kLanes);
  }
}

template <int kQ, typename T>
HWY_NOINLINE void add_values(const RowBlock& block, const float* HWY_RESTRICT weights,
                             std::size_t d, float* HWY_RESTRICT values) {
  constexpr int kW = static_cast<int>(HWY_MAX(1, HWY_MIN(4, kLanes / kQ)));
  std::size_t c = 0;
  for (; c + kW * kLanes <= d; c += kW * kLanes)
    add_columns<kQ, kW, T>(block, weights, c, d, values);
  for (; c < d; c += kLanes) add_columns<kQ, 1, T>(block, weights, c, d, values);
}

// Masks the scores of rows [first, first + rows) that a query does not see.
template <int kQ>
void mask_scores(const AttendTile& tile, int bunch, std::int64_t first, std::size_t rows,
                 float* scores) {
  const std::size_t padded = hwy::RoundUpTo(rows, kLanes / kQ);
  for (std::size_t g = 0; g < kQ; ++g) {
    const int m = std::min(bunch * kQ + static_cast<int>(g), tile.queries - 1);
    // Rows past the block's last row repeat it, so they are masked, too.
    const auto seen =
        std::clamp<std::int64_t>(tile.visible_to(m) - first, 0, static_cast<std::int64_t>(rows));
    const auto hidden = std::clamp<std::int64_t>(tile.first_of(m) - first, 0, seen);
    for (auto r = std::size_t{0}; r < static_cast<std::size_t>(hidden); ++r) {
      scores[r * kQ + g] = kMinusInfinity;
    }
    for (auto r = static_cast<std::size_t>(seen); r < padded; ++r) {
      scores[r * kQ + g] = kMinusInfinity;
    }
  }
}

// Raises the maxima of a bunch to `block_highest` and rescales its sums.
template <int kQ>
HWY_NOINLINE void raise_maxima(const DecodeState& state, std::size_t bunch, VF block_highest) {
  const DF df;
  float* const highest = state.highest + bunch * kLanes;
  HWY_ALIGN float lanes[kLanes];
  const VF old = hn::Load(df, highest);
  hn::Store(hn::Max(old, block_highest), df, lanes);
  for (std::size_t i = kQ; i < kLanes; ++i) lanes[i % kQ] = std::max(lanes[i % kQ], lanes[i]);
  for (std::size_t i = kQ; i < kLanes; ++i) lanes[i] = lanes[i % kQ];
  const VF now = hn::Load(df, lanes);
  const VF factor = exp2_of(hn::Sub(old, softmax_reference(now)));
  float* const sums = state.sums + bunch * kLanes;
  hn::Store(now, df, highest);
  hn::Store(hn::Mul(hn::Load(df, sums), factor), df, sums);
  hn::Store(factor, df, lanes);
  for (std::size_t g = 0; g < kQ; ++g) {
    float* const values = state.values + (bunch * kQ + g) * state.head_dim;
    const VF query_factor = hn::Set(df, lanes[g]);
    for (std::size_t c = 0; c < state.head_dim; c += kLanes) {
      hn::Store(hn::Mul(hn::Load(df, values + c), query_factor), df, values + c);
    }
  }
}

// Turns the scores of a bunch into weights and adds them to its sums.
template <int kQ>
HWY_INLINE void weigh_scores(const DecodeState& state, std::size_t bunch, std::size_t rows,
                             float* HWY_RESTRICT scores) {
  const DF df;
  const std::size_t count = hwy::RoundUpTo(rows * kQ, kLanes);
  const float* const highest = state.highest + bunch * kLanes;
  VF now = hn::Load(df, scores);
  for (std::size_t i = kLanes; i < count; i += kLanes) {
    now = hn::Max(now, hn::Load(df, scores + i));
  }
  if (!hn::AllTrue(df, hn::Le(now, hn::Load(df, highest)))) raise_maxima<kQ>(state, bunch, now);
  const VF reference = softmax_reference(hn::Load(df, highest));
  float* const sums = state.sums + bunch * kLanes;
  VF sum = hn::Load(df, sums);
  for (std::size_t i = 0; i < count; i += kLanes) {
    const VF weight = exp2_of(hn::Sub(hn::Load(df, scores + i), reference));
    sum = hn::Add(sum, weight);
    hn::Store(weight, df, scores + i);
  }
  hn::Store(sum, df, sums);
}

// Multiplies the weights of a bunch by the scales of the values, which are then added as codes.
template <int kQ, typename T>
void scale_weights(const RowBlock& block, float* HWY_RESTRICT weights) {
  const std::size_t padded = hwy::RoundUpTo(block.rows, kLanes / kQ);
  for (std::size_t row = 0; row < padded; ++row) {
    const float scale = scale_of(block.value<T>(row));
    for (std::size_t g = 0; g < kQ; ++g) weights[row * kQ + g] *= scale;
  }
}

// Attends to a block whose first row is row `first`.
template <int kQ, typename Rows>
void attend_block(const AttendTile& tile, const DecodeState& state, const RowBlock& block,
                  std::int64_t first) {
  using Value = typename Rows::Value;
  const std::size_t d = state.head_dim;
  const auto end = first + static_cast<std::int64_t>(block.rows);
  for (std::size_t bunch = 0; bunch * kQ < state.queries; ++bunch) {
    score_rows<kQ, typename Rows::Key>(block, state.q + bunch * kQ * d, d, state.scores);
    if (block.rows % (kLanes / kQ) != 0 || end > tile.visible_to(0) ||
        first < tile.first_of(tile.queries - 1)) {
      mask_scores<kQ>(tile, static_cast<int>(bunch), first, block.rows, state.scores);
    }
    weigh_scores<kQ>(state, bunch, block.rows, state.scores);
    if constexpr (kHasScale<Value>) scale_weights<kQ, Value>(block, state.scores);
    add_values<kQ, Value>(block, state.scores, d, state.values + bunch * kQ * d);
  }
}

// Unpacks rows that are not whole vectors to 2 * head_dim floats each in scratch.
template <typename Rows>
RowBlock unpack_block(const AttendTile& tile, const DecodeState& state, const RowBlock& from) {
  const auto d = static_cast<std::size_t>(tile.head_dim);
  for (std::size_t r = 0; r < from.rows; ++r) {
    float* const to = state.unpacked + r * 2 * state.head_dim;
    unpack(from.key<typename Rows::Key>(r), d, state.head_dim, to);
    unpack(from.value<typename Rows::Value>(r), d, state.head_dim, to + state.head_dim);
  }
  const auto* const k = reinterpret_cast<const std::byte*>(state.unpacked);
  const std::size_t half = state.head_dim * sizeof(float);
  return {k, k + half, 2 * half, from.rows};
}

// The block that starts at row `first` of `count` in a run.
HWY_INLINE RowBlock block_at(const AttendTile& tile, const DecodeState& state,
                             const std::byte* rows, std::int64_t first, std::int64_t count) {
  const std::byte* const k = rows + static_cast<std::size_t>(first) * tile.row_bytes;
  const auto rest = static_cast<std::size_t>(count - first);
  RowBlock block = {k, k + tile.value_offset(), tile.row_bytes, HWY_MIN(state.block_rows, rest)};
  if ((rest - block.rows) * tile.row_bytes >= kAheadBytes) block.ahead = kAheadBytes;
  return block;
}

// Attends to the first `count` rows of a run; `before` rows precede the run.
template <int kQ, typename Rows>
void attend_run(const AttendTile& tile, const DecodeState& state, const std::byte* rows,
                std::int64_t count, std::int64_t before) {
  const bool whole = static_cast<std::size_t>(tile.head_dim) == state.head_dim;
  const auto step = static_cast<std::int64_t>(state.block_rows);
  for (std::int64_t first = 0; first < count; first += step) {
    const RowBlock block = block_at(tile, state, rows, first, count);
    if (whole) {
      attend_block<kQ, Rows>(tile, state, block, before + first);
    } else {
      attend_block<kQ, RowTypes<float, float>>(tile, state, unpack_block<Rows>(tile, state, block),
                                               before + first);
    }
  }
}

template <int kQ, typename Rows>
void attend_rows(const AttendTile& tile, std::span<const RowSpan> runs, const DecodeState& state) {
  const std::int64_t seen = tile.visible_to(tile.queries - 1);
  std::int64_t before = 0;
  for (const RowSpan& run : runs) {
    attend_run<kQ, Rows>(tile, state, run.rows, std::min(run.count, seen - before), before);
    before += run.count;
  }
}

// Rows of a block, in whole steps of kR.
std::size_t block_rows(const AttendTile& tile, std::size_t bunch) {
  const std::size_t step = kLanes / bunch;
  const std::size_t rows = std::clamp(kBlockBytes / tile.row_bytes, step, kMaxBlockRows);
  return rows / step * step;
}

// Sizes only; pointers stay null.
DecodeState sizes_of(const AttendTile& tile, int bunch) {
  DecodeState state;
  const auto q = static_cast<std::size_t>(bunch);
  state.queries = hwy::RoundUpTo(static_cast<std::size_t>(tile.queries), q);
  state.head_dim = hwy::RoundUpTo(static_cast<std::size_t>(tile.head_dim), kLanes);
  state.block_rows = block_rows(tile, q);
  return state;
}

std::size_t floats_of(const AttendTile& tile, int bunch) {
  const DecodeState state = sizes_of(tile, bunch);
  const auto q = static_cast<std::size_t>(bunch);
  const bool whole = static_cast<std::size_t>(tile.head_dim) == state.head_dim;
  const std::size_t unpacked = whole ? 0 : state.block_rows * 2 * state.head_dim;
  return 2 * (state.queries * state.head_dim + state.queries / q * kLanes) + state.block_rows * q +
         unpacked;
}

DecodeState make_state(const AttendTile& tile, int bunch) {
  DecodeState state = sizes_of(tile, bunch);
  const auto q = static_cast<std::size_t>(bunch);
  const auto d = static_cast<std::size_t>(tile.head_dim);
  const std::size_t matrix = state.queries * state.head_dim;
  const std::size_t sums = state.queries / q * kLanes;
  const std::size_t scores = state.block_rows * q;
  const std::size_t zeroed = 2 * matrix + sums;
  float* const scratch = thread_scratch(Scratch::tile, floats_of(tile, bunch));
  std::fill_n(scratch, zeroed, 0.0f);
  state.q = scratch;
  state.values = state.q + matrix;
  state.sums = state.values + matrix;
  state.highest = state.sums + sums;
  state.scores = state.highest + sums;
  state.unpacked = state.scores + scores;
  std::fill_n(state.highest, sums, kMinusInfinity);
  const float factor = tile.scale * std::numbers::log2e_v<float>;
  for (int m = 0; m < tile.queries; ++m) {
    float* const to = state.q + static_cast<std::size_t>(m) * state.head_dim;
    for (std::size_t c = 0; c < d; ++c) to[c] = tile.query(m)[c] * factor;
  }
  return state;
}

template <int kQ>
void attend_bunches(const AttendTile& tile, std::span<const RowSpan> runs) {
  const DecodeState state = make_state(tile, kQ);
  dispatch_rows(tile.format,
                [&](auto types) { attend_rows<kQ, decltype(types)>(tile, runs, state); });
  for (int m = 0; m < tile.queries; ++m) {
    const auto i = static_cast<std::size_t>(m);
    const std::size_t lane = i / kQ * kLanes + i % kQ;
    float sum = 0.0f;
    for (std::size_t r = 0; r < kLanes; r += kQ) sum += state.sums[lane + r];
    finish_query(tile, m, {state.values + i * state.head_dim, 1, state.highest[lane], sum});
  }
}

// Maximum over all bunch sizes.
std::size_t scratch_floats(const AttendTile& tile) {
  std::size_t most = 0;
  for (int bunch = 1; bunch <= kMaxBunch; bunch *= 2) {
    most = HWY_MAX(most, floats_of(tile, bunch));
  }
  return most;
}

void decode_tile(const AttendTile& tile, std::span<const RowSpan> runs) {
  if constexpr (kMaxBunch >= 8) {
    if (tile.queries > 4) return attend_bunches<8>(tile, runs);
  }
  if constexpr (kMaxBunch >= 4) {
    if (tile.queries > 2) return attend_bunches<4>(tile, runs);
    // A bunch of one scores kLanes rows at a time; long rows then exceed a memory page.
    const bool pages = kLanes * tile.row_bytes > kBlockBytes;
    if (tile.queries == 2 || pages) return attend_bunches<2>(tile, runs);
  }
  attend_bunches<1>(tile, runs);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace sluice::cpu
HWY_AFTER_NAMESPACE();

#endif  // SLUICE_CPU_ATTENTION_DECODE_INL_H_
