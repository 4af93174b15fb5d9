#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/attention/attended_rows.h"
#include "cpu/attention/attention.h"
#include "cpu/attention/prefetch.h"
#include "cpu/attention/row_cache.h"
#include "cpu/runtime/elementwise.h"

namespace sluice::cpu {
namespace {

// One token and KV head.
class SelectedHead {
 public:
  SelectedHead(const AttendSelectedParams& p, std::int64_t number, std::int64_t head)
      : p_(p),
        token_(p.batch.tokens[number]),
        number_(number),
        head_(head),
        index_(number * p.shape.kv_heads + head),
        positions_(p.selected.positions + index_ * p.selected.capacity,
                   static_cast<std::size_t>(p.selected.heads[index_].count)) {}

  void attend(const ArenaPart& arena) const {
    AttendedRows rows(decode_tile_of(p_, number_, head_), arena);
    add_rows(p_.rows, token_.sequence, head_, token_.page_first(), token_.count(),
             p_.shape.row_bytes(), rows);
    if (p_.estimated_lse != nullptr) {
      rows.attend();
      for_queries([&](std::int64_t query) { add_newest_share(query); });
    }
    if (p_.places != nullptr) {
      add_placed(rows);
    } else {
      add_paged(rows);
    }
    rows.attend();
    if (p_.value_sums != nullptr) for_queries([&](std::int64_t query) { compensate(query); });
  }

 private:
  void add_paged(AttendedRows& rows) const {
    std::int32_t resident = 0;
    for_rows(
        positions_.size(), p_.shape.row_bytes(),
        [&](std::size_t i) {
          return p_.rows.row(token_.sequence, head_, positions_[i],
                             static_cast<std::int64_t>(p_.shape.row_bytes()));
        },
        [&](std::size_t i, const std::byte* row) {
          rows.add_copy(row, 1);
          const PageSlots& page = p_.rows.page(token_.sequence, positions_[i] / kPageTokens);
          resident += page.device != PageSlots::kNone ? 1 : 0;
        });
    report(resident);
  }

  void report(std::int32_t resident) const {
    if (p_.resident != nullptr) p_.resident[index_] = resident;
  }

  void add_placed(AttendedRows& rows) const {
    std::int32_t resident = 0;
    const PlacedRow* const places = p_.places + index_ * p_.selected.capacity;
    for_rows(
        positions_.size(), p_.shape.row_bytes(),
        [&](std::size_t i) { return placed_row(p_, head_, places[i]); },
        [&](std::size_t i, const std::byte* row) {
          std::byte* const way = way_of(p_, head_, places[i]);
          if (way != nullptr) std::memcpy(way, row, p_.shape.row_bytes());
          rows.add_copy(row, 1);
          resident += places[i].is_cached() || places[i].is_on_device() ? 1 : 0;
        });
    report(resident);
  }

  // Calls body(query) for the queries of this head, in [count, query_heads].
  void for_queries(const auto& body) const {
    for (std::int64_t g = 0; g < p_.shape.group(); ++g) body(index_ * p_.shape.group() + g);
  }

  // Adds the newest rows' share to alpha; called when only the newest rows have been attended.
  void add_newest_share(std::int64_t query) const {
    const float highest = std::max(p_.estimated_lse[query], p_.lse[query]);
    const float newest = std::exp(p_.lse[query] - highest);
    const float estimated = std::exp(p_.estimated_lse[query] - highest);
    p_.alpha[query] = (p_.alpha[query] * estimated + newest) / (estimated + newest);
  }

  // Mixes the mean value into the output; called when all rows have been attended.
  void compensate(std::int64_t query) const {
    const int d = p_.shape.head_dim;
    const float alpha = p_.alpha[query];
    const float rest = (1.0f - alpha) / static_cast<float>(token_.count());
    const float* const sums = p_.value_sums + index_ * d;
    float* const out = p_.out + query * d;
    for (int c = 0; c < d; ++c) out[c] = alpha * out[c] + rest * sums[c];
  }

  const AttendSelectedParams& p_;
  const BatchToken& token_;
  std::int64_t number_;
  std::int64_t head_;
  std::int64_t index_;  // into [count, kv_heads]
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

}  // namespace sluice::cpu
