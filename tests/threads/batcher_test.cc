// A batcher whose clients submit, read, cancel and watch from threads of their own.
#include "sluice/batcher.h"

#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <vector>

#include "sluice/engine.h"
#include "tests/threads/together.h"

namespace sluice {
namespace {

using testing::together;

constexpr int kClients = 4;
constexpr TokenId kVocabulary = 384;  // of golden/qwen3

Engine open_engine() {
  EngineConfig config;
  config.model = SLUICE_TEST_DATA "/golden/qwen3";
  config.threads = 2;
  config.chunk = 32;
  config.compute = DType::f32;
  return Engine::open(config);
}

BatcherOptions small_pool() {
  BatcherOptions options;
  options.context = 300;
  options.running = 3;
  options.cached = 1;
  options.tokens = 300;
  return options;
}

Request request_of(int number) {
  Request request;
  for (int i = 0; i < 100; ++i) {
    request.prompt.push_back(static_cast<TokenId>((7 * i + 13 * (number % 2)) % kVocabulary));
  }
  request.sampling.max_tokens = 12;
  request.ignore_eos = true;
  request.priority = number % 2;
  return request;
}

std::vector<TokenId> read(Stream& stream) {
  std::vector<TokenId> tokens;
  while (const std::optional<Piece> piece = stream.next()) {
    for (const ScoredToken& token : piece->tokens) tokens.push_back(token.token);
  }
  return tokens;
}

TEST(SharedBatcher, GivesEveryClientItsAnswer) {
  Engine engine = open_engine();
  Batcher batcher(engine, small_pool());
  std::vector<std::vector<TokenId>> answers(kClients);
  together(kClients, [&](int i) {
    Stream stream = batcher.submit(request_of(i));
    answers[static_cast<std::size_t>(i)] = read(stream);
  });
  EXPECT_EQ(answers[0].size(), 12u);
  EXPECT_EQ(answers[0], answers[2]);
  EXPECT_EQ(answers[1], answers[3]);
}

TEST(SharedBatcher, IsCancelledAndWatchedWhileItComputes) {
  Engine engine = open_engine();
  Batcher batcher(engine, small_pool());
  std::atomic<int> working = kClients - 1;
  together(kClients, [&](int i) {
    if (i == 0) {
      do {
        const BatcherStats stats = batcher.stats();
        EXPECT_LE(stats.running, 3);
        EXPECT_LE(stats.free_tokens, stats.planned_tokens);
      } while (working > 0);
      return;
    }
    for (int round = 0; round < 3; ++round) {
      Stream stream = batcher.submit(request_of(i + round));
      if (round != 1) stream.next();
      if (round < 2) stream.cancel();
      read(stream);
    }
    --working;
  });
  EXPECT_EQ(batcher.stats().failed, 0u);
  EXPECT_EQ(batcher.stats().submitted, 3u * (kClients - 1));
}

TEST(SharedBatcher, EndsWithRequestsUnderWay) {
  Engine engine = open_engine();
  std::optional<Batcher> batcher(std::in_place, engine, small_pool());
  std::vector<Stream> streams;
  for (int i = 0; i < 5; ++i) streams.push_back(batcher->submit(request_of(i)));
  batcher.reset();
  for (Stream& stream : streams) read(stream);  // none waits for ever
}

}  // namespace
}  // namespace sluice
