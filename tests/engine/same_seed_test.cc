// What the seed of a sampler promises: the same text for what is computed the same way, and few
// draws that differ where logits differ by rounding.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "sluice/engine.h"
#include "sluice/errors.h"
#include "sluice/sampler.h"
#include "tests/support/backends.h"
#include "tests/support/expect.h"
#include "tests/support/model_sessions.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using testing::book_tokens;
using testing::config_for;
using testing::copy_of;
using testing::largest_difference;
using testing::likeliest;

// Logits of the same tokens, computed by a session alone and in a batch.
struct TwoWays {
  std::vector<float> alone;
  std::vector<float> together;
};

// Of `count` sessions with ragged prompts, for some steps.
std::vector<TwoWays> logits_two_ways(Engine& engine, int count, int steps,
                                     testing::Random& random) {
  const std::vector<TokenId> book = book_tokens(engine, 3000);
  SessionOptions options;
  options.context = 160;
  Session alone = engine.new_session(options);
  options.sequences = count;
  std::vector<Session> sessions;
  std::vector<std::vector<TokenId>> texts;
  for (int i = 0; i < count; ++i) {
    sessions.push_back(i == 0 ? engine.new_session(options) : sessions.front().sibling());
    const auto first = book.begin() + random.integer(0, 2500);
    texts.emplace_back(first, first + random.integer(2, 120));
  }
  std::vector<TwoWays> all(static_cast<std::size_t>(count * steps));
  const auto at = [&](std::size_t session, int step) -> TwoWays& {
    return all[session * static_cast<std::size_t>(steps) + static_cast<std::size_t>(step)];
  };
  for (std::size_t s = 0; s < sessions.size(); ++s) {
    alone.truncate(0);
    TokenId next = likeliest(alone.prefill(texts[s]));
    sessions[s].prefill(texts[s]);
    for (int step = 0; step < steps; ++step) {
      texts[s].push_back(next);
      at(s, step).alone = copy_of(alone.decode(next));
      next = likeliest(at(s, step).alone);
    }
  }
  for (int step = 0; step < steps; ++step) {
    std::vector<StepToken> batch;
    for (std::size_t s = 0; s < sessions.size(); ++s) {
      batch.push_back({&sessions[s], texts[s][texts[s].size() - static_cast<std::size_t>(steps) +
                                              static_cast<std::size_t>(step)]});
    }
    const std::vector<StepResult> results = engine.step(batch);
    for (std::size_t s = 0; s < sessions.size(); ++s) {
      at(s, step).together = copy_of(results[s].logits);
    }
  }
  return all;
}

std::vector<SamplingParams> ways_to_draw() {
  SamplingParams plain;
  plain.temperature = 1.0;
  SamplingParams top_p = plain;
  top_p.temperature = 0.8;
  top_p.top_p = 0.95;
  SamplingParams top_k = plain;
  top_k.top_k = 40;
  SamplingParams min_p = plain;
  min_p.min_p = 0.05;
  return {plain, top_p, top_k, min_p};
}

struct Share {
  int flips = 0;
  int draws = 0;

  void add(bool flips_now) {
    flips += flips_now ? 1 : 0;
    ++draws;
  }
  double share() const { return static_cast<double>(flips) / draws; }
};

// Softmax walked along by id up to a random number, the draw that these sources do not make: the
// scale of what the logits' rounding does.
std::size_t walked(const std::vector<float>& logits, double random) {
  const float most = *std::max_element(logits.begin(), logits.end());
  std::vector<double> sums;
  double sum = 0.0;
  for (const float logit : logits) {
    sum += std::exp(static_cast<double>(logit - most));
    sums.push_back(sum);
  }
  return static_cast<std::size_t>(std::upper_bound(sums.begin(), sums.end(), random * sum) -
                                  sums.begin());
}

// Draws from the two logits of each pair, in every way and by the walk.
struct Flips {
  std::vector<Share> shares = std::vector<Share>(ways_to_draw().size());
  Share walk;
  double difference = 0.0;  // of logits, the largest

  void draw(const TwoWays& two, testing::Random& random) {
    difference = std::max<double>(difference, largest_difference(two.alone, two.together));
    for (int i = 0; i < 16; ++i) {
      const std::uint64_t seed = random.engine()();
      const std::int64_t position = random.integer(0, 1 << 20);
      for (std::size_t way = 0; way < shares.size(); ++way) {
        SamplingParams params = ways_to_draw()[way];
        params.seed = seed;
        const Sampler sampler(params);
        shares[way].add(sampler.next(two.alone, {}, position) !=
                        sampler.next(two.together, {}, position));
      }
      const double at = static_cast<double>(random.integer(0, (1ll << 40) - 1)) * 0x1p-40;
      walk.add(walked(two.alone, at) != walked(two.together, at));
    }
  }
  void expect_few(double most) const {
    std::string measured;
    for (const Share& share : shares) {
      EXPECT_LE(share.share(), most);
      measured += std::to_string(share.flips) + " ";
    }
    std::printf("logits differ by up to %g; of %d draws %sdiffer, by a walk %d\n", difference,
                walk.draws, measured.c_str(), walk.flips);
  }
};

class SameSeed : public ::testing::TestWithParam<std::tuple<std::string, DType>> {
 protected:
  const std::uint64_t seed_ = testing::seed(5);
  testing::Random random_{seed_};
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};
};

TEST_P(SameSeed, ABatchOfEightChangesFewDraws) {
  const auto& [device, compute] = GetParam();
  if (testing::skips(device)) return;
  EngineConfig config = config_for(device);
  config.compute = compute;
  try {
    Engine::open(config);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::unsupported) throw;
    GTEST_SKIP() << error.what();  // a processor without bf16 multiplication
  }
  if (compute == DType::bf16) config.kv_dtype = DType::bf16;
  Engine engine = Engine::open(config);
  const std::vector<TwoWays> logits = logits_two_ways(engine, 8, 16, random_);
  Flips flips;
  for (const TwoWays& two : logits) flips.draw(two, random_);
  flips.expect_few(0.01);
}

// Rounding errors of f32 and of bf16 put into the logits, as a batch may give the very same ones.
TEST(SameSeedRounding, ChangesFewDraws) {
  const std::uint64_t seed = testing::seed(6);
  SCOPED_TRACE(testing::seed_message(seed));
  testing::Random random(seed);
  Engine engine = Engine::open(config_for());
  std::vector<TwoWays> logits = logits_two_ways(engine, 8, 16, random);
  for (const float relative : {1e-5f, 1e-3f}) {
    Flips flips;
    for (TwoWays& two : logits) {
      const std::vector<float> noise = random.normal(std::ssize(two.alone), relative);
      for (std::size_t i = 0; i < noise.size(); ++i) {
        two.together[i] = two.alone[i] * (1.0f + noise[i]);
      }
      flips.draw(two, random);
    }
    flips.expect_few(relative < 1e-4f ? 0.001 : 0.01);
    const double least = relative > 1e-4f ? 0.05 : 0.0;
    EXPECT_GE(flips.walk.share(), least) << "too little noise to show anything";
  }
}

INSTANTIATE_TEST_SUITE_P(, SameSeed,
                         ::testing::Combine(::testing::ValuesIn(testing::devices()),
                                            ::testing::Values(DType::f32, DType::bf16)),
                         [](const auto& parameter) {
                           return std::get<0>(parameter.param) + "_" +
                                  std::string(to_string(std::get<1>(parameter.param)));
                         });

}  // namespace
}  // namespace sluice
