#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/attended_rows.h"
#include "cpu/elementwise.h"
#include "cpu/selection.h"

namespace sluice::cpu {
namespace {

// Rows far apart: the next ones are asked for while one is copied.
constexpr std::int64_t kAheadRows = 8;
constexpr std::size_t kLineBytes = 64;

// Calls body(row) for rows of a sequence that are named by position, one after the other.
void for_rows_at(const PagedRows& rows, std::int32_t sequence, std::int64_t head,
                 std::span<const std::int32_t> positions, std::size_t row_bytes, const auto& body) {
  const auto row_at = [&](std::size_t i) {
    return rows.row(sequence, head, positions[i], static_cast<std::int64_t>(row_bytes));
  };
  for (std::size_t i = 0; i < positions.size(); ++i) {
    if (i + kAheadRows < positions.size()) {
      const std::byte* const later = row_at(i + kAheadRows);
      for (std::size_t at = 0; at < row_bytes; at += kLineBytes) __builtin_prefetch(later + at);
    }
    body(row_at(i));
  }
}

// One token and KV head.
class SelectedHead {
 public:
  SelectedHead(const AttendSelectedParams& p, std::int64_t number, std::int64_t head)
      : p_(p),
        token_(p.batch.tokens[number]),
        number_(number),
        head_(head),
        index_(number * p.shape.kv_heads + head),
        selection_(p.selected.heads[index_]),
        positions_(p.selected.positions + index_ * p.selected.capacity,
                   static_cast<std::size_t>(selection_.count)) {}

  void attend(const ArenaPart& arena) const {
    AttendedRows rows(decode_tile_of(p_, number_, head_), arena);
    add_rows(p_.rows, token_.sequence, head_, token_.page_first(), token_.count(),
             p_.shape.row_bytes(), rows);
    if (p_.estimated_lse != nullptr) {
      rows.attend();
      for_queries([&](std::int64_t query) { add_newest_share(query); });
    }
    for_rows_at(p_.rows, token_.sequence, head_, positions_, p_.shape.row_bytes(),
                [&](const std::byte* row) { rows.add_copy(row, 1); });
    rows.attend();
    if (p_.value_sums != nullptr) for_queries([&](std::int64_t query) { compensate(query); });
    selection_.resident = resident();
  }

 private:
  // Queries among [count, query_heads].
  void for_queries(const auto& body) const {
    for (std::int64_t g = 0; g < p_.shape.group(); ++g) body(index_ * p_.shape.group() + g);
  }

  // Once the newest rows alone are attended.
  void add_newest_share(std::int64_t query) const {
    const float highest = std::max(p_.estimated_lse[query], p_.lse[query]);
    const float newest = std::exp(p_.lse[query] - highest);
    const float estimated = std::exp(p_.estimated_lse[query] - highest);
    p_.alpha[query] = (p_.alpha[query] * estimated + newest) / (estimated + newest);
  }

  // Once all rows are attended: the mean value takes its part of the output.
  void compensate(std::int64_t query) const {
    const int d = p_.shape.head_dim;
    const float alpha = p_.alpha[query];
    const float rest = (1.0f - alpha) / static_cast<float>(token_.count());
    const float* const sums = p_.value_sums + index_ * d;
    float* const out = p_.out + query * d;
    for (int c = 0; c < d; ++c) out[c] = alpha * out[c] + rest * sums[c];
  }

  std::int32_t resident() const {
    return static_cast<std::int32_t>(
        std::count_if(positions_.begin(), positions_.end(), [&](std::int32_t position) {
          return p_.rows.page(token_.sequence, position / kPageTokens).device != PageSlots::kNone;
        }));
  }

  const AttendSelectedParams& p_;
  const BatchToken& token_;
  std::int64_t number_;
  std::int64_t head_;
  std::int64_t index_;  // of [count, kv_heads]
  HeadSelection& selection_;
  std::span<const std::int32_t> positions_;
};

}  // namespace

void attend_selected(const AttendSelectedParams& p, Threads& threads) {
  std::int64_t rows = 0;
  for (std::int64_t b = 0; b < p.batch.count; ++b) {
    for (std::int64_t head = 0; head < p.shape.kv_heads; ++head) {
      const BatchToken& token = p.batch.tokens[b];
      rows +=
          p.selected.heads[b * p.shape.kv_heads + head].count + token.count() - token.page_first();
    }
  }
  const ArenaParts arena(p.arena, p.arena_rows, p.shape.row_bytes(), p.batch.count);
  threads.for_each(
      arena.count * p.shape.kv_heads,
      [&](std::int64_t task) {
        const std::int64_t head = task % p.shape.kv_heads;
        const std::int64_t part = task / p.shape.kv_heads;
        for (std::int64_t b = part; b < p.batch.count; b += arena.count) {
          SelectedHead(p, b, head).attend(arena.part(head, part));
        }
      },
      rows * static_cast<std::int64_t>(p.shape.row_bytes()));
}

void gather(const GatherParams& p, Threads& threads) {
  const std::size_t row_bytes = p.shape.row_bytes();
  threads.for_each(p.shape.kv_heads, [&](std::int64_t head) {
    const std::int64_t count = p.counts[static_cast<std::size_t>(head)];
    std::byte* to = p.to + static_cast<std::size_t>(head * p.to_rows) * row_bytes;
    for_rows_at(p.rows, p.sequence, head,
                {p.positions + head * p.capacity + p.first, static_cast<std::size_t>(count)},
                row_bytes, [&](const std::byte* row) {
                  std::memcpy(to, row, row_bytes);
                  to += row_bytes;
                });
  });
}

void sum_values(const SumValuesParams& p) {
  const auto d = static_cast<std::size_t>(p.shape.head_dim);
  std::vector<float> value(d);
  for (std::size_t head = 0; head < p.rows.size(); ++head) {
    // A partial sum per call keeps the running sum's rounding at one per step.
    std::vector<float> sums(d);
    const std::byte* row = p.rows[head].rows + d * size_of(p.shape.dtype);
    for (std::int64_t i = 0; i < p.rows[head].count; ++i, row += p.shape.row_bytes()) {
      convert(row, p.shape.dtype, value.data(), DType::f32, p.shape.head_dim);
      for (std::size_t c = 0; c < d; ++c) sums[c] += value[c];
    }
    float* const to = p.sums + head * d;
    for (std::size_t c = 0; c < d; ++c) to[c] += p.subtract ? -sums[c] : sums[c];
  }
}

}  // namespace sluice::cpu
