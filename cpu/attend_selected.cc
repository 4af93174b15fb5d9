#include <algorithm>
#include <cstring>

#include "cpu/attention.h"
#include "cpu/attention_simd.h"
#include "cpu/elementwise.h"
#include "cpu/selection.h"

namespace sluice::cpu {
namespace {

// Rows far apart: the next ones are asked for while one is copied.
constexpr std::int64_t kAheadRows = 8;
constexpr std::size_t kLineBytes = 64;

void prefetch_row(const std::byte* row, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += kLineBytes) __builtin_prefetch(row + at);
}

const std::byte* row_at(const RowSource& source, std::int64_t position, std::size_t row_bytes) {
  const std::byte* const base = position < source.resident_count ? source.resident : source.home;
  return base + static_cast<std::size_t>(position) * row_bytes;
}

void gather(const RowSource& source, const std::int32_t* positions, std::int64_t count,
            std::size_t row_bytes, std::byte* to) {
  for (std::int64_t i = 0; i < count; ++i) {
    if (i + kAheadRows < count) {
      prefetch_row(row_at(source, positions[i + kAheadRows], row_bytes), row_bytes);
    }
    std::memcpy(to + static_cast<std::size_t>(i) * row_bytes,
                row_at(source, positions[i], row_bytes), row_bytes);
  }
}

std::byte* arena_of(const AttendSelectedParams& p, std::int64_t head) {
  return p.arena + static_cast<std::size_t>(head * p.arena_rows) * p.shape.row_bytes();
}

// Copies up to arena_rows rows of a KV head, from number `first` of its selection on, and returns
// how many.
std::int64_t gather_piece(const AttendSelectedParams& p, std::int64_t head, std::int64_t first) {
  const std::int32_t* const positions = p.selected.positions + head * p.selected.capacity;
  const std::int64_t left = p.selected.heads[head].count - first;
  const std::int64_t count = std::clamp<std::int64_t>(left, 0, p.arena_rows);
  gather(p.rows[static_cast<std::size_t>(head)], positions + first, count, p.shape.row_bytes(),
         arena_of(p, head));
  return count;
}

void count_resident(const AttendSelectedParams& p, std::int64_t head) {
  const std::int32_t* const positions = p.selected.positions + head * p.selected.capacity;
  HeadSelection& selection = p.selected.heads[head];
  const std::int64_t resident = p.rows[static_cast<std::size_t>(head)].resident_count;
  selection.resident = static_cast<std::int32_t>(
      std::lower_bound(positions, positions + selection.count, resident) - positions);
}

// One token: gather and attend head by head, while the rows are in the cache.
void attend_head(const AttendSelectedParams& p, std::int64_t head) {
  const KvShape& shape = p.shape;
  const std::int64_t first_head = head * shape.group();
  AttendTile tile;
  tile.q = p.q + first_head * shape.head_dim;
  tile.queries = tile.group = shape.group();
  tile.head_dim = shape.head_dim;
  tile.scale = p.scale;
  tile.rows = arena_of(p, head);
  tile.row_bytes = shape.row_bytes();
  tile.dtype = shape.dtype;
  tile.out = p.out + first_head * shape.head_dim;
  tile.lse = p.lse + first_head;
  tile.merge = p.merge;
  std::int64_t done = 0;
  do {
    tile.count = gather_piece(p, head, done);
    tile.visible = std::min(tile.count, p.first_query + 1 - done);
    attend_decode(tile);
    tile.merge = true;
    done += tile.count;
  } while (done < p.selected.heads[head].count);
}

// Many tokens: pieces of all heads at a time go through the kernels of dense attention.
void attend_tokens(const AttendSelectedParams& p, Threads& threads) {
  std::int64_t longest = 0;
  for (int head = 0; head < p.shape.kv_heads; ++head) {
    longest = std::max<std::int64_t>(longest, p.selected.heads[head].count);
  }
  std::vector<RowSpan> rows(static_cast<std::size_t>(p.shape.kv_heads));
  AttendParams params = dense_of(p);
  params.rows = rows;
  std::int64_t first = 0;
  do {
    threads.for_each(p.shape.kv_heads, [&](std::int64_t head) {
      rows[static_cast<std::size_t>(head)] = {arena_of(p, head), gather_piece(p, head, first)};
    });
    params.first_row_position = first;
    attend(params, threads);
    params.merge = true;
    first += p.arena_rows;
  } while (first < longest);
}

}  // namespace

void attend_selected(const AttendSelectedParams& params, Threads& threads) {
  AttendSelectedParams p = params;
  if (!p.newest.empty()) {
    attend(newest_of(p), threads);
    add_newest_share(p);
    p.merge = true;
  }
  std::int64_t rows = 0;
  for (int head = 0; head < p.shape.kv_heads; ++head) {
    rows += p.selected.heads[head].count;
    count_resident(p, head);
  }
  if (p.tokens > 1) return attend_tokens(p, threads);
  threads.for_each(
      p.shape.kv_heads, [&](std::int64_t head) { attend_head(p, head); },
      rows * static_cast<std::int64_t>(p.shape.row_bytes()));
  compensate(p);
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
