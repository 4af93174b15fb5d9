#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/runtime/softmax.h"
#include "cpu/scan/key_score.h"
#include "cpu/scan/scan.h"

namespace sluice::cpu {
namespace {

// Adds the weights that one query gives to the rows it sees. Returns false if a logit is NaN.
bool add_query(const ColumnSumsParams& p, std::int64_t probe, std::int64_t query_head,
               std::vector<float>& logits, std::vector<float>& sums) {
  const RowSpan& rows = p.rows[static_cast<std::size_t>(query_head / p.shape.group())];
  const std::int64_t count = p.positions[static_cast<std::size_t>(probe)] + 1;
  const float* const q = p.q + (probe * p.shape.query_heads + query_head) * p.shape.head_dim;
  const ChannelList channels = all_channels(p.shape.head_dim);
  score_rows({rows.rows, count, p.shape.row_bytes(), p.shape.rows.key(), p.shape.head_dim}, q,
             1.0f / std::sqrt(static_cast<float>(p.shape.head_dim)), channels, logits.data());
  if (!softmax(logits.data(), count)) return false;
  add_to(logits.data(), count, sums.data());
  return true;
}

}  // namespace

// Sums and logits of each thread.
std::uint64_t column_sums_bytes(std::int64_t rows, int threads) {
  return 2 * static_cast<std::uint64_t>(rows) * static_cast<std::uint64_t>(threads) * sizeof(float);
}

void column_sums(const ColumnSumsParams& p, Threads& threads) {
  const auto rows = static_cast<std::size_t>(p.rows[0].count);
  const std::int64_t tasks = static_cast<std::int64_t>(p.positions.size()) * p.shape.query_heads;
  const std::int64_t parts = std::min<std::int64_t>(threads.count(), tasks);
  std::vector<std::vector<float>> sums(static_cast<std::size_t>(parts));
  threads.for_each(parts, [&](std::int64_t part) {
    std::vector<float>& own = sums[static_cast<std::size_t>(part)];
    own.assign(rows, 0.0f);
    std::vector<float> logits(rows);
    for (std::int64_t task = part; task < tasks; task += parts) {
      // Neighbouring tasks share a probe, so its rows are in the cache.
      if (!add_query(p, task / p.shape.query_heads, task % p.shape.query_heads, logits, own)) {
        std::fill(own.begin(), own.end(), std::nanf(""));
        return;
      }
    }
  });
  std::fill_n(p.sums, rows, 0.0f);
  for (const std::vector<float>& part : sums) {
    add_to(part.data(), static_cast<std::int64_t>(rows), p.sums);
  }
}

}  // namespace sluice::cpu
