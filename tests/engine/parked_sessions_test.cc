// Sessions whose key index makes room for that of others, in host memory, answer as sessions of a
// pool that has the index of all on the device, to the bit; and so do requests to a batcher.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "sluice/batcher.h"
#include "sluice/engine.h"
#include "sluice/errors.h"
#include "tests/support/backends.h"
#include "tests/support/expect.h"
#include "tests/support/model_sessions.h"
#include "tests/support/random.h"
#include "tests/support/random_checkpoint.h"
#include "tests/support/served.h"
#include "tests/support/small_sessions.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_disk.h"

namespace sluice {
namespace {

using testing::copy_of;
using testing::expect_error;
using testing::Random;
using testing::random_tokens;
using testing::RandomCheckpoint;

constexpr std::uint64_t kPlenty = std::uint64_t{1} << 30;

// With a cap, because without one the index is in host memory anyway.
SessionOptions options_for(const Engine& engine, const std::string& policy, int sequences,
                           std::int64_t indexed) {
  SessionOptions options = testing::options_for(engine, policy, sequences);
  options.device_memory = kPlenty;
  options.indexed_tokens = indexed;
  options.loads = true;
  return options;
}

std::uint64_t swapped(const Ledger& ledger, Tier from, Tier to) {
  std::uint64_t bytes = 0;
  for (const Phase phase : {Phase::prefill, Phase::decode, Phase::correction}) {
    bytes += ledger.total(phase, from, to, Cause::index_swap).bytes;
  }
  return bytes;
}

struct Twins {
  Session parked;
  Session whole;
};

class World {
 public:
  World(Engine& engine, const std::string& policy, std::uint64_t seed)
      : engine_(&engine), random_(seed) {
    const std::int64_t indexed = random_.integer(kContext, 2 * kContext);
    twins_.push_back({engine.new_session(options_for(engine, policy, kSequences, indexed)),
                      engine.new_session(options_for(engine, policy, kSequences, 0))});
    EXPECT_LT(twins_[0].parked.plan().device_bytes, twins_[0].whole.plan().device_bytes);
    EXPECT_GT(twins_[0].parked.plan().parked_bytes, 0u);
    prefill(twins_[0], 700);
  }

  void act() {
    Twins& two = twins_[static_cast<std::size_t>(random_.integer(0, std::ssize(twins_) - 1))];
    switch (random_.integer(0, 10)) {
      case 0:
        return add(two, true);
      case 1:
      case 2:
        return add(two, false);
      case 3:
        return end(two);
      case 4:
        return truncate(two);
      case 5:
      case 6:
        return prefill(two, random_.integer(1, 400));
      case 7:
        return decode(two);
      case 8:
        return save(two);
      default:
        return step();
    }
  }

  std::uint64_t returned_bytes() const { return returned_; }
  void end_all() {
    while (!twins_.empty()) remove(twins_.back());
  }

 private:
  static constexpr std::int64_t kContext = testing::kSmallContext;
  static constexpr int kSequences = 6;

  bool is_full() const { return std::ssize(twins_) == kSequences; }

  std::vector<TokenId> tokens(std::int64_t count) {
    return random_tokens(static_cast<std::size_t>(count),
                         static_cast<std::uint64_t>(random_.integer(1, 1 << 30)));
  }

  void prefill(Twins& two, std::int64_t most) {
    const std::vector<TokenId> given = tokens(std::min(most, kContext - two.whole.length()));
    if (given.empty()) return;
    const std::vector<float> expected = copy_of(two.whole.prefill(given));
    ASSERT_EQ(copy_of(two.parked.prefill(given)), expected);
  }
  void decode(Twins& two) {
    for (std::int64_t i = random_.integer(1, 20); i > 0; --i) {
      if (two.whole.length() == kContext || two.whole.length() == 0) return;
      const TokenId token = tokens(1)[0];
      const std::vector<float> expected = copy_of(two.whole.decode(token));
      ASSERT_EQ(copy_of(two.parked.decode(token)), expected);
    }
  }
  void add(Twins& two, bool forks) {
    if (is_full()) return;
    Twins added = forks ? Twins{two.parked.fork(), two.whole.fork()}
                        : Twins{two.parked.sibling(), two.whole.sibling()};
    twins_.push_back(std::move(added));
    if (!forks) prefill(twins_.back(), random_.integer(300, 1000));
  }
  void end(Twins& two) {
    if (twins_.size() > 1 && random_.integer(0, 1) == 0) remove(two);
  }
  void remove(Twins& two) {
    returned_ += swapped(two.parked.ledger(), Tier::host, Tier::device);
    EXPECT_EQ(swapped(two.whole.ledger(), Tier::host, Tier::device), 0u);
    twins_.erase(twins_.begin() + (&two - twins_.data()));
  }
  void truncate(Twins& two) {
    const std::int64_t length = random_.integer(two.whole.length() / 2, two.whole.length());
    two.parked.truncate(length);
    two.whole.truncate(length);
  }
  // Each goes on from what the other has saved.
  void save(Twins& two) {
    if (two.whole.length() == 0 || is_full()) return;
    const testing::TempDir of_parked, of_whole;
    two.parked.save(of_parked.path());
    two.whole.save(of_whole.path());
    twins_.push_back({two.parked.sibling(), two.whole.sibling()});
    twins_.back().parked.load(of_whole.path());
    twins_.back().whole.load(of_parked.path());
    decode(twins_.back());
  }

  // Those that fit, in one step.
  void step() {
    std::vector<Session*> parked, whole;
    std::vector<const Session*> fitting;
    for (Twins& two : twins_) {
      const std::int64_t length = two.whole.length();
      if (length == 0 || length == kContext || random_.integer(0, 2) == 0) continue;
      fitting.push_back(&two.parked);
      if (!engine_->index_fits(fitting, std::ssize(fitting))) {
        fitting.pop_back();
        continue;
      }
      parked.push_back(&two.parked);
      whole.push_back(&two.whole);
    }
    if (parked.empty()) return;
    const std::vector<TokenId> given = tokens(std::ssize(parked));
    ASSERT_EQ(logits_of_step(parked, given), logits_of_step(whole, given));
  }
  std::vector<std::vector<float>> logits_of_step(std::span<Session* const> sessions,
                                                 std::span<const TokenId> given) {
    std::vector<StepToken> batch;
    for (std::size_t i = 0; i < sessions.size(); ++i) batch.push_back({sessions[i], given[i]});
    std::vector<std::vector<float>> logits;
    for (const StepResult& result : engine_->step(batch)) {
      if (result.error) throw Error(*result.error);
      logits.push_back(copy_of(result.logits));
    }
    return logits;
  }

  Engine* engine_;
  Random random_;
  std::vector<Twins> twins_;
  std::uint64_t returned_ = 0;
};

class OfPolicy : public ::testing::TestWithParam<const char*> {};

TEST_P(OfPolicy, ParkedSessionsAnswerAndAreSavedAsOthers) {
  const RandomCheckpoint model(1);
  Engine engine = Engine::open(testing::config_of(model));
  const std::uint64_t seed = testing::seed(1);
  std::uint64_t returned = 0;
  for (std::uint64_t i = 0; i < 3; ++i) {
    SCOPED_TRACE(testing::seed_message(seed + i));
    World world(engine, GetParam(), seed + i);
    for (int round = 0; round < 50; ++round) {
      world.act();
      ASSERT_FALSE(HasFatalFailure()) << "round " << round;
    }
    world.end_all();
    returned += world.returned_bytes();
  }
  EXPECT_GT(returned, 0u);
}

INSTANTIATE_TEST_SUITE_P(ParkedSessions, OfPolicy,
                         ::testing::Values("values", "sluice", "sparq", "quest", "twilight",
                                           "compact",
                                           "select=int4 prune=top_k(50) dense=0 anchors=1",
                                           "select=int4 prune=top_k(50) correct=16",
                                           "values prefill=pages(0.9)"));

class OnDevice : public ::testing::TestWithParam<std::string> {};

// Three conversations by turns, and one that two others continue.
TEST_P(OnDevice, ParkedSessionsAnswerAsOthers) {
  if (testing::skips(GetParam())) return;
  Engine engine = Engine::open(testing::config_for(GetParam()));
  const std::vector<TokenId> book = testing::book_tokens(engine, 2400);
  const auto answers = [&](std::int64_t indexed) {
    SessionOptions options;
    options.context = 1024;
    options.policies = {engine.policy("values")};
    options.sequences = 5;
    options.device_memory = kPlenty;
    options.indexed_tokens = indexed;
    std::vector<Session> sessions;
    sessions.push_back(engine.new_session(options));
    std::vector<std::vector<float>> logits;
    for (std::size_t i = 0; i < 3; ++i) {
      if (i > 0) sessions.push_back(sessions[0].sibling());
      logits.push_back(copy_of(sessions[i].prefill(std::span(book).subspan(700 * i, 800))));
    }
    sessions.push_back(sessions[0].fork());
    for (std::size_t turn = 0; turn < 3; ++turn) {
      for (Session& session : sessions) {
        for (std::size_t i = 0; i < 3; ++i) {
          logits.push_back(copy_of(session.decode(book[20 * turn + i])));
        }
      }
    }
    const bool is_parked = sessions[0].plan().parked_bytes > 0;
    EXPECT_EQ(is_parked, indexed > 0);
    EXPECT_EQ(swapped(sessions[0].ledger(), Tier::host, Tier::device) > 0, is_parked);
    return logits;
  };
  EXPECT_EQ(answers(1024), answers(0));
}

INSTANTIATE_TEST_SUITE_P(ParkedSessions, OnDevice, ::testing::ValuesIn(testing::devices()),
                         [](const auto& device) { return device.param; });

using ParkedOnDisk = testing::OnDisk;

// Where rows lie on disk, a session that is loaded leaves them in its file and takes its index from
// there: what a parked session has saved, and to where others' tiles make room.
TEST_F(ParkedOnDisk, SessionsAreSavedAndLoadedWithTheirIndex) {
  constexpr double kTolerance = 2e-3;  // sums in f32 whose order differs
  const RandomCheckpoint model(4);
  EngineConfig config = testing::config_of(model);
  config.compute = DType::f32;
  config.kv_dtype = DType::f32;
  Engine in_memory = Engine::open(config);
  config.disk = DiskConfig{{parent_}, {}};
  Engine engine = Engine::open(config);
  SessionOptions options = testing::options_for(engine, "values", 24);
  options.indexed_tokens = testing::kSmallContext;
  options.loads = true;
  options.device_memory = std::uint64_t{8} << 20;
  for (std::uint64_t host = 1 << 20; !testing::has_plan(engine, options, true); host += host / 8) {
    options.host_memory = host;
    ASSERT_LT(host, kPlenty) << "no plan with rows on disk";
  }
  std::vector<Session> sessions;
  sessions.push_back(engine.new_session(options));
  ASSERT_GT(sessions[0].plan().parked_bytes, 0u);
  const testing::TempDir dir;
  for (std::uint64_t i = 0; i < 3; ++i) {
    if (i > 0) sessions.push_back(sessions[0].sibling());
    sessions[i].prefill(random_tokens(1100, i));
  }
  const std::filesystem::path saved = dir.path() / "session";
  sessions[0].save(saved);
  sessions.push_back(sessions[0].sibling());
  sessions[3].load(saved);
  for (std::size_t i = 0; i < 4; ++i) {
    Session alone = in_memory.new_session(testing::options_for(in_memory, "values"));
    alone.prefill(random_tokens(1100, i % 3));
    for (TokenId token = 0; token < 5; ++token) {
      const std::vector<float> expected = copy_of(alone.decode(token));
      EXPECT_LE(testing::largest_difference(copy_of(sessions[i].decode(token)), expected),
                kTolerance)
          << "session " << i << ", token " << token;
    }
  }
  EXPECT_GT(swapped(sessions[0].ledger(), Tier::host, Tier::device), 0u);
}

TEST(ParkedSessions, APlanShowsTheirHostMemoryAndRefusesTooLittle) {
  const RandomCheckpoint model(2);
  const Engine engine = Engine::open(testing::config_of(model));
  SessionOptions options = options_for(engine, "values", 6, testing::kSmallContext);
  const Plan plan = engine.plan(options);
  EXPECT_NE(plan.to_table().find("host: parked index"), std::string::npos);
  EXPECT_NE(plan.to_json().find("\"parked_bytes\":" + std::to_string(plan.kv.parked_bytes)),
            std::string::npos);
  options.host_memory = plan.session_host_bytes();
  EXPECT_EQ(engine.plan(options).kv.parked_bytes, plan.kv.parked_bytes);
  options.host_memory = plan.session_host_bytes() - 1;
  expect_error(ErrorCode::memory, "give at least " + std::to_string(plan.session_host_bytes()),
               [&] { engine.plan(options); });
  options.host_memory.reset();
  options.indexed_tokens = testing::kSmallContext - 1;
  expect_error(ErrorCode::usage, "`indexed_tokens`", [&] { engine.plan(options); });
}

// Under caps of the plan's bytes, which the allocators enforce, all sessions fill their context.
TEST(ParkedSessions, APlanHoldsToTheLastToken) {
  const RandomCheckpoint model(3);
  EngineConfig config = testing::config_of(model);
  const auto options_of = [](const Engine& engine) {
    SessionOptions options = testing::options_for(engine, "values", 6);
    options.indexed_tokens = testing::kSmallContext;
    return options;
  };
  config.device_memory = kPlenty;
  Plan plan;
  {
    const Engine engine = Engine::open(config);
    plan = engine.plan(options_of(engine));
  }
  config.device_memory = plan.kv.device_bytes;
  config.host_memory = std::max(plan.host_bytes(), plan.loading_peak_bytes);
  Engine engine = Engine::open(config);
  std::vector<Session> sessions;
  sessions.push_back(engine.new_session(options_of(engine)));
  EXPECT_EQ(sessions[0].plan().parked_bytes, plan.kv.parked_bytes);
  for (int i = 1; i < 6; ++i) sessions.push_back(sessions[0].sibling());
  for (Session& session : sessions) session.prefill(random_tokens(1190, 1));
  std::vector<float> first;
  for (int i = 0; i < 10; ++i) {
    for (Session& session : sessions) {
      const std::vector<float> logits = copy_of(session.decode(static_cast<TokenId>(i)));
      if (&session == &sessions[0]) first = logits;
      EXPECT_EQ(logits, first);
    }
  }
  EXPECT_EQ(sessions[5].length(), testing::kSmallContext);
  EXPECT_LE(engine.memory().host_peak, *config.host_memory);
  EXPECT_LE(engine.memory().device_peak, *config.device_memory);
}

TEST(ParkedSessions, AStepOfTooManyIsRefusedAndChangesNothing) {
  const RandomCheckpoint model(2);
  Engine engine = Engine::open(testing::config_of(model));
  std::vector<Session> sessions;
  sessions.push_back(engine.new_session(options_for(engine, "values", 3, testing::kSmallContext)));
  for (int i = 1; i < 3; ++i) sessions.push_back(sessions[0].sibling());
  std::vector<StepToken> batch;
  std::vector<const Session*> all;
  for (Session& session : sessions) {
    session.prefill(random_tokens(1100, 1));
    batch.push_back({&session, 3});
    all.push_back(&session);
  }
  EXPECT_FALSE(engine.index_fits(all, 3));
  EXPECT_TRUE(engine.index_fits({all.data(), 1}, 1));
  expect_error(ErrorCode::memory, "`indexed_tokens`", [&] { engine.step(batch); });
  std::vector<std::vector<float>> logits;
  for (const StepToken& token : batch) {
    const std::vector<StepResult> results = engine.step({&token, 1});
    ASSERT_FALSE(results[0].error);
    logits.push_back(copy_of(results[0].logits));
  }
  EXPECT_EQ(logits[1], logits[0]);
  EXPECT_EQ(logits[2], logits[0]);
}

// Sequences run while their index fits, others wait, and finished ones are parked and found again.
TEST(ParkedSessions, ABatcherServesMoreThanTheIndexHolds) {
  static constexpr std::int64_t kContext = 700;
  const RandomCheckpoint model(5);
  EngineConfig config = testing::config_of(model);
  config.compute = DType::f32;
  config.kv_dtype = DType::f32;
  config.chunk = 64;
  Engine engine = Engine::open(config);
  const Policy policy = engine.policy("values");
  BatcherOptions options;
  options.context = kContext;
  options.policies = {policy};
  options.running = 4;
  options.cached = 4;
  options.tokens = 8 * kContext;
  options.device_memory = kPlenty;
  options.indexed_tokens = 2 * kContext;
  Batcher batcher(engine, options);
  std::vector<Request> requests;
  for (std::uint64_t i = 0; i < 8; ++i) {
    Request& request = requests.emplace_back();
    request.prompt = random_tokens(300 + 40 * i, i % 4);
    request.sampling.max_tokens = 30;
  }
  for (int round = 0; round < 2; ++round) {
    std::vector<Stream> streams;
    for (const Request& request : requests) streams.push_back(batcher.submit(request));
    for (std::size_t i = 0; i < streams.size(); ++i) {
      testing::expect_alone(testing::tokens_alone(engine, requests[i], kContext, policy),
                            testing::read_all(streams[i])[0]);
    }
  }
  const BatcherStats stats = batcher.stats();
  EXPECT_EQ(stats.failed, 0u);
  EXPECT_EQ(stats.preemptions, 0u);
  const bool swaps = std::any_of(stats.traffic.begin(), stats.traffic.end(), [](const auto& one) {
    return one.cause == Cause::index_swap && one.to == Tier::device && one.traffic.bytes > 0;
  });
  EXPECT_TRUE(swaps);
  options.indexed_tokens = kContext - 1;
  expect_error(ErrorCode::usage, "`indexed_tokens`", [&] { Batcher(engine, options); });
}

}  // namespace
}  // namespace sluice
