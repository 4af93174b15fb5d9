// The key index of every backend: what its tiles and bounds hold, and what is estimated from them.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

#include "sluice/half.h"
#include "tests/support/backends.h"
#include "tests/support/fitted_halves.h"
#include "tests/support/indexed_case.h"
#include "tests/support/random.h"
#include "tests/support/watched_device.h"

namespace sluice {
namespace {

using sluice::testing::AttentionCase;
using sluice::testing::EstimateCase;
using sluice::testing::IndexedCase;
using sluice::testing::NamedBackend;
using sluice::testing::Random;

AttentionCase random_keys(Random& random, const KvShape& shape, std::int64_t tokens) {
  return testing::random_case(random, shape, 1, tokens);
}

std::vector<AttentionCase> random_sequences(Random& random, const KvShape& shape,
                                            const std::vector<std::int64_t>& lengths) {
  std::vector<AttentionCase> sequences;
  for (const std::int64_t tokens : lengths) {
    sequences.push_back(random_keys(random, shape, tokens));
  }
  return sequences;
}

// Lengths around the borders of pages and tiles.
const std::vector<std::int64_t> kLengths = {2 * kPageTokens + 75, 1, kPageTokens, kPageTokens + 1,
                                            5 * kPageTokens};

// The newest token of every sequence, after the one before it in the first.
std::vector<BatchToken> newest_tokens(const std::vector<std::int64_t>& lengths) {
  std::vector<BatchToken> tokens = {{0, static_cast<std::int32_t>(lengths[0]) - 2}};
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    tokens.push_back({static_cast<std::int32_t>(i), static_cast<std::int32_t>(lengths[i]) - 1});
  }
  return tokens;
}

double key_at(const AttentionCase& c, int head, std::int64_t token, int channel) {
  return testing::row_element(c, head, token, channel);
}

using Shape =
    std::tuple<RowFormat, int, int, int, bool>;  // of rows, head_dim, group, bits, rotated
using Param = std::tuple<NamedBackend, Shape>;

class KeyIndexParity : public ::testing::TestWithParam<Param> {
 protected:
  KvShape shape() const {
    const auto [format, head_dim, group, bits, rotated] = std::get<Shape>(GetParam());
    return {1, 2 * group, 2, head_dim, format};
  }
  int bits() const { return std::get<3>(std::get<Shape>(GetParam())); }
  bool rotated() const { return std::get<4>(std::get<Shape>(GetParam())); }
  void SetUp() override {
    backend_ = testing::make_or_skip(std::get<NamedBackend>(GetParam()));
    const RowFormat rows = shape().rows;
    if (backend_ != nullptr && !backend_->info().takes(rows)) {
      GTEST_SKIP() << "no rows of " << to_string(rows);
    }
  }
  bool half_logits() const { return backend_->info().logits.dtype == DType::f16; }

  std::unique_ptr<testing::Device> backend_;
};

TEST_P(KeyIndexParity, BuildsWhatTheReferenceBuilds) {
  const std::uint64_t seed = testing::seed(11);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  const auto sequences = random_sequences(random, shape(), {3 * kPageTokens + 40, 127, 256});
  testing::Device slow(std::make_unique<cpu::ReferenceBackend>());
  IndexedCase a(*backend_, sequences, bits(), seed, rotated());
  IndexedCase b(slow, sequences, bits(), seed, rotated());
  a.build();
  b.build();
  EXPECT_EQ(a.codes(), b.codes());
  EXPECT_EQ(a.scales(), b.scales());
  EXPECT_EQ(a.bounds(), b.bounds());
  EXPECT_EQ(a.bad(), std::vector<std::int32_t>(6));
}

// Token by token, in batches with tokens that complete no page.
TEST_P(KeyIndexParity, StepsBuildWhatPrefillBuilds) {
  const std::uint64_t seed = testing::seed(17);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  const auto sequences = random_sequences(random, shape(), kLengths);
  IndexedCase a(*backend_, sequences, bits(), seed, rotated());
  IndexedCase b(*backend_, sequences, bits(), seed, rotated());
  a.build();
  for (std::int32_t last = kPageTokens - 1; last < kLengths.back(); last += kPageTokens) {
    std::vector<BatchToken> tokens;
    for (std::int32_t i = 0; i < static_cast<std::int32_t>(kLengths.size()); ++i) {
      if (last - 1 < kLengths[static_cast<std::size_t>(i)]) tokens.push_back({i, last - 1});
      if (last < kLengths[static_cast<std::size_t>(i)]) tokens.push_back({i, last});
    }
    b.build_batch(tokens);
  }
  EXPECT_EQ(a.codes(), b.codes());
  EXPECT_EQ(a.scales(), b.scales());
  EXPECT_EQ(a.bounds(), b.bounds());
  EXPECT_EQ(b.bad(), std::vector<std::int32_t>(2 * kLengths.size()));
  const std::vector<std::uint8_t> codes = a.codes();
  EXPECT_NE(codes, std::vector<std::uint8_t>(codes.size()));
}

TEST_P(KeyIndexParity, BoundsHoldEveryKeyTightly) {
  Random random(testing::seed(12));
  const auto sequences = random_sequences(random, shape(), {2 * kPageTokens});
  const AttentionCase& c = sequences[0];
  IndexedCase index(*backend_, sequences, bits(), 12, rotated());
  index.build();
  const std::vector<std::uint16_t> bounds = index.bounds();
  const int d = shape().head_dim;
  for (std::int64_t part = 0; part < 2 * kBoundsPerPage; ++part) {
    const std::size_t first = index.bounds_of(0, 0, part / kBoundsPerPage) +
                              static_cast<std::size_t>(part % kBoundsPerPage * 2 * d);
    for (int channel = 0; channel < d; ++channel) {
      double low = INFINITY;
      double high = -INFINITY;
      for (std::int64_t t = 0; t < kBoundTokens; ++t) {
        const double key = key_at(c, 0, part * kBoundTokens + t, channel);
        low = std::min(low, key);
        high = std::max(high, key);
      }
      const std::size_t at = first + static_cast<std::size_t>(channel);
      const double below = f16_to_float(bounds[at]);
      const double above = f16_to_float(bounds[at + static_cast<std::size_t>(d)]);
      ASSERT_LE(below, low);
      ASSERT_GE(above, high);
      ASSERT_LE(low - below, std::abs(low) * 0x1p-10 + 1e-7);
      ASSERT_LE(above - high, std::abs(high) * 0x1p-10 + 1e-7);
    }
  }
}

// The Hadamard matrix times a vector, by its definition: entries +-1 / sqrt(block) by the parity of
// the bits that both indices have.
std::vector<double> rotated_by_matrix(const std::vector<double>& x) {
  std::size_t block = 1;
  while (x.size() % (2 * block) == 0) block *= 2;
  std::vector<double> to(x.size());
  for (std::size_t row = 0; row < x.size(); ++row) {
    for (std::size_t i = 0; i < block; ++i) {
      const double sign = std::popcount(row % block & i) % 2 == 0 ? 1.0 : -1.0;
      to[row] += sign * x[row / block * block + i] / std::sqrt(static_cast<double>(block));
    }
  }
  return to;
}

// Rotated tiles hold each rotated key as the nearest of 2^bits evenly spaced ones in the middle of
// its channel's range; one bit stands for the means of the range's halves.
TEST_P(KeyIndexParity, RotatedTilesHoldTheNearestCodesOfRotatedKeys) {
  if (!rotated()) GTEST_SKIP() << "for rotated tiles";
  const std::uint64_t seed = testing::seed(23);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  const auto sequences = random_sequences(random, shape(), {2 * kPageTokens});
  IndexedCase index(*backend_, sequences, bits(), seed, true);
  index.build();
  const int d = shape().head_dim;
  const double kept = bits() == 2 ? 0.75 : bits() == 3 ? 0.9 : 0.95;
  for (const std::int64_t page : {0, 1}) {
    std::vector<std::vector<double>> keys;
    for (std::int64_t t = 0; t < kPageTokens; ++t) {
      std::vector<double> key;
      for (int c = 0; c < d; ++c) key.push_back(key_at(sequences[0], 1, page * kPageTokens + t, c));
      keys.push_back(rotated_by_matrix(key));
    }
    const std::vector<double> coded = index.tile_keys(0, 1, page);
    for (std::size_t c = 0; c < static_cast<std::size_t>(d); ++c) {
      double low = INFINITY;
      double high = -INFINITY;
      for (const std::vector<double>& key : keys) {
        low = std::min(low, key[c]);
        high = std::max(high, key[c]);
      }
      if (bits() == 1) {
        std::vector<double> values;
        std::vector<double> of_codes;
        for (std::size_t t = 0; t < kPageTokens; ++t) {
          values.push_back(keys[t][c]);
          of_codes.push_back(coded[t * static_cast<std::size_t>(d) + c]);
        }
        ASSERT_NO_FATAL_FAILURE(testing::expect_halves(values, of_codes)) << "channel " << c;
        continue;
      }
      const double range = (high - low) * kept;
      const double middle = (high + low) / 2;
      for (std::size_t t = 0; t < kPageTokens; ++t) {
        const double inside = std::clamp(keys[t][c], middle - range / 2, middle + range / 2);
        // Zero and scale are rounded to f16.
        ASSERT_NEAR(coded[t * static_cast<std::size_t>(d) + c], inside,
                    range / ((1 << bits()) - 1) * 0.502 + range * 2e-3)
            << "page " << page << " token " << t << " channel " << c;
      }
    }
  }
}

// The 8-bit weights of a folded query are off by up to half a step of 1/127 of the largest
// |q * scale|, each multiplied by a code: independent errors, so seven deviations of their sum.
double fold_rounding(const AttentionCase& c, const float* of_query, int head, int bits,
                     bool rotated, int channels) {
  const int d = c.shape.head_dim;
  std::vector<double> q(of_query, of_query + d);
  if (rotated) q = rotated_by_matrix(q);
  const double levels = (1 << bits) - 1;
  double largest = 0.0;
  for (int channel = 0; channel < d; ++channel) {
    double low = INFINITY;
    double high = -INFINITY;
    for (std::int64_t t = 0; t < c.count(head); ++t) {
      low = std::min(low, key_at(c, head, t, channel));
      high = std::max(high, key_at(c, head, t, channel));
    }
    // Rotated keys are of deviation 1, too.
    const double range = rotated ? 8.0 : high - low;
    largest = std::max(largest, std::abs(q[static_cast<std::size_t>(channel)]) * range / levels);
  }
  return 7.0 * largest / 127.0 / std::sqrt(12.0) * levels *
         std::sqrt(static_cast<double>(channels));
}

// Every method by itself, with and without the rows of a token's own page, then candidates.
std::vector<EstimateCase> estimate_cases(Random& random, const KvShape& shape,
                                         const std::vector<BatchToken>& tokens, bool rotated) {
  const int d = shape.head_dim;
  EstimateCase c;
  c.tokens = tokens;
  c.q = random.normal(static_cast<std::int64_t>(tokens.size()) * shape.query_heads * d);
  std::vector<EstimateCase> cases;
  for (const auto& [method, channels] :
       {std::tuple{Selector::int4, d}, std::tuple{Selector::sparq, d / 4},
        std::tuple{Selector::sparq, d - 1}, std::tuple{Selector::sparq, 1},
        std::tuple{Selector::quest, d}, std::tuple{Selector::exact, d}}) {
    if (rotated && method == Selector::sparq) continue;
    c.method = method;
    c.channels = channels;
    c.skip_newest = random.integer(0, 1) == 1;
    cases.push_back(c);
  }
  for (const BatchToken& token : tokens) {
    for (int head = 0; head < shape.kv_heads; ++head) {
      const std::int64_t often = random.integer(1, 40);
      auto& list = c.candidates.emplace_back();
      for (std::int32_t t = 0; t < token.page_first(); ++t) {
        if (random.integer(0, often) == 0) list.push_back(t);
      }
    }
  }
  for (const Selector method : {Selector::int4, Selector::exact}) {
    c.method = method;
    c.channels = d;
    c.skip_newest = !c.skip_newest;
    cases.push_back(c);
  }
  return cases;
}

TEST_P(KeyIndexParity, EstimatesWhatTheReferenceEstimates) {
  const std::uint64_t seed = testing::seed(13);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  const auto sequences = random_sequences(random, shape(), kLengths);
  const int d = shape().head_dim;
  testing::Device slow(std::make_unique<cpu::ReferenceBackend>());
  IndexedCase a(*backend_, sequences, bits(), seed, rotated());
  IndexedCase b(slow, sequences, bits(), seed, rotated());
  a.build();
  b.build();
  for (const EstimateCase& c :
       estimate_cases(random, shape(), newest_tokens(kLengths), rotated())) {
    const auto x = a.estimate(c);
    const auto y = b.estimate(c);
    for (std::size_t row = 0; row < x.size(); ++row) {
      const auto number = row / static_cast<std::size_t>(shape().query_heads);
      const BatchToken& token = c.tokens[number];
      const int head = static_cast<int>(row) % shape().query_heads / shape().group();
      const bool tiles = c.method == Selector::int4 || c.method == Selector::sparq;
      // 1 / temperature is at most 1 / sqrt(head_dim) * sqrt(|q|_1 / |q of the channels|_1).
      const double factor = c.method == Selector::sparq ? 1.0 : 1.0 / std::sqrt(d);
      const double rounding =
          tiles ? fold_rounding(sequences[static_cast<std::size_t>(token.sequence)],
                                &c.q[row * static_cast<std::size_t>(d)], head, bits(), rotated(),
                                c.channels) *
                      factor
                : 0.0;
      const std::vector<std::int64_t> at = b.positions(c, static_cast<std::int64_t>(row));
      for (std::size_t i = 0; i < at.size(); ++i) {
        const bool indexed = at[i] < token.page_first();
        // Queries and results in f16: 2^-11 of each, the terms' errors independent.
        const double half =
            half_logits() ? 0x1p-11 * (std::abs(y[row][i]) + 7 * factor * std::sqrt(d)) : 0.0;
        ASSERT_NEAR(x[row][i], y[row][i], 2e-5 + half + (indexed ? rounding : 0.0))
            << "token " << number << " row " << row << " position " << at[i] << " method "
            << static_cast<int>(c.method) << " candidates " << !c.candidates.empty();
      }
    }
  }
}

// Rows in full precision, by plain loops over what was put into the sequences.
TEST_P(KeyIndexParity, ExactLogitsAreProducts) {
  const std::uint64_t seed = testing::seed(18);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  const auto sequences = random_sequences(random, shape(), kLengths);
  const int d = shape().head_dim;
  IndexedCase index(*backend_, sequences, bits(), seed, rotated());
  for (const EstimateCase& c :
       estimate_cases(random, shape(), newest_tokens(kLengths), rotated())) {
    if (c.method != Selector::exact) continue;
    const auto logits = index.estimate(c);
    for (std::size_t row = 0; row < logits.size(); ++row) {
      const BatchToken& token = c.tokens[row / static_cast<std::size_t>(shape().query_heads)];
      const int head = static_cast<int>(row) % shape().query_heads / shape().group();
      const std::vector<std::int64_t> at = index.positions(c, static_cast<std::int64_t>(row));
      for (std::size_t i = 0; i < at.size(); ++i) {
        double sum = 0.0;
        for (int channel = 0; channel < d; ++channel) {
          sum += static_cast<double>(
                     c.q[row * static_cast<std::size_t>(d) + static_cast<std::size_t>(channel)]) *
                 key_at(sequences[static_cast<std::size_t>(token.sequence)], head, at[i], channel);
        }
        const double logit = sum / std::sqrt(d);
        const double half = half_logits() ? 0x1p-11 * (std::abs(logit) + 7) : 0.0;
        ASSERT_NEAR(logits[row][i], logit, 2e-5 + half) << "row " << row << " position " << at[i];
      }
    }
  }
}

// A token's logits are nothing to who else is in the batch.
TEST_P(KeyIndexParity, EstimatesABatchAsItsTokensAlone) {
  const std::uint64_t seed = testing::seed(19);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  const auto sequences = random_sequences(random, shape(), kLengths);
  IndexedCase index(*backend_, sequences, bits(), seed, rotated());
  index.build();
  const auto queries = static_cast<std::size_t>(shape().query_heads);
  const auto heads = static_cast<std::size_t>(shape().kv_heads);
  for (const EstimateCase& c :
       estimate_cases(random, shape(), newest_tokens(kLengths), rotated())) {
    const auto together = index.estimate(c);
    for (std::size_t i = 0; i < c.tokens.size(); ++i) {
      EstimateCase one = c;
      const auto slice = [i](auto& all, std::size_t each) {
        if (all.empty()) return;
        all = {all.begin() + static_cast<std::int64_t>(i * each),
               all.begin() + static_cast<std::int64_t>((i + 1) * each)};
      };
      slice(one.tokens, 1);
      slice(one.q, queries * static_cast<std::size_t>(shape().head_dim));
      slice(one.candidates, heads);
      const auto alone = index.estimate(one);
      for (std::size_t head = 0; head < queries; ++head) {
        ASSERT_EQ(alone[head], together[i * queries + head])
            << "token " << i << " head " << head << " method " << static_cast<int>(c.method);
      }
    }
  }
}

// Tiles in which there are candidates, as often as the backend reads them.
TEST_P(KeyIndexParity, TellsWhatWasReadForCandidates) {
  const std::uint64_t seed = testing::seed(21);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  const auto sequences = random_sequences(random, shape(), kLengths);
  IndexedCase index(*backend_, sequences, bits(), seed, rotated());
  index.build();
  const ReadPattern& reads = backend_->info().reads;
  for (const EstimateCase& c :
       estimate_cases(random, shape(), newest_tokens(kLengths), rotated())) {
    if (c.method != Selector::int4 || c.candidates.empty()) continue;
    index.estimate(c);
    for (std::size_t head = 0; head < c.candidates.size(); ++head) {
      std::set<std::int64_t> tiles;
      for (const std::int32_t at : c.candidates[head]) {
        tiles.insert(at / kPageTokens / reads.tile_pages);
      }
      EXPECT_EQ(index.pages_read()[head],
                static_cast<int>(tiles.size()) * reads.tile_pages *
                    ReadPattern::parts(shape().group(), reads.estimate_queries))
          << "KV head " << head << " of all tokens";
    }
  }
}

// Candidates whose pages have a slot on the device, however often their keys are read.
TEST_P(KeyIndexParity, TellsWhichCandidatesAreOnTheDevice) {
  const std::uint64_t seed = testing::seed(23);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  const auto sequences = random_sequences(random, shape(), kLengths);
  IndexedCase index(*backend_, sequences, bits(), seed, rotated());
  std::int64_t all = 0;
  std::int64_t resident = 0;
  for (const EstimateCase& c :
       estimate_cases(random, shape(), newest_tokens(kLengths), rotated())) {
    if (c.method != Selector::exact || c.candidates.empty()) continue;
    index.estimate(c);
    for (std::size_t head = 0; head < c.candidates.size(); ++head) {
      const auto& listed = c.candidates[head];
      const BatchToken& token = c.tokens[head / static_cast<std::size_t>(shape().kv_heads)];
      const auto expected = std::count_if(listed.begin(), listed.end(), [&](std::int32_t position) {
        return index.is_on_device(token, position);
      });
      all += std::ssize(listed);
      resident += expected;
      if (listed.empty()) continue;  // nothing may be written then
      EXPECT_EQ(index.resident()[head], expected) << "KV head " << head << " of all tokens";
    }
  }
  EXPECT_GT(resident, 0);
  EXPECT_LT(resident, all);
}

// The rows of a token's own page alone.
TEST_P(KeyIndexParity, NewestLogitsAreThoseOfTheRows) {
  Random random(testing::seed(22));
  const auto sequences = random_sequences(random, shape(), kLengths);
  IndexedCase index(*backend_, sequences, bits(), 22, rotated());
  EstimateCase c;
  c.tokens = newest_tokens(kLengths);
  c.q = random.normal(static_cast<std::int64_t>(c.tokens.size()) * shape().query_heads *
                      shape().head_dim);
  c.method = Selector::exact;
  const auto exact = index.estimate(c);
  c.method = Selector::newest;
  const auto newest = index.estimate(c);
  for (std::size_t row = 0; row < exact.size(); ++row) {
    const BatchToken& token = c.tokens[row / static_cast<std::size_t>(shape().query_heads)];
    for (auto at = static_cast<std::size_t>(token.page_first()); at < exact[row].size(); ++at) {
      const double half =
          half_logits() ? 0x1p-10 * std::abs(static_cast<double>(exact[row][at])) : 0.0;
      ASSERT_NEAR(newest[row][at], exact[row][at], 2e-5 + half) << "row " << row << " " << at;
    }
  }
}

TEST_P(KeyIndexParity, TilesEstimateTheLogits) {
  Random random(testing::seed(14));
  const auto sequences = random_sequences(random, shape(), {2 * kPageTokens + 1});
  IndexedCase index(*backend_, sequences, bits(), 14, rotated());
  index.build();
  EstimateCase c;
  c.tokens = {{0, 2 * kPageTokens}};
  c.q = sequences[0].q;
  c.skip_newest = true;
  const auto estimate = index.estimate(c);
  c.method = Selector::exact;
  const auto exact = index.estimate(c);
  // Keys of deviation 1 range over about 5.4 in 128 tokens; a code is off by up to half a step.
  // The error of one bit's means is 0.6, that of a step of 2.09.
  const double step = bits() == 1 ? 2.09 : 5.4 / ((1 << bits()) - 1);
  double squares = 0.0;
  double count = 0.0;
  for (std::size_t row = 0; row < exact.size(); ++row) {
    for (std::size_t i = 0; i < exact[row].size(); ++i) {
      count += 1.0;
      squares +=
          std::pow(static_cast<double>(estimate[row][i]) - static_cast<double>(exact[row][i]), 2);
    }
  }
  const double deviation = std::sqrt(squares / count);
  EXPECT_LT(deviation, 1.3 * step / std::sqrt(12.0));
  EXPECT_GT(deviation, 0.0);
}

std::string name_of(const ::testing::TestParamInfo<Param>& info) {
  const auto [format, head_dim, group, bits, rotated] = std::get<Shape>(info.param);
  return std::get<NamedBackend>(info.param).name + "_" + to_string(format) + "_d" +
         std::to_string(head_dim) + "_g" + std::to_string(group) + "_int" + std::to_string(bits) +
         (rotated ? "_rotated" : "");
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, KeyIndexParity,
    ::testing::Combine(
        ::testing::ValuesIn(testing::backends_by_kind()),
        ::testing::Values(
            Shape{DType::bf16, 64, 4, 4, false}, Shape{DType::bf16, 128, 8, 4, false},
            Shape{DType::bf16, 80, 1, 4, false}, Shape{DType::f16, 32, 2, 2, false},
            Shape{DType::bf16, 128, 4, 3, false}, Shape{DType::f16, 64, 8, 3, false},
            Shape{DType::bf16, 18, 3, 3, false}, Shape{DType::f32, 256, 16, 3, false},
            Shape{DType::bf16, 80, 12, 3, false}, Shape{DType::f32, 64, 5, 2, false},
            Shape{DType::bf16, 256, 1, 2, false}, Shape{DType::f16, 256, 4, 4, false},
            Shape{DType::f32, 18, 3, 4, false}, Shape{DType::f16, 18, 3, 4, false},
            Shape{DType::bf16, 128, 16, 4, false}, Shape{DType::bf16, 128, 4, 1, true},
            Shape{DType::bf16, 64, 8, 1, true}, Shape{DType::f16, 80, 12, 1, true},
            Shape{DType::f32, 256, 1, 1, true}, Shape{DType::bf16, 128, 4, 3, true},
            Shape{DType::bf16, 128, 8, 2, true}, Shape{DType::f16, 64, 4, 4, true},
            Shape{DType::bf16, 64, 1, 3, true}, Shape{DType::bf16, 80, 12, 3, true},
            Shape{DType::f16, 96, 2, 2, true}, Shape{DType::bf16, 18, 3, 4, true},
            Shape{DType::f32, 64, 5, 2, true}, Shape{DType::bf16, 256, 16, 3, true},
            Shape{DType::f16, 256, 4, 4, true}, Shape{DType::f32, 192, 3, 3, true},
            Shape{RowCode::int8, 128, 4, 4, false}, Shape{RowCode::int8, 64, 3, 3, true},
            Shape{RowCode::int8, 48, 8, 2, true}, Shape{RowCode::int8, 64, 2, 1, true},
            Shape{RowCode::k8v4, 128, 4, 4, false}, Shape{RowCode::k8v4, 80, 3, 2, true})),
    name_of);

class BuildIndex : public ::testing::TestWithParam<NamedBackend> {};

TEST_P(BuildIndex, NamesTheHeadOfAKeyThatIsNoNumber) {
  const std::unique_ptr<testing::Device> backend = testing::make_or_skip(GetParam());
  if (backend == nullptr) return;
  Random random(testing::seed(16));
  for (const float strange : {std::nanf(""), -std::numeric_limits<float>::infinity()}) {
    auto sequences = random_sequences(random, {1, 4, 2, 64, DType::bf16}, {300, 2 * kPageTokens});
    testing::set_row_element(sequences[1], 1, 200, 63, strange);
    IndexedCase prefilled(*backend, sequences, 4, 16);
    prefilled.build();
    EXPECT_EQ(prefilled.bad(), (std::vector<std::int32_t>{0, 0, 0, 1}));
    IndexedCase stepped(*backend, sequences, 4, 16);
    stepped.build_batch({{0, 255}, {1, 127}, {1, 254}});
    EXPECT_EQ(stepped.bad(), std::vector<std::int32_t>(4));
    stepped.build_batch({{0, 255}, {1, 255}});
    EXPECT_EQ(stepped.bad(), (std::vector<std::int32_t>{0, 0, 0, 1}));
  }
}

// Keys that are all the same have no range; a channel of one huge sign is f16's limit in all
// rotated ones. Estimates stay numbers, and those of equal keys are exact but for f16.
TEST_P(BuildIndex, TakesKeysWithoutARangeAndHugeOnes) {
  const std::unique_ptr<testing::Device> backend = testing::make_or_skip(GetParam());
  if (backend == nullptr) return;
  const std::uint64_t seed = testing::seed(24);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  for (const int bits : {1, 2, 3, 4}) {
    for (const bool rotated : {false, true}) {
      if (bits == 1 && !rotated) continue;
      for (const float huge : {0.0f, 30000.0f, 1e30f}) {
        auto sequences =
            random_sequences(random, {1, 4, 2, 96, DType::bf16}, {2 * kPageTokens + 1});
        for (std::int64_t t = 0; t < 2 * kPageTokens; ++t) {
          for (int head = 0; head < 2; ++head) {
            for (int c = 0; c < 96; ++c) testing::set_row_element(sequences[0], head, t, c, 0.375f);
            if (huge > 0.0f)
              testing::set_row_element(sequences[0], head, t, 7, t % 2 ? huge : -huge);
          }
        }
        IndexedCase index(*backend, sequences, bits, seed, rotated);
        index.build();
        EXPECT_EQ(index.bad(), std::vector<std::int32_t>(2));
        EstimateCase c;
        c.tokens = {{0, 2 * kPageTokens}};
        c.q = random.normal(4 * 96);
        c.skip_newest = true;
        const auto estimate = index.estimate(c);
        c.method = Selector::exact;
        const auto exact = index.estimate(c);
        for (std::size_t row = 0; row < exact.size(); ++row) {
          for (std::size_t i = 0; i < exact[row].size(); ++i) {
            ASSERT_TRUE(std::isfinite(estimate[row][i])) << "bits " << bits << " huge " << huge;
            if (huge > 0.0f) continue;
            // Zeros of up to 2.1 in f16, of 3 channels after a rotation, of 96 without one.
            ASSERT_NEAR(estimate[row][i], exact[row][i], 0.02) << "bits " << bits << rotated;
          }
        }
      }
    }
  }
}

// The reference tells of every page of the index that it reads, once for a KV head.
TEST(ReferenceEstimate, TellsWhatItReads) {
  struct Reads : cpu::ReferenceQueue {
    using ReferenceQueue::ReferenceQueue;
    void on_index_read(const cpu::PageRead& read) override { all.push_back(read); }
    std::vector<cpu::PageRead> all;
  };
  Random random(testing::seed(20));
  const KvShape shape = {1, 4, 2, 64, DType::bf16};
  const auto sequences = random_sequences(random, shape, kLengths);
  testing::WatchedDevice<Reads> backend;
  IndexedCase index(backend, sequences, 4, 20);
  index.build();
  EstimateCase c;
  c.tokens = {{2, 127}, {4, 639}};
  c.q = random.normal(2 * 4 * 64);
  const auto read = [&] {
    backend.watch().all.clear();
    index.estimate(c);
    std::size_t bytes = 0;
    for (const cpu::PageRead& one : backend.watch().all) {
      EXPECT_EQ(one.sequence, 4);
      bytes += one.bytes;
    }
    return bytes;
  };
  EXPECT_EQ(read(), 2u * 4 * 64 * (64 + 4));  // KV heads, pages, channels, codes and scales
  c.method = Selector::sparq;
  c.channels = 16;
  EXPECT_EQ(read(), 2u * 4 * 16 * (64 + 4));
  c.method = Selector::quest;
  EXPECT_EQ(read(), 2u * 4 * 64 * 8 * 2 * 2);  // sub-pages, two bounds of f16
  c.method = Selector::int4;
  c.candidates = {{}, {}, {1, 2, 300}, {511}};
  EXPECT_EQ(read(), 3u * 64 * (64 + 4));
  c.method = Selector::exact;
  EXPECT_EQ(read(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Backends, BuildIndex, ::testing::ValuesIn(testing::backends_by_kind()),
                         testing::name_of);

}  // namespace
}  // namespace sluice
