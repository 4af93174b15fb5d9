#include "cpu/reference/selection.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <vector>

#include "cpu/reference/ops.h"
#include "lib/check.h"
#include "sluice/half.h"

namespace sluice::cpu::reference {
namespace {

std::vector<float> floats_of(const std::byte* row, const KvShape& shape) {
  std::vector<float> floats;
  for (int c = 0; c < shape.head_dim; ++c) floats.push_back(key_element(shape, row, c));
  for (int c = 0; c < shape.head_dim; ++c) floats.push_back(value_element(shape, row, c));
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

// One KV head of a token of a SelectParams, as plain vectors.
struct Problem {
  BatchToken token;
  std::int64_t kv_head = 0;                  // into [tokens, kv_heads]
  std::vector<std::int64_t> positions;       // positions that may be emitted
  std::vector<bool> forced;                  // [positions], always kept
  std::vector<std::vector<double>> weights;  // [group][positions, then the newest rows]
  bool bad = false;
};

std::vector<std::int64_t> positions_of(const SelectParams& p, const Problem& problem) {
  if (p.candidates != nullptr) {
    const std::int32_t* const at =
        p.candidates->positions + problem.kv_head * p.candidates->capacity;
    return {at, at + p.candidates->heads[problem.kv_head].count};
  }
  std::vector<std::int64_t> positions(static_cast<std::size_t>(problem.token.page_first()));
  std::iota(positions.begin(), positions.end(), 0);
  return positions;
}

// Replaces one query head's logits by their softmax.
std::vector<double> weigh(const SelectParams& p, Problem& problem, std::int64_t query_head) {
  float* const logits = p.logits.floats() + query_head * p.logits.stride;
  const std::int64_t newest =
      p.skip_newest ? 0 : problem.token.count() - problem.token.page_first();
  const std::int64_t total = static_cast<std::int64_t>(problem.positions.size()) + newest;
  const bool sane = std::all_of(logits, logits + total, [](float x) { return x < INFINITY; });
  const float highest = total > 0 ? *std::max_element(logits, logits + total) : -INFINITY;
  problem.bad = problem.bad || !sane || (total > 0 && !(highest > -INFINITY));
  std::vector<double> weights;
  double sum = 0.0;
  for (std::int64_t i = 0; i < total; ++i) {
    weights.push_back(std::exp(static_cast<double>(logits[i]) - static_cast<double>(highest)));
    sum += weights.back();
  }
  if (p.lse != nullptr) p.lse[query_head] = static_cast<float>(highest + std::log(sum));
  for (std::int64_t i = 0; i < total; ++i) {
    weights[static_cast<std::size_t>(i)] /= sum;
    logits[i] = static_cast<float>(weights[static_cast<std::size_t>(i)]);
  }
  return weights;
}

Problem problem_of(const SelectParams& p, std::int64_t token, int kv_head) {
  Problem problem;
  problem.token = p.batch.tokens[token];
  problem.kv_head = token * p.shape.kv_heads + kv_head;
  problem.positions = positions_of(p, problem);
  for (const std::int64_t at : problem.positions) {
    problem.forced.push_back(at < p.sinks || at >= problem.token.count() - p.recent);
  }
  for (int g = 0; g < p.shape.group() && p.logits.data != nullptr; ++g) {
    problem.weights.push_back(weigh(p, problem, problem.kv_head * p.shape.group() + g));
  }
  return problem;
}

// Entries by descending weight; among equals the older first.
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

// Keeps `count` of the entries marked in `allowed`, those that are always kept first.
std::vector<bool> heaviest(const Problem& problem, const std::vector<bool>& allowed,
                           std::int64_t count) {
  std::vector<bool> kept = problem.forced;
  count -= std::count(kept.begin(), kept.end(), true);
  for (const std::size_t i : by_weight(summed(problem), problem.positions.size())) {
    if (count <= 0) break;
    if (kept[i] || !allowed[i]) continue;
    kept[i] = true;
    --count;
  }
  return kept;
}

void keep_share(const SelectParams& p, const Problem& problem, const std::vector<double>& weights,
                std::vector<bool>& kept) {
  const std::vector<bool>& forced = problem.forced;
  double sum = 0.0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (i >= forced.size() || forced[i]) sum += weights[i];
  }
  for (const std::size_t i : by_weight(weights, forced.size())) {
    if (sum >= static_cast<double>(p.p)) break;
    if (forced[i]) continue;
    kept[i] = true;
    sum += weights[i];
  }
}

// The entries to keep; sets `cut` if the cap drops some of the wanted ones.
std::vector<bool> choose(const SelectParams& p, const Problem& problem, std::int32_t& cut) {
  if (p.logits.data == nullptr) return problem.forced;
  const std::int64_t tokens = problem.token.count();
  if (p.prune == Pruner::top_k) {
    return heaviest(problem, std::vector<bool>(problem.positions.size(), true), p.k.of(tokens));
  }
  std::vector<bool> kept = problem.forced;
  for (const auto& weights : problem.weights) keep_share(p, problem, weights, kept);
  const std::int64_t cap = p.cap.of(tokens);
  if (std::count(kept.begin(), kept.end(), true) <= cap) return kept;
  cut = 1;
  return heaviest(problem, kept, cap);
}

// The share of the weight that is kept and emitted; 1 if there are no weights.
double kept_weight(const std::vector<double>& weights, const std::vector<bool>& kept) {
  double sum = 0.0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (i >= kept.size() || kept[i]) sum += weights[i];
  }
  return weights.empty() ? 1.0 : std::min(sum, 1.0);
}

void select_head(const SelectParams& p, std::int64_t token, int kv_head) {
  const Problem problem = problem_of(p, token, kv_head);
  HeadSelection& result = p.selected.heads[problem.kv_head];
  result = {};
  if (problem.bad) {
    result.bad = 1;
    return;
  }
  const std::vector<bool> kept = choose(p, problem, result.cut);
  std::set<std::int64_t> pages;
  for (std::size_t i = 0; i < kept.size(); ++i) {
    if (!kept[i]) continue;
    check(result.count < p.selected.capacity, "more selected positions than there is room for");
    const std::int64_t at = problem.positions[i];
    p.selected.positions[problem.kv_head * p.selected.capacity + result.count++] =
        static_cast<std::int32_t>(at);
    pages.insert(at / kPageTokens);
  }
  result.pages = static_cast<std::int32_t>(pages.size());
  for (int g = 0; g < p.shape.group(); ++g) {
    const std::int64_t query_head = problem.kv_head * p.shape.group() + g;
    const double share = p.share != nullptr ? static_cast<double>(p.share[query_head]) : 1.0;
    const double weight = p.logits.data == nullptr
                              ? 1.0
                              : kept_weight(problem.weights[static_cast<std::size_t>(g)], kept);
    p.alpha[query_head] = static_cast<float>(weight * share);
  }
}

}  // namespace

void select(const SelectParams& p) {
  for (std::int64_t token = 0; token < p.batch.count; ++token) {
    for (int head = 0; head < p.shape.kv_heads; ++head) select_head(p, token, head);
  }
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
        logits.push_back(product(q, row_of_span(rows, t, p.shape), channels) /
                         std::sqrt(static_cast<double>(p.shape.head_dim)));
      }
      const double highest = *std::max_element(logits.begin(), logits.end());
      double total = 0.0;
      for (double& x : logits) total += x = std::exp(x - highest);
      for (std::size_t t = 0; t < logits.size(); ++t) sums[t] += logits[t] / total;
    }
  }
  std::copy(sums.begin(), sums.end(), p.sums);
}

void choose_tokens(const ChooseTokensParams& p) {
  const auto tokens = static_cast<std::size_t>(p.end - p.first);
  const std::vector<double> sums(p.sums + p.first, p.sums + p.end);
  *p.bad = std::all_of(sums.begin(), sums.end(), [](double x) { return std::isfinite(x); }) ? 0 : 1;
  if (*p.bad != 0) return;
  const double total = std::accumulate(sums.begin(), sums.end(), 0.0);
  const std::vector<std::size_t> heaviest = by_weight(sums, tokens);
  std::size_t count = p.tau < 1.0 ? 0 : tokens;
  for (double carried = 0.0; count < tokens && carried < p.tau * total; ++count) {
    carried += sums[heaviest[count]];
  }
  std::vector<double> means;
  for (std::size_t t = 0; t < tokens; ++t) {
    const auto sees = std::count_if(p.probes.begin(), p.probes.end(), [&](std::int64_t probe) {
      return probe >= p.first + static_cast<std::int64_t>(t);
    });
    // Means are fp32, so that every backend finds the same ties.
    means.push_back(static_cast<double>(static_cast<float>(sums[t]) / static_cast<float>(sees)));
  }
  std::vector<bool> important(tokens);
  const std::vector<std::size_t> order = by_weight(means, tokens);
  for (std::size_t i = 0; i < count; ++i) important[order[i]] = true;
  const auto newest = std::min(p.end - p.first, ChooseTokensParams::kNewest);
  std::fill(important.end() - newest, important.end(), true);

  constexpr std::int64_t kBlock = ChooseTokensParams::kBlock;
  std::vector<std::int32_t> before;  // [end]: positions listed before it
  std::int32_t* position = p.positions;
  for (std::int64_t t = 0; t < p.end; ++t) {
    const bool is_listed = t < p.first || important[static_cast<std::size_t>(t - p.first)];
    before.push_back(static_cast<std::int32_t>(position - p.positions));
    p.listed[t] = is_listed ? 1 : 0;
    if (is_listed) *position++ = static_cast<std::int32_t>(t);
    if (t < p.first) continue;
    const std::int64_t block = std::max(p.first, t / kBlock * kBlock);
    p.seen[t - p.first] = before[static_cast<std::size_t>(block)];
  }
}

void pack_tokens(const PackTokensParams& p) {
  for (std::int64_t i = 0; i < p.count; ++i) {
    std::copy_n(p.piece + (p.positions[i] - p.first) * p.stride, p.width, p.packed + i * p.width);
  }
}

void unpack_tokens(const UnpackTokensParams& p) {
  if (p.clear) std::fill_n(p.piece, p.tokens * p.width, 0.0f);
  for (std::int64_t i = 0; i < p.count; ++i) {
    std::copy_n(p.packed + i * p.width, p.width, p.piece + (p.positions[i] - p.first) * p.width);
  }
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
