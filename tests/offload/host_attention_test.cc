// Sessions of which the host attends to part of the rows answer as those do that it leaves alone.
// The device is a CPU, too, which is told that it has little memory.
#include "offload/attention/host_attention.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/cpu_backend.h"
#include "cpu/cpu_queue.h"
#include "tests/support/counting_backend.h"
#include "tests/support/late_backend.h"
#include "tests/support/plan.h"
#include "tests/support/script.h"

namespace sluice {
namespace {

using testing::CountingBackend;
using testing::expect_error;
using testing::largest_difference;
using testing::LateBackend;
using testing::Script;
using testing::step_together;

constexpr double kTolerance = 3e-5;  // fp32 sums of a few thousand terms of order one
constexpr std::int64_t kContext = 1500;
constexpr std::int64_t kSequences = 4;
constexpr KvShape kShape{3, 8, 2, 32, DType::bf16};

// Room for the newest page of every sequence, and for `pages` more.
KvPlan some_plan(const Policy& policy, std::int64_t pages, bool host_attention = true) {
  KvRequest request;
  request.shape = kShape;
  request.context = kContext;
  request.chunk = 64;
  request.sequences = kSequences;
  request.policies = {&policy, 1};
  request.on = testing::cpu_info();
  request.host_attention = host_attention;
  const KvPlan free = plan_kv(request);
  const std::uint64_t page = kPageTokens * kShape.token_bytes();
  request.device_cap = free.index_bytes + free.work_bytes + free.table_bytes +
                       static_cast<std::uint64_t>(kSequences + pages) * page +
                       2 * kPageTokens * kShape.token_bytes();
  return plan_kv(request);
}

// A CPU that can be told to fail.
class FailingBackend : public cpu::CpuBackend {
 public:
  FailingBackend() : CpuBackend(LateBackend::one_thread()) {}
  using Backend::make_queue;
  std::unique_ptr<Queue> make_queue(const QueueOptions& options) override;

  std::function<void()> fails = [] {};
};

class FailingQueue : public cpu::CpuQueue {
 public:
  explicit FailingQueue(FailingBackend& backend) : CpuQueue(backend), owner_(&backend) {}
  void submit(const Operation& operation) override {
    if (params_of<AttendBatchParams>(operation) != nullptr) owner_->fails();
    CpuQueue::submit(operation);
  }

 private:
  FailingBackend* owner_;
};

std::unique_ptr<Queue> FailingBackend::make_queue(const QueueOptions& /*options*/) {
  return std::make_unique<FailingQueue>(*this);
}

HostAttender attender(std::optional<double> share) {
  return {std::make_shared<cpu::CpuBackend>(LateBackend::one_thread()), share};
}

std::shared_ptr<KvPool> pool_of(Backend& backend, const Policy& policy, const KvPlan& plan,
                                const HostAttender& attender = {}) {
  return std::make_shared<KvPool>(backend.make_queue(), plan, std::span(&policy, 1), own_scorers(),
                                  attender);
}

struct Reads {
  std::uint64_t all = 0;
  std::uint64_t by_host = 0;
};

Reads reads_of(const KvSession& session) {
  Reads reads;
  const auto rows = [&](Tier from, Tier to, Cause cause) {
    return session.ledger().total(Phase::decode, from, to, cause).rows;
  };
  reads.by_host = rows(Tier::host, Tier::host, Cause::hit);
  reads.all = reads.by_host + rows(Tier::device, Tier::device, Cause::hit) +
              rows(Tier::host, Tier::device, Cause::miss);
  return reads;
}

class Shares : public ::testing::TestWithParam<std::tuple<const char*, double, int>> {
 protected:
  Policy policy_ = parse_policy(std::get<0>(GetParam()));
  double share_ = std::get<1>(GetParam());
  std::int64_t pages_ = std::get<2>(GetParam());
};

// The same conversations in two pools: steps together and alone, forks, and tokens taken back.
TEST_P(Shares, GiveTheSameAnswers) {
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  const KvPlan plan = some_plan(policy_, pages_);
  ASSERT_TRUE(plan.host_attention);
  const auto pool = pool_of(backend, policy_, plan, attender(share_));
  const auto plain = pool_of(backend, policy_, some_plan(policy_, pages_, false));
  std::vector<Script> scripts;
  std::vector<KvSession> sessions, twins;
  for (const std::int64_t tokens : {1, 300, 1100}) {
    scripts.emplace_back(kShape, kContext, 7 + static_cast<std::uint64_t>(tokens));
    sessions.emplace_back(pool);
    twins.emplace_back(plain);
    scripts.back().append(sessions.back(), tokens);
    scripts.back().append(twins.back(), tokens);
  }
  scripts.push_back(scripts.back());
  const auto all = [](std::vector<KvSession>& of) {
    std::vector<KvSession*> pointers;
    for (KvSession& session : of) pointers.push_back(&session);
    return pointers;
  };
  const auto step = [&](int steps) {
    std::vector<const Script*> ordered;
    for (std::size_t i = 0; i < sessions.size(); ++i) ordered.push_back(&scripts[i]);
    for (; steps > 0; --steps) {
      const auto own = step_together(all(sessions), ordered);
      const auto expected = step_together(all(twins), ordered);
      for (std::size_t i = 0; i < own.size(); ++i) {
        ASSERT_LT(largest_difference(own[i], expected[i]), kTolerance) << "session " << i;
      }
    }
  };
  step(3);
  sessions.push_back(sessions[2].fork());
  twins.push_back(twins[2].fork());
  step(40);  // over a page's border
  for (auto* const of : {&sessions, &twins}) {
    (*of)[2].truncate(700);
    (*of)[3].truncate(1025);
  }
  step(3);
  for (std::size_t i = 0; i < sessions.size(); ++i) {
    const auto own = scripts[i].decode(sessions[i], 9);
    const auto expected = scripts[i].decode(twins[i], 9);
    ASSERT_LT(largest_difference(own, expected), kTolerance) << "session " << i;
  }
  Reads own, expected;
  for (std::size_t i = 0; i < sessions.size(); ++i) {
    own.all += reads_of(sessions[i]).all;
    own.by_host += reads_of(sessions[i]).by_host;
    expected.all += reads_of(twins[i]).all;
    expected.by_host += reads_of(twins[i]).by_host;
  }
  EXPECT_EQ(own.all, expected.all);
  EXPECT_EQ(expected.by_host, 0u);
  // Layer 1 is dense in both policies; rows of it may all be on the device.
  std::uint64_t missed = 0;
  for (const KvSession& twin : twins) {
    missed += twin.ledger().total(Phase::decode, 1, Tier::host, Tier::device, Cause::miss).rows;
  }
  EXPECT_EQ(own.by_host > 0, share_ > 0.0 && missed > 0);
}

INSTANTIATE_TEST_SUITE_P(, Shares,
                         ::testing::Combine(::testing::Values("dense",
                                                              "select=exact prune=top_k(64) "
                                                              "dense=1"),
                                            ::testing::Values(0.0, 0.2, 0.5, 1.0),
                                            ::testing::Values(0, 5)));

// All that is left to the device of rows in host memory is none.
TEST(HostAttention, MayAttendToEverythingThatIsAtHost) {
  const Policy policy = parse_policy("dense");
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  const auto pool = pool_of(backend, policy, some_plan(policy, 0), attender(1.0));
  KvSession session(pool);
  const Script script(kShape, kContext, 3);
  script.append(session, 800);
  script.step(session, Phase::decode, 1);
  const Traffic missed =
      session.ledger().total(Phase::decode, Tier::host, Tier::device, Cause::miss);
  EXPECT_EQ(missed.rows, 0u);
  EXPECT_GT(reads_of(session).by_host, 0u);
}

// Both sides tell of every row that they read, and of no other.
TEST(HostAttention, TheLedgerHasWhatEitherSideRead) {
  for (const bool like_gpu : {false, true}) {
    const Policy policy = parse_policy("dense");
    CountingBackend backend;
    if (like_gpu) backend.read_like({kTilePages, 7, 3});
    const auto host = std::make_shared<CountingBackend>();
    const auto pool = pool_of(backend, policy, some_plan(policy, 3), {host, 0.6});
    const Script script(kShape, kContext, 3);
    KvSession session(pool);
    script.append(session, 900);
    const std::uint64_t rows = backend.rows_read;
    const std::uint64_t host_rows = backend.host_rows_read;
    script.step(session, Phase::decode, 1);
    const auto told = [&](Tier from, Tier to, Cause cause) {
      return session.ledger().total(Phase::decode, from, to, cause).rows;
    };
    EXPECT_EQ(told(Tier::host, Tier::host, Cause::hit), host->rows_read);
    EXPECT_EQ(told(Tier::host, Tier::device, Cause::miss), backend.host_rows_read - host_rows);
    EXPECT_EQ(
        told(Tier::device, Tier::device, Cause::hit) + told(Tier::host, Tier::device, Cause::miss),
        backend.rows_read - rows);
    EXPECT_GT(host->rows_read, 0u);
  }
}

// What fails on the host fails the step's sessions, with an error of its kind, and nobody else.
TEST(HostAttention, AFailureIsAnErrorOfTheStep) {
  const Policy policy = parse_policy("dense");
  cpu::CpuBackend backend{LateBackend::one_thread()};
  const auto host = std::make_shared<FailingBackend>();
  const auto pool = pool_of(backend, policy, some_plan(policy, 0), {host, 0.5});
  const Script script(kShape, kContext, 3);
  const std::pair<std::function<void()>, ErrorCode> failures[] = {
      {[] { throw std::bad_alloc(); }, ErrorCode::memory},
      {[] { throw Error(ErrorCode::numeric, "a number"); }, ErrorCode::numeric},
      {[] { throw std::runtime_error("a reason"); }, ErrorCode::internal},
      {[] { throw 1; }, ErrorCode::internal}};
  for (const auto& [fails, code] : failures) {
    KvSession session(pool);
    KvSession other(pool);
    script.append(session, 500);
    script.append(other, 400);
    host->fails = fails;
    expect_error(code, "", [&] { script.step(session, Phase::decode, 1); });
    host->fails = [] {};
    EXPECT_THROW(script.step(session, Phase::decode, 1), Error);
    EXPECT_NO_THROW(script.step(other, Phase::decode, 1));
  }
  // In a batch all of them.
  KvSession sessions[] = {KvSession(pool), KvSession(pool)};
  for (KvSession& session : sessions) script.append(session, 500);
  host->fails = failures[0].first;
  KvSession* const both[] = {&sessions[0], &sessions[1]};
  const Script* const scripts[] = {&script, &script};
  EXPECT_THROW(step_together(both, scripts), Error);
  EXPECT_TRUE(sessions[0].in_step());
  EXPECT_TRUE(sessions[1].in_step());
}

// Few rows are not worth waking the host: with a share of its own choice it sleeps.
TEST(HostAttention, FewRowsAreLeftToTheDevice) {
  const Policy policy = parse_policy("dense");
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  const auto pool = pool_of(backend, policy, some_plan(policy, 0), attender(std::nullopt));
  KvSession session(pool);
  const Script script(kShape, kContext, 3);
  script.append(session, 1000);
  script.step(session, Phase::decode, 1);
  EXPECT_EQ(reads_of(session).by_host, 0u);
}

// Of rows that are worth it, both sides get some, and none is lost while their share changes.
TEST(HostAttention, FindsAShareItself) {
  const Policy policy = parse_policy("dense");
  constexpr KvShape kWide{1, 8, 8, 128, DType::bf16};
  KvRequest request;
  request.shape = kWide;
  request.context = 5000;
  request.policies = {&policy, 1};
  request.host_attention = true;
  request.device_cap = std::uint64_t{6} << 20;
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  const KvPlan plan = plan_kv(request);
  const auto pool = pool_of(backend, policy, plan, attender(std::nullopt));
  request.host_attention = false;
  const auto plain = pool_of(backend, policy, plan_kv(request));
  const Script script(kWide, 5000, 4);
  KvSession session(pool);
  KvSession twin(plain);
  script.append(session, 4600);
  script.append(twin, 4600);
  const Script* const scripts[] = {&script};
  for (int step = 0; step < 12; ++step) {
    KvSession* const own[] = {&session};
    KvSession* const other[] = {&twin};
    ASSERT_LT(largest_difference(step_together(own, scripts)[0], step_together(other, scripts)[0]),
              kTolerance);
  }
  EXPECT_EQ(reads_of(session).all, reads_of(twin).all);
  EXPECT_GT(reads_of(session).by_host, 0u);
  EXPECT_NE(pool->host_attention()->share().share(), HostShare().share());
}

TEST(HostAttention, IsPlannedToTheByte) {
  for (const char* const text : {"dense", "select=exact prune=top_k(64) dense=1"}) {
    const Policy policy = parse_policy(text);
    const KvPlan plan = some_plan(policy, 2);
    const KvPlan without = some_plan(policy, 2, false);
    EXPECT_TRUE(plan.host_attention);
    EXPECT_EQ(plan.host_bytes - without.host_bytes, HostAttentionBytes(plan).host());
    cpu::CpuBackend backend{cpu::CpuOptions{}};
    const auto used = [&](Tier tier) { return backend.account(tier).used(); };
    const auto pool = pool_of(backend, policy, plan, attender(0.5));
    const std::uint64_t host = used(Tier::host);
    EXPECT_EQ(used(Tier::device), plan.device_bytes);
    cpu::CpuBackend other{cpu::CpuOptions{}};
    const auto plain = pool_of(other, policy, without);
    EXPECT_EQ(host - other.account(Tier::host).used(), HostAttentionBytes(plan).host());
  }
}

TEST(HostAttention, IsPlannedOnlyWhereRowsStayAtHost) {
  const Policy dense = parse_policy("dense");
  const Policy selects = parse_policy("select=exact prune=top_k(64)");
  EXPECT_FALSE(some_plan(dense, 1000).host_attention) << "all rows are resident";
  EXPECT_FALSE(some_plan(selects, 1).host_attention) << "no layer attends to everything";
}

}  // namespace
}  // namespace sluice
