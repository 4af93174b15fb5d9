// Attention over value tiles: random problems, and the right results by definition, in fp64.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "lib/value_tiles.h"
#include "sluice/half.h"
#include "tests/support/random.h"

namespace sluice::testing {

struct ValueCase {
  int head_dim = 128;
  int group = 4;
  int bits = 2;
  float share = 0.9f;
  // Positions of the batch's tokens; each token has its own sequence.
  std::vector<std::int32_t> positions = {5, 127, 128, 700, 2303};
  int selected = 16;  // positions per KV head, or all if fewer
  int kv_heads = 2;
  bool merge = false;
  float deviation = 2.0f;  // of the logits
  float level = -3.0f;     // mean of the logits
  bool half = false;       // tiles hold half the components of values

  std::string name() const {
    return "head_dim " + std::to_string(head_dim) + " group " + std::to_string(group) + " bits " +
           std::to_string(bits) + " share " + std::to_string(share) + " selected " +
           std::to_string(selected) + " deviation " + std::to_string(deviation) +
           (merge ? " merged" : "") + (half ? " half" : "");
  }
  std::int64_t count() const { return static_cast<std::int64_t>(positions.size()); }
  int query_heads() const { return group * kv_heads; }
  int channels() const { return half ? head_dim / 2 : head_dim; }  // of a page
  KvShape shape() const { return {1, query_heads(), kv_heads, head_dim, DType::bf16}; }
  std::int64_t capacity() const {
    return *std::max_element(positions.begin(), positions.end()) + 1;
  }
};

// One number of a page, decoded as lib/value_tiles.h describes.
inline double value_in_page(const std::byte* page, int bits, int channels, int token, int channel) {
  const auto d = static_cast<std::size_t>(channels);
  const auto c = static_cast<std::size_t>(channel);
  const auto half_at = [&](std::size_t i) {
    std::uint16_t half = 0;
    std::memcpy(&half, page + 2 * i, 2);
    return static_cast<double>(f16_to_float(half));
  };
  const auto word_at = [&](int row) {
    std::uint32_t word = 0;
    std::memcpy(&word, page + 4 * d + 4 * (static_cast<std::size_t>(row) * d + c), 4);
    return word;
  };
  // Words of 1, 2 or 4 bits hold pairs of tokens in their two halves.
  const int low = bits == 3 ? 2 : bits;
  const int per_word = 32 / low;
  const int half = token % 2 * 16;
  const int at = token % per_word / 2 * low + half;
  int code = static_cast<int>(word_at(token / per_word) >> at) & ((1 << low) - 1);
  if (bits == 3) {
    const int pair = token % 32 / 2;
    const int a = pair / 4;
    const int b = pair % 4;
    code +=
        4 * static_cast<int>(word_at(8 + token / 32) >> (2 * b + a % 2 + 8 * (a / 2) + half) & 1u);
  }
  return half_at(d + c) + half_at(c) * code;
}

// Random bases, [kv_heads, head_dim / 2, head_dim], of orthonormal vectors.
inline std::vector<float> random_bases(Random& random, int kv_heads, int head_dim) {
  const auto d = static_cast<std::size_t>(head_dim);
  std::vector<float> bases;
  for (int head = 0; head < kv_heads; ++head) {
    std::vector<std::vector<double>> vectors;
    while (vectors.size() < d / 2) {
      const std::vector<float> numbers = random.normal(head_dim);
      std::vector<double> vector(numbers.begin(), numbers.end());
      const auto product = [&](const std::vector<double>& other) {
        return std::inner_product(vector.begin(), vector.end(), other.begin(), 0.0);
      };
      for (const std::vector<double>& other : vectors) {
        const double part = product(other);
        for (std::size_t c = 0; c < d; ++c) vector[c] -= part * other[c];
      }
      const double length = std::sqrt(product(vector));
      for (double& x : vector) x /= length;
      vectors.push_back(std::move(vector));
    }
    for (const std::vector<double>& vector : vectors) {
      bases.insert(bases.end(), vector.begin(), vector.end());
    }
  }
  return bases;
}

// Random tiles, logits and selections of a case, in host memory.
class ValueProblem {
 public:
  ValueProblem(const ValueCase& c, std::uint64_t seed) : case_(c) {
    Random random(seed);
    for (std::size_t i = 0; i < c.positions.size(); ++i) {
      tokens.push_back({static_cast<std::int32_t>(i), c.positions[i]});
    }
    fill_tiles(random);
    fill_logits(random);
    select(random);
    const std::int64_t d = c.head_dim;
    sums = random.normal(c.count() * c.kv_heads * d, 20.0f);
    out = random.normal(c.count() * c.query_heads() * d);
    lse = random.normal(c.count() * c.query_heads(), 3.0f);
    pages_read.assign(static_cast<std::size_t>(c.count() * c.kv_heads), -1);
    if (c.half) bases = random_bases(random, c.kv_heads, c.head_dim);
  }

  // The parameters, with pointers into this object.
  AttendTilesParams params() {
    AttendTilesParams p;
    p.shape = case_.shape();
    p.batch = {tokens.data(), case_.count(), case_.capacity()};
    p.logits = {reinterpret_cast<std::byte*>(logits.data()), stride};
    p.estimated_lse = estimated_lse.data();
    p.selected = {positions.data(), selected_capacity, heads.data()};
    p.values.tiles = {case_.bits, pages.data(), slots, case_.half ? bases.data() : nullptr};
    p.values.slots = table.data();
    p.values.table_stride = table_stride;
    p.share = case_.share;
    p.value_sums = sums.data();
    p.out = out.data();
    p.lse = lse.data();
    p.merge = case_.merge;
    p.pages_read = pages_read.data();
    return p;
  }

  const ValueCase& of() const { return case_; }
  std::int64_t heads_in_all() const { return case_.count() * case_.kv_heads; }
  const float* logits_of(std::int64_t query) const { return logits.data() + query * stride; }
  // `head` is an index over all tokens' heads.
  bool is_selected(std::int64_t head, std::int32_t position) const {
    const std::int32_t* const first = positions.data() + head * selected_capacity;
    const auto count = heads[static_cast<std::size_t>(head)].count;
    return std::binary_search(first, first + count, position);
  }

  std::vector<BatchToken> tokens;
  std::vector<std::byte> pages;
  std::vector<std::int32_t> table;
  std::int64_t slots = 0;
  std::int64_t table_stride = 0;
  std::vector<float> logits;  // exactly representable in f16
  std::int64_t stride = 0;
  std::vector<float> estimated_lse;
  std::vector<std::int32_t> positions;
  std::int64_t selected_capacity = 0;
  std::vector<HeadSelection> heads;
  std::vector<float> sums;
  std::vector<float> bases;  // empty, unless pages hold components
  std::vector<float> out;
  std::vector<float> lse;
  std::vector<std::int32_t> pages_read;

 private:
  // Random codes, with scales and zeros of about 1.
  void fill_tiles(Random& random) {
    const ValueCase& c = case_;
    table_stride = (c.capacity() + 2 * kPageTokens - 1) / (2 * kPageTokens);
    slots = table_stride * c.count() + 3;
    table.resize(static_cast<std::size_t>(slots));
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), random.engine());
    const ValueTiles tiles{c.bits, nullptr, slots};
    pages.resize(tiles.bytes(c.kv_heads, c.channels()));
    for (std::size_t at = 0; at < pages.size(); at += 4) {
      const auto word = static_cast<std::uint32_t>(random.engine()());
      std::memcpy(&pages[at], &word, 4);
    }
    const std::size_t page_bytes = tiles.page_bytes(c.channels());
    for (std::size_t page = 0; page < pages.size(); page += page_bytes) {
      const std::vector<float> numbers = random.normal(2 * c.channels(), 0.7f);
      for (std::size_t i = 0; i < numbers.size(); ++i) {
        const bool is_scale = i < numbers.size() / 2;
        const std::uint16_t half = float_to_f16(is_scale ? std::fabs(numbers[i]) : numbers[i]);
        std::memcpy(&pages[page + 2 * i], &half, 2);
      }
    }
  }

  // Each page has its own level, so that some matter more. Logits that must not be read are NaN.
  void fill_logits(Random& random) {
    const ValueCase& c = case_;
    stride = (c.capacity() + LogitView::kLogitAlignment - 1) / LogitView::kLogitAlignment *
             LogitView::kLogitAlignment;
    const std::int64_t queries = c.count() * c.query_heads();
    logits.assign(static_cast<std::size_t>(queries * stride),
                  std::numeric_limits<float>::quiet_NaN());
    for (std::int64_t query = 0; query < queries; ++query) {
      const std::int64_t end =
          tokens[static_cast<std::size_t>(query / c.query_heads())].page_first();
      const std::vector<float> own = random.normal(end, c.deviation);
      const std::vector<float> levels = random.normal(end / kPageTokens, c.deviation);
      double highest = -std::numeric_limits<double>::infinity();
      double sum = 0.0;
      for (std::int64_t at = 0; at < end; ++at) {
        const float x = own[static_cast<std::size_t>(at)] +
                        levels[static_cast<std::size_t>(at / kPageTokens)] + c.level;
        const float rounded = f16_to_float(float_to_f16(x));
        logits[static_cast<std::size_t>(query * stride + at)] = rounded;
        highest = std::max(highest, static_cast<double>(rounded));
      }
      for (std::int64_t at = 0; at < end; ++at) {
        sum += std::exp(static_cast<double>(logits_of(query)[at]) - highest);
      }
      estimated_lse.push_back(static_cast<float>(highest + std::log(sum)));
    }
  }

  // Half of the selection is the heaviest tokens, as in a real one, and half is random others.
  void select(Random& random) {
    const ValueCase& c = case_;
    selected_capacity = std::max(c.selected, 1);
    positions.assign(static_cast<std::size_t>(heads_in_all() * selected_capacity), -1);
    heads.resize(static_cast<std::size_t>(heads_in_all()));
    for (std::int64_t head = 0; head < heads_in_all(); ++head) {
      const std::int64_t end = tokens[static_cast<std::size_t>(head / c.kv_heads)].page_first();
      const auto count = std::min<std::int64_t>(c.selected, end);
      std::vector<std::int32_t> order(static_cast<std::size_t>(end));
      std::iota(order.begin(), order.end(), 0);
      const float* const row = logits_of(head * c.group);
      std::sort(order.begin(), order.end(),
                [&](std::int32_t a, std::int32_t b) { return row[a] > row[b]; });
      std::shuffle(order.begin() + count / 2, order.end(), random.engine());
      std::sort(order.begin(), order.begin() + count);
      std::copy_n(order.begin(), count, positions.begin() + head * selected_capacity);
      heads[static_cast<std::size_t>(head)].count = static_cast<std::int32_t>(count);
    }
  }

  ValueCase case_;
};

// The right result.
struct ValueAnswer {
  std::vector<double> out;
  std::vector<double> lse;
  std::vector<std::int32_t> pages_read;
};

// Marks the pages of a head that are read.
inline std::vector<bool> pages_to_read(const std::vector<double>& weights, double share) {
  const auto rough = [](double x) {
    return std::bit_cast<std::uint32_t>(static_cast<float>(x)) >> 16;
  };
  const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<bool> read(weights.size(), false);
  double sum = 0.0;
  while (sum < all * share || share >= 1.0) {
    // Adds the heaviest unread page and all pages with the same rough weight.
    std::uint32_t best = 0;
    bool has_any = false;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      if (read[i]) continue;
      best = std::max(best, rough(weights[i]));
      has_any = true;
    }
    if (!has_any) break;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      if (read[i] || rough(weights[i]) != best) continue;
      read[i] = true;
      sum += weights[i];
    }
  }
  return read;
}

// The values of a page of a KV head, [kPageTokens, head_dim], as the page tells them: components
// and, of the rest, the mean.
inline std::vector<double> values_of_page(const ValueProblem& problem, std::int64_t kv_head,
                                          const std::byte* page, const std::vector<double>& mean) {
  const ValueCase& c = problem.of();
  const auto d = static_cast<std::size_t>(c.head_dim);
  const auto vector_of = [&](int i) {
    return problem.bases.data() + (kv_head * c.channels() + i) * c.head_dim;
  };
  std::vector<double> of_mean;
  for (int i = 0; c.half && i < c.channels(); ++i) {
    of_mean.push_back(std::inner_product(mean.begin(), mean.end(), vector_of(i), 0.0));
  }
  std::vector<double> values;
  for (int t = 0; t < kPageTokens; ++t) {
    std::vector<double> value = c.half ? mean : std::vector<double>(d);
    for (int i = 0; i < c.channels(); ++i) {
      const double number = value_in_page(page, c.bits, c.channels(), t, i);
      const auto at = static_cast<std::size_t>(i);
      if (!c.half) value[at] = number;
      for (std::size_t ch = 0; c.half && ch < d; ++ch) {
        value[ch] += (number - of_mean[at]) * static_cast<double>(vector_of(i)[ch]);
      }
    }
    values.insert(values.end(), value.begin(), value.end());
  }
  return values;
}

// The answer for one KV head of a token, written to [group, head_dim] of `answer` from `query`.
inline void answer_head(const ValueProblem& problem, std::int64_t head, ValueAnswer& answer) {
  const ValueCase& c = problem.of();
  const BatchToken token = problem.tokens[static_cast<std::size_t>(head / c.kv_heads)];
  const auto d = static_cast<std::size_t>(c.head_dim);
  const auto pages = static_cast<std::size_t>(token.pages());
  const bool is_bad = problem.heads[static_cast<std::size_t>(head)].bad != 0;
  const auto weight = [&](std::int64_t query, std::int32_t at) {
    const auto place = static_cast<std::size_t>(query);
    return problem.is_selected(head, at)
               ? 0.0
               : std::exp(static_cast<double>(problem.logits_of(query)[at]) -
                          static_cast<double>(problem.estimated_lse[place]));
  };
  std::vector<double> page_weights(is_bad ? 0 : pages, 0.0);
  for (std::int64_t g = 0; g < c.group; ++g) {
    for (std::size_t at = 0; at < page_weights.size() * kPageTokens; ++at) {
      page_weights[at / kPageTokens] += weight(head * c.group + g, static_cast<std::int32_t>(at));
    }
  }
  const std::vector<bool> read = pages_to_read(page_weights, static_cast<double>(c.share));
  answer.pages_read.push_back(
      static_cast<std::int32_t>(std::count(read.begin(), read.end(), true)));
  const ValueTiles tiles{c.bits, nullptr, problem.slots};
  std::vector<double> mean;
  for (std::size_t ch = 0; ch < d; ++ch) {
    mean.push_back(static_cast<double>(problem.sums[static_cast<std::size_t>(head) * d + ch]) /
                   static_cast<double>(token.position + 1));
  }
  std::vector<std::vector<double>> values(read.size());  // of the pages that are read
  for (std::size_t page = 0; page < read.size(); ++page) {
    const auto entry = static_cast<std::size_t>(token.sequence * problem.table_stride) + page / 2;
    const std::int64_t place = (head % c.kv_heads * problem.slots + problem.table[entry]) * 2 +
                               static_cast<std::int64_t>(page % 2);
    const std::byte* const bytes =
        problem.pages.data() + static_cast<std::size_t>(place) * tiles.page_bytes(c.channels());
    if (read[page]) values[page] = values_of_page(problem, head % c.kv_heads, bytes, mean);
  }
  for (std::int64_t g = 0; g < c.group; ++g) {
    const std::int64_t query = head * c.group + g;
    double mass = 0.0;
    std::vector<double> sums(d, 0.0);
    for (std::size_t page = 0; page < read.size(); ++page) {
      for (int t = 0; t < kPageTokens; ++t) {
        const double w = weight(query, static_cast<std::int32_t>(page) * kPageTokens + t);
        mass += w;
        for (std::size_t ch = 0; ch < d && w > 0.0; ++ch) {
          sums[ch] +=
              w * (read[page] ? values[page][static_cast<std::size_t>(t) * d + ch] : mean[ch]);
        }
      }
    }
    double lse = -std::numeric_limits<double>::infinity();
    if (mass > 0.0) {
      lse = static_cast<double>(problem.estimated_lse[static_cast<std::size_t>(query)]) +
            std::log(mass);
    }
    const auto place = static_cast<std::size_t>(query);
    double before = 0.0;  // share of the previous partial
    if (c.merge) {
      const auto old = static_cast<double>(problem.lse[place]);
      before = mass > 0.0 ? 1.0 / (1.0 + std::exp(lse - old)) : 1.0;
      lse = mass > 0.0 ? old - std::log(before) : old;
    }
    answer.lse.push_back(lse);
    for (std::size_t ch = 0; ch < d; ++ch) {
      const double here = mass > 0.0 ? sums[ch] / mass : 0.0;
      answer.out.push_back(before * static_cast<double>(problem.out[place * d + ch]) +
                           (1.0 - before) * here);
    }
  }
}

inline ValueAnswer answer_of(const ValueProblem& problem) {
  ValueAnswer answer;
  for (std::int64_t head = 0; head < problem.heads_in_all(); ++head) {
    answer_head(problem, head, answer);
  }
  return answer;
}

// Makes the selection of one KV head bad and puts NaN into entries that must not be read then. The
// right result attends nothing for that head.
inline ValueAnswer spoil_head(ValueProblem& problem, std::int64_t head) {
  HeadSelection& selection = problem.heads[static_cast<std::size_t>(head)];
  selection.bad = 1;
  selection.count = 0;
  const ValueAnswer wanted = answer_of(problem);
  const std::int64_t query = head * problem.of().group;
  problem.logits[static_cast<std::size_t>(query * problem.stride)] =
      std::numeric_limits<float>::quiet_NaN();
  problem.estimated_lse[static_cast<std::size_t>(query)] = std::numeric_limits<float>::quiet_NaN();
  return wanted;
}

// The largest allowed difference from the right result.
struct ValueTolerance {
  double out = 2e-5;  // for values of about 1
  double lse = 2e-5;
};

// Adds the error from page weights that are off by `weight_error`, relative to the heaviest. Scales
// are normal with a deviation of 0.7, so they seldom exceed 4 deviations.
inline ValueTolerance tolerance_of(const ValueCase& c, double weight_error) {
  ValueTolerance tolerance;
  tolerance.out += weight_error * 0.7 * 4 * static_cast<double>((1 << c.bits) - 1);
  return tolerance;
}

inline void expect_answer(const ValueAnswer& wanted, const std::vector<float>& out,
                          const std::vector<float>& lse,
                          const std::vector<std::int32_t>& pages_read,
                          const ValueTolerance& tolerance = {}) {
  ASSERT_EQ(out.size(), wanted.out.size());
  ASSERT_EQ(lse.size(), wanted.lse.size());
  EXPECT_EQ(pages_read, wanted.pages_read);
  double worst = 0.0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    ASSERT_TRUE(std::isfinite(out[i])) << i;
    worst = std::max(worst, std::fabs(static_cast<double>(out[i]) - wanted.out[i]));
  }
  EXPECT_LE(worst, tolerance.out);
  for (std::size_t i = 0; i < lse.size(); ++i) {
    if (std::isinf(wanted.lse[i])) {
      EXPECT_EQ(lse[i], static_cast<float>(wanted.lse[i])) << i;
    } else {
      EXPECT_NEAR(static_cast<double>(lse[i]), wanted.lse[i], tolerance.lse) << i;
    }
  }
}

// Shapes and settings that every implementation is held to.
inline std::vector<ValueCase> value_cases() {
  std::vector<ValueCase> cases;
  for (const int bits : {1, 2, 3, 4}) {
    for (const int head_dim : {64, 80, 96, 128, 256}) cases.push_back({head_dim, 4, bits});
    for (const int group : {1, 2, 7, 8, 16}) cases.push_back({64, group, bits});
    for (const float share : {0.5f, 1.0f}) cases.push_back({128, 4, bits, share});
  }
  const auto add_half = [&](ValueCase c) {
    c.half = true;
    cases.push_back(c);
  };
  for (const int head_dim : {64, 80, 96, 128, 256}) {
    for (const int bits : {1, 2}) add_half({head_dim, 4, bits});
  }
  for (const int group : {1, 7, 8, 16}) add_half({64, group, 2});
  for (const float share : {0.5f, 1.0f}) add_half({128, 4, 3, share});
  add_half({128, 2, 4, 0.9f, {3, 9000}, 300, 2, true});
  const std::vector<std::int32_t> ragged = {0, 127, 128, 255, 256, 511, 1283, 4000};
  for (const int selected : {0, 1, 300, 100000}) {
    for (const bool merge : {false, true}) {
      cases.push_back({128, 4, 2, 0.9f, ragged, selected, 3, merge});
      cases.push_back({64, 1, 4, 0.5f, ragged, selected, 1, merge});
    }
  }
  // Flat rows, whose pages weigh all alike, and steep ones, where one page has all the weight.
  for (const float deviation : {0.0f, 0.01f, 12.0f}) {
    cases.push_back({128, 4, 2, 0.9f, {3, 9000}, 16, 2, false, deviation});
  }
  cases.push_back({64, 2, 2, 0.9f, {0, 64, 127}, 4});  // first pages only
  // Logits far from zero, and pages that are read although all their tokens are selected.
  for (const float level : {-200.0f, 0.0f, 200.0f}) {
    for (const int selected : {128, 100000}) {
      cases.push_back({64, 2, 3, 1.0f, {130, 260, 700}, selected, 2, false, 2.0f, level});
    }
  }
  return cases;
}

}  // namespace sluice::testing
