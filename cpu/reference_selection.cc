#include "cpu/reference_selection.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <vector>

#include "cpu/elementwise.h"
#include "cpu/reference_ops.h"

namespace sluice::cpu::reference {
namespace {

std::vector<float> floats_of(const std::byte* row, const KvShape& shape) {
  std::vector<float> floats(2 * static_cast<std::size_t>(shape.head_dim));
  convert(row, shape.dtype, floats.data(), DType::f32, 2 * shape.head_dim);
  return floats;
}

std::vector<float> row_of_span(const RowSpan& span, std::int64_t row, const KvShape& shape) {
  return floats_of(span.rows + static_cast<std::size_t>(row) * shape.row_bytes(), shape);
}

double product(const float* q, const std::vector<float>& key, const std::vector<int>& channels) {
  double sum = 0.0;
  for (const int c : channels) {
    sum += static_cast<double>(q[c]) * static_cast<double>(key[static_cast<std::size_t>(c)]);
  }
  return sum;
}

// One KV head of a SelectParams, as plain vectors.
struct Problem {
  std::vector<std::int64_t> positions;       // that may be emitted
  std::vector<std::vector<double>> weights;  // [group][positions, then the tail]
  bool bad = false;
};

Problem problem_of(const SelectParams& p, int head) {
  Problem problem;
  std::int64_t total = p.count;
  if (p.candidates != nullptr) {
    const std::int32_t* const at = p.candidates->positions + head * p.candidates->capacity;
    problem.positions.assign(at, at + p.candidates->heads[head].count);
    total = static_cast<std::int64_t>(problem.positions.size()) + p.tail;
  } else {
    problem.positions.resize(static_cast<std::size_t>(std::min(p.end, p.count)));
    std::iota(problem.positions.begin(), problem.positions.end(), 0);
  }
  for (int g = 0; g < p.shape.group(); ++g) {
    float* const logits = p.logits.floats() + (head * p.shape.group() + g) * p.logits.stride;
    for (std::size_t i = 0; i < problem.positions.size(); ++i) {
      if (p.eligible != nullptr && p.eligible[problem.positions[i]] == 0) logits[i] = -INFINITY;
    }
    const bool sane = std::all_of(logits, logits + total, [](float x) { return x < INFINITY; });
    const float highest = total > 0 ? *std::max_element(logits, logits + total) : -INFINITY;
    problem.bad = problem.bad || !sane || !(highest > -INFINITY);
    std::vector<double> weights;
    double sum = 0.0;
    for (std::int64_t i = 0; i < total; ++i) {
      weights.push_back(std::exp(static_cast<double>(logits[i]) - static_cast<double>(highest)));
      sum += weights.back();
    }
    if (p.lse != nullptr) {
      p.lse[head * p.shape.group() + g] = static_cast<float>(highest + std::log(sum));
    }
    for (std::int64_t i = 0; i < total; ++i) {
      weights[static_cast<std::size_t>(i)] /= sum;
      logits[i] = static_cast<float>(weights[static_cast<std::size_t>(i)]);
    }
    problem.weights.push_back(std::move(weights));
  }
  return problem;
}

// Entries by falling weight; of equals the older first.
std::vector<std::size_t> by_weight(const std::vector<double>& weights, std::size_t count) {
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return weights[a] > weights[b]; });
  return order;
}

std::vector<double> summed(const Problem& problem) {
  std::vector<double> sums(problem.positions.size());
  for (const std::vector<double>& weights : problem.weights) {
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += weights[i];
  }
  return sums;
}

// Keeps `count` of the entries that `allowed` marks, those in `forced` first.
std::vector<bool> heaviest(const Problem& problem, const std::vector<bool>& forced,
                           const std::vector<bool>& allowed, std::int64_t count) {
  std::vector<bool> kept = forced;
  count -= std::count(kept.begin(), kept.end(), true);
  for (const std::size_t i : by_weight(summed(problem), problem.positions.size())) {
    if (count <= 0) break;
    if (kept[i] || !allowed[i]) continue;
    kept[i] = true;
    --count;
  }
  return kept;
}

void keep_share(const SelectParams& p, const std::vector<double>& weights,
                const std::vector<bool>& forced, const std::vector<bool>& allowed,
                std::vector<bool>& kept) {
  double sum = 0.0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (i >= forced.size() || forced[i]) sum += weights[i];
  }
  for (const std::size_t i : by_weight(weights, forced.size())) {
    if (sum >= static_cast<double>(p.p)) break;
    if (forced[i] || !allowed[i]) continue;
    kept[i] = true;
    sum += weights[i];
  }
}

void select_head(const SelectParams& p, int head) {
  HeadSelection& result = p.selected.heads[head];
  result = {};
  const Problem problem = problem_of(p, head);
  if (problem.bad) {
    result.bad = 1;
    return;
  }
  const std::size_t count = problem.positions.size();
  std::vector<bool> allowed(count);
  std::vector<bool> forced(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t at = problem.positions[i];
    allowed[i] = p.eligible == nullptr || p.eligible[at] != 0;
    forced[i] = allowed[i] && (at < p.sinks || at >= p.recent_first);
  }
  std::vector<bool> kept = forced;
  if (p.prune == Pruner::top_k) {
    kept = heaviest(problem, forced, allowed, p.k);
  } else {
    for (const auto& weights : problem.weights) keep_share(p, weights, forced, allowed, kept);
    if (std::count(kept.begin(), kept.end(), true) > p.cap) {
      kept = heaviest(problem, forced, kept, p.cap);
      result.cut = 1;
    }
  }
  std::vector<double> alpha(static_cast<std::size_t>(p.shape.group()));
  for (std::size_t i = 0; i < problem.weights.front().size(); ++i) {
    if (i < count && !kept[i]) continue;
    if (i < count && result.count == p.selected.capacity) {
      result.cut = 1;
      continue;
    }
    if (i < count) {
      p.selected.positions[head * p.selected.capacity + result.count++] =
          static_cast<std::int32_t>(problem.positions[i]);
    }
    for (std::size_t g = 0; g < alpha.size(); ++g) alpha[g] += problem.weights[g][i];
  }
  std::set<std::int32_t> pages;
  for (std::int32_t i = 0; i < result.count; ++i) {
    pages.insert(p.selected.positions[head * p.selected.capacity + i] / kPageTokens);
  }
  result.pages = static_cast<std::int32_t>(pages.size());
  for (int g = 0; g < p.shape.group(); ++g) {
    const int query_head = head * p.shape.group() + g;
    const double share = p.share != nullptr ? static_cast<double>(p.share[query_head]) : 1.0;
    p.alpha[query_head] =
        static_cast<float>(std::min(alpha[static_cast<std::size_t>(g)], 1.0) * share);
  }
}

}  // namespace

void select(const SelectParams& p) {
  for (int head = 0; head < p.shape.kv_heads; ++head) select_head(p, head);
}

void attend_selected(const AttendSelectedParams& given) {
  AttendSelectedParams p = given;
  if (!p.newest.empty()) {
    reference_attend(newest_of(p));
    add_newest_share(p);
    p.merge = true;
  }
  const std::size_t row_bytes = p.shape.row_bytes();
  std::vector<std::vector<std::byte>> rows(p.rows.size());
  std::vector<RowSpan> spans;
  for (std::size_t head = 0; head < rows.size(); ++head) {
    HeadSelection& selection = p.selected.heads[head];
    selection.resident = 0;
    const auto first = static_cast<std::int64_t>(head) * p.selected.capacity;
    for (std::int32_t i = 0; i < selection.count; ++i) {
      const std::int32_t at = p.selected.positions[first + i];
      const bool resident = at < p.rows[head].resident_count;
      selection.resident += resident ? 1 : 0;
      const std::byte* const row = (resident ? p.rows[head].resident : p.rows[head].home) +
                                   static_cast<std::size_t>(at) * row_bytes;
      rows[head].insert(rows[head].end(), row, row + row_bytes);
    }
    spans.push_back({rows[head].data(), selection.count});
  }
  AttendParams params = dense_of(p);
  params.rows = spans;
  reference_attend(params);
  compensate(p);
}

void column_sums(const ColumnSumsParams& p) {
  std::vector<double> sums(static_cast<std::size_t>(p.rows[0].count));
  std::vector<int> channels(static_cast<std::size_t>(p.shape.head_dim));
  std::iota(channels.begin(), channels.end(), 0);
  for (std::size_t probe = 0; probe < p.positions.size(); ++probe) {
    for (int head = 0; head < p.shape.query_heads; ++head) {
      const RowSpan& rows = p.rows[static_cast<std::size_t>(head / p.shape.group())];
      const float* const q =
          p.q + (static_cast<std::int64_t>(probe) * p.shape.query_heads + head) * p.shape.head_dim;
      std::vector<double> logits;
      for (std::int64_t t = 0; t <= p.positions[probe]; ++t) {
        const double logit = product(q, row_of_span(rows, t, p.shape), channels) /
                             std::sqrt(static_cast<double>(p.shape.head_dim));
        logits.push_back(p.eligible != nullptr && p.eligible[t] == 0 ? -INFINITY : logit);
      }
      const double highest = *std::max_element(logits.begin(), logits.end());
      double total = 0.0;
      for (double& x : logits) total += x = std::exp(x - highest);
      for (std::size_t t = 0; t < logits.size(); ++t) sums[t] += logits[t] / total;
    }
  }
  std::copy(sums.begin(), sums.end(), p.sums);
}

void sum_values(const SumValuesParams& p) {
  for (std::size_t head = 0; head < p.rows.size(); ++head) {
    for (std::int64_t i = 0; i < p.rows[head].count; ++i) {
      const std::vector<float> row = row_of_span(p.rows[head], i, p.shape);
      for (std::size_t c = 0; c < static_cast<std::size_t>(p.shape.head_dim); ++c) {
        const float value = row[static_cast<std::size_t>(p.shape.head_dim) + c];
        p.sums[head * static_cast<std::size_t>(p.shape.head_dim) + c] +=
            p.subtract ? -value : value;
      }
    }
  }
}

}  // namespace sluice::cpu::reference
