// Policies on a real model: complete budgets equal dense attention, corrections make up for what
// sparse steps left behind, and prompts of important tokens.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <list>
#include <tuple>

#include "sluice/engine.h"
#include "sluice/errors.h"
#include "tests/support/backends.h"
#include "tests/support/expect.h"
#include "tests/support/model_sessions.h"

namespace sluice {
namespace {

using testing::book_tokens;
using testing::kModel;
using testing::largest_difference;

Engine open_engine(std::optional<std::uint64_t> cap = std::nullopt,
                   const std::string& device = "cpu") {
  EngineConfig config = testing::config_for(device);
  config.device_memory = cap;
  return Engine::open(config);
}

// Logits reach 20; the kernels' fp32 sums differ in order only.
constexpr double kTolerance = 2e-3;

// Rows of bf16, and queries and softmax weights rounded to it where a prompt attends.
constexpr double kCudaTolerance = 5e-2;

class CompletePolicy : public ::testing::TestWithParam<std::tuple<std::string, const char*>> {};

TEST_P(CompletePolicy, GivesTheLogitsOfDense) {
  const auto& [device, line] = GetParam();
  if (testing::skips(device)) return;
  const double tolerance = device == "cuda" ? kCudaTolerance : kTolerance;
  Engine engine = open_engine(std::nullopt, device);
  const std::vector<TokenId> tokens = book_tokens(engine, 420);
  const std::span prompt(tokens.data(), 400);
  const Policy policy = engine.policy(line);
  Session dense = engine.new_session(440);
  Session sparse = engine.new_session({440, {policy}, 1});
  const std::span<const float> a = dense.prefill(prompt);
  std::vector<float> expected(a.begin(), a.end());
  EXPECT_LT(largest_difference(expected, sparse.prefill(prompt)), tolerance);
  for (std::size_t i = 400; i < 406; ++i) {
    const std::span<const float> b = dense.decode(tokens[i]);
    expected.assign(b.begin(), b.end());
    ASSERT_LT(largest_difference(expected, sparse.decode(tokens[i])), tolerance) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Policies, CompletePolicy,
    ::testing::Combine(
        ::testing::ValuesIn(testing::devices()),
        ::testing::Values("select=int4 prune=top_k(1/1)", "select=exact prune=top_p(1)",
                          "sparq prune=top_k(1/1)", "sluice candidates=1/1 prune=top_p(1) cap=none",
                          "quest prune=top_k(1/1)", "tidaldecode prune=top_k(1/1)",
                          "select=int4 prune=top_k(1/1) compensate=values",
                          "compact prune=top_k(1/1)", "select=int4 prune=top_k(1/1) early=half",
                          "sluice candidates=1/1 prune=top_p(1) cap=none early=layer",
                          "values prune=top_k(1/1) early=layer",
                          "tidaldecode prune=top_k(1/1) early=half", "streaming recent=100000",
                          "select=dense prefill=zipvl(1)", "select=dense prefill=zipvl(1,evict)",
                          "select=int4 prune=top_k(1/1) prefill=zipvl(1,evict)",
                          "select=dense prefill=pages(1)")),
    [](const auto& parameter) {
      return std::get<0>(parameter.param) + "_" + std::to_string(parameter.index);
    });

// Logits after a prompt and a shorter one behind it.
std::vector<float> after_two_prompts(Engine& engine, const Policy& policy) {
  const std::vector<TokenId> tokens = book_tokens(engine, 1100);
  Session session = engine.new_session({1200, {policy}, 1});
  session.prefill(std::span(tokens.data(), 900));
  return testing::copy_of(session.prefill(std::span(tokens.data() + 900, 200)));
}

// Queries choose pages together with the same neighbours whatever fits a step.
TEST(ListedPages, DoNotDependOnTheChunk) {
  const Policy policy = parse_policy("select=dense prefill=pages(0.3)");
  EngineConfig config = testing::config_for();
  std::vector<std::vector<float>> logits;
  for (const int chunk : {512, 128, 300, 1000}) {
    config.chunk = chunk;
    Engine engine = Engine::open(config);
    logits.push_back(after_two_prompts(engine, policy));
    EXPECT_LT(largest_difference(logits.front(), logits.back()), kTolerance) << chunk;
  }
  Engine dense = Engine::open(config);
  EXPECT_GT(largest_difference(logits.front(), after_two_prompts(dense, Policy())),
            100 * kTolerance);
}

// The smallest cap that a plan accepts, too.
TEST(ListedPages, DoNotDependOnTheCap) {
  const Policy policy = parse_policy("select=dense prefill=pages(0.3)");
  EngineConfig config = testing::config_for();
  config.chunk = 512;
  Engine ample = Engine::open(config);
  const std::vector<float> expected = after_two_prompts(ample, policy);
  std::int64_t smallest = 512;
  for (std::uint64_t cap = std::uint64_t{4} << 20; cap > 0; cap -= cap / 8) {
    config.device_memory = cap;
    Engine engine = Engine::open(config);
    try {
      smallest = engine.plan({1200, {policy}, 1}).kv.chunk;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::memory);
      break;
    }
    EXPECT_LT(largest_difference(expected, after_two_prompts(engine, policy)), kTolerance) << cap;
  }
  EXPECT_EQ(smallest, 128);
}

// As Session::score() promises, whatever a prompt would attend to.
TEST(ListedPages, AreAllOfThemWhereTokensAreScored) {
  Engine engine = open_engine();
  const std::vector<TokenId> tokens = book_tokens(engine, 1500);
  SessionOptions options;
  options.context = 1500;
  options.policies = {parse_policy("dense prefill=pages(0.1)"), Policy{}};
  Session session = engine.new_session(options);
  const std::vector<float> scores = session.score(tokens);
  EXPECT_EQ(session.prefill_share(), 1.0);
  session.truncate(0);
  session.prefill(tokens);
  EXPECT_LT(session.prefill_share(), 1.0);
  session.truncate(0);
  session.use(Policy{});
  EXPECT_EQ(scores, session.score(tokens));
}

TEST(ListedPages, RefuseAChunkBelowABlock) {
  EngineConfig config = testing::config_for();
  config.chunk = 100;
  Engine engine = Engine::open(config);
  const Policy policy = parse_policy("select=dense prefill=pages(0.3)");
  testing::expect_error(ErrorCode::usage, "`chunk` of at least 128 tokens, not 100", [&] {
    engine.new_session({1200, {policy}, 1});
  });
  EXPECT_NO_THROW(engine.new_session({100, {policy}, 1}));
}

TEST(Correction, ReplacesWhatSparseStepsWrote) {
  Engine engine = open_engine();
  const std::vector<TokenId> tokens = book_tokens(engine, 520);
  const std::span prompt(tokens.data(), 500);
  const Policy policy = parse_policy("select=streaming sinks=1 recent=1 correct=8");
  Session dense = engine.new_session(540);
  Session corrected = engine.new_session({540, {policy}, 1});
  Session sparse =
      engine.new_session({540, {parse_policy("select=streaming sinks=1 recent=1")}, 1});
  for (Session* session : {&dense, &corrected, &sparse}) {
    session->prefill(prompt);
    for (std::size_t i = 500; i < 508; ++i) session->decode(tokens[i]);
  }
  // A prompt after sparse steps corrects them first, and is dense itself.
  const std::span next(tokens.data() + 508, 4);
  const std::span<const float> a = dense.prefill(next);
  const std::vector<float> expected(a.begin(), a.end());
  EXPECT_LT(largest_difference(expected, corrected.prefill(next)), kTolerance);
  EXPECT_EQ(corrected.length(), 512);
  EXPECT_EQ(corrected.ledger().tokens(Phase::correction), 8u);
  EXPECT_GT(largest_difference(expected, sparse.prefill(next)), 10 * kTolerance);
}

// A cut forgets what it takes away; what stays is still owed.
TEST(Correction, OutlivesACut) {
  Engine engine = open_engine();
  const std::vector<TokenId> tokens = book_tokens(engine, 520);
  const Policy policy = parse_policy("select=streaming sinks=1 recent=1 correct=8");
  Session session = engine.new_session({540, {policy}, 1});
  session.prefill(std::span(tokens.data(), 500));
  for (std::size_t i = 500; i < 506; ++i) session.decode(tokens[i]);
  session.truncate(506);
  session.use(policy);
  session.truncate(504);
  session.prefill(std::span(tokens.data() + 504, 2));
  EXPECT_EQ(session.ledger().tokens(Phase::correction), 4u);
  for (std::size_t i = 506; i < 509; ++i) session.decode(tokens[i]);
  session.truncate(500);
  session.prefill(std::span(tokens.data() + 500, 2));
  EXPECT_EQ(session.ledger().tokens(Phase::correction), 4u);
}

TEST(Correction, ComesEveryTSteps) {
  Engine engine = open_engine();
  const std::vector<TokenId> tokens = book_tokens(engine, 330);
  Session session = engine.new_session({340, {parse_policy("sparq correct=5")}, 4});
  session.prefill(std::span(tokens.data(), 300));
  std::size_t seen = 0;
  session.decode_known(std::span(tokens.data() + 300, 23),
                       [&](std::size_t i, std::span<const float> logits) {
                         EXPECT_EQ(i, seen++);
                         EXPECT_EQ(logits.size(), 4096u);
                       });
  EXPECT_EQ(seen, 23u);
  EXPECT_EQ(session.length(), 323);
  EXPECT_EQ(session.ledger().tokens(Phase::correction), 20u);
}

TEST(SparsePrefill, AttendsToLessAndSaysNearlyTheSame) {
  Engine engine = open_engine();
  const std::vector<TokenId> tokens = book_tokens(engine, 900);
  Session dense = engine.new_session(900);
  Session sparse = engine.new_session({900, {parse_policy("select=dense prefill=zipvl(0.95)")}, 1});
  const std::span<const float> a = dense.prefill(tokens);
  const std::vector<float> expected(a.begin(), a.end());
  const std::span<const float> b = sparse.prefill(tokens);
  const auto best = std::max_element(expected.begin(), expected.end()) - expected.begin();
  EXPECT_LT(std::abs(expected[static_cast<std::size_t>(best)] - b[static_cast<std::size_t>(best)]),
            3.0f);
  EXPECT_GT(largest_difference(expected, b), 1e-2);
}

// The queries of a prompt that is one piece are projected once.
TEST(SparsePrefill, OfOnePieceGivesTheLogitsOfDense) {
  Engine engine = open_engine();
  const std::vector<TokenId> tokens = book_tokens(engine, 100);
  Session dense = engine.new_session(120);
  Session sparse = engine.new_session({120, {parse_policy("select=dense prefill=zipvl(1)")}, 1});
  const std::span<const float> a = dense.prefill(tokens);
  const std::vector<float> expected(a.begin(), a.end());
  EXPECT_LT(largest_difference(expected, sparse.prefill(tokens)), kTolerance);
}

TEST(SparsePrefill, WhatIsEvictedIsGone) {
  Engine engine = open_engine();
  const std::vector<TokenId> tokens = book_tokens(engine, 700);
  SessionOptions options;
  options.context = 720;
  options.policies = {parse_policy("select=dense prefill=zipvl(0.8,evict)")};
  Session session = engine.new_session(options);
  session.prefill(std::span(tokens.data(), 690));
  EXPECT_LT(session.room().own, 640) << "of 768 tokens in whole pages";
  const auto read = [&] {
    return session.ledger().total(Phase::decode, Tier::host, Tier::host, Cause::hit).rows;
  };
  session.decode(tokens[690]);
  std::uint64_t step = read();
  EXPECT_LT(step, 12u * 2 * 640) << "of the rows of 12 layers of 2 KV heads";
  // Later tokens attend to the very rows that were left, and to those after the prompt.
  for (std::size_t token = 691; token < 700; ++token) {
    const std::uint64_t before = read();
    session.decode(tokens[token]);
    step += 12 * 2;
    EXPECT_EQ(read() - before, step);
  }
}

TEST(SparsePrefill, TakesAnyStepAfterOneThatEvicts) {
  Engine engine = open_engine();
  const std::vector<TokenId> tokens = book_tokens(engine, 400);
  const auto part = [&](std::size_t first, std::size_t count) {
    return std::span(tokens).subspan(first, count);
  };
  SessionOptions options;
  options.context = 420;
  options.policies = {parse_policy("select=dense prefill=zipvl(0.8,evict)"), Policy{}};
  options.sequences = 2;
  Session session = engine.new_session(options);
  Session other = session.sibling();
  session.prefill(part(0, 300));
  EXPECT_EQ(session.score(part(300, 20)).size(), 19u);
  session.use(Policy{});
  EXPECT_FALSE(session.prefill(part(320, 20)).empty());
  session.decode(tokens[340]);
  try {
    session.truncate(200);
    ADD_FAILURE() << "cut within the prompt";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::usage) << error.what();
  }
  EXPECT_EQ(session.length(), 341);
  session.truncate(305);
  session.use(options.policies.front());
  EXPECT_FALSE(session.prefill(part(305, 20)).empty());
  EXPECT_EQ(other.score(part(0, 20)).size(), 19u) << "of a session that has all of its tokens";
  session.truncate(0);
  EXPECT_EQ(session.score(part(0, 20)).size(), 19u);
}

TEST(SparsePrefill, SharesWhatItLeavesFree) {
  Engine engine = open_engine();
  const std::vector<TokenId> tokens = book_tokens(engine, 1024);
  SessionOptions options;
  options.context = 1100;
  options.policies = {parse_policy("select=dense prefill=zipvl(0.8,evict)")};
  options.sequences = 16;
  options.tokens = 1100;
  std::list<Session> sessions;
  sessions.push_back(engine.new_session(options));
  try {
    while (true) {
      sessions.back().prefill(tokens);
      sessions.push_back(sessions.front().sibling());
    }
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::memory) << error.what();
  }
  EXPECT_GT(sessions.size(), 2u) << "in the pages of one";
  EXPECT_EQ(sessions.back().length(), 0) << "what found no room has changed nothing";
  sessions.pop_front();
  EXPECT_FALSE(sessions.back().prefill(tokens).empty());
  EXPECT_FALSE(sessions.back().decode(tokens[0]).empty());
}

TEST(SparsePrefill, HoldsUnderACap) {
  const Policy policy = parse_policy("select=int4 prune=top_k(64) prefill=zipvl(0.9)");
  Engine unlimited = open_engine();
  const std::vector<TokenId> tokens = book_tokens(unlimited, 700);
  Session free = unlimited.new_session({720, {policy}, 1});
  const std::span<const float> a = free.prefill(std::span(tokens.data(), 690));
  const std::vector<float> expected(a.begin(), a.end());
  const Plan everything = unlimited.plan({720, {policy}, 1});
  const std::uint64_t cap = everything.kv.index_bytes + everything.kv.work_bytes + (6 << 20);
  Engine capped = open_engine(cap);
  Session session = capped.new_session({720, {policy}, 1});
  EXPECT_LT(largest_difference(expected, session.prefill(std::span(tokens.data(), 690))),
            kTolerance);
  session.decode(tokens[690]);
  EXPECT_LE(capped.memory().device_peak, cap);
  EXPECT_GT(session.ledger().total(Phase::prefill, Tier::host, Tier::device, Cause::miss).rows, 0u);
}

TEST(EnginePolicy, CalibrationReplacesAPreset) {
  const std::filesystem::path copy =
      std::filesystem::temp_directory_path() / ("sluice-calibration-" + std::to_string(::getpid()));
  std::filesystem::create_directory(copy);
  for (const char* file : {"config.json", "tokenizer.json", "model.safetensors"}) {
    std::filesystem::create_symlink(kModel / file, copy / file);
  }
  EngineConfig config;
  config.model = copy;
  Policy chosen = parse_policy("tidaldecode anchors=2,5,9");
  store_calibration(copy, "tidaldecode", chosen);
  const Engine engine = Engine::open(config);
  EXPECT_EQ(engine.policy("tidaldecode"), chosen);
  EXPECT_EQ(engine.policy("tidaldecode prune=top_k(64)").anchors, (std::vector<int>{2, 5, 9}));
  EXPECT_EQ(engine.policy("quest"), parse_policy("quest"));
  testing::expect_error(ErrorCode::usage, "no preset",
                        [&] { store_calibration(copy, "\xff", chosen); });
  chosen.anchors = {9, 2};
  testing::expect_error(ErrorCode::usage, "anchors",
                        [&] { store_calibration(copy, "tidaldecode", chosen); });
  std::ofstream(copy / "sluice.json") << "{\"policies\": [1]}";
  try {
    engine.policy("tidaldecode");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::corrupt);
    EXPECT_NE(std::string(error.what()).find("sluice.json"), std::string::npos);
  }
  std::filesystem::remove_all(copy);
}

}  // namespace
}  // namespace sluice
