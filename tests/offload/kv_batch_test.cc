// Steps of several sessions, and forks: what each gets is what it would get alone.
#include "offload/kv_batch.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <memory>

#include "cpu/cpu_backend.h"
#include "tests/support/counting_backend.h"
#include "tests/support/plan.h"
#include "tests/support/script.h"

namespace sluice {
namespace {

using testing::CountingBackend;
using testing::largest_difference;
using testing::Random;
using testing::Script;
using testing::step_together;

constexpr double kTolerance = 3e-5;  // fp32 sums of a few thousand terms of order one

KvPlan plan_of(const KvShape& shape, std::int64_t context, std::int64_t sequences,
               std::span<const Policy> policies, std::optional<std::uint64_t> cap = std::nullopt,
               std::int64_t tokens = 0) {
  KvRequest request;
  request.shape = shape;
  request.context = context;
  request.chunk = 64;
  request.sequences = sequences;
  request.tokens = tokens;
  request.policies = policies;
  request.device_cap = cap;
  request.attends_host_rows = true;
  return plan_kv(request);
}

const char* const kPolicies[] = {
    "dense",
    "select=exact prune=top_k(64)",
    "select=int4 prune=top_p(0.8) sinks=2 recent=16",
    "select=int4 bits=2 prune=top_k(40)",
    "select=sparq candidates=1/4 prune=top_k(16) bits=3 0:bits=4",
    "select=sparq(r=8) prune=top_k(40) recent=10 compensate=mean_value",
    "select=quest prune=top_k(64)",
    "select=streaming sinks=4 recent=60",
    "select=sparq candidates=1/4 prune=top_p(0.9) cap=50 compensate=mean_value",
    "select=quest candidates=1/2 prune=top_p(0.9)",
    "select=int4 prune=top_k(50) dense=0 anchors=1",
    "select=exact prune=top_k(50) dense=0 anchors=1 anchors_attend=all",
    "select=int4 prune=top_k(16) compensate=values",
    "select=sparq candidates=1/4 prune=top_p(0.9) cap=50 compensate=values(bits=3,pages=0.5)",
    "sluice cap=40 0:bits=2 1:cap=8 1:compensate=values(bits=3) 0:compensate=none",
};

class Batches : public ::testing::TestWithParam<std::tuple<const char*, bool>> {
 protected:
  Policy policy_ = parse_policy(std::get<0>(GetParam()));
  bool capped_ = std::get<1>(GetParam());
  KvShape shape_{3, 8, 2, 32, DType::bf16};

  // None, or one that keeps the newest pages and a few others on the device.
  std::optional<std::uint64_t> cap(std::int64_t context, std::int64_t sequences,
                                   std::span<const Policy> policies) const {
    if (!capped_) return std::nullopt;
    const KvPlan free = plan_of(shape_, context, sequences, policies);
    const std::uint64_t page = kPageTokens * shape_.row_bytes() * 6;  // of every layer and KV head
    return free.index_bytes + free.work_bytes + free.table_bytes +
           (static_cast<std::uint64_t>(sequences) + 4) * page;
  }
};

TEST_P(Batches, EverySessionGetsWhatItWouldGetAlone) {
  const std::int64_t context = 700;
  const std::int64_t lengths[] = {1, 127, 128, 300, 509};
  std::vector<Script> scripts;
  for (std::uint64_t i = 0; i < 5; ++i) scripts.emplace_back(shape_, context, 20 + i);
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  const auto pool = std::make_shared<KvPool>(
      backend.make_queue(),
      plan_of(shape_, context, 5, {&policy_, 1}, cap(context, 5, {&policy_, 1})),
      std::span(&policy_, 1));
  std::vector<KvSession> together;
  std::vector<KvSession> alone;
  std::vector<KvSession*> sessions;
  std::vector<const Script*> ordered;
  for (std::size_t i = 0; i < 5; ++i) {
    together.emplace_back(pool);
    alone.push_back(
        testing::session_of(backend, plan_of(shape_, context, 1, {&policy_, 1}), {&policy_, 1}));
    scripts[i].prefill(together[i], lengths[i]);
    scripts[i].prefill(alone[i], lengths[i]);
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

TEST_P(Batches, ForksAnswerAsSessionsOfTheirOwnWould) {
  const std::int64_t context = 500;
  const std::uint64_t seed = testing::seed(5);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  const auto pool = std::make_shared<KvPool>(
      backend.make_queue(),
      plan_of(shape_, context, 4, {&policy_, 1}, cap(context, 4, {&policy_, 1})),
      std::span(&policy_, 1));
  // Every session follows one script up to where it was forked, and its own from there on.
  struct Branch {
    std::unique_ptr<KvSession> session;
    std::unique_ptr<KvSession> own;
  };
  const Script script(shape_, context, seed);
  const auto fresh = [&](std::int64_t tokens) {
    auto session = std::make_unique<KvSession>(
        testing::session_of(backend, plan_of(shape_, context, 1, {&policy_, 1}), {&policy_, 1}));
    script.prefill(*session, tokens);
    return session;
  };
  std::vector<Branch> branches;
  branches.push_back({std::make_unique<KvSession>(pool), fresh(150)});
  script.prefill(*branches[0].session, 150);
  for (int round = 0; round < 40; ++round) {
    const auto at =
        static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(branches.size()) - 1));
    Branch& branch = branches[at];
    const std::int64_t length = branch.session->length();
    switch (random.integer(0, 6)) {
      case 0:
        if (branches.size() == 4) break;
        branches.push_back({std::make_unique<KvSession>(branch.session->fork()), fresh(length)});
        break;
      case 1:
        if (branches.size() > 1) branches.erase(branches.begin() + static_cast<std::int64_t>(at));
        break;
      case 2: {
        const std::int64_t shorter = random.integer(length / 2, length);
        branch.session->truncate(shorter);
        branch.own->truncate(shorter);
        break;
      }
      case 3: {
        const std::int64_t tokens = std::min<std::int64_t>(random.integer(1, 64), context - length);
        if (tokens == 0) break;
        script.step(*branch.session, Phase::prefill, tokens);
        script.step(*branch.own, Phase::prefill, tokens);
        break;
      }
      case 4: {
        // The newest tokens once more, as cache correction replaces them.
        const std::int64_t tokens = random.integer(1, std::min<std::int64_t>(length, 40));
        for (KvSession* session : {branch.session.get(), branch.own.get()}) {
          session->truncate(length - tokens);
          script.step(*session, Phase::correction, tokens);
        }
        break;
      }
      default: {
        if (length == context) break;
        const auto expected = script.step(*branch.own, Phase::decode, 1);
        KvSession* const one = branch.session.get();
        const Script* const its = &script;
        const auto actual = step_together({&one, 1}, {&its, 1});
        // Rows that a cap splits up are merged in another order.
        ASSERT_LT(largest_difference(actual[0], expected), policy_.is_dense(0) ? 1e-2 : kTolerance)
            << "round " << round << ", length " << length;
      }
    }
  }
  branches.clear();
  EXPECT_EQ(pool->tables().block_slots().used(), 0);
}

INSTANTIATE_TEST_SUITE_P(Policies, Batches,
                         ::testing::Combine(::testing::ValuesIn(kPolicies), ::testing::Bool()));

// Of this process, in bytes.
std::uint64_t resident_memory() {
  std::ifstream file("/proc/self/statm");
  std::uint64_t size = 0;
  std::uint64_t resident = 0;
  file >> size >> resident;
  return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

// AddressSanitizer holds back what is freed, so that it sees who still uses it.
#ifdef __SANITIZE_ADDRESS__
constexpr bool kFreesAtOnce = false;
#else
constexpr bool kFreesAtOnce = true;
#endif

// Rows that nobody attends to yet.
void append_only(KvSession& session, const Script& script, std::int64_t tokens) {
  for (std::int64_t first = 0; first < tokens;) {
    const std::int64_t count = std::min(session.plan().chunk, tokens - first);
    session.begin_step(Phase::prefill, count);
    for (int layer = 0; layer < script.shape().layers; ++layer) {
      const auto at = static_cast<std::size_t>(layer);
      session.append(layer, {script.k(at, first), script.v(at, first), script.key_width()});
    }
    session.end_step();
    first += count;
  }
}

TEST(KvBatch, TwentyFourForksCostOnePrefixAndWhatTheyAdd) {
  const KvShape shape{1, 4, 2, 64, DType::bf16};
  const Policy policy = parse_policy("select=int4 prune=top_k(64)");
  const std::int64_t prefix = 32768;
  const std::int64_t own = 40;  // tokens that each adds
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  const KvPlan plan =
      plan_of(shape, prefix + own, 25, {&policy, 1}, std::nullopt, prefix + 25 * own);
  const auto pool = std::make_shared<KvPool>(backend.make_queue(), plan, std::span(&policy, 1));
  const Script script(shape, prefix + own, 3);
  KvSession root(pool);
  append_only(root, script, prefix);
  const std::uint64_t before = backend.account(Tier::host).used();
  const std::uint64_t resident = resident_memory();
  std::vector<KvSession> forks;
  for (int i = 0; i < 24; ++i) forks.push_back(root.fork());
  EXPECT_EQ(backend.account(Tier::host).used(), before) << "a fork by itself costs nothing";
  std::vector<KvSession*> sessions;
  for (KvSession& fork : forks) sessions.push_back(&fork);
  const std::vector<const Script*> scripts(forks.size(), &script);
  for (std::int64_t i = 0; i < own; ++i) step_together(sessions, scripts);
  // A page of 128 tokens for each, and what the store commits ahead.
  const std::uint64_t pages = 24 * kPageTokens * shape.token_bytes();
  const std::uint64_t added = backend.account(Tier::host).used() - before;
  EXPECT_GE(added, 24 * static_cast<std::uint64_t>(own) * shape.token_bytes());
  EXPECT_LE(added, pages + (prefix + 24 * kPageTokens) / 4 * shape.token_bytes());
  // Steps touch their work space for the first time. Copies of the prefix would be 24 times its
  // rows.
  const std::uint64_t growth =
      kFreesAtOnce ? resident_memory() - std::min(resident, resident_memory()) : 0;
  EXPECT_LE(growth, added + plan.work_bytes + (std::uint64_t{4} << 20));
  EXPECT_GE(24 * static_cast<std::uint64_t>(prefix) * shape.token_bytes(), 10 * growth);
  const std::uint64_t written =
      forks[0].ledger().total(Phase::decode, Tier::host, Tier::host, Cause::append).rows;
  EXPECT_EQ(written, static_cast<std::uint64_t>(own * shape.kv_heads * shape.layers));
  EXPECT_EQ(forks[0].ledger().tokens(Phase::prefill), 0u);
}

TEST(KvBatch, RefusesWhatItCannotServeAndChangesNothing) {
  const KvShape shape{2, 4, 2, 32, DType::bf16};
  const std::vector<Policy> policies = {parse_policy("select=int4 prune=top_k(8)"), Policy()};
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  const auto pool =
      std::make_shared<KvPool>(backend.make_queue(), plan_of(shape, 200, 2, policies), policies);
  KvSession a(pool);
  KvSession b(pool);
  EXPECT_THROW(KvSession{pool}, Error) << "two were planned for";
  KvSession other = testing::session_of(backend, plan_of(shape, 200, 1, policies), policies);
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
      backend.make_queue(), plan_of(shape, 300, 2, {&policy, 1}), std::span(&policy, 1));
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
      testing::session_of(backend, plan_of(shape, 300, 1, {&policy, 1}), std::span(&policy, 1));
  script.prefill(alone, 128);
  EXPECT_LT(
      largest_difference(script.step(good, Phase::decode, 1), script.step(alone, Phase::decode, 1)),
      kTolerance);
}

TEST(KvBatch, APoolThatIsFullRefusesTheStepAndServesItOnceThereIsRoom) {
  const KvShape shape{1, 2, 1, 32, DType::bf16};
  CountingBackend backend;
  const KvPlan plan = plan_of(shape, 384, 3, {}, std::nullopt, 256);  // six blocks
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

}  // namespace
}  // namespace sluice
