// Rotations of queries and keys against their definition, near and far.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "tests/support/backends.h"
#include "tests/support/device.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using testing::download;
using testing::NamedBackend;
using testing::Random;
using testing::upload;

std::vector<float> frequencies(int head_dim, double theta) {
  std::vector<float> result;
  for (int i = 0; i < head_dim / 2; ++i) {
    result.push_back(static_cast<float>(std::pow(theta, -2.0 * i / head_dim)));
  }
  return result;
}

class RopeParity : public ::testing::TestWithParam<NamedBackend> {
 protected:
  void SetUp() override { backend_ = testing::make_or_skip(GetParam()); }

  // Rotates the tokens of x, [tokens, heads * head_dim], where a batch says they are.
  std::vector<float> rotated(const std::vector<float>& x, const std::vector<BatchToken>& tokens,
                             int heads, const std::vector<float>& frequency, float factor = 1.0f) {
    const Buffer device = upload(*backend_, x);
    const Buffer device_tokens = upload(*backend_, tokens);
    RopeParams p;
    p.x = device.floats();
    p.tokens = static_cast<std::int64_t>(tokens.size());
    p.stride = static_cast<std::int64_t>(x.size()) / p.tokens;
    p.query_heads = heads - 1;
    p.key_heads = 1;
    p.head_dim = 2 * static_cast<int>(frequency.size());
    p.batch = {reinterpret_cast<const BatchToken*>(device_tokens.data()), p.tokens,
               std::int64_t{1} << 31};
    p.first_position = 12345;  // is nothing to a batch
    p.inverse_frequency = frequency.data();
    p.factor = factor;
    backend_->queue->run(p);
    return download<float>(*backend_, device);
  }

  const std::uint64_t seed_ = testing::seed(17);
  Random random_{seed_};
  std::unique_ptr<testing::Device> backend_;
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};
};

TEST_P(RopeParity, NormalisesAndRotatesHalves) {
  constexpr int kHeads = 3;
  constexpr int kQueryHeads = 2;
  constexpr double kFloat = 16 * 0x1p-24;
  for (const int d : {40, 64, 256}) {
    const auto half = static_cast<std::size_t>(d / 2);
    const std::size_t stride = static_cast<std::size_t>(kHeads) * static_cast<std::size_t>(d) + 8;
    const std::vector<float> frequency = frequencies(d, 1e4);
    for (const bool norm : {false, true}) {
      const std::vector<float> x = random_.normal(2 * static_cast<std::int64_t>(stride));
      const std::vector<float> weights[2] = {random_.normal(d), random_.normal(d)};
      const Buffer device_x = upload(*backend_, x);
      const Buffer query_norm = upload(*backend_, weights[0]);
      const Buffer key_norm = upload(*backend_, weights[1]);
      RopeParams p;
      p.x = device_x.floats();
      p.tokens = 2;
      p.stride = static_cast<std::int64_t>(stride);
      p.query_heads = kQueryHeads;
      p.key_heads = kHeads - kQueryHeads;
      p.head_dim = d;
      p.first_position = 1000;
      p.inverse_frequency = frequency.data();
      p.query_norm = norm ? query_norm.floats() : nullptr;
      p.key_norm = norm ? key_norm.floats() : nullptr;
      p.norm_epsilon = 1e-3f;
      backend_->queue->run(p);
      const std::vector<float> actual = download<float>(*backend_, device_x);
      for (std::size_t i = 0; i < actual.size(); ++i) {
        const std::size_t column = i % stride;
        if (column >= static_cast<std::size_t>(kHeads) * static_cast<std::size_t>(d)) {
          ASSERT_EQ(actual[i], x[i]) << "past the heads";
          continue;
        }
        const std::size_t head = i - column % static_cast<std::size_t>(d);
        const std::size_t c = i - head;
        const auto& weight = weights[column < kQueryHeads * static_cast<std::size_t>(d) ? 0 : 1];
        double squares = 0;
        for (std::size_t j = 0; j < 2 * half; ++j) squares += std::pow(x[head + j], 2.0);
        const double factor = norm ? 1 / std::sqrt(squares / d + 1e-3f) : 1.0;
        const auto input = [&](std::size_t j) {
          return x[head + j] * factor * (norm ? weight[j] : 1.0f);
        };
        const std::size_t token = i / stride;
        const double angle = (1000.0 + static_cast<double>(token)) * frequency[c % half];
        const double expected =
            c < half ? input(c) * std::cos(angle) - input(c + half) * std::sin(angle)
                     : input(c) * std::cos(angle) + input(c - half) * std::sin(angle);
        // Numbers of up to 4, norms and weights included mostly; angles are off by 1e-6.
        ASSERT_NEAR(actual[i], expected, 16 * (kFloat + 1e-6)) << i;
      }
    }
  }
}

// (1, 0) becomes the cosine and the sine of the angle.
TEST_P(RopeParity, AnglesAreExactAtAnyPosition) {
  constexpr std::int32_t kLast = std::numeric_limits<std::int32_t>::max();
  std::vector<BatchToken> tokens;
  for (const std::int32_t position :
       {0, 1, 127, 4097, (1 << 20) - 1, 1 << 20, 1 << 21, (1 << 24) + 1, kLast - 1, kLast}) {
    tokens.push_back({static_cast<std::int32_t>(tokens.size()), position});
  }
  for (int i = 0; i < 100; ++i) {
    tokens.push_back({0, static_cast<std::int32_t>(random_.integer(0, 1 << 21))});
  }
  for (const double theta : {1e4, 5e5, 1e12}) {
    const std::vector<float> frequency = frequencies(128, theta);
    const std::size_t half = frequency.size();
    std::vector<float> x(tokens.size() * 4 * half);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = i % (2 * half) < half ? 1.0f : 0.0f;
    const std::vector<float> actual = rotated(x, tokens, 2, frequency);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::int32_t position = tokens[i / (4 * half)].position;
      const long double angle = static_cast<long double>(position) * frequency[i % half];
      const long double expected = i % (2 * half) < half ? std::cos(angle) : std::sin(angle);
      ASSERT_NEAR(actual[i], static_cast<double>(expected), 2e-6)
          << "position " << position << " frequency " << frequency[i % half];
    }
  }
}

TEST_P(RopeParity, MultipliesByTheFactor) {
  const std::vector<float> frequency = frequencies(64, 1e4);
  const std::vector<BatchToken> tokens = {{0, 5}, {1, 1000}};
  const std::vector<float> x = random_.normal(std::int64_t{2} * 3 * 64);
  // The same positions one after the other with another factor: nothing of the first may be kept.
  const std::vector<float> plain = rotated(x, tokens, 3, frequency);
  const std::vector<float> larger = rotated(x, tokens, 3, frequency, 1.25f);
  for (std::size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(larger[i], 1.25f * plain[i], 2e-6) << i;
}

TEST_P(RopeParity, ABatchIsItsTokensAlone) {
  const std::vector<float> frequency = frequencies(80, 1e4);
  constexpr int kHeads = 5;
  for (int round = 0; round < 3; ++round) {
    // The same count with other positions each time, and two neighbours.
    std::vector<BatchToken> tokens;
    for (std::int32_t i = 0; i < 20; ++i) {
      tokens.push_back({i, static_cast<std::int32_t>(random_.integer(0, 1 << 20))});
    }
    tokens.push_back({19, tokens.back().position + 1});
    const auto width = std::int64_t{kHeads} * 80;
    const std::vector<float> x = random_.normal(static_cast<std::int64_t>(tokens.size()) * width);
    const std::vector<float> together = rotated(x, tokens, kHeads, frequency);
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      const auto begin = static_cast<std::ptrdiff_t>(t) * width;
      const std::vector<float> alone =
          rotated({x.begin() + begin, x.begin() + begin + width}, {tokens[t]}, kHeads, frequency);
      ASSERT_TRUE(std::equal(alone.begin(), alone.end(), together.begin() + begin)) << t;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, RopeParity, ::testing::ValuesIn(testing::backends_by_kind()),
                         testing::name_of);

}  // namespace
}  // namespace sluice
