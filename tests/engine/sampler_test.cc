#include "sluice/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "tests/io/test_files.h"

namespace sluice {
namespace {

using testing::expect_error;
using ::testing::UnorderedElementsAre;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

SamplingParams params(double temperature) {
  SamplingParams p;
  p.temperature = temperature;
  return p;
}

std::vector<float> logits_of(const std::vector<double>& probabilities) {
  std::vector<float> logits;
  for (const double p : probabilities) logits.push_back(static_cast<float>(std::log(p)));
  return logits;
}

std::vector<int> counts(const SamplingParams& p, const std::vector<float>& logits, int draws,
                        const std::vector<TokenId>& history = {}) {
  const Sampler sampler(p);
  std::vector<int> result(logits.size(), 0);
  for (int i = 0; i < draws; ++i) {
    ++result.at(static_cast<std::size_t>(sampler.next(logits, history, i)));
  }
  return result;
}

std::set<TokenId> support(const SamplingParams& p, const std::vector<float>& logits) {
  std::set<TokenId> ids;
  const std::vector<int> drawn = counts(p, logits, 20'000);
  for (std::size_t id = 0; id < drawn.size(); ++id) {
    if (drawn[id] > 0) ids.insert(static_cast<TokenId>(id));
  }
  return ids;
}

// Chi-square with its mean (the degrees of freedom) and standard deviation: five of them is far
// beyond what a correct sampler shows, and the seeds are fixed.
void expect_frequencies(const std::vector<int>& drawn, const std::vector<double>& probabilities) {
  int draws = 0;
  for (const int count : drawn) draws += count;
  double chi_square = 0.0;
  int kinds = 0;
  for (std::size_t id = 0; id < drawn.size(); ++id) {
    const double expected = probabilities[id] * draws;
    if (expected == 0.0) {
      EXPECT_EQ(drawn[id], 0) << "token " << id;
      continue;
    }
    chi_square += (drawn[id] - expected) * (drawn[id] - expected) / expected;
    ++kinds;
  }
  const double freedom = kinds - 1;
  EXPECT_LT(chi_square, freedom + 5.0 * std::sqrt(2.0 * freedom) + 1e-9);
}

// Probabilities of all tokens under top-k, top-p and min-p, of logits of which no two are equal.
std::vector<double> filtered_softmax(const std::vector<float>& logits, const SamplingParams& p) {
  std::vector<std::size_t> order(logits.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return logits[a] > logits[b]; });
  if (p.top_k > 0) order.resize(static_cast<std::size_t>(p.top_k));
  const double most = logits[order.front()];
  const auto weight = [&](std::size_t id) { return std::exp((logits[id] - most) / p.temperature); };
  double total = 0.0;
  for (const std::size_t id : order) total += weight(id);
  std::vector<double> result(logits.size(), 0.0);
  double before = 0.0;
  double kept = 0.0;
  for (const std::size_t id : order) {
    if (before >= p.top_p * total || weight(id) < p.min_p) break;
    before += weight(id);
    result[id] = weight(id);
    kept += weight(id);
  }
  for (double& probability : result) probability /= kept;
  return result;
}

TEST(Sampler, GreedyTakesTheMostLikelyAndTheLowestIdOnATie) {
  const Sampler sampler(params(0.0));
  EXPECT_EQ(sampler.next(std::vector<float>{0.5f, 2.0f, -1.0f, 2.0f}, {}, 0), 1);
  EXPECT_EQ(sampler.next(std::vector<float>{-kInfinity, -5.0f}, {}, 0), 1);
}

TEST(Sampler, RepetitionPenaltyCountsATokenOnce) {
  SamplingParams p = params(0.0);
  p.repetition_penalty = 2.0;
  const Sampler sampler(p);
  const std::vector<TokenId> twice = {0, 0};
  EXPECT_EQ(sampler.next(std::vector<float>{3.9f, 2.0f}, twice, 0), 1) << "3.9 / 2 < 2";
  EXPECT_EQ(sampler.next(std::vector<float>{4.1f, 2.0f}, twice, 0), 0) << "not 4.1 / 4";
  EXPECT_EQ(sampler.next(std::vector<float>{-1.0f, -1.9f}, twice, 0), 1) << "-1 * 2 < -1.9";
  EXPECT_EQ(sampler.next(std::vector<float>{-1.0f, -2.1f}, twice, 0), 0);
  EXPECT_EQ(sampler.next(std::vector<float>{-kInfinity, -9.0f}, twice, 0), 1);
}

TEST(Sampler, FrequenciesAreProbabilities) {
  const std::vector<double> probabilities = {0.5, 0.25, 0.125, 0.0625, 0.0625, 0.0};
  const std::vector<float> logits = logits_of(probabilities);
  for (const std::uint64_t seed : {0u, 1u, 2u}) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    SamplingParams p = params(1.0);
    p.seed = seed;
    expect_frequencies(counts(p, logits, 100'000), probabilities);
    p.temperature = 0.5;  // squares them
    double total = 0.0;
    std::vector<double> squares;
    for (const double probability : probabilities) total += probability * probability;
    for (const double probability : probabilities) {
      squares.push_back(probability * probability / total);
    }
    expect_frequencies(counts(p, logits, 100'000), squares);
  }
}

TEST(Sampler, WhatIsLeftIsRenormalised) {
  SamplingParams p = params(1.0);
  p.top_k = 2;
  expect_frequencies(counts(p, logits_of({0.1, 0.3, 0.6}), 100'000), {0.0, 1.0 / 3, 2.0 / 3});
  p.top_k = 0;
  p.top_p = 0.7;
  expect_frequencies(counts(p, logits_of({0.1, 0.3, 0.6}), 100'000), {0.0, 1.0 / 3, 2.0 / 3});
}

TEST(Sampler, TopKKeepsExactlyK) {
  const std::vector<float> logits = logits_of({0.1, 0.2, 0.2, 0.3, 0.2});
  SamplingParams p = params(1.0);
  p.top_k = 1;
  EXPECT_THAT(support(p, logits), UnorderedElementsAre(3));
  p.top_k = 3;
  EXPECT_THAT(support(p, logits), UnorderedElementsAre(1, 2, 3)) << "lowest ids on a tie";
  p.top_k = 99;
  EXPECT_THAT(support(p, logits), UnorderedElementsAre(0, 1, 2, 3, 4));
}

TEST(Sampler, TopPKeepsTheSmallestSet) {
  const std::vector<float> logits = logits_of({0.05, 0.4, 0.15, 0.3, 0.1});
  SamplingParams p = params(1.0);
  p.top_p = 1e-9;
  EXPECT_THAT(support(p, logits), UnorderedElementsAre(1)) << "one token at least";
  p.top_p = 0.39;
  EXPECT_THAT(support(p, logits), UnorderedElementsAre(1));
  p.top_p = 0.41;
  EXPECT_THAT(support(p, logits), UnorderedElementsAre(1, 3));
  p.top_p = 0.69;
  EXPECT_THAT(support(p, logits), UnorderedElementsAre(1, 3));
  p.top_p = 0.94;
  EXPECT_THAT(support(p, logits), UnorderedElementsAre(1, 2, 3, 4));
}

// Sizes around the blocks in which candidates are sorted.
TEST(Sampler, TopPKeepsTheSmallestSetWhateverItsSize) {
  constexpr std::size_t kTokens = 1000;
  for (const std::size_t kept : {63u, 64u, 65u, 300u}) {
    std::vector<double> probabilities(kTokens, 0.1 / static_cast<double>(kTokens - kept));
    std::set<TokenId> likely;
    for (std::size_t i = 0; i < kept; ++i) {
      const std::size_t id = (i * 389) % kTokens;
      probabilities[id] = 0.9 / static_cast<double>(kept);
      likely.insert(static_cast<TokenId>(id));
    }
    SamplingParams p = params(1.0);
    p.top_p = 0.9 - 0.45 / static_cast<double>(kept);
    EXPECT_EQ(support(p, logits_of(probabilities)), likely);
  }
}

TEST(Sampler, MinPIsRelativeToTheMostLikely) {
  const std::vector<float> logits = logits_of({0.05, 0.4, 0.15, 0.3, 0.1});
  SamplingParams p = params(1.0);
  p.min_p = 0.3;  // drops what is below 0.12
  EXPECT_THAT(support(p, logits), UnorderedElementsAre(1, 2, 3));
  p.min_p = 1.0;
  EXPECT_THAT(support(p, logits), UnorderedElementsAre(1));
}

TEST(Sampler, FiltersComeInTheDocumentedOrder) {
  // Temperature 2 makes 0.64 and 0.32 of 0.04: roots 0.8, 0.566, 0.2 of 1.566.
  SamplingParams p = params(2.0);
  p.top_p = 0.6;
  EXPECT_THAT(support(p, logits_of({0.64, 0.32, 0.04})), UnorderedElementsAre(0, 1))
      << "at temperature 1 the first token alone would be enough";
  // Among the top two 0.4 and 0.3 the first has 0.57 of the weight, of all it has 0.4.
  p = params(1.0);
  p.top_k = 2;
  p.top_p = 0.5;
  EXPECT_THAT(support(p, logits_of({0.4, 0.3, 0.2, 0.1})), UnorderedElementsAre(0));
}

// All filters at once, over more tokens than are ever sorted together.
TEST(Sampler, FrequenciesAreThoseOfTheFilteredSoftmax) {
  constexpr std::size_t kTokens = 300;
  std::vector<float> logits(kTokens);
  for (std::size_t i = 0; i < kTokens; ++i) {
    logits[i * 101 % kTokens] = -0.02f * static_cast<float>(i);
  }
  for (const int filter : {0, 1, 2, 3, 4}) {
    SCOPED_TRACE("filter " + std::to_string(filter));
    SamplingParams p = params(0.7);
    p.seed = static_cast<std::uint64_t>(filter);
    if (filter == 1 || filter == 4) p.top_k = 120;
    if (filter == 2 || filter == 4) p.top_p = 0.9;
    if (filter == 3 || filter == 4) p.min_p = 0.1;
    expect_frequencies(counts(p, logits, 50'000), filtered_softmax(logits, p));
  }
}

// A rare token is drawn as often as its probability says, too.
TEST(Sampler, RareTokensAreDrawnAsOftenAsTheyShould) {
  std::vector<double> probabilities(64, 0.01 / 63);
  probabilities[17] = 0.99;
  SamplingParams p = params(1.0);
  expect_frequencies(counts(p, logits_of(probabilities), 400'000), probabilities);
}

std::vector<TokenId> draws_of(std::uint64_t seed, std::int64_t first, int count) {
  const std::vector<float> logits(1000, 0.0f);
  SamplingParams p = params(1.0);
  p.seed = seed;
  const Sampler sampler(p);
  std::vector<TokenId> ids;
  for (int i = 0; i < count; ++i) ids.push_back(sampler.next(logits, {}, first + i));
  return ids;
}

TEST(Sampler, ADrawIsOfItsSeedAndPosition) {
  EXPECT_EQ(draws_of(7, 0, 20), draws_of(7, 0, 20));
  const std::vector<TokenId> all = draws_of(7, 0, 20);
  EXPECT_EQ(draws_of(7, 12, 8), std::vector<TokenId>(all.begin() + 12, all.end()));
  // Of equal tokens the one with the smallest word is drawn. Computed apart from these sources: a
  // change must not change the texts of all seeds unnoticed.
  EXPECT_EQ(draws_of(7, 0, 5), (std::vector<TokenId>{716, 897, 155, 167, 793}));
}

// Of 1000 equal tokens, draws of two independent sequences agree once in 1000.
TEST(Sampler, NeighbouringSeedsAndPositionsAreIndependent) {
  constexpr int kDraws = 5'000;
  const std::vector<TokenId> own = draws_of(7, 0, kDraws);
  const auto agreements = [&](const std::vector<TokenId>& other) {
    int same = 0;
    for (std::size_t i = 0; i < own.size(); ++i) same += own[i] == other[i] ? 1 : 0;
    return same;
  };
  // 5 on average, deviation 2.2.
  for (const std::uint64_t seed : {6ull, 8ull, 7ull + (1ull << 32), 7ull | (1ull << 63)}) {
    EXPECT_LT(agreements(draws_of(seed, 0, kDraws)), 20) << seed;
  }
  for (const std::int64_t first : {std::int64_t{1}, std::int64_t{4}, std::int64_t{1} << 32}) {
    EXPECT_LT(agreements(draws_of(7, first, kDraws)), 20) << first;
  }
}

TEST(Sampler, ExtremeValuesAreHandled) {
  Sampler cold(params(1e-300));
  EXPECT_EQ(cold.next(std::vector<float>{1.0f, 3e38f, -3e38f}, {}, 0), 1);
  Sampler hot(params(1e300));
  for (int i = 0; i < 100; ++i) {
    EXPECT_NE(hot.next(std::vector<float>{3e38f, -kInfinity, -3e38f}, {}, i), 1);
  }
}

TEST(Sampler, RepetitionPenaltyDoesNotOverflow) {
  SamplingParams p = params(1.0);
  p.repetition_penalty = 1e-3;
  EXPECT_EQ(Sampler(p).next(std::vector<float>{3e38f, 1.0f}, std::vector<TokenId>{0}, 0), 0);
  p.repetition_penalty = 1e3;
  EXPECT_EQ(Sampler(p).next(std::vector<float>{-3e38f}, std::vector<TokenId>{0}, 0), 0);
}

TEST(Sampler, BadLogitsAreErrors) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const double temperature : {0.0, 1.0}) {
    SamplingParams p = params(temperature);
    p.repetition_penalty = 1.5;
    Sampler sampler(p);
    const auto next = [&](const std::vector<float>& logits, const std::vector<TokenId>& history) {
      return [=, &sampler] { sampler.next(logits, history, 0); };
    };
    constexpr auto kCode = ErrorCode::numeric;
    expect_error(kCode, "token 1 the logit NaN", next({0.0f, kNan}, {}));
    expect_error(kCode, "token 0 the logit infinity", next({kInfinity, 0.0f}, {}));
    expect_error(kCode, "every token", next({-kInfinity, -kInfinity}, {}));
    expect_error(kCode, "every token", next({}, {}));
    expect_error(ErrorCode::usage, "token 2 of the history", next({0.0f, 0.0f}, {2}));
    expect_error(ErrorCode::usage, "token -1 of the history", next({0.0f, 0.0f}, {-1}));
  }
}

TEST(SamplingParams, OutOfRangeIsAUsageErrorThatNamesTheParameter) {
  const auto refuse = [](const std::string& name, auto edit) {
    SamplingParams p;
    edit(p);
    expect_error(ErrorCode::usage, name, [&] { p.validate(); });
    expect_error(ErrorCode::usage, name, [&] { Sampler{p}; });
  };
  const double nan = std::nan("");
  EXPECT_NO_THROW(SamplingParams().validate());
  refuse("`temperature`", [](SamplingParams& p) { p.temperature = -0.1; });
  refuse("`temperature`", [&](SamplingParams& p) { p.temperature = nan; });
  refuse("`top_k`", [](SamplingParams& p) { p.top_k = -1; });
  refuse("`top_p`", [](SamplingParams& p) { p.top_p = 0.0; });
  refuse("`top_p`", [](SamplingParams& p) { p.top_p = 1.1; });
  refuse("`top_p` 1.0000001", [](SamplingParams& p) { p.top_p = 1.0000001; });
  refuse("finite",
         [](SamplingParams& p) { p.temperature = std::numeric_limits<double>::infinity(); });
  refuse("`min_p`", [&](SamplingParams& p) { p.min_p = nan; });
  refuse("`repetition_penalty`", [](SamplingParams& p) { p.repetition_penalty = 0.0; });
  refuse("`max_tokens`", [](SamplingParams& p) { p.max_tokens = 0; });
  refuse("`stop`", [](SamplingParams& p) { p.stop = {"ok", ""}; });
  refuse("`stop`", [](SamplingParams& p) { p.stop = {"\xFF"}; });
}

}  // namespace
}  // namespace sluice
