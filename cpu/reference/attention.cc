#include "cpu/reference/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <vector>

#include "cpu/attention/row_cache.h"
#include "cpu/reference/ops.h"
#include "lib/backend.h"

namespace sluice::cpu::reference {
namespace {

// Log-sum-exp of an empty set.
constexpr double kNone = -std::numeric_limits<double>::infinity();

// Rows of one KV head, in device or host memory.
using Rows = std::vector<const std::byte*>;

void report(const Rows& rows, const KvShape& shape, ReferenceReads& reads) {
  for (const std::byte* const row : rows) reads.on_read(row, shape.row_bytes());
}

// Reports the reads of a decoding token: once for each part of its query heads.
void report_parts(const Rows& rows, const KvShape& shape, ReferenceReads& reads) {
  const int parts = ReadPattern::parts(shape.group(), reads.attend_queries());
  for (int part = 0; part < parts; ++part) report(rows, shape, reads);
}

// Attention of one query to a set of rows.
struct Partial {
  std::vector<double> out;
  double lse = kNone;
};

std::vector<double> logits_of(const float* q, const KvShape& shape, double scale, const Rows& rows,
                              std::size_t visible) {
  std::vector<double> logits;
  for (std::size_t i = 0; i < visible; ++i) {
    double dot = 0;
    for (int c = 0; c < shape.head_dim; ++c) {
      dot += static_cast<double>(q[c]) * key_element(shape, rows[i], c);
    }
    logits.push_back(dot * scale);
  }
  return logits;
}

// Attention of one query to the first `visible` rows.
Partial attend_query(const float* q, const KvShape& shape, double scale, const Rows& rows,
                     std::size_t visible) {
  const int d = shape.head_dim;
  std::vector<double> weights = logits_of(q, shape, scale, rows, visible);
  double highest = kNone;
  for (const double logit : weights) highest = logit > highest ? logit : highest;
  // If all logits are -inf, no row has any weight, as if there were no rows; NaN stays NaN.
  const double reference = highest == kNone ? 0 : highest;
  double sum = 0;
  for (double& weight : weights) sum += weight = std::exp(weight - reference);
  Partial result;
  result.out.resize(static_cast<std::size_t>(d));
  if (sum == 0) return result;
  result.lse = reference + std::log(sum);
  for (int c = 0; c < d; ++c) {
    double& value = result.out[static_cast<std::size_t>(c)];
    for (std::size_t i = 0; i < visible; ++i) {
      value += weights[i] / sum * value_element(shape, rows[i], c);
    }
  }
  return result;
}

// Weights of an old partial and of this one; both zero when neither holds a row.
struct MergeWeights {
  double before;
  double here;
  double lse;
};

MergeWeights merge_weights(double before, double here) {
  if (before == kNone && here == kNone) return {0, 0, kNone};
  const double highest = std::max(before, here);
  const double lse = highest + std::log(std::exp(before - highest) + std::exp(here - highest));
  return {std::exp(before - lse), std::exp(here - lse), lse};
}

void store(const Partial& partial, bool merge, float* out, float* lse) {
  const MergeWeights weights = merge_weights(merge ? *lse : kNone, partial.lse);
  for (std::size_t c = 0; c < partial.out.size(); ++c) {
    const double before = weights.before == 0 ? 0 : weights.before * out[c];
    out[c] = static_cast<float>(before + (weights.here == 0 ? 0 : weights.here * partial.out[c]));
  }
  *lse = static_cast<float>(weights.lse);
}

// Rows [first, end) of a sequence, by position.
Rows rows_between(const PagedRows& rows, const KvShape& shape, std::int32_t sequence, int head,
                  std::int64_t first, std::int64_t end) {
  Rows result;
  for (std::int64_t at = first; at < end; ++at) {
    result.push_back(rows.row(sequence, head, at, static_cast<std::int64_t>(shape.row_bytes())));
  }
  return result;
}

// One token and KV head of a batch.
struct Item {
  BatchToken token;
  std::int64_t number;  // of the token in the batch
  int head;

  std::int64_t index(const KvShape& shape) const { return number * shape.kv_heads + head; }
  // Index of its first query in [count, query_heads].
  std::int64_t first_query(const KvShape& shape) const { return index(shape) * shape.group(); }
};

template <typename Body>
void for_items(const TokenBatch& batch, const KvShape& shape, const Body& body) {
  for (std::int64_t number = 0; number < batch.count; ++number) {
    for (int head = 0; head < shape.kv_heads; ++head)
      body(Item{batch.tokens[number], number, head});
  }
}

// All rows of a token except those in its gap or, if in_gaps, only those in its gap.
Rows attended_rows(const AttendBatchParams& p, const Item& item) {
  const PositionGap gap = p.gap(item.number);
  const auto between = [&](std::int64_t first, std::int64_t end) {
    return rows_between(p.rows, p.shape, item.token.sequence, item.head, first, end);
  };
  if (p.in_gaps) return between(gap.first, gap.end);
  Rows rows = between(0, gap.first);
  const Rows behind = between(gap.end, item.token.count());
  rows.insert(rows.end(), behind.begin(), behind.end());
  return rows;
}

// The selected rows; adds the number of resident ones to `resident`.
Rows selected_rows(const AttendSelectedParams& p, const Item& item, std::int32_t& resident) {
  Rows rows;
  const std::int64_t index = item.index(p.shape);
  const std::int32_t* const positions = p.selected.positions + index * p.selected.capacity;
  for (std::int32_t i = 0; i < p.selected.heads[index].count; ++i) {
    if (p.places != nullptr) {
      const PlacedRow& place = p.places[index * p.selected.capacity + i];
      resident += place.is_cached() || place.is_on_device() ? 1 : 0;
      rows.push_back(placed_row(p, item.head, place));
      continue;
    }
    const std::int64_t at = positions[i];
    const PageSlots& page = p.rows.page(item.token.sequence, at / kPageTokens);
    resident += page.device != PageSlots::kNone ? 1 : 0;
    rows.push_back(p.rows.row(item.token.sequence, item.head, at,
                              static_cast<std::int64_t>(p.shape.row_bytes())));
  }
  return rows;
}

// Copies the rows of one token and KV head to the cache ways assigned to them.
void fill_ways(const AttendSelectedParams& p, const Item& item) {
  const std::int64_t index = item.index(p.shape);
  for (std::int32_t i = 0; i < p.selected.heads[index].count; ++i) {
    const PlacedRow& place = p.places[index * p.selected.capacity + i];
    std::byte* const way = way_of(p, item.head, place);
    if (way != nullptr) std::memcpy(way, placed_row(p, item.head, place), p.shape.row_bytes());
  }
}

// alpha after adding the share of the newest rows, whose log-sum-exp is `newest_lse`.
double alpha_with_newest(double alpha, double estimated_lse, double newest_lse) {
  const double highest = std::max(estimated_lse, newest_lse);
  const double newest = std::exp(newest_lse - highest);
  const double estimated = std::exp(estimated_lse - highest);
  return (alpha * estimated + newest) / (estimated + newest);
}

void attend_selected_item(const AttendSelectedParams& p, const Item& item, ReferenceReads& reads) {
  const int d = p.shape.head_dim;
  std::int32_t resident = 0;
  Rows rows = selected_rows(p, item, resident);
  if (p.resident != nullptr) p.resident[item.index(p.shape)] = resident;
  const Rows newest = rows_between(p.rows, p.shape, item.token.sequence, item.head,
                                   item.token.page_first(), item.token.count());
  rows.insert(rows.end(), newest.begin(), newest.end());
  report_parts(rows, p.shape, reads);
  for (int g = 0; g < p.shape.group(); ++g) {
    const std::int64_t query = item.first_query(p.shape) + g;
    const float* const q =
        p.q + item.number * p.q_stride + (std::int64_t{item.head} * p.shape.group() + g) * d;
    Partial partial = attend_query(q, p.shape, p.scale, rows, rows.size());
    if (p.estimated_lse != nullptr) {
      const double newest_lse = attend_query(q, p.shape, p.scale, newest, newest.size()).lse;
      p.alpha[query] =
          static_cast<float>(alpha_with_newest(p.alpha[query], p.estimated_lse[query], newest_lse));
    }
    for (int c = 0; c < d && p.value_sums != nullptr; ++c) {
      const double alpha = p.alpha[query];
      const double mean = static_cast<double>(p.value_sums[item.index(p.shape) * d + c]) /
                          static_cast<double>(item.token.count());
      double& value = partial.out[static_cast<std::size_t>(c)];
      value = alpha * value + (1 - alpha) * mean;
    }
    store(partial, false, p.out + query * d, p.lse + query);
  }
}

}  // namespace

namespace {

// Positions and rows of one KV head that a block of queries may see, ascending.
std::map<std::int64_t, const std::byte*> listed_rows(const AttendParams& p, int head,
                                                     std::int64_t block) {
  const RowSpan& span = p.rows[static_cast<std::size_t>(head)];
  std::map<std::int64_t, const std::byte*> rows;
  for (const std::int32_t page : p.listed.of(head, block)) {
    for (std::int64_t r = 0; r < kPageTokens; ++r) {
      const std::int64_t position = page * kPageTokens + r;
      const std::int64_t number = position - p.first_row_position;
      if (number < 0 || number >= span.count) continue;
      rows[position] = span.rows + static_cast<std::size_t>(number) * p.shape.row_bytes();
    }
  }
  return rows;
}

// Attends one block of queries of one query head; each query sees rows at positions up to its own.
void attend_listed(const AttendParams& p, int head, std::int64_t block,
                   const std::map<std::int64_t, const std::byte*>& listed) {
  Rows rows;
  for (const auto& [position, row] : listed) rows.push_back(row);
  const std::int64_t first = block * PageLists::kBlock;
  for (std::int64_t t = first; t < std::min(p.tokens, first + PageLists::kBlock); ++t) {
    const auto end = listed.upper_bound(p.first_query_position + t);
    const auto visible = static_cast<std::size_t>(std::distance(listed.begin(), end));
    const float* const q = p.q + t * p.q_stride + std::int64_t{head} * p.shape.head_dim;
    const std::int64_t index = t * p.shape.query_heads + head;
    store(attend_query(q, p.shape, p.scale, rows, visible), p.merge,
          p.out + index * p.shape.head_dim, p.lse + index);
  }
}

void attend_listed(const AttendParams& p, ReferenceReads& reads) {
  for (int head = 0; head < p.shape.kv_heads; ++head) {
    std::map<std::int64_t, const std::byte*> read;
    for (std::int64_t block = 0; block < p.listed.blocks; ++block) {
      const auto rows = listed_rows(p, head, block);
      read.insert(rows.begin(), rows.upper_bound(p.first_query_position + p.tokens - 1));
      for (int g = 0; g < p.shape.group(); ++g) {
        attend_listed(p, head * p.shape.group() + g, block, rows);
      }
    }
    for (const auto& [position, row] : read) reads.on_read(row, p.shape.row_bytes());
  }
}

}  // namespace

void attend(const AttendParams& p, ReferenceReads& reads) {
  if (p.listed.exist()) return attend_listed(p, reads);
  const auto visible_to = [&](std::int64_t token, const RowSpan& span) {
    const std::int64_t end = p.seen != nullptr ? p.seen[token] : p.first_query_position + token + 1;
    return static_cast<std::size_t>(
        std::clamp<std::int64_t>(end - p.first_row_position, 0, span.count));
  };
  const auto first_of = [&](std::int64_t token, const RowSpan& span) {
    const std::int64_t first = first_in(p.window, p.first_query_position + token);
    return std::min(
        static_cast<std::size_t>(std::max<std::int64_t>(first - p.first_row_position, 0)),
        visible_to(token, span));
  };
  for (int head = 0; head < p.shape.query_heads; ++head) {
    const RowSpan& span = p.rows[static_cast<std::size_t>(head / p.shape.group())];
    const auto rows_of = [&](std::size_t first, std::size_t end) {
      Rows rows;
      for (std::size_t i = first; i < end; ++i) {
        rows.push_back(span.rows + i * p.shape.row_bytes());
      }
      return rows;
    };
    if (head % p.shape.group() == 0) {
      report(rows_of(first_of(0, span), visible_to(p.tokens - 1, span)), p.shape, reads);
    }
    for (std::int64_t t = 0; t < p.tokens; ++t) {
      const Rows rows = rows_of(first_of(t, span), visible_to(t, span));
      const float* const q = p.q + t * p.q_stride + std::int64_t{head} * p.shape.head_dim;
      const std::int64_t index = t * p.shape.query_heads + head;
      store(attend_query(q, p.shape, p.scale, rows, rows.size()), p.merge,
            p.out + index * p.shape.head_dim, p.lse + index);
    }
  }
}

void attend_batch(const AttendBatchParams& p, ReferenceReads& reads) {
  for_items(p.batch, p.shape, [&](const Item& item) {
    const Rows rows = attended_rows(p, item);
    report_parts(rows, p.shape, reads);
    for (int g = 0; g < p.shape.group(); ++g) {
      const int head = item.head * p.shape.group() + g;
      const float* const q = p.q + item.number * p.q_stride + std::int64_t{head} * p.shape.head_dim;
      const std::int64_t index = item.first_query(p.shape) + g;
      store(attend_query(q, p.shape, p.scale, rows, rows.size()), false,
            p.out + index * p.shape.head_dim, p.lse + index);
    }
  });
}

void attend_selected(const AttendSelectedParams& p, ReferenceReads& reads) {
  for_items(p.batch, p.shape, [&](const Item& item) { attend_selected_item(p, item, reads); });
  if (p.places == nullptr) return;
  for_items(p.batch, p.shape, [&](const Item& item) { fill_ways(p, item); });
}

void gather(const GatherParams& p, ReferenceReads& reads) {
  const std::size_t bytes = p.shape.row_bytes();
  for (int head = 0; head < p.shape.kv_heads; ++head) {
    for (std::int64_t i = 0; i < p.count; ++i) {
      const std::byte* const row =
          p.rows.row(p.sequence, head, p.positions[i], static_cast<std::int64_t>(bytes));
      reads.on_read(row, bytes);
      std::memcpy(p.to + static_cast<std::size_t>(head * p.to_rows + i) * bytes, row, bytes);
    }
  }
}

}  // namespace sluice::cpu::reference
