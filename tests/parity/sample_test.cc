// Drawing a token where its logits are, against its definition in fp64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "lib/backend/memory.h"
#include "lib/gumbel.h"
#include "sluice/errors.h"
#include "tests/support/backends.h"
#include "tests/support/device.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using testing::NamedBackend;
using testing::Random;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Noise by its definition, in long double.
long double noise(const TokenDraw& p, std::size_t id) {
  const std::uint32_t word =
      noise_words(p.seed, static_cast<std::uint64_t>(p.position),
                  static_cast<std::uint32_t>(id / kNoiseGroup))[id % kNoiseGroup];
  const long double u = 1.0L - (static_cast<long double>(word) + 0.5L) * 0x1p-32L;
  return -std::log(-std::log(u));
}

// The token to draw, by its definition: the most likely come first.
TokenId drawn(const std::vector<float>& logits, const TokenDraw& p) {
  std::vector<std::size_t> order(logits.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return logits[a] > logits[b]; });
  if (p.temperature == 0.0) return static_cast<TokenId>(order.front());
  if (p.top_k > 0) order.resize(std::min(order.size(), static_cast<std::size_t>(p.top_k)));
  const double most = logits[order.front()];
  const auto weight = [&](std::size_t id) { return std::exp((logits[id] - most) / p.temperature); };
  const auto total = [&] {
    return std::accumulate(order.begin(), order.end(), 0.0,
                           [&](double sum, std::size_t id) { return sum + weight(id); });
  };
  if (p.top_p < 1.0) {
    const double wanted = p.top_p * total();
    double kept = 0.0;
    std::size_t count = 0;
    while (count < order.size() && (count == 0 || kept < wanted)) kept += weight(order[count++]);
    order.resize(count);
  }
  std::erase_if(order, [&](std::size_t id) { return weight(id) < p.min_p; });
  std::sort(order.begin(), order.end());
  const auto score = [&](std::size_t id) {
    return static_cast<long double>((logits[id] - most) / p.temperature) + noise(p, id);
  };
  std::vector<long double> scores;
  for (const std::size_t id : order) scores.push_back(score(id));
  const auto best = std::max_element(scores.begin(), scores.end()) - scores.begin();
  return static_cast<TokenId>(order[static_cast<std::size_t>(best)]);
}

class SampleParity : public ::testing::TestWithParam<NamedBackend> {
 protected:
  void SetUp() override { backend_ = testing::make_or_skip(GetParam()); }

  TokenId sample(const std::vector<float>& logits, const TokenDraw& params) {
    const Buffer device = testing::upload(*backend_, logits);
    const auto count = static_cast<std::int64_t>(logits.size());
    SampledToken token;
    backend_->queue->run(
        SampleParams{{device.data(), DType::f32, 1, count, count}, {&params, 1}, {&token, 1}});
    return token_of(token);
  }
  // Weights in f32 may move the borders of top-p and min-p by so much.
  void expect_drawn(const std::vector<float>& logits, const TokenDraw& params) {
    constexpr double kBorder = 1e-5;
    const TokenId actual = sample(logits, params);
    if (actual == drawn(logits, params)) return;
    std::set<TokenId> expected;
    for (const double share : {-kBorder, 0.0, kBorder}) {
      for (const double least : {-kBorder, 0.0, kBorder}) {
        TokenDraw p = params;
        if (p.top_p < 1.0) p.top_p = std::clamp(p.top_p + share, kBorder, 1.0);
        if (p.min_p > 0.0) p.min_p *= 1.0 + least;
        expected.insert(drawn(logits, p));
      }
    }
    EXPECT_TRUE(expected.contains(actual))
        << "temperature " << params.temperature << " top_k " << params.top_k << " top_p "
        << params.top_p << " min_p " << params.min_p << " seed " << params.seed << " position "
        << params.position;
  }
  // A seed and position of any size.
  TokenDraw any_draw() {
    TokenDraw p;
    p.temperature = 0.7;
    p.seed = random_.engine()();
    p.position = random_.integer(0, std::int64_t{1} << random_.integer(0, 40));
    return p;
  }
  // Draws by every combination of filters.
  void expect_all_drawn(const std::vector<float>& logits) {
    for (const int top_k : {0, 1, 40, 1 << 20}) {
      for (const double top_p : {1.0, 0.95, 0.3}) {
        for (const double min_p : {0.0, 0.05}) {
          TokenDraw p = any_draw();
          p.top_k = top_k;
          p.top_p = top_p;
          p.min_p = min_p;
          expect_drawn(logits, p);
        }
      }
    }
  }

  const std::uint64_t seed_ = testing::seed(11);
  Random random_{seed_};
  std::unique_ptr<testing::Device> backend_;
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};
};

TEST_P(SampleParity, GreedyTakesTheFirstOfTheLikeliest) {
  for (const std::int64_t count : {1, 31, 1000, 4096, 128256}) {
    std::vector<float> logits = random_.normal(count, 3.0f);
    EXPECT_EQ(sample(logits, {}), drawn(logits, {})) << count;
    logits.front() = -kInfinity;
    logits.back() = 100.0f;
    logits[logits.size() / 2] = 100.0f;
    EXPECT_EQ(sample(logits, {}), count / 2) << count;
  }
  EXPECT_EQ(sample({-0.0f, 0.0f, -kInfinity}, {}), 0);
}

TEST_P(SampleParity, DrawsAmongManyTokens) {
  for (const std::int64_t count : {1, 7, 1000, 4096, 128256}) {
    for (const float deviation : {0.5f, 3.0f, 10.0f}) {
      SCOPED_TRACE(std::to_string(count) + " tokens, deviation " + std::to_string(deviation));
      expect_all_drawn(random_.normal(count, deviation));
    }
  }
}

// Every word of a group, groups cut off by the end, and noise from its least to its largest.
TEST_P(SampleParity, DrawsByTheNoiseOfEveryId) {
  for (const std::int64_t count : {2, 3, 4, 5, 6, 1025, 4099}) {
    for (int i = 0; i < 100; ++i) {
      expect_drawn(std::vector<float>(static_cast<std::size_t>(count), 1.0f), any_draw());
      expect_drawn(random_.normal(count, 1.0f), any_draw());
    }
  }
}

// More tokens than a list of the heaviest takes share the border, or all are equal.
TEST_P(SampleParity, DrawsAmongEqualTokensByTheirIds) {
  std::vector<float> logits(50000, 1.5f);
  expect_all_drawn(logits);
  for (std::size_t i = 0; i < logits.size(); i += 3) logits[i] = -2.0f;
  logits[777] = 4.0f;
  expect_all_drawn(logits);
  for (std::size_t i = 0; i < logits.size(); ++i) logits[i] = i % 2 == 0 ? -kInfinity : -0.0f;
  expect_all_drawn(logits);
}

TEST_P(SampleParity, TakesAnyTemperature) {
  const std::vector<float> logits = {3e38f, -3e38f, 0.0f, 2.9e38f, -kInfinity};
  for (const double temperature : {1e-300, 1e-6, 1.0, 1e6, 1e300}) {
    for (int i = 0; i < 20; ++i) {
      TokenDraw params = any_draw();
      params.temperature = temperature;
      expect_drawn(logits, params);
    }
  }
}

TEST_P(SampleParity, NamesTheFirstBadLogit) {
  for (const double temperature : {0.0, 1.0}) {
    for (const float bad : {std::nanf(""), kInfinity}) {
      std::vector<float> logits = random_.normal(3000);
      logits[1234] = bad;
      logits[2345] = std::nanf("");
      TokenDraw params;
      params.temperature = temperature;
      try {
        sample(logits, params);
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::numeric);
        EXPECT_NE(std::string(error.what()).find("token 1234"), std::string::npos) << error.what();
      }
    }
    TokenDraw params;
    params.temperature = temperature;
    EXPECT_THROW(sample(std::vector<float>(100, -kInfinity), params), Error);
  }
}

// More rows than one launch takes, each with its own way to draw; bad ones between.
TEST_P(SampleParity, RowsAreDrawnAsIfAlone) {
  constexpr std::int64_t kRows = 150;
  constexpr std::int64_t kCount = 5000;
  constexpr std::int64_t kStride = kCount + 24;
  std::vector<float> logits = random_.normal(kRows * kStride, 3.0f);
  const auto row = [&](std::int64_t i) { return logits.begin() + i * kStride; };
  for (std::int64_t i = 0; i < kRows; ++i) row(i)[kCount] = std::nanf("");  // past the row's end
  std::fill_n(row(3), kCount, -kInfinity);
  row(0)[17] = kInfinity;
  row(149)[4999] = std::nanf("");
  std::vector<TokenDraw> params(kRows);
  for (TokenDraw& p : params) {
    p = any_draw();
    p.temperature = random_.integer(0, 3) == 0 ? 0.0 : 0.8;
    p.top_k = static_cast<int>(random_.integer(0, 2)) * 50;
    p.top_p = random_.integer(0, 1) == 0 ? 1.0 : 0.9;
    p.min_p = random_.integer(0, 1) == 0 ? 0.0 : 0.02;
  }
  const Buffer device = testing::upload(*backend_, logits);
  std::vector<SampledToken> tokens(kRows);
  backend_->queue->run(
      SampleParams{{device.data(), DType::f32, kRows, kCount, kStride}, params, tokens});
  for (std::int64_t i = 0; i < kRows; ++i) {
    const auto at = static_cast<std::size_t>(i);
    SampledToken alone;
    float* const first = device.floats() + i * kStride;
    backend_->queue->run(
        SampleParams{{first, DType::f32, 1, kCount, kStride}, {&params[at], 1}, {&alone, 1}});
    EXPECT_EQ(tokens[at].id, alone.id) << i;
    EXPECT_EQ(tokens[at].bad, alone.bad) << i;
    const bool bad = i == 0 || i == 3 || i == 149;
    EXPECT_EQ(tokens[at].id < 0, bad) << i;
    if (!bad) expect_drawn({row(i), row(i) + kCount}, params[at]);
  }
  EXPECT_EQ(tokens[0].bad, 17);
  EXPECT_EQ(tokens[0].bad_logit, kInfinity);
  EXPECT_EQ(tokens[3].bad, -1);
  EXPECT_EQ(tokens[149].bad, 4999);
  EXPECT_TRUE(std::isnan(tokens[149].bad_logit));
  EXPECT_THROW(static_cast<void>(token_of(tokens[3])), Error);
}

INSTANTIATE_TEST_SUITE_P(, SampleParity, ::testing::ValuesIn(testing::backends_by_kind()),
                         testing::name_of);

}  // namespace
}  // namespace sluice
