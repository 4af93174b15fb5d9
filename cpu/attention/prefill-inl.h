// The prefill kernel, once per instruction set; included by prefill.cc only.
//
// Queries are stored in panels of two vectors, one query per lane. Scores are S = K Q^T, [rows,
// lanes], and values O = V^T P, [head_dim, lanes], so softmax needs no cross-lane operations.
#if defined(SLUICE_CPU_ATTENTION_PREFILL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLUICE_CPU_ATTENTION_PREFILL_INL_H_
#undef SLUICE_CPU_ATTENTION_PREFILL_INL_H_
#else
#define SLUICE_CPU_ATTENTION_PREFILL_INL_H_
#endif

#include <algorithm>
#include <numbers>

#include "cpu/attention/tile.h"
#include "cpu/runtime/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::cpu {
namespace HWY_NAMESPACE {
namespace {

constexpr std::size_t kPanel = 2 * kLanes;

// Rows per block: its keys and values, as floats, stay in the L2 cache.
constexpr std::size_t kPrefillRows = 64;

// Rows of a product held in registers; at two vectors each they fill half of the register file.
constexpr std::size_t kProductRows = kLanes == 16 ? 8 : 4;

// The scratch of one tile. head_dim is padded to kProductRows, with zeros.
struct PrefillState {
  std::size_t panels = 0;
  std::size_t head_dim = 0;
  std::size_t stride = 0;       // of an unpacked key or value, whole vectors
  float* q = nullptr;           // [panels, head_dim, kPanel], times scale / ln 2
  float* values = nullptr;      // [panels, head_dim, kPanel], see SoftmaxState
  float* highest = nullptr;     // [panels, kPanel]
  float* sums = nullptr;        // [panels, kPanel]
  float* scores = nullptr;      // [kPrefillRows, kPanel]
  float* keys = nullptr;        // [kPrefillRows, stride]
  float* row_values = nullptr;  // [kPrefillRows, stride]
};

// A matrix read one element at a time: element (i, k) is at i * row + k * depth.
struct Operand {
  const float* data;
  std::size_t row;
  std::size_t depth;
};

// c[0, kProductRows) (+)= a b, with b [depth, kPanel] and c [kProductRows, kPanel].
template <bool kAccumulate>
HWY_INLINE void multiply_rows(const Operand& a, const float* HWY_RESTRICT b, std::size_t depth,
                              float* HWY_RESTRICT c) {
  const DF df;
  VF low[kProductRows];
  VF high[kProductRows];
  for (std::size_t i = 0; i < kProductRows; ++i) {
    low[i] = kAccumulate ? hn::Load(df, c + i * kPanel) : hn::Zero(df);
    high[i] = kAccumulate ? hn::Load(df, c + i * kPanel + kLanes) : hn::Zero(df);
  }
  for (std::size_t k = 0; k < depth; ++k) {
    const VF b_low = hn::Load(df, b + k * kPanel);
    const VF b_high = hn::Load(df, b + k * kPanel + kLanes);
    for (std::size_t i = 0; i < kProductRows; ++i) {
      const VF factor = hn::Set(df, a.data[i * a.row + k * a.depth]);
      low[i] = hn::MulAdd(factor, b_low, low[i]);
      high[i] = hn::MulAdd(factor, b_high, high[i]);
    }
  }
  for (std::size_t i = 0; i < kProductRows; ++i) {
    hn::Store(low[i], df, c + i * kPanel);
    hn::Store(high[i], df, c + i * kPanel + kLanes);
  }
}

// c (+)= a b with `rows` rows, a multiple of kProductRows.
template <bool kAccumulate>
HWY_NOINLINE void multiply(const Operand& a, const float* HWY_RESTRICT b, std::size_t rows,
                           std::size_t depth, float* HWY_RESTRICT c) {
  for (std::size_t i = 0; i < rows; i += kProductRows) {
    multiply_rows<kAccumulate>({a.data + i * a.row, a.row, a.depth}, b, depth, c + i * kPanel);
  }
}

// Masks the scores of rows [first, first + rows) that a query does not see.
void mask_panel(const AttendTile& tile, std::size_t panel, std::int64_t first, std::size_t rows,
                float* scores) {
  for (std::size_t lane = 0; lane < kPanel; ++lane) {
    const int m = std::min(static_cast<int>(panel * kPanel + lane), tile.queries - 1);
    const std::int64_t seen = std::max<std::int64_t>(tile.visible_to(m) - first, 0);
    const auto hidden =
        std::clamp<std::int64_t>(tile.first_of(m) - first, 0, static_cast<std::int64_t>(rows));
    for (std::size_t r = 0; r < static_cast<std::size_t>(hidden); ++r) {
      scores[r * kPanel + lane] = kMinusInfinity;
    }
    for (auto r = static_cast<std::size_t>(seen); r < rows; ++r) {
      scores[r * kPanel + lane] = kMinusInfinity;
    }
  }
}

// Turns one vector's column of scores into weights.
HWY_INLINE void weigh_lanes(float* HWY_RESTRICT scores, std::size_t rows, std::size_t head_dim,
                            float* HWY_RESTRICT highest, float* HWY_RESTRICT sums,
                            float* HWY_RESTRICT values) {
  const DF df;
  const VF old = hn::Load(df, highest);
  VF now = old;
  for (std::size_t r = 0; r < rows; ++r) now = hn::Max(now, hn::Load(df, scores + r * kPanel));
  const VF reference = softmax_reference(now);
  VF sum = hn::Load(df, sums);
  if (!hn::AllTrue(df, hn::Eq(now, old))) {
    const VF factor = exp2_of(hn::Sub(old, reference));
    sum = hn::Mul(sum, factor);
    hn::Store(now, df, highest);
    for (std::size_t c = 0; c < head_dim; ++c) {
      hn::Store(hn::Mul(hn::Load(df, values + c * kPanel), factor), df, values + c * kPanel);
    }
  }
  for (std::size_t r = 0; r < rows; ++r) {
    const VF weight = exp2_of(hn::Sub(hn::Load(df, scores + r * kPanel), reference));
    sum = hn::Add(sum, weight);
    hn::Store(weight, df, scores + r * kPanel);
  }
  hn::Store(sum, df, sums);
}

// One block of unpacked rows, [first, first + rows), against one panel.
void attend_panel(const AttendTile& tile, const PrefillState& state, std::size_t panel,
                  std::int64_t first, std::size_t rows) {
  const int last = std::min(static_cast<int>((panel + 1) * kPanel), tile.queries) - 1;
  const std::int64_t seen = tile.visible_to(last) - first;
  const int earliest = static_cast<int>(panel * kPanel);
  const bool is_hidden = tile.first_of(earliest) - first >= static_cast<std::int64_t>(rows);
  if (seen <= 0 || is_hidden) return;
  rows = std::min(rows, static_cast<std::size_t>(seen));
  const std::size_t padded = hwy::RoundUpTo(rows, kProductRows);
  const std::size_t matrix = panel * state.head_dim * kPanel;
  float* const values = state.values + matrix;
  multiply<false>({state.keys, state.stride, 1}, state.q + matrix, padded, state.head_dim,
                  state.scores);
  if (static_cast<std::int64_t>(padded) > tile.visible_to(earliest) - first ||
      first < tile.first_of(last)) {
    mask_panel(tile, panel, first, padded, state.scores);
  }
  for (std::size_t lanes = 0; lanes < kPanel; lanes += kLanes) {
    const std::size_t column = panel * kPanel + lanes;
    weigh_lanes(state.scores + lanes, padded, state.head_dim, state.highest + column,
                state.sums + column, values + lanes);
  }
  multiply<true>({state.row_values, 1, state.stride}, state.scores, state.head_dim, padded, values);
}

// Keys and values of rows [first, first + rows) as floats; zeros up to kPrefillRows.
template <typename Rows>
HWY_NOINLINE void unpack_rows(const AttendTile& tile, const PrefillState& state, std::int64_t first,
                              std::size_t rows) {
  const std::byte* const k = tile.rows + static_cast<std::size_t>(first) * tile.row_bytes;
  const RowBlock block = {k, k + tile.value_offset(), tile.row_bytes, rows};
  const auto d = static_cast<std::size_t>(tile.head_dim);
  for (std::size_t r = 0; r < rows; ++r) {
    unpack(block.key<typename Rows::Key>(r), d, state.stride, state.keys + r * state.stride);
    unpack(block.value<typename Rows::Value>(r), d, state.stride,
           state.row_values + r * state.stride);
  }
  const std::size_t rest = (kPrefillRows - rows) * state.stride;
  std::fill_n(state.keys + rows * state.stride, rest, 0.0f);
  std::fill_n(state.row_values + rows * state.stride, rest, 0.0f);
}

void unpack_rows(const AttendTile& tile, const PrefillState& state, std::int64_t first,
                 std::size_t rows) {
  dispatch_rows(tile.format,
                [&](auto types) { unpack_rows<decltype(types)>(tile, state, first, rows); });
}

// Sizes only; pointers stay null.
PrefillState sizes_of(const AttendTile& tile) {
  PrefillState state;
  const auto d = static_cast<std::size_t>(tile.head_dim);
  state.panels = (static_cast<std::size_t>(tile.queries) + kPanel - 1) / kPanel;
  state.head_dim = hwy::RoundUpTo(d, kProductRows);
  state.stride = hwy::RoundUpTo(d, HWY_MAX(kLanes, kProductRows));
  return state;
}

std::size_t scratch_floats(const AttendTile& tile) {
  const PrefillState state = sizes_of(tile);
  const std::size_t queries = state.panels * kPanel;
  return 2 * queries * (state.head_dim + 1) + kPrefillRows * (kPanel + 2 * state.stride);
}

PrefillState make_prefill_state(const AttendTile& tile) {
  PrefillState state = sizes_of(tile);
  const auto d = static_cast<std::size_t>(tile.head_dim);
  const std::size_t queries = state.panels * kPanel;
  const std::size_t matrix = queries * state.head_dim;
  const std::size_t rows = kPrefillRows * state.stride;
  const std::size_t zeroed = 2 * matrix + queries;
  float* const scratch = thread_scratch(Scratch::tile, scratch_floats(tile));
  std::fill_n(scratch, zeroed, 0.0f);
  state.q = scratch;
  state.values = state.q + matrix;
  state.sums = state.values + matrix;
  state.highest = state.sums + queries;
  state.scores = state.highest + queries;
  state.keys = state.scores + kPrefillRows * kPanel;
  state.row_values = state.keys + rows;
  std::fill_n(state.highest, queries, kMinusInfinity);
  const float factor = tile.scale * std::numbers::log2e_v<float>;
  for (std::size_t m = 0; m < static_cast<std::size_t>(tile.queries); ++m) {
    const float* const from = tile.query(static_cast<int>(m));
    float* const to = state.q + m / kPanel * state.head_dim * kPanel + m % kPanel;
    for (std::size_t c = 0; c < d; ++c) to[c * kPanel] = from[c] * factor;
  }
  return state;
}

void prefill_tile(const AttendTile& tile) {
  const PrefillState state = make_prefill_state(tile);
  const std::int64_t count = tile.visible_to(tile.queries - 1);
  constexpr auto kStep = static_cast<std::int64_t>(kPrefillRows);
  for (std::int64_t first = 0; first < count; first += kStep) {
    const auto rows = static_cast<std::size_t>(std::min(kStep, count - first));
    unpack_rows(tile, state, first, rows);
    for (std::size_t p = 0; p < state.panels; ++p) attend_panel(tile, state, p, first, rows);
  }
  for (int m = 0; m < tile.queries; ++m) {
    const auto i = static_cast<std::size_t>(m);
    const float* const values = state.values + i / kPanel * state.head_dim * kPanel + i % kPanel;
    finish_query(tile, m, {values, kPanel, state.highest[i], state.sums[i]});
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace sluice::cpu
HWY_AFTER_NAMESPACE();

#endif  // SLUICE_CPU_ATTENTION_PREFILL_INL_H_
