#include "cpu/attention/row_cache.h"

#include <algorithm>

#include "cpu/attention/attention.h"

namespace sluice::cpu {
namespace {

// A KV head's part of the cache.
class CachedHead {
 public:
  CachedHead(const FindRowsParams& p, std::int64_t head)
      : p_(p),
        head_(head),
        first_(head * p.cache.ways()),
        fresh_(p.cache.heat_of_new(*p.cache.clock)) {}

  // Looks up all rows before taking ways, so that no cached row of the selection is evicted.
  void find() const {
    for_selected([&](std::int64_t number, std::int32_t position, PlacedRow& to) {
      to = look_up(p_.batch.tokens[number], position);
    });
    for (std::int64_t number = 0; p_.evicted != nullptr && number < p_.batch.count; ++number) {
      p_.evicted[index_of(number)] = 0;
    }
    for_selected([&](std::int64_t number, std::int32_t, PlacedRow& to) {
      if (to.place == PlacedRow::kHost) to.place = take_way(to.number, number);
    });
  }

 private:
  std::int64_t index_of(std::int64_t number) const { return number * p_.shape.kv_heads + head_; }

  // Calls body(number of the token, position, place).
  void for_selected(const auto& body) const {
    for (std::int64_t number = 0; number < p_.batch.count; ++number) {
      const std::int64_t index = index_of(number);
      const std::int64_t first = index * p_.selected.capacity;
      for (std::int64_t i = first; i < first + p_.selected.heads[index].count; ++i) {
        body(number, p_.selected.positions[i], p_.places[i]);
      }
    }
  }

  PlacedRow look_up(const BatchToken& token, std::int32_t position) const {
    constexpr auto kRows = static_cast<std::int32_t>(kPageTokens);
    const PageSlots& page = p_.rows.page(token.sequence, position / kRows);
    if (page.device != PageSlots::kNone) {
      return {page.device * kRows + position % kRows, PlacedRow::kDevice};
    }
    const std::int32_t host = page.host * kRows + position % kRows;
    const RowCacheView::Tag tag = p_.cache.tag(p_.layer, host);
    const std::int64_t way = way_of(tag);
    if (way < 0) return {host, PlacedRow::kHost};
    heat(way);
    return {static_cast<std::int32_t>(way), PlacedRow::kCached};
  }

  // Returns the way that a selected row in host memory will be cached in, or kHost if it gets none.
  std::int32_t take_way(std::int32_t host, std::int64_t number) const {
    const RowCacheView::Tag tag = p_.cache.tag(p_.layer, host);
    // Another token of the batch has already taken a way for this row; it is not filled yet.
    if (const std::int64_t way = way_of(tag); way >= 0) {
      heat(way);
      return PlacedRow::kHost;
    }
    const std::int64_t set = p_.cache.set_of(tag) * RowCacheView::kWays;
    const std::int32_t* const heat = p_.cache.heat + first_ + set;
    const std::int64_t coldest = std::min_element(heat, heat + RowCacheView::kWays) - heat;
    if (heat[coldest] >= fresh_) return PlacedRow::kHost;
    const std::int64_t way = set + coldest;
    const bool evicts = p_.cache.tags[first_ + way] != RowCacheView::kNothing;
    if (evicts && p_.evicted != nullptr) ++p_.evicted[index_of(number)];
    p_.cache.tags[first_ + way] = tag;
    p_.cache.heat[first_ + way] = fresh_;
    return static_cast<std::int32_t>(way);
  }

  // The way that holds this row, or -1.
  std::int64_t way_of(RowCacheView::Tag tag) const {
    const std::int64_t set = p_.cache.set_of(tag) * RowCacheView::kWays;
    const RowCacheView::Tag* const tags = p_.cache.tags + first_ + set;
    const RowCacheView::Tag* const found = std::find(tags, tags + RowCacheView::kWays, tag);
    return found == tags + RowCacheView::kWays ? -1 : set + (found - tags);
  }

  void heat(std::int64_t way) const {
    std::int32_t& heat = p_.cache.heat[first_ + way];
    heat = RowCacheView::heated(heat, fresh_);
  }

  const FindRowsParams& p_;
  std::int64_t head_;
  std::int64_t first_;  // first way of this head
  std::int32_t fresh_;
};

std::byte* cached_row(const AttendSelectedParams& p, std::int64_t head, std::int64_t way) {
  return p.cache.rows + static_cast<std::size_t>(head * p.cache.ways() + way) * p.shape.row_bytes();
}

}  // namespace

void find_rows(const FindRowsParams& p, Threads& threads) {
  std::int64_t rows = 0;
  for (std::int64_t i = 0; i < p.batch.count * p.shape.kv_heads; ++i) {
    rows += p.selected.heads[i].count;
  }
  // Bytes read to look up one row.
  constexpr std::int64_t kSetBytes = RowCacheView::kWays * sizeof(RowCacheView::Tag);
  threads.for_each(
      p.shape.kv_heads, [&](std::int64_t head) { CachedHead(p, head).find(); }, rows * kSetBytes);
}

void forget_rows(const ForgetRowsParams& p) {
  for (std::int64_t way = 0; way < p.shape.kv_heads * p.cache.ways(); ++way) {
    RowCacheView::Tag& tag = p.cache.tags[way];
    const std::int64_t host = p.cache.host_of(tag);
    const bool named = tag != RowCacheView::kNothing && host >= p.first && host - p.first < p.count;
    if (!p.all && !named) continue;
    tag = RowCacheView::kNothing;
    p.cache.heat[way] = RowCacheView::kCold;
  }
}

const std::byte* placed_row(const AttendSelectedParams& p, std::int64_t head,
                            const PlacedRow& place) {
  if (place.is_cached()) return cached_row(p, head, place.number);
  const bool there = place.is_on_device();
  return (there ? p.rows.device + head * p.rows.device_stride
                : p.rows.host + head * p.rows.host_stride) +
         static_cast<std::size_t>(place.number) * p.shape.row_bytes();
}

std::byte* way_of(const AttendSelectedParams& p, std::int64_t head, const PlacedRow& place) {
  return place.is_kept() ? cached_row(p, head, place.place) : nullptr;
}

}  // namespace sluice::cpu
