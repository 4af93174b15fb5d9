// What an observer is shown of a model's attention, and that answers stay the same.
#include "sluice/row_observer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "tests/support/backends.h"
#include "tests/support/model_sessions.h"

namespace sluice {
namespace {

// Keeps copies of all rows.
class Keeper : public RowObserver {
 public:
  struct Rows {
    int layer = 0;
    Phase phase = Phase::prefill;
    std::int64_t tokens = 0;
    std::vector<float> q, k, v;
  };

  explicit Keeper(const KvShape& shape) : shape_(shape) {}

  void observe(const ObservedRows& rows) override {
    Rows& kept = seen.emplace_back();
    std::tie(kept.layer, kept.phase, kept.tokens) = std::tie(rows.layer, rows.phase, rows.tokens);
    kept.q = copy(rows.q, rows, shape_.query_heads);
    kept.k = copy(rows.k, rows, shape_.kv_heads);
    kept.v = copy(rows.v, rows, shape_.kv_heads);
    if (fails_at == std::ssize(seen)) throw Error(ErrorCode::io, "the disk is full");
  }

  std::vector<Rows> seen;
  std::int64_t fails_at = -1;

 private:
  std::vector<float> copy(const float* from, const ObservedRows& rows, int heads) const {
    std::vector<float> all;
    for (std::int64_t token = 0; token < rows.tokens; ++token) {
      const float* const one = from + token * rows.stride;
      all.insert(all.end(), one, one + heads * shape_.head_dim);
    }
    return all;
  }

  KvShape shape_;
};

class RowObservers : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (testing::skips(GetParam())) return;
    EngineConfig config = testing::config_for(GetParam());
    const KvShape shape = Engine::open(config).info().kv;
    keeper_ = std::make_shared<Keeper>(shape);
    config.observer = keeper_;
    engine_.emplace(Engine::open(config));
  }

  Session session(int sequences = 1) {
    SessionOptions options;
    options.context = 512;
    options.sequences = sequences;
    return engine_->new_session(options);
  }

  std::size_t layers() const { return static_cast<std::size_t>(engine_->info().kv.layers); }

  std::shared_ptr<Keeper> keeper_;
  std::optional<Engine> engine_;
};

double norm_of(std::span<const float> values) {
  double sum = 0.0;
  for (const float value : values) sum += double{value} * value;
  return std::sqrt(sum);
}

double distance_of(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += std::pow(double{a[i]} - b[i], 2);
  return std::sqrt(sum);
}

TEST_P(RowObservers, SeeEveryLayerOfEveryStepAndChangeNoAnswer) {
  const std::vector<TokenId> prompt = testing::book_tokens(*engine_, 200);
  Session observed = session();
  const std::vector<TokenId> tokens = testing::continuation(observed, prompt, 4);
  Engine alone = Engine::open(testing::config_for(GetParam()));
  Session unobserved = alone.new_session(512);
  EXPECT_EQ(testing::continuation(unobserved, prompt, 4), tokens);
  // Two chunks of up to 128 tokens, then three of the four tokens are appended.
  const std::vector<std::int64_t> steps = {128, 72, 1, 1, 1};
  ASSERT_EQ(keeper_->seen.size(), steps.size() * layers());
  for (std::size_t i = 0; i < keeper_->seen.size(); ++i) {
    const Keeper::Rows& rows = keeper_->seen[i];
    EXPECT_EQ(rows.layer, static_cast<int>(i % layers()));
    EXPECT_EQ(rows.tokens, steps[i / layers()]);
    EXPECT_EQ(rows.phase, i / layers() < 2 ? Phase::prefill : Phase::decode);
  }
}

// In the first layer a row depends on its token and position alone: values not on the position, and
// RoPE turns keys without changing their length.
TEST_P(RowObservers, SeeKeysAfterRope) {
  Session first = session();
  const std::vector<TokenId> prompt = testing::book_tokens(*engine_, 8);
  first.prefill(prompt);
  first.decode(prompt[3]);
  const Keeper::Rows& before = keeper_->seen.front();
  const Keeper::Rows& after = keeper_->seen[layers()];
  const auto width = after.k.size();
  const std::vector<float> k(before.k.begin() + static_cast<std::ptrdiff_t>(3 * width),
                             before.k.begin() + static_cast<std::ptrdiff_t>(4 * width));
  const std::vector<float> v(before.v.begin() + static_cast<std::ptrdiff_t>(3 * width),
                             before.v.begin() + static_cast<std::ptrdiff_t>(4 * width));
  EXPECT_LT(distance_of(v, after.v), 2e-2 * norm_of(v));
  EXPECT_NEAR(norm_of(k), norm_of(after.k), 2e-2 * norm_of(k));
  EXPECT_GT(distance_of(k, after.k), 0.1 * norm_of(k));
}

TEST_P(RowObservers, SeeSessionsOfAStepInTheirOrder) {
  const std::vector<TokenId> prompt = testing::book_tokens(*engine_, 40);
  Session first = session(2);
  first.prefill(prompt);
  Session second = first.fork();
  keeper_->seen.clear();
  first.decode(prompt[1]);
  const Keeper::Rows alone = keeper_->seen.front();
  first.truncate(40);
  keeper_->seen.clear();
  StepToken tokens[2];
  tokens[0] = {&first, prompt[1]};
  tokens[1] = {&second, prompt[2]};
  for (const StepResult& result : engine_->step(tokens)) EXPECT_FALSE(result.error);
  const Keeper::Rows& both = keeper_->seen.front();
  ASSERT_EQ(both.tokens, 2);
  const auto width = static_cast<std::ptrdiff_t>(alone.q.size());
  const std::vector<float> own(both.q.begin(), both.q.begin() + width);
  const std::vector<float> other(both.q.begin() + width, both.q.end());
  EXPECT_LT(distance_of(own, alone.q), 2e-2 * norm_of(alone.q));
  EXPECT_GT(distance_of(other, alone.q), 0.1 * norm_of(alone.q));
}

TEST_P(RowObservers, EndTheStepByThrowing) {
  Session failing = session();
  failing.prefill(testing::book_tokens(*engine_, 8));
  keeper_->fails_at = std::ssize(keeper_->seen) + 3;
  try {
    failing.decode(5);
    ADD_FAILURE() << "nothing thrown";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "the disk is full");
  }
  EXPECT_THROW(failing.decode(5), Error);
  keeper_->fails_at = -1;
  Session next = session();
  next.prefill(testing::book_tokens(*engine_, 8));
}

INSTANTIATE_TEST_SUITE_P(Devices, RowObservers, ::testing::ValuesIn(testing::devices()),
                         [](const auto& parameter) { return parameter.param; });

}  // namespace
}  // namespace sluice
