// Sessions of one engine: batches, forks, threads, lifetimes, caps and errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

#include "sluice/engine.h"
#include "sluice/errors.h"
#include "tests/support/backends.h"
#include "tests/support/expect.h"
#include "tests/support/model_sessions.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using testing::book_tokens;
using testing::config_for;
using testing::continuation;
using testing::copy_of;
using testing::expect_error;
using ::testing::HasSubstr;
using testing::kModel;
using testing::largest_difference;
using testing::lead;
using testing::likeliest;

class Batches : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  const std::uint64_t seed_ = testing::seed(3);
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};
};

// Ragged prompts, then tokens that each session would draw by itself, fed to the batch and to the
// session alone.
TEST_P(Batches, GiveTheTokensOfEachSessionAlone) {
  const auto& [device, policy_name] = GetParam();
  if (testing::skips(device)) return;
  // Logits reach 20. In f32 only the order of sums differs; on a GPU queries and weights are
  // rounded to bf16, and a policy may then choose one token more or less.
  const float tolerance = device == "cpu" ? 2e-3f : 0.3f;
  Engine engine = Engine::open(config_for(device));
  const std::vector<TokenId> book = book_tokens(engine, 3000);
  const Policy policy = engine.policy(policy_name);
  testing::Random random(seed_);
  for (const int count : {1, 4, 16}) {
    SCOPED_TRACE(std::to_string(count) + " sessions");
    SessionOptions options;
    options.context = 400;
    options.policies = {policy};
    Session alone = engine.new_session(options);
    options.sequences = count;
    std::vector<Session> together;
    for (int i = 0; i < count; ++i) {
      together.push_back(i == 0 ? engine.new_session(options) : together.front().sibling());
    }
    struct Step {
      TokenId token;
      std::vector<float> logits;  // after it
    };
    std::vector<std::vector<Step>> expected;
    for (Session& session : together) {
      const auto first = static_cast<std::size_t>(random.integer(0, 2500));
      const auto length = static_cast<std::size_t>(random.integer(1, count == 1 ? 390 : 180));
      const std::span prompt(book.data() + first, length);
      alone.truncate(0);
      TokenId next = likeliest(alone.prefill(prompt));
      session.prefill(prompt);
      std::vector<Step>& steps = expected.emplace_back();
      for (int i = 0; i < 5; ++i) {
        steps.push_back({next, copy_of(alone.decode(next))});
        next = likeliest(steps.back().logits);
      }
    }
    for (std::size_t i = 0; i < 5; ++i) {
      std::vector<StepToken> batch;
      for (std::size_t s = 0; s < together.size(); ++s) {
        batch.push_back({&together[s], expected[s][i].token});
      }
      const std::vector<StepResult> results = engine.step(batch);
      for (std::size_t s = 0; s < together.size(); ++s) {
        SCOPED_TRACE("session " + std::to_string(s) + ", step " + std::to_string(i));
        ASSERT_FALSE(results[s].error);
        const std::vector<float>& own = expected[s][i].logits;
        EXPECT_LT(largest_difference(results[s].logits, own), tolerance);
        const bool is_clear = lead(own) > 2 * tolerance;
        EXPECT_TRUE(!is_clear || likeliest(results[s].logits) == likeliest(own));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, Batches,
                         ::testing::Combine(::testing::ValuesIn(testing::devices()),
                                            ::testing::Values("dense", "sparq", "sluice")),
                         [](const auto& parameter) {
                           return std::get<0>(parameter.param) + "_" + std::get<1>(parameter.param);
                         });

class Sessions : public ::testing::Test {
 protected:
  static SessionOptions options(std::int64_t context, int sequences = 1,
                                std::vector<Policy> policies = {}) {
    SessionOptions options;
    options.context = context;
    options.sequences = sequences;
    options.policies = std::move(policies);
    return options;
  }

  Engine engine_ = Engine::open(config_for());
  std::vector<TokenId> book_ = book_tokens(engine_, 1000);
  std::span<const TokenId> part(std::size_t first, std::size_t count) const {
    return std::span(book_).subspan(first, count);
  }
};

TEST_F(Sessions, OfSeveralThreadsTakeTurns) {
  std::vector<std::vector<TokenId>> expected;
  for (std::size_t i = 0; i < 2; ++i) {
    Session session = engine_.new_session(200);
    expected.push_back(continuation(session, part(200 * i, 150), 20));
  }
  std::vector<std::vector<TokenId>> actual(2);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] {
      Session session = engine_.new_session(options(200, 2));
      actual[i] = continuation(session, part(200 * i, 150), 20);
      Session fork = session.fork();
    });
  }
  expect_error(ErrorCode::prompt, "empty", [&] { engine_.new_session(100).prefill({}); });
  threads[0].join();
  threads[1].join();
  EXPECT_EQ(actual, expected);
}

TEST_F(Sessions, OutliveTheirEngine) {
  Session reference = engine_.new_session(100);
  const std::vector<TokenId> expected = continuation(reference, part(0, 50), 10);
  std::optional<Session> session;
  std::optional<Session> fork;
  {
    Engine engine = Engine::open(config_for());
    session = engine.new_session(options(100, 2));
    Engine moved = std::move(engine);
    // NOLINTNEXTLINE(bugprone-use-after-move): what is left is what is tried
    expect_error(ErrorCode::usage, "moved from", [&] { engine.new_session(10); });
    session->prefill(part(0, 1));
    session->truncate(0);
    fork = session->fork();
  }
  EXPECT_EQ(continuation(*session, part(0, 50), 10), expected);
  Session moved = std::move(*session);
  expect_error(ErrorCode::usage, "moved from", [&] { session->decode(1); });
  session.reset();
  EXPECT_EQ(moved.length(), 59);
  EXPECT_EQ(continuation(*fork, part(0, 50), 10), expected);
}

TEST_F(Sessions, KeepTheirLogits) {
  Session a = engine_.new_session(100);
  Session b = engine_.new_session(100);
  const std::span<const float> prompt = a.prefill(part(0, 30));
  const std::vector<float> before = copy_of(prompt);
  b.prefill(part(300, 40));
  b.decode(7);
  EXPECT_EQ(copy_of(prompt), before);
  const std::span<const float> token = a.decode(9);
  const std::vector<float> after = copy_of(token);
  b.decode(8);
  b.score(part(500, 20));
  EXPECT_EQ(copy_of(token), after);
}

TEST_F(Sessions, RefuseToComputeInACallback) {
  Engine fresh = Engine::open(config_for());
  int calls = 0;
  const auto refused = [&](const auto& call) {
    ++calls;
    expect_error(ErrorCode::usage, "callback", call);
  };
  fresh.load_weights([&](double) { refused([&] { fresh.new_session(10); }); });
  EXPECT_GT(std::exchange(calls, 0), 0);
  Session a = engine_.new_session(options(100, 2));
  Session b = engine_.new_session(100);
  a.prefill(part(0, 20), [&](std::int64_t, std::int64_t) {
    refused([&] { a.decode(5); });
    refused([&] { b.prefill(part(0, 5)); });
    refused([&] { b.truncate(0); });
    refused([&] { a.fork(); });
    const StepToken token = {&b, 5};
    refused([&] { engine_.step({&token, 1}); });
    return true;
  });
  EXPECT_EQ(std::exchange(calls, 0), 10);
  a.decode_known(part(20, 3), [&](std::size_t, std::span<const float>) {
    refused([&] { a.score(part(0, 3)); });
  });
  EXPECT_EQ(calls, 3);
  EXPECT_EQ(a.length(), 23);
  EXPECT_EQ(b.length(), 0);
  b.prefill(part(0, 5));
}

TEST_F(Sessions, MayEndInACallbackOfTheirOwn) {
  engine_.load_weights();
  const std::uint64_t before = engine_.memory().device_bytes;
  std::optional<Session> session = engine_.new_session(options(300, 2));
  std::optional<Session> other = session->sibling();
  int calls = 0;
  const auto end_both = [&](std::int64_t, std::int64_t) {
    ++calls;
    session.reset();
    other.reset();
    return true;
  };
  EXPECT_TRUE(session->prefill(part(0, 200), end_both).empty());
  EXPECT_GT(calls, 1) << "it went on";
  session = engine_.new_session(options(300, 2));
  session->prefill(part(0, 200));
  session->decode_known(part(200, 3), [&](std::size_t, std::span<const float> logits) {
    session.reset();
    EXPECT_TRUE(std::isfinite(logits[0]));
  });
  session = engine_.new_session(options(300, 2));
  const std::vector<float> scores = session->score(part(0, 200), end_both);
  EXPECT_EQ(scores, engine_.new_session(300).score(part(0, 200)));
  EXPECT_EQ(engine_.memory().device_bytes, before);
}

TEST_F(Sessions, RefuseASparsePrefillOfScatteredRowsBeforeAnythingChanges) {
  const Policy sparse = engine_.policy("dense prefill=zipvl(0.9)");
  const Policy dense = engine_.policy("dense");
  Session root = engine_.new_session(options(600, 3, {sparse, dense}));
  root.prefill(part(0, 300));
  Session fork = root.fork();
  expect_error(ErrorCode::unsupported, "rows that follow each other",
               [&] { fork.prefill(part(300, 50)); });
  EXPECT_EQ(fork.length(), 300);
  fork.use(dense);
  root.use(dense);
  EXPECT_EQ(continuation(fork, part(300, 50), 5), continuation(root, part(300, 50), 5));
}

TEST_F(Sessions, BeginASparsePrefillWhereThereIsRoomInARow) {
  const Policy sparse = engine_.policy("dense prefill=zipvl(0.9)");
  Session first = engine_.new_session(options(600, 2, {sparse}));
  first.prefill(part(0, 200));
  Session second = first.sibling();
  const std::vector<float> before = copy_of(second.prefill(part(0, 500)));
  first.truncate(0);
  EXPECT_EQ(copy_of(first.prefill(part(0, 500))), before);
}

TEST_F(Sessions, HaveWhatTheyHadAfterACallbackThatThrows) {
  Session session = engine_.new_session(options(600, 1));
  session.prefill(part(0, 10));
  const auto throws = [](std::int64_t done, std::int64_t) {
    if (done > 0) throw 5;
    return true;
  };
  EXPECT_THROW(session.prefill(part(10, 300), throws), int);
  EXPECT_EQ(session.length(), 10);
  EXPECT_THROW(session.score(part(10, 300), throws), int);
  EXPECT_EQ(session.length(), 10);
  session.decode_known(part(10, 3), {});
  EXPECT_EQ(session.length(), 13);
}

TEST_F(Sessions, ForksGoOnAsSessionsOfTheirOwn) {
  for (const char* const policy : {"dense", "sluice", "select=int4 prune=top_k(32) correct=4"}) {
    SCOPED_TRACE(policy);
    const Policy chosen = engine_.policy(policy);
    Session root = engine_.new_session(options(360, 3, {chosen}));
    root.prefill(part(0, 300));
    Session fork = root.fork();
    Session late = root.fork();
    EXPECT_THROW(root.fork(), Error) << "three were planned for";
    const Session* const all[] = {&root, &fork, &late};
    for (const Session* session : all) EXPECT_EQ(session->length(), 300);
    late.truncate(250);
    const std::size_t ends[] = {300, 300, 250};
    Session* const sessions[] = {&root, &fork, &late};
    for (std::size_t i = 0; i < 3; ++i) {
      Session own = engine_.new_session(options(360, 1, {chosen}));
      own.prefill(part(0, 300));
      own.truncate(static_cast<std::int64_t>(ends[i]));
      for (std::size_t t = 0; t < 6; ++t) {
        const TokenId token = book_[600 + 10 * i + t];
        const std::vector<float> expected = copy_of(own.decode(token));
        EXPECT_LT(largest_difference(sessions[i]->decode(token), expected), 2e-3f) << i << ' ' << t;
      }
    }
  }
}

TEST_F(Sessions, RefuseBatchesThatCannotBe) {
  Engine other_engine = Engine::open(config_for());
  const std::vector<Policy> policies = {Policy(), engine_.policy("sluice")};
  Session a = engine_.new_session(options(50, 3, policies));
  Session b = a.sibling();
  Session full = a.sibling();
  Session stranger = engine_.new_session(options(50, 1, policies));
  Session foreign = other_engine.new_session(50);
  a.prefill(part(0, 10));
  full.prefill(part(0, 50));
  const auto refused = [&](ErrorCode code, const std::string& text,
                           const std::vector<StepToken>& batch) {
    expect_error(code, text, [&] { engine_.step(batch); });
    EXPECT_EQ(a.length(), 10);
  };
  refused(ErrorCode::usage, "must be a session", {});
  refused(ErrorCode::usage, "twice", {{&a, 1}, {&b, 2}, {&a, 3}});
  refused(ErrorCode::usage, "this engine", {{&a, 1}, {&foreign, 1}});
  refused(ErrorCode::usage, "this engine", {{&a, 1}, {nullptr, 1}});
  refused(ErrorCode::usage, "one pool", {{&a, 1}, {&stranger, 1}});
  refused(ErrorCode::prompt, "raise `context`", {{&a, 1}, {&full, 1}});
  refused(ErrorCode::prompt, "vocabulary", {{&a, 1}, {&b, 4096}});
  refused(ErrorCode::prompt, "vocabulary", {{&a, -1}});
  SamplingParams penalty;
  penalty.repetition_penalty = 1.1;
  Sampler sampler(penalty);
  const std::vector<TokenId> history = {1, 4096};
  refused(ErrorCode::usage, "token 4096 of the history", {{&a, 1, &sampler, history}});
  b.use(policies[1]);
  refused(ErrorCode::usage, "one policy", {{&a, 1}, {&b, 1}});
  const Session moved = std::move(b);
  // NOLINTNEXTLINE(bugprone-use-after-move): what is left is what is tried
  refused(ErrorCode::usage, "moved from", {{&a, 1}, {&b, 1}});
  const StepToken good = {&a, 1};
  EXPECT_FALSE(engine_.step({&good, 1})[0].error);
  EXPECT_EQ(a.length(), 11);
}

// The checkpoint with a NaN in the embedding of one token. As the head is tied to it, that token's
// logit is NaN everywhere.
std::filesystem::path damaged_model(TokenId token) {
  const std::filesystem::path copy =
      std::filesystem::temp_directory_path() / ("sluice-session-" + std::to_string(::getpid()));
  std::filesystem::create_directories(copy);
  for (const char* file : {"config.json", "tokenizer.json", "model.safetensors"}) {
    std::filesystem::copy_file(kModel / file, copy / file,
                               std::filesystem::copy_options::overwrite_existing);
  }
  std::fstream tensors(copy / "model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
  std::uint64_t header = 0;
  tensors.read(reinterpret_cast<char*>(&header), sizeof header);
  std::string json(header, ' ');
  tensors.read(json.data(), static_cast<std::streamsize>(header));
  const std::size_t name = json.find("\"model.embed_tokens.weight\"");
  const std::string key = "\"data_offsets\":[";
  const std::size_t offset = json.find(key, name) + key.size();
  const std::uint64_t begin = std::stoull(json.substr(offset));
  const std::uint16_t nan = 0x7fc0;
  const std::uint64_t row = 384 * sizeof(nan);
  tensors.seekp(
      static_cast<std::streamoff>(8 + header + begin + static_cast<std::uint64_t>(token) * row));
  tensors.write(reinterpret_cast<const char*>(&nan), sizeof nan);
  return copy;
}

TEST(DamagedSessions, EndAloneAndTheOthersGoOn) {
  constexpr TokenId kBad = 4000;
  EngineConfig config = config_for();
  config.model = damaged_model(kBad);
  Engine engine = Engine::open(config);
  const std::vector<TokenId> book = book_tokens(engine, 200);
  ASSERT_EQ(std::count(book.begin(), book.end(), kBad), 0);
  SessionOptions options;
  options.context = 300;
  options.sequences = 3;
  options.policies = {engine.policy("sluice")};
  Session good = engine.new_session(options);
  Session bad = good.sibling();
  Session alone = good.sibling();
  for (Session* const session : {&good, &bad, &alone}) session->prefill(std::span(book).first(150));
  const StepToken batch[] = {{&bad, kBad}, {&good, book[150]}};
  const std::vector<StepResult> results = engine.step(batch);
  ASSERT_TRUE(results[0].error);
  EXPECT_EQ(results[0].error->code(), ErrorCode::numeric);
  EXPECT_THAT(results[0].error->what(), HasSubstr("layer 0"));
  EXPECT_TRUE(results[0].logits.empty());
  EXPECT_FALSE(results[1].error);
  EXPECT_THROW(bad.decode(book[151]), Error);
  EXPECT_THROW(bad.fork(), Error);
  expect_error(ErrorCode::internal, "start a new one",
               [&] { bad.prefill(std::span(book).first(3)); });
  const auto without_bad = [](std::span<const float> logits) {
    std::vector<float> all = copy_of(logits);
    EXPECT_TRUE(std::isnan(all[kBad]));
    all[kBad] = 0.0f;
    return all;
  };
  const std::vector<float> in_batch = without_bad(results[1].logits);
  EXPECT_LT(largest_difference(in_batch, without_bad(alone.decode(book[150]))), 2e-3f);
  EXPECT_LT(
      largest_difference(without_bad(good.decode(book[151])), without_bad(alone.decode(book[151]))),
      2e-3f);
  std::filesystem::remove_all(config.model);
}

TEST(SessionCaps, PlanTellsWhatIsLeftAndHolds) {
  EngineConfig config = config_for();
  Engine measured = Engine::open(config);
  const Plan free = measured.plan(600);
  EXPECT_FALSE(free.device_left);
  EXPECT_FALSE(free.host_left);
  // Two and a half sessions; what is left tells of rows that are not written yet.
  const std::uint64_t kv = free.kv.host_bytes;
  config.host_memory = free.host_bytes() + kv + kv / 2;
  Engine engine = Engine::open(config);
  EXPECT_EQ(engine.plan(600).host_left, kv + kv / 2);
  Session first = engine.new_session(600);
  EXPECT_EQ(engine.plan(600).host_left, kv / 2);
  {
    Session second = engine.new_session(600);
    expect_error(ErrorCode::memory, "`host_memory`", [&] { engine.plan(600); });
    expect_error(ErrorCode::memory, "`host_memory`", [&] { engine.new_session(600); });
    const std::vector<TokenId> book = book_tokens(engine, 600);
    first.prefill(book);
    second.prefill(book);
    EXPECT_LE(engine.memory().host_peak, *config.host_memory);
  }
  EXPECT_EQ(engine.plan(600).host_left, kv / 2);
}

TEST(SessionCaps, OfTheDeviceHoldForEachSession) {
  EngineConfig config = config_for();
  config.device_memory = 24 << 20;
  Engine engine = Engine::open(config);
  const std::vector<TokenId> book = book_tokens(engine, 900);
  Session whole = engine.new_session(1000);
  const std::vector<TokenId> expected = continuation(whole, book, 8);
  const std::uint64_t taken = engine.memory().device_bytes;
  SessionOptions options;
  options.context = 1000;
  options.device_memory = 2 << 20;
  const Plan plan = engine.plan(options);
  EXPECT_LE(plan.kv.device_bytes, *options.device_memory);
  EXPECT_EQ(plan.device_left, *config.device_memory - taken - plan.kv.device_bytes);
  Session small = engine.new_session(options);
  EXPECT_EQ(engine.memory().device_bytes, taken + plan.kv.device_bytes);
  EXPECT_EQ(continuation(small, book, 8), expected);
  EXPECT_GT(small.ledger().crossed(Tier::host, Tier::device).rows, 0u);
  EXPECT_LE(engine.memory().device_peak, taken + *options.device_memory);
  options.host_memory = plan.kv.host_bytes - 1;
  expect_error(ErrorCode::memory, "cap", [&] { engine.plan(options); });
  options.host_memory = plan.kv.host_bytes;
  engine.plan(options);
}

}  // namespace
}  // namespace sluice
