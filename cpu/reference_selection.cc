#include "cpu/reference_selection.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <vector>

#include "cpu/elementwise.h"
#include "lib/half.h"

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

// Where channel `channel` of a page lies.
struct Channel {
  std::byte* codes;
  std::uint16_t* scale;
  std::uint16_t* zero;
};

Channel channel_of(const KeyTiles& tiles, int head_dim, std::int64_t head, std::int64_t page,
                   int channel) {
  const auto index = static_cast<std::size_t>(head * tiles.capacity + page);
  const auto d = static_cast<std::size_t>(head_dim);
  const auto c = static_cast<std::size_t>(channel);
  return {tiles.tile_of(head_dim, head, page) + KeyTiles::place_of(page, c) * tiles.code_bytes(),
          tiles.scales + index * 2 * d + c, tiles.scales + (index * 2 + 1) * d + c};
}

// The part of a byte that holds a token's code, and the byte.
struct CodePlace {
  std::size_t byte;
  int shift;
};

CodePlace place_of(const KeyTiles& tiles, std::size_t token) {
  return {token % tiles.code_bytes(), static_cast<int>(token / tiles.code_bytes()) * tiles.bits};
}

void build_channel(const KeyTiles& tiles, const Channel& channel, const std::vector<float>& keys) {
  const auto [low, high] = std::minmax_element(keys.begin(), keys.end());
  const int largest = (1 << tiles.bits) - 1;
  const float limit = 65504.0f;
  *channel.zero = float_to_f16(std::clamp(*low, -limit, limit));
  *channel.scale =
      float_to_f16(std::clamp((*high - *low) / static_cast<float>(largest), -limit, limit));
  const float zero = f16_to_float(*channel.zero);
  const float scale = f16_to_float(*channel.scale);
  std::fill_n(channel.codes, tiles.code_bytes(), std::byte{0});
  for (std::size_t token = 0; token < keys.size(); ++token) {
    const float exact = scale > 0.0f ? (keys[token] - zero) * (1.0f / scale) : 0.0f;
    const auto code =
        static_cast<unsigned>(std::lrint(std::clamp(exact, 0.0f, static_cast<float>(largest))));
    const CodePlace place = place_of(tiles, token);
    channel.codes[place.byte] |= static_cast<std::byte>(code << place.shift);
  }
}

// The smallest f16 that is not below x, by trying.
std::uint16_t f16_at_least(float x) {
  const float limited = std::clamp(x, -65504.0f, 65504.0f);
  std::uint16_t best = float_to_f16(limited);
  for (int step = -2; step <= 2; ++step) {
    const auto candidate = static_cast<std::uint16_t>(float_to_f16(limited) + step);
    const float value = f16_to_float(candidate);
    if (!(value >= limited)) continue;
    if (!(f16_to_float(best) >= limited) || value < f16_to_float(best)) best = candidate;
  }
  return f16_to_float(best) >= limited ? best : std::uint16_t{0};
}

double key_of(const EstimateParams& p, int head, std::int64_t position, int channel) {
  const KeyTiles& tiles = p.index.tiles;
  const Channel at = channel_of(tiles, p.shape.head_dim, head, position / kPageTokens, channel);
  const CodePlace place = place_of(tiles, static_cast<std::size_t>(position % kPageTokens));
  const int code =
      (static_cast<int>(at.codes[place.byte]) >> place.shift) & ((1 << tiles.bits) - 1);
  return static_cast<double>(f16_to_float(*at.zero)) +
         static_cast<double>(f16_to_float(*at.scale)) * code;
}

// The channels that SparQ looks at; all of them for everybody else.
std::vector<int> channels_of(const EstimateParams& p, int head) {
  const int d = p.shape.head_dim;
  std::vector<int> order(static_cast<std::size_t>(d));
  std::iota(order.begin(), order.end(), 0);
  if (p.method != Selector::sparq) return order;
  const auto size = [&](int channel) {
    float sum = 0.0f;
    for (int g = 0; g < p.shape.group(); ++g) {
      sum += std::fabs(p.q[(head * p.shape.group() + g) * d + channel]);
    }
    return sum;
  };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return size(a) > size(b); });
  order.resize(static_cast<std::size_t>(std::min(p.channels, d)));
  return order;
}

double temperature(const float* q, int head_dim, const std::vector<int>& channels) {
  double all = 0.0;
  double kept = 0.0;
  for (int c = 0; c < head_dim; ++c) all += std::fabs(static_cast<double>(q[c]));
  for (const int c : channels) kept += std::fabs(static_cast<double>(q[c]));
  if (static_cast<int>(channels.size()) == head_dim) return std::sqrt(head_dim);
  return std::sqrt(head_dim * kept / all);
}

double bound_of(const EstimateParams& p, int head, std::int64_t position, const float* q) {
  const auto d = static_cast<std::size_t>(p.shape.head_dim);
  const auto part = static_cast<std::size_t>(head * p.index.bounds.capacity * kBoundsPerPage +
                                             position / kBoundTokens);
  const std::uint16_t* const low = p.index.bounds.bounds + part * 2 * d;
  double sum = 0.0;
  for (std::size_t c = 0; c < d; ++c) {
    const auto query = static_cast<double>(q[c]);
    sum += std::max(query * static_cast<double>(f16_to_float(low[c])),
                    query * static_cast<double>(f16_to_float(low[d + c])));
  }
  return sum;
}

double product(const float* q, const std::vector<float>& key, const std::vector<int>& channels) {
  double sum = 0.0;
  for (const int c : channels) {
    sum += static_cast<double>(q[c]) * static_cast<double>(key[static_cast<std::size_t>(c)]);
  }
  return sum;
}

void estimate_query(const EstimateParams& p, int query_head) {
  const int head = query_head / p.shape.group();
  const float* const q = p.q + query_head * p.shape.head_dim;
  const std::vector<int> channels = channels_of(p, head);
  const double divisor = temperature(q, p.shape.head_dim, channels);
  float* to = p.logits.floats() + query_head * p.logits.stride;
  const auto put = [&](double dot) {
    *to++ = static_cast<float>(divisor > 0.0 || std::isnan(divisor) ? dot / divisor : 0.0);
  };
  const auto indexed = [&](std::int64_t position) {
    if (p.method == Selector::quest) return bound_of(p, head, position, q);
    double dot = 0.0;
    for (const int c : channels) dot += static_cast<double>(q[c]) * key_of(p, head, position, c);
    return dot;
  };
  if (p.candidates != nullptr) {
    const std::int32_t* const at = p.candidates->positions + head * p.candidates->capacity;
    for (std::int32_t i = 0; i < p.candidates->heads[head].count; ++i) {
      put(p.method == Selector::exact
              ? product(
                    q,
                    row_of_span(p.candidate_rows[static_cast<std::size_t>(head)], at[i], p.shape),
                    channels)
              : indexed(at[i]));
    }
  } else {
    for (std::int64_t t = 0; t < p.pages * kPageTokens; ++t) put(indexed(t));
  }
  const RowSpan& rows = p.rows[static_cast<std::size_t>(head)];
  for (std::int64_t i = 0; i < rows.count; ++i)
    put(product(q, row_of_span(rows, i, p.shape), channels));
}

// One KV head of a token of a SelectParams, as plain vectors.
struct Problem {
  BatchToken token;
  std::int64_t kv_head = 0;                  // of all tokens'
  std::vector<std::int64_t> positions;       // that may be emitted
  std::vector<bool> allowed;                 // of them, that are eligible
  std::vector<bool> forced;                  // and always kept
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

// Softmax of one query head's logits, which it replaces.
std::vector<double> weigh(const SelectParams& p, Problem& problem, std::int64_t query_head) {
  float* const logits = p.logits.floats() + query_head * p.logits.stride;
  const std::int64_t newest =
      p.skip_newest ? 0 : problem.token.count() - problem.token.page_first();
  const std::int64_t total = static_cast<std::int64_t>(problem.positions.size()) + newest;
  for (std::size_t i = 0; i < problem.positions.size(); ++i) {
    if (!problem.allowed[i]) logits[i] = -INFINITY;
  }
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
    const bool allowed =
        p.eligible == nullptr || p.eligible[problem.token.sequence * p.eligible_stride + at] != 0;
    problem.allowed.push_back(allowed);
    problem.forced.push_back(allowed && (at < p.sinks || at >= problem.token.count() - p.recent));
  }
  for (int g = 0; g < p.shape.group() && p.logits.data != nullptr; ++g) {
    problem.weights.push_back(weigh(p, problem, problem.kv_head * p.shape.group() + g));
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

// Keeps `count` of the entries that `allowed` marks, those that are always kept first.
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
    if (forced[i] || !problem.allowed[i]) continue;
    kept[i] = true;
    sum += weights[i];
  }
}

// What is kept of the entries; `cut` is set if that is not all that is wanted.
std::vector<bool> choose(const SelectParams& p, const Problem& problem, std::int32_t& cut) {
  if (p.logits.data == nullptr) return problem.forced;
  const std::int64_t tokens = problem.token.count();
  if (p.prune == Pruner::top_k) return heaviest(problem, problem.allowed, p.k.of(tokens));
  std::vector<bool> kept = problem.forced;
  for (const auto& weights : problem.weights) keep_share(p, problem, weights, kept);
  const std::int64_t cap = p.cap.of(tokens);
  if (std::count(kept.begin(), kept.end(), true) <= cap) return kept;
  cut = 1;
  return heaviest(problem, kept, cap);
}

// The part of the weight that is kept and emitted; all where there is none.
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
  std::vector<bool> kept = choose(p, problem, result.cut);
  std::set<std::int64_t> pages;
  for (std::size_t i = 0; i < kept.size(); ++i) {
    if (!kept[i]) continue;
    if (result.count == p.selected.capacity) {
      result.cut = 1;
      kept[i] = false;
      continue;
    }
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

void build_index(const BuildIndexParams& p) {
  for (int head = 0; head < p.shape.kv_heads; ++head) {
    const RowSpan& rows = p.rows[static_cast<std::size_t>(head)];
    for (std::int64_t page = 0; page < p.pages; ++page) {
      for (int channel = 0; channel < p.shape.head_dim; ++channel) {
        std::vector<float> keys;
        for (std::int64_t t = 0; t < kPageTokens; ++t) {
          keys.push_back(row_of_span(rows, page * kPageTokens + t,
                                     p.shape)[static_cast<std::size_t>(channel)]);
          if (!std::isfinite(keys.back())) p.bad[head] = 1;
        }
        if (p.bad[head] != 0) return;
        if (p.index.tiles.codes != nullptr) {
          build_channel(
              p.index.tiles,
              channel_of(p.index.tiles, p.shape.head_dim, head, p.first_page + page, channel),
              keys);
        }
        if (p.index.bounds.bounds == nullptr) continue;
        for (std::int64_t part = 0; part < kBoundsPerPage; ++part) {
          const auto first = keys.begin() + part * kBoundTokens;
          const auto [low, high] = std::minmax_element(first, first + kBoundTokens);
          const std::int64_t at =
              ((head * p.index.bounds.capacity + p.first_page + page) * kBoundsPerPage + part) * 2;
          std::uint16_t* const to = p.index.bounds.bounds + at * p.shape.head_dim + channel;
          to[0] = static_cast<std::uint16_t>(f16_at_least(-*low) ^ 0x8000u);
          to[p.shape.head_dim] = f16_at_least(*high);
        }
      }
    }
  }
}

void estimate(const EstimateParams& p) {
  for (int head = 0; head < p.shape.query_heads; ++head) estimate_query(p, head);
}

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
