// One engine, and one KV cache, that threads share: each has sessions of its own.
#include "sluice/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "sluice/kv_cache.h"
#include "tests/support/temp_dir.h"
#include "tests/threads/together.h"

namespace sluice {
namespace {

using testing::together;

constexpr int kThreads = 4;
constexpr TokenId kVocabulary = 384;  // of golden/qwen3

Engine open_engine(std::optional<std::uint64_t> device_memory = std::nullopt) {
  EngineConfig config;
  config.model = SLUICE_TEST_DATA "/golden/qwen3";
  config.threads = 2;
  config.chunk = 32;
  config.compute = DType::f32;
  config.device_memory = device_memory;
  return Engine::open(config);
}

SessionOptions options_for(const char* policy) {
  SessionOptions options;
  options.context = 300;
  options.policies = {parse_policy(policy)};
  options.sequences = 2;
  return options;
}

std::vector<TokenId> prompt_of(int number) {
  std::vector<TokenId> tokens(150);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<TokenId>((7 * i + 13 * static_cast<std::size_t>(number)) % kVocabulary);
  }
  return tokens;
}

TokenId likeliest(std::span<const float> logits) {
  return static_cast<TokenId>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// Greedy tokens after a prompt, the last of them by a fork.
std::vector<TokenId> answer(Engine& engine, const char* policy, int number) {
  Session session = engine.new_session(options_for(policy));
  std::vector<TokenId> tokens = {likeliest(session.prefill(prompt_of(number)))};
  for (int i = 0; i < 8; ++i) tokens.push_back(likeliest(session.decode(tokens.back())));
  Session fork = session.fork();
  for (int i = 0; i < 4; ++i) tokens.push_back(likeliest(fork.decode(tokens.back())));
  return tokens;
}

class SharedEngine : public ::testing::TestWithParam<const char*> {};

TEST_P(SharedEngine, GivesEveryThreadItsAnswer) {
  std::vector<std::vector<TokenId>> expected;
  Engine alone = open_engine();
  for (int i = 0; i < kThreads; ++i) expected.push_back(answer(alone, GetParam(), i));
  // Who comes first loads the weights.
  Engine engine = open_engine(16 << 20);
  std::vector<std::vector<TokenId>> actual(kThreads);
  together(kThreads,
           [&](int i) { actual[static_cast<std::size_t>(i)] = answer(engine, GetParam(), i); });
  EXPECT_EQ(actual, expected);
}

INSTANTIATE_TEST_SUITE_P(Policies, SharedEngine,
                         ::testing::Values("dense", "sluice", "tidaldecode anchors=2 correct=4",
                                           "zipvl"));

// Plans and counts are asked for while others compute.
TEST(SharedEngine, AnswersWhileItComputes) {
  Engine engine = open_engine(16 << 20);
  std::atomic<int> working = kThreads - 1;
  together(kThreads, [&](int i) {
    if (i > 0) {
      answer(engine, "sluice", i);
      --working;
      return;
    }
    const SessionOptions options = options_for("sluice");
    do {
      EXPECT_GT(engine.plan(options).kv.device_bytes, 0u);
      EXPECT_LE(engine.memory().device_bytes, engine.memory().device_peak);
      EXPECT_EQ(engine.info().vocabulary, kVocabulary);
    } while (working > 0);
  });
}

// A flag that another thread raises ends a prompt between two pieces.
TEST(SharedEngine, IsInterruptedByAnotherThread) {
  Engine engine = open_engine();
  Session session = engine.new_session(options_for("dense"));
  std::atomic<bool> interrupted = false;
  std::atomic<bool> has_begun = false;
  std::jthread other([&] {
    has_begun.wait(false);
    interrupted = true;
    interrupted.notify_all();
  });
  const std::span<const float> logits =
      session.prefill(prompt_of(1), [&](std::int64_t done, std::int64_t) {
        has_begun = true;
        has_begun.notify_all();
        if (done > 0) interrupted.wait(false);
        return !interrupted;
      });
  EXPECT_TRUE(logits.empty());
  EXPECT_LE(session.length(), 32);
}

// Sessions may end in another thread than they began in, while others work.
TEST(SharedEngine, LosesSessionsInOtherThreads) {
  Engine engine = open_engine(16 << 20);
  std::vector<std::optional<Session>> sessions(kThreads);
  together(kThreads, [&](int i) {
    Session& session =
        sessions[static_cast<std::size_t>(i)].emplace(engine.new_session(options_for("sluice")));
    session.prefill(prompt_of(i));
  });
  EXPECT_GT(engine.memory().device_bytes, 0u);
  together(kThreads, [&](int i) {
    sessions[static_cast<std::size_t>((i + 1) % kThreads)].reset();
    answer(engine, "dense", i);
  });
  EXPECT_EQ(engine.memory().device_bytes, 0u);
}

// Some threads load a session, and fork what they loaded; others fork one that was there before.
TEST_P(SharedEngine, LoadsWhileOthersFork) {
  Engine engine = open_engine(16 << 20);
  const testing::TempDir temp;
  const SessionOptions options = options_for(GetParam());
  const auto go_on = [](Session& session) {
    std::vector<TokenId> tokens = {1};
    for (int i = 0; i < 6; ++i) tokens.push_back(likeliest(session.decode(tokens.back())));
    return tokens;
  };
  std::vector<Session> roots;
  for (int i = 0; i < kThreads / 2; ++i) {
    roots.push_back(engine.new_session(options));
    roots.back().prefill(prompt_of(1));
  }
  roots.front().save(temp.path() / "session");
  std::vector<TokenId> expected;
  {
    Session session = roots.front().fork();
    expected = go_on(session);
  }
  together(kThreads, [&](int i) {
    for (int round = 0; round < 6; ++round) {
      std::optional<Session> loaded;
      if (i % 2 == 1) loaded.emplace(engine.load_session(temp.path() / "session", options));
      Session fork = loaded ? loaded->fork() : roots[static_cast<std::size_t>(i / 2)].fork();
      EXPECT_EQ(go_on(fork), expected) << "thread " << i << " round " << round;
      if (loaded) {
        EXPECT_EQ(go_on(*loaded), expected) << "thread " << i << " round " << round;
      }
    }
  });
}

TEST(SharedCache, GivesEveryThreadItsSequence) {
  KvConfig config;
  config.shape = {2, 4, 2, 32, DType::f32};
  config.context = 80;
  config.chunk = 16;
  config.sequences = kThreads;
  config.threads = 2;
  KvCache cache(config);
  // Every value of a thread's rows is the same number: so is what attention gives.
  together(kThreads, [&](int i) {
    const std::vector<float> rows(16 * 2 * 32, static_cast<float>(i + 1));
    const std::vector<float> queries(16 * 4 * 32, 0.5f);
    std::vector<float> out(queries.size());
    KvSequence sequence = cache.new_sequence();
    for (int step = 0; step < 8; ++step) {
      const bool prompt = step < 2;
      KvStep next = sequence.begin_step(prompt ? Phase::prefill : Phase::decode, prompt ? 16 : 1);
      for (int layer = 0; layer < 2; ++layer) {
        next.append(layer, rows.data(), rows.data());
        next.attend(layer, queries.data(), out.data());
      }
      next.end();
      EXPECT_NEAR(out.front(), static_cast<float>(i + 1), 1e-4f);
    }
  });
}

}  // namespace
}  // namespace sluice
