// Steps of several sessions: what each gets is what it would get alone.
#include "offload/step/kv_batch.h"

#include <gtest/gtest.h>

#include <memory>

#include "cpu/cpu_backend.h"
#include "tests/support/batch_cases.h"
#include "tests/support/counting_backend.h"
#include "tests/support/plan.h"
#include "tests/support/script.h"

namespace sluice {
namespace {

using testing::CountingBackend;
using testing::largest_difference;
using testing::Script;
using testing::shared_plan;
using testing::step_together;

constexpr double kTolerance = 3e-5;  // fp32 sums of a few thousand terms of order one

class Batches : public ::testing::TestWithParam<std::tuple<const char*, bool>> {
 protected:
  Policy policy_ = parse_policy(std::get<0>(GetParam()));
  bool capped_ = std::get<1>(GetParam());
  KvShape shape_{3, 8, 2, 32, DType::bf16};

  KvPlan plan(std::int64_t context, std::int64_t sequences) const {
    const std::span<const Policy> policies(&policy_, 1);
    std::optional<std::uint64_t> cap;
    if (capped_) cap = testing::small_cap(shape_, context, sequences, policies);
    return shared_plan(shape_, context, sequences, policies, cap);
  }
};

TEST_P(Batches, EverySessionGetsWhatItWouldGetAlone) {
  const std::int64_t context = 700;
  const std::int64_t lengths[] = {1, 127, 128, 300, 509};
  std::vector<Script> scripts;
  for (std::uint64_t i = 0; i < 5; ++i) scripts.emplace_back(shape_, context, 20 + i);
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  const auto pool = testing::shared_pool(backend, plan(context, 5), std::span(&policy_, 1));
  std::vector<KvSession> together;
  std::vector<KvSession> alone;
  std::vector<KvSession*> sessions;
  std::vector<const Script*> ordered;
  for (std::size_t i = 0; i < 5; ++i) {
    together.emplace_back(pool);
    alone.push_back(testing::session_of(backend, shared_plan(shape_, context, 1, {&policy_, 1}),
                                        {&policy_, 1}));
    scripts[i].append(together[i], lengths[i]);
    scripts[i].append(alone[i], lengths[i]);
  }
  for (std::size_t i = 0; i < 5; ++i) sessions.push_back(&together[i]);
  for (const Script& script : scripts) ordered.push_back(&script);
  for (int step = 0; step < 6; ++step) {
    const auto outputs = step_together(sessions, ordered);
    for (std::size_t i = 0; i < 5; ++i) {
      const auto expected = scripts[i].step(alone[i], Phase::decode, 1);
      ASSERT_LT(largest_difference(outputs[i], expected), kTolerance)
          << "session " << i << ", step " << step;
      EXPECT_EQ(together[i].selection().size(), alone[i].selection().size());
    }
  }
  for (std::size_t i = 0; i < 5; ++i) {
    const auto index = [](const KvSession& s, Tier tier) {
      const auto bytes = [&](Tier from) {
        return s.ledger().total(Phase::decode, from, tier, Cause::index_read).bytes +
               s.ledger().total(Phase::decode, from, tier, Cause::value_read).bytes;
      };
      return bytes(tier) + (tier == Tier::host ? 0 : bytes(Tier::host));
    };
    EXPECT_EQ(index(together[i], pool->tier()), index(alone[i], Tier::host)) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, Batches,
                         ::testing::Combine(::testing::ValuesIn(testing::kBatchPolicies),
                                            ::testing::Bool()));

TEST(KvBatch, RefusesWhatItCannotServeAndChangesNothing) {
  const KvShape shape{2, 4, 2, 32, DType::bf16};
  const std::vector<Policy> policies = {parse_policy("select=int4 prune=top_k(8)"), Policy()};
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  const auto pool = std::make_shared<KvPool>(backend.make_queue(),
                                             shared_plan(shape, 200, 2, policies), policies);
  KvSession a(pool);
  KvSession b(pool);
  EXPECT_THROW(KvSession{pool}, Error) << "two were planned for";
  KvSession other = testing::session_of(backend, shared_plan(shape, 200, 1, policies), policies);
  const Script script(shape, 200, 1);
  script.prefill(a, 50);
  script.prefill(b, 200);
  script.prefill(other, 50);
  const auto code_of = [](std::vector<KvSession*> sessions) -> std::optional<ErrorCode> {
    try {
      KvBatch batch(sessions);
    } catch (const Error& error) {
      return error.code();
    }
    return std::nullopt;
  };
  EXPECT_EQ(code_of({}), ErrorCode::usage);
  EXPECT_EQ(code_of({&a, &a}), ErrorCode::usage);
  EXPECT_EQ(code_of({&a, &other}), ErrorCode::usage) << "another pool";
  EXPECT_EQ(code_of({&a, &b}), ErrorCode::prompt) << "b is full";
  b.truncate(60);
  b.use(policies[1]);
  EXPECT_EQ(code_of({&a, &b}), ErrorCode::usage) << "another policy";
  b.use(policies[0]);
  EXPECT_EQ(a.length(), 50);
  KvSession* const both[] = {&a, &b};
  const Script* const scripts[] = {&script, &script};
  EXPECT_EQ(step_together(both, scripts).size(), 2u);
  EXPECT_EQ(a.length(), 51);
  EXPECT_EQ(b.length(), 61);
}

TEST(KvBatch, ASessionThatMeetsNaNEndsAloneAndTheOthersGoOn) {
  const KvShape shape{2, 4, 2, 32, DType::bf16};
  const Policy policy = parse_policy("select=int4 prune=top_k(8)");
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  const auto pool = std::make_shared<KvPool>(
      backend.make_queue(), shared_plan(shape, 300, 2, {&policy, 1}), std::span(&policy, 1));
  KvSession good(pool);
  KvSession bad(pool);
  const Script script(shape, 300, 1);
  Script damaged(shape, 300, 1);
  damaged.damage_key(1, 127, NAN);
  script.prefill(good, 127);
  damaged.prefill(bad, 127);
  KvSession* const both[] = {&good, &bad};
  const Script* const scripts[] = {&script, &damaged};
  EXPECT_THROW(step_together(both, scripts), Error);
  EXPECT_EQ(good.length(), 128);
  EXPECT_EQ(bad.length(), 127);
  EXPECT_THROW(bad.fork(), Error) << "a fork of a broken session";
  EXPECT_THROW(KvBatch{both}, Error);
  KvSession alone =
      testing::session_of(backend, shared_plan(shape, 300, 1, {&policy, 1}), std::span(&policy, 1));
  script.prefill(alone, 128);
  EXPECT_LT(
      largest_difference(script.step(good, Phase::decode, 1), script.step(alone, Phase::decode, 1)),
      kTolerance);
}

TEST(KvBatch, APoolThatIsFullRefusesTheStepAndServesItOnceThereIsRoom) {
  const KvShape shape{1, 2, 1, 32, DType::bf16};
  CountingBackend backend;
  const KvPlan plan = shared_plan(shape, 384, 3, {}, std::nullopt, 256);  // six blocks
  const auto pool = std::make_shared<KvPool>(backend.make_queue(), plan);
  const Script script(shape, 384, 1);
  KvSession a(pool);
  KvSession b(pool);
  KvSession c(pool);
  script.prefill(a, 256);
  script.prefill(b, 256);
  script.prefill(c, 256);
  KvSession* const all[] = {&a, &b, &c};
  try {
    KvBatch batch(all);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::memory);
  }
  EXPECT_EQ(a.length(), 256);
  c.truncate(0);
  KvSession* const two[] = {&a, &b};
  const Script* const scripts[] = {&script, &script};
  EXPECT_EQ(step_together(two, scripts).size(), 2u);
}

TEST(KvBatch, ForksThatFillAPoolStepTogether) {
  const KvShape shape{1, 2, 1, 32, DType::bf16};
  CountingBackend backend;
  for (const std::size_t count : {2u, 3u, 5u}) {
    const auto sequences = static_cast<int>(count);
    const auto pool =
        std::make_shared<KvPool>(backend.make_queue(), shared_plan(shape, 100, sequences, {}));
    const Script script(shape, 100, 1);
    std::vector<KvSession> sessions;
    sessions.emplace_back(pool);
    script.prefill(sessions.front(), 50);
    while (sessions.size() < count) sessions.push_back(sessions.front().fork());
    std::vector<KvSession*> all;
    for (KvSession& session : sessions) all.push_back(&session);
    const std::vector<const Script*> scripts(count, &script);
    const auto outputs = step_together(all, scripts);
    ASSERT_EQ(outputs.size(), count);
    for (const auto& output : outputs) EXPECT_EQ(output, outputs.front());
    EXPECT_EQ(sessions.back().length(), 51);
  }
}

}  // namespace
}  // namespace sluice
