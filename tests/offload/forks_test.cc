// Forks share what they do not write: each answers as its own tokens say, whatever the others
// write, and a prefix is in memory once.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/cpu_backend.h"
#include "offload/step/kv_batch.h"
#include "offload/step/kv_session.h"
#include "tests/support/attention_oracle.h"
#include "tests/support/batch_cases.h"
#include "tests/support/plan.h"
#include "tests/support/random.h"
#include "tests/support/script.h"

namespace sluice {
namespace {

using testing::largest_difference;
using testing::Random;
using testing::Script;
using testing::shared_plan;
using testing::step_together;

constexpr double kTolerance = 3e-5;  // fp32 sums of a few thousand terms of order one

// Dense attention of the token at `position` to it and all before it, in fp64, of all layers.
std::vector<float> dense_answer(const Script& script, std::int64_t position) {
  const KvShape& shape = script.shape();
  std::vector<float> answer;
  for (std::size_t layer = 0; layer < static_cast<std::size_t>(shape.layers); ++layer) {
    testing::AttentionCase c;
    c.shape = shape;
    c.first_query_position = position;
    c.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    c.q.assign(script.q(layer, position), script.q(layer, position + 1));
    for (int head = 0; head < shape.kv_heads; ++head) {
      c.rows.emplace_back(static_cast<std::size_t>(position + 1) * shape.row_bytes());
      for (std::int64_t row = 0; row <= position; ++row) {
        const int at = head * shape.head_dim;
        set_row(c, head, row, script.k(layer, row) + at, script.v(layer, row) + at);
      }
    }
    const testing::AttentionOracle oracle(c);
    for (int head = 0; head < shape.query_heads; ++head) {
      const std::vector<double> out = oracle.query(0, head).out;
      answer.insert(answer.end(), out.begin(), out.end());
    }
  }
  return answer;
}

std::vector<float> next_answer(KvSession& session, const Script& script) {
  KvSession* const one = &session;
  const Script* const its = &script;
  return step_together({&one, 1}, {&its, 1}).front();
}

// A session, and the queries, keys and values of its own tokens: no two forks have a token in
// common but those that they shared when they were forked.
struct Fork {
  KvSession session;
  Script script;

  std::int64_t length() const { return session.length(); }
};

// Up to four forks in one pool, which a seed has do this and that.
class Family {
 public:
  static constexpr std::int64_t kContext = 500;
  static constexpr int kForks = 4;

  Family(const Policy& policy, bool capped, std::uint64_t seed) : random_(seed), policy_(policy) {
    policies_ = {policy};
    if (!(policy == Policy())) policies_.emplace_back();
    std::optional<std::uint64_t> cap;
    if (capped) cap = testing::small_cap(kShape, kContext, kForks + 1, policies_);
    // One more, which is asked.
    pool_ = testing::shared_pool(
        backend_, shared_plan(kShape, kContext, kForks + 1, policies_, cap), policies_);
    alone_ = testing::shared_pool(backend_, shared_plan(kShape, kContext, 1, policies_), policies_);
    forks_.push_back({KvSession(pool_), Script(kShape, kContext, seed)});
    forks_.front().script.prefill(forks_.front().session, random_.integer(100, 300));
  }

  void act() {
    switch (random_.integer(0, 7)) {
      case 0:
      case 1:
        return fork();
      case 2:
        return end();
      case 3:
        return cut();
      case 4:
        return extend();
      case 5:
        return correct();
      case 6:
        return decode(any());
      default:
        return decode_together();
    }
  }

  // Every fork answers its next token as a session that was given its tokens from the start. Forks
  // of them are asked, so that they go on sharing what they share.
  void check() {
    for (Fork& fork : forks_) {
      if (fork.length() == kContext) continue;
      SCOPED_TRACE(::testing::Message() << last_ << "; a fork of " << fork.length() << " tokens");
      KvSession asked = fork.session.fork();
      ASSERT_LT(largest_difference(next_answer(asked, fork.script), answer_alone(fork)),
                kTolerance);
    }
  }
  // The same of dense attention, by its definition.
  void check_dense() { check_dense(any()); }
  void check_all_dense() {
    for (Fork& fork : forks_) {
      check_dense(fork);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }

  void end_all() {
    while (!forks_.empty()) {
      end(any());
      check();
      if (::testing::Test::HasFatalFailure()) return;
    }
    EXPECT_EQ(pool_->tables().block_slots().used(), 0);
    EXPECT_EQ(pool_->tables().tile_slots().used(), 0);
  }

 private:
  static constexpr KvShape kShape{3, 8, 2, 32, DType::bf16};

  std::int64_t count() const { return static_cast<std::int64_t>(forks_.size()); }
  Fork& any() { return *std::next(forks_.begin(), random_.integer(0, count() - 1)); }
  void note(const std::string& what, std::int64_t tokens) {
    last_ = "after " + what + " of " + std::to_string(tokens) + " tokens";
  }

  std::vector<float> answer_alone(const Fork& fork) {
    KvSession session(alone_);
    fork.script.append(session, fork.length());
    return next_answer(session, fork.script);
  }
  void check_dense(Fork& fork) {
    if (fork.length() == kContext) return;
    SCOPED_TRACE(::testing::Message() << last_ << "; dense, of " << fork.length() << " tokens");
    KvSession asked = fork.session.fork();
    asked.use(Policy());
    ASSERT_LT(largest_difference(next_answer(asked, fork.script),
                                 dense_answer(fork.script, fork.length())),
              kTolerance);
  }

  void fork() {
    if (count() == kForks) return;
    Fork& from = any();
    forks_.push_back({from.session.fork(), from.script});
    note("a fork", from.length());
    renew_from(forks_.back(), from.length());
  }
  void end() {
    if (count() > 1) end(any());
  }
  void end(const Fork& fork) {
    note("the end", fork.length());
    forks_.remove_if([&](const Fork& other) { return &other == &fork; });
  }
  void cut() {
    Fork& fork = any();
    const std::int64_t length = random_.integer(fork.length() / 2, fork.length());
    note("a cut", fork.length() - length);
    fork.session.truncate(length);
    renew_from(fork, length);
  }
  void extend() {
    Fork& fork = any();
    const std::int64_t tokens = std::min(random_.integer(1, 64), kContext - fork.length());
    note("a prefill", tokens);
    if (tokens > 0) fork.script.step(fork.session, Phase::prefill, tokens);
  }
  // As cache correction does: the newest tokens get other rows, for what sparse steps made of them
  // is not what dense attention makes.
  void correct() {
    Fork& fork = any();
    const std::int64_t tokens = random_.integer(0, std::min<std::int64_t>(fork.length(), 40));
    note("a correction", tokens);
    if (tokens == 0) return;
    fork.session.truncate(fork.length() - tokens);
    fork.script.renew(fork.length(), tokens, random_);
    fork.script.step(fork.session, Phase::correction, tokens);
  }
  void decode(Fork& fork) {
    if (fork.length() == kContext) return;
    note("a step", 1);
    const std::vector<float> expected = answer_alone(fork);
    ASSERT_LT(largest_difference(next_answer(fork.session, fork.script), expected), kTolerance);
  }
  void decode_together() {
    std::vector<KvSession*> sessions;
    std::vector<const Script*> scripts;
    std::vector<std::vector<float>> expected;
    for (Fork& fork : forks_) {
      if (fork.length() == kContext || random_.integer(0, 3) == 0) continue;
      sessions.push_back(&fork.session);
      scripts.push_back(&fork.script);
      expected.push_back(answer_alone(fork));
    }
    note("a step of several", std::ssize(sessions));
    if (sessions.empty()) return;
    const std::vector<std::vector<float>> answers = step_together(sessions, scripts);
    for (std::size_t i = 0; i < answers.size(); ++i) {
      ASSERT_LT(largest_difference(answers[i], expected[i]), kTolerance) << "session " << i;
    }
  }
  void renew_from(Fork& fork, std::int64_t length) {
    fork.script.renew(length, kContext - length, random_);
  }

  Random random_;
  Policy policy_;
  std::vector<Policy> policies_;
  cpu::CpuBackend backend_{cpu::CpuOptions{}};
  std::shared_ptr<KvPool> pool_;
  std::shared_ptr<KvPool> alone_;
  std::list<Fork> forks_;  // which stay where they are
  std::string last_;       // what was done
};

class Forks : public ::testing::TestWithParam<std::tuple<const char*, bool>> {};

TEST_P(Forks, AnswerAsTheirOwnTokensSayWhateverTheOthersDo) {
  const std::uint64_t seed = testing::seed(5);
  SCOPED_TRACE(testing::seed_message(seed));
  const auto& [policy, capped] = GetParam();
  Family family(parse_policy(policy), capped, seed);
  for (int round = 0; round < 40; ++round) {
    family.act();
    if (!HasFatalFailure()) family.check();
    if (!HasFatalFailure()) family.check_dense();
    ASSERT_FALSE(HasFatalFailure()) << "round " << round;
  }
  family.check_all_dense();
  if (!HasFatalFailure()) family.end_all();
}

INSTANTIATE_TEST_SUITE_P(Policies, Forks,
                         ::testing::Combine(::testing::ValuesIn(testing::kBatchPolicies),
                                            ::testing::Bool()));

// Of this process, in bytes; none where the system does not say.
std::optional<std::uint64_t> resident_memory() {
  std::ifstream file("/proc/self/statm");
  std::uint64_t size = 0;
  std::uint64_t resident = 0;
  if (!(file >> size >> resident)) return std::nullopt;
  return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

// Sanitizers hold back what is freed, and keep notes on what is written.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kResidentIsOurs = false;
#else
constexpr bool kResidentIsOurs = true;
#endif

// 32 MiB of rows, and 24 forks that add 40 tokens each.
class ManyForks : public ::testing::Test {
 protected:
  static constexpr KvShape kShape{2, 2, 2, 64, DType::bf16};
  static constexpr std::int64_t kPrefix = 32768;
  static constexpr std::int64_t kOwn = 40;
  static constexpr std::uint64_t kForks = 24;

  ManyForks() { script_.append(root_, kPrefix); }

  void fork() {
    for (std::uint64_t i = 0; i < kForks; ++i) forks_.push_back(root_.fork());
  }
  void decode() {
    std::vector<KvSession*> sessions;
    for (KvSession& fork : forks_) sessions.push_back(&fork);
    const std::vector<const Script*> scripts(forks_.size(), &script_);
    for (std::int64_t i = 0; i < kOwn; ++i) step_together(sessions, scripts);
  }
  std::uint64_t host_bytes() { return backend_.account(Tier::host).used(); }
  // A page for each.
  static constexpr std::uint64_t kPages = kForks * kPageTokens * kShape.token_bytes();

  // What threads touch for the first time does not depend on the machine.
  static cpu::CpuOptions two_threads() {
    cpu::CpuOptions options;
    options.threads = 2;
    return options;
  }

  Policy policy_ = parse_policy("select=int4 prune=top_k(64)");
  Script script_{kShape, kPrefix + kOwn, 3};
  cpu::CpuBackend backend_{two_threads()};
  std::shared_ptr<KvPool> pool_ =
      std::make_shared<KvPool>(backend_.make_queue(),
                               shared_plan(kShape, kPrefix + kOwn, kForks + 1, {&policy_, 1},
                                           std::nullopt, kPrefix + (kForks + 1) * kOwn),
                               std::span(&policy_, 1));
  KvSession root_{pool_};
  std::vector<KvSession> forks_;
};

TEST_F(ManyForks, CostOnePrefixAndWhatTheyAdd) {
  const std::uint64_t before = host_bytes();
  fork();
  EXPECT_EQ(host_bytes(), before) << "a fork by itself costs nothing";
  decode();
  const std::uint64_t added = host_bytes() - before;
  EXPECT_GE(added, kForks * kOwn * kShape.token_bytes());
  // The store commits ahead, up to a quarter.
  EXPECT_LE(added, kPages + (kPrefix + kForks * kPageTokens) / 4 * kShape.token_bytes());
  for (const KvSession& fork : forks_) {
    const Ledger& ledger = fork.ledger();
    const std::uint64_t written =
        ledger.total(Phase::decode, Tier::host, Tier::host, Cause::append).rows;
    EXPECT_EQ(written, static_cast<std::uint64_t>(kOwn * kShape.kv_heads * kShape.layers));
    EXPECT_EQ(ledger.tokens(Phase::prefill), 0u);
  }
}

TEST_F(ManyForks, AreResidentAsOnePrefixAndWhatTheyAdd) {
  const std::optional<std::uint64_t> before = resident_memory();
  if (!before || !kResidentIsOurs) GTEST_SKIP() << "nothing says what is resident of ours";
  const std::uint64_t charged = host_bytes();
  fork();
  decode();
  const std::uint64_t after = resident_memory().value();
  const std::uint64_t growth = after - std::min(*before, after);
  // Steps touch their work space for the first time, and threads their stacks.
  constexpr std::uint64_t kSlack = std::uint64_t{8} << 20;
  const std::uint64_t allowed = host_bytes() - charged + pool_->plan().work_bytes + kSlack;
  EXPECT_LE(growth, allowed);
  EXPECT_LT(allowed, kPrefix * kShape.token_bytes()) << "a single copy would not be seen";
}

}  // namespace
}  // namespace sluice
