// Requests to a batcher, of token ids, against the same in sessions of their own.
#include "sluice/batcher.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <limits>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/expect.h"
#include "tests/support/random.h"
#include "tests/support/random_checkpoint.h"
#include "tests/support/served.h"
#include "tests/support/test_disk.h"

namespace sluice {
namespace {

using testing::Alone;
using testing::expect_alone;
using testing::expect_error;
using testing::Random;
using testing::RandomCheckpoint;
using testing::read_all;
using testing::Served;
using testing::tokens_alone;
using namespace std::chrono_literals;

constexpr std::int64_t kContext = 700;

class BatcherTest : public ::testing::Test {
 protected:
  static EngineConfig config_of(int chunk) {
    static const RandomCheckpoint checkpoint(5);
    EngineConfig config;
    config.model = checkpoint.path();
    config.threads = 1;
    config.chunk = chunk;
    config.compute = DType::f32;
    config.kv_dtype = DType::f32;
    return config;
  }
  static Engine open(int chunk = 64) { return Engine::open(config_of(chunk)); }
  static BatcherOptions options() {
    BatcherOptions options;
    options.context = kContext;
    options.running = 4;
    options.cached = 2;
    return options;
  }
  static std::vector<TokenId> random_prompt(std::size_t size, std::uint64_t seed) {
    Random random(seed);
    std::vector<TokenId> tokens(size);
    for (TokenId& id : tokens) {
      id = static_cast<TokenId>(random.integer(0, RandomCheckpoint::kVocabulary - 1));
    }
    return tokens;
  }
  static Request request(std::size_t prompt, int tokens, std::uint64_t seed = 1) {
    Request request;
    request.prompt = random_prompt(prompt, seed);
    request.sampling.max_tokens = tokens;
    return request;
  }

  // Rows appended by prompts so far, per layer and KV head.
  static std::uint64_t prompt_rows(const BatcherStats& stats) {
    std::uint64_t rows = 0;
    for (const TierTraffic& one : stats.traffic) {
      const bool is_new = one.cause == Cause::append || one.cause == Cause::write_back;
      if (one.phase == Phase::prefill && is_new) rows += one.traffic.rows;
    }
    return rows / (RandomCheckpoint::kLayers * RandomCheckpoint::kKvHeads);
  }

  Engine engine_ = open();
};

TEST_F(BatcherTest, GivesEveryRequestTheAnswerThatItHasAlone) {
  Batcher batcher(engine_, options());
  std::vector<Request> requests;
  std::vector<Stream> streams;
  for (int i = 0; i < 12; ++i) {
    requests.push_back(
        request(static_cast<std::size_t>(1 + 37 * i), 20 + i, static_cast<std::uint64_t>(i)));
    streams.push_back(batcher.submit(requests.back()));
  }
  for (std::size_t i = 0; i < streams.size(); ++i) {
    const Served served = read_all(streams[i])[0];
    EXPECT_EQ(served.reason, FinishReason::max_tokens);
    expect_alone(tokens_alone(engine_, requests[i], kContext, Policy()), served);
    const Usage usage = streams[i].usage();
    EXPECT_EQ(usage.prompt_tokens, std::ssize(requests[i].prompt));
    EXPECT_EQ(usage.answer_tokens, std::ssize(served.tokens));
    EXPECT_GT(usage.first_token_seconds, 0.0);
    EXPECT_GE(usage.seconds, usage.first_token_seconds);
  }
  const BatcherStats stats = batcher.stats();
  EXPECT_EQ(stats.submitted, 12u);
  EXPECT_EQ(stats.finished[static_cast<std::size_t>(FinishReason::max_tokens)], 12u);
  EXPECT_EQ(stats.running, 0);
  EXPECT_EQ(stats.queued, 0);
  EXPECT_EQ(stats.first_token_seconds.count, 12u);
}

TEST_F(BatcherTest, TakesStepsTogether) {
  BatcherOptions together = options();
  together.cached = 0;
  Batcher batcher(engine_, together);
  std::vector<Stream> streams;
  for (std::uint64_t i = 0; i < 4; ++i) streams.push_back(batcher.submit(request(8, 200, i)));
  for (Stream& stream : streams) read_all(stream);
  EXPECT_LT(batcher.stats().steps, 4 * 199u / 2);
}

// Drafts for a sequence that runs alone change nothing but the number of its steps. The random
// model repeats itself: greedy texts of it soon do.
TEST_F(BatcherTest, DraftsForASequenceAlone) {
  for (const double temperature : {0.0, 0.2}) {
    Request wanted = request(150, 200);
    wanted.sampling.temperature = temperature;
    BatcherOptions with_drafts = options();
    with_drafts.drafts = 6;
    Batcher batcher(engine_, with_drafts);
    Stream stream = batcher.submit(wanted);
    const Served served = read_all(stream)[0];
    EXPECT_EQ(served.reason, FinishReason::max_tokens);
    expect_alone(tokens_alone(engine_, wanted, kContext, Policy()), served);
    batcher.drain(10s);
    const BatcherStats stats = batcher.stats();
    EXPECT_LE(stats.accepted, stats.drafted);
    EXPECT_EQ(stats.steps + stats.accepted + 1, 200u);
    if (temperature == 0.0) {
      EXPECT_GT(stats.accepted, 20u);
    }
  }
  BatcherOptions bad = options();
  for (const int drafts : {-1, 64}) {
    bad.drafts = drafts;
    expect_error(ErrorCode::usage, "drafts", [&] { Batcher(engine_, bad); });
  }
}

TEST_F(BatcherTest, GivesAllMemoryBack) {
  {
    const std::uint64_t before = engine_.memory().host_bytes;
    BatcherOptions own = options();
    own.cached = 0;
    {
      Batcher batcher(engine_, own);
      const BatcherStats empty = batcher.stats();
      EXPECT_EQ(empty.free_tokens, empty.planned_tokens);
      std::vector<Stream> streams;
      for (std::uint64_t i = 0; i < 8; ++i) streams.push_back(batcher.submit(request(300, 9, i)));
      for (Stream& stream : streams) read_all(stream);
      EXPECT_EQ(batcher.stats().free_tokens, empty.planned_tokens);
    }
    // The first session also allocated weights and activations.
    const std::uint64_t after = engine_.memory().host_bytes;
    {
      Batcher batcher(engine_, own);
      read_all(*std::make_unique<Stream>(batcher.submit(request(9, 9))));
    }
    EXPECT_EQ(engine_.memory().host_bytes, after);
    EXPECT_LE(before, after);
  }
}

// ---- Prefixes

TEST_F(BatcherTest, ComputesASharedPrefixOnce) {
  BatcherOptions many = options();
  many.running = 24;
  many.tokens = 4096;
  Batcher batcher(engine_, many);
  const std::vector<TokenId> prefix = random_prompt(512, 77);
  std::vector<Request> requests;
  std::vector<Stream> streams;
  for (int i = 0; i < 24; ++i) {
    Request one = request(5, 10, static_cast<std::uint64_t>(i));
    one.prompt.insert(one.prompt.begin(), prefix.begin(), prefix.end());
    requests.push_back(one);
    streams.push_back(batcher.submit(one));
  }
  for (std::size_t i = 0; i < streams.size(); ++i) {
    expect_alone(tokens_alone(engine_, requests[i], kContext, Policy()), read_all(streams[i])[0]);
  }
  // 517 of the first, and at most the five own tokens of the others.
  EXPECT_LE(prompt_rows(batcher.stats()), 517u + 23 * 5);
  EXPECT_GE(batcher.stats().reused_tokens, 23 * 512u);
}

TEST_F(BatcherTest, ContinuesFromAFinishedAnswer) {
  Batcher batcher(engine_, options());
  const Request first = request(200, 50);
  Stream stream = batcher.submit(first);
  const Served served = read_all(stream)[0];
  Request second = first;
  second.prompt.insert(second.prompt.end(), served.tokens.begin(), served.tokens.end());
  second.prompt.push_back(3);
  Stream next = batcher.submit(second);
  expect_alone(tokens_alone(engine_, second, kContext, Policy()), read_all(next)[0]);
  // All but the answer's last token, which was never fed back.
  EXPECT_EQ(next.usage().reused_tokens, 249);
}

TEST_F(BatcherTest, ForgetsTheLeastRecentlyUsedPrefix) {
  Batcher batcher(engine_, options());  // keeps two
  for (const std::uint64_t seed : {1, 2, 3}) {
    Stream stream = batcher.submit(request(150, 2, seed));
    read_all(stream);
  }
  EXPECT_EQ(batcher.stats().cached, 2);
  Stream forgotten = batcher.submit(request(150, 2, 1));
  read_all(forgotten);
  EXPECT_EQ(forgotten.usage().reused_tokens, 0);
  Stream kept = batcher.submit(request(150, 2, 3));
  read_all(kept);
  EXPECT_EQ(kept.usage().reused_tokens, 149);
}

TEST_F(BatcherTest, ForksChoicesAndGivesEachItsSeed) {
  Batcher batcher(engine_, options());
  Request several = request(140, 12);
  several.choices = 4;
  several.sampling.temperature = 1.5;
  several.sampling.seed = 100;
  Stream stream = batcher.submit(several);
  const std::vector<Served> all = read_all(stream, 4);
  EXPECT_GE(stream.usage().reused_tokens, 3 * 139);
  EXPECT_EQ(stream.usage().answer_tokens, 48);
  for (int i = 0; i < 4; ++i) {
    Request one = several;
    one.choices = 1;
    one.sampling.seed = 100 + static_cast<std::uint64_t>(i);
    EXPECT_EQ(all[static_cast<std::size_t>(i)].tokens,
              tokens_alone(engine_, one, kContext, Policy(), 0.0f).tokens)
        << "choice " << i;
  }
}

// ---- Room

TEST_F(BatcherTest, PreemptsAndReplaysWhenBlocksRunOut) {
  BatcherOptions tight = options();
  tight.cached = 0;
  tight.tokens = 128;  // and a block for each of six sequences: seven, for four answers of three
  Batcher batcher(engine_, tight);
  std::vector<Request> requests;
  std::vector<Stream> streams;
  for (std::uint64_t i = 0; i < 4; ++i) {
    requests.push_back(request(100, 250, i));
    streams.push_back(batcher.submit(requests.back()));
  }
  for (std::size_t i = 0; i < 4; ++i) {
    expect_alone(tokens_alone(engine_, requests[i], kContext, Policy()), read_all(streams[i])[0]);
  }
  EXPECT_GT(batcher.stats().preemptions, 0u);
  EXPECT_EQ(batcher.stats().failed, 0u);
}

TEST_F(BatcherTest, SaysEarlyThatThereIsNoRoom) {
  BatcherOptions small = options();
  small.cached = 0;
  small.tokens = 256;  // two blocks, and two for each further sequence
  Batcher batcher(engine_, small);
  // Answers wait, so that none ends and frees its room before the next is submitted. The second
  // request is refused before the first is admitted, and also while the first runs, because the
  // first may still take the blocks that are free.
  std::promise<void> go_on;
  const auto wait = [go = go_on.get_future().share()](auto&&...) { go.wait(); };
  Request impatient = request(400, 300);
  impatient.waits = false;
  impatient.rules.mask = wait;
  Stream stream = batcher.submit(impatient);
  for (const bool is_known : {false, true}) {
    while (is_known && batcher.stats().running == 0) std::this_thread::sleep_for(1ms);
    expect_error(ErrorCode::memory, "tokens are free", [&] {
      Request second = request(400, 300);
      second.choices = 2;
      second.waits = false;
      batcher.submit(second);
    });
  }
  small.queued = 0;
  small.running = 1;
  Batcher narrow(engine_, small);
  Request endless = request(10, 600);
  endless.rules.mask = wait;
  Stream running = narrow.submit(endless);
  expect_error(ErrorCode::memory, "wait already", [&] { narrow.submit(request(10, 10)); });
  go_on.set_value();
  read_all(stream);
  EXPECT_EQ(narrow.stats().refused, 1u);
}

TEST_F(BatcherTest, RefusesWhatCannotBeServed) {
  BatcherOptions small = options();
  small.running = 1;
  small.cached = 0;
  small.tokens = 128;  // four blocks
  small.context = 600;
  Batcher batcher(engine_, small);
  const auto refuse = [&](ErrorCode code, const char* text, const auto& change) {
    Request bad = request(10, 10);
    change(bad);
    expect_error(code, text, [&] { batcher.submit(bad); });
  };
  refuse(ErrorCode::prompt, "empty", [](Request& r) { r.prompt.clear(); });
  refuse(ErrorCode::prompt, "token id -1", [](Request& r) { r.prompt[3] = -1; });
  refuse(ErrorCode::prompt, "token id 128", [](Request& r) { r.prompt[3] = 128; });
  refuse(ErrorCode::prompt, "do not fit", [](Request& r) { r.sampling.max_tokens = 592; });
  refuse(ErrorCode::prompt, "do not fit",
         [](Request& r) { r.sampling.max_tokens = std::numeric_limits<int>::max(); });
  refuse(ErrorCode::usage, "`max_tokens`", [](Request& r) { r.sampling.max_tokens = -1; });
  refuse(ErrorCode::usage, "`temperature`", [](Request& r) { r.sampling.temperature = NAN; });
  refuse(ErrorCode::usage, "`choices`", [](Request& r) { r.choices = 0; });
  refuse(ErrorCode::usage, "`choices`", [](Request& r) { r.choices = 2; });
  refuse(ErrorCode::usage, "`logprobs`", [](Request& r) { r.logprobs = 21; });
  refuse(ErrorCode::usage, "`prompt_logprobs`", [](Request& r) { r.prompt_logprobs = -1; });
  refuse(ErrorCode::usage, "`logit_bias`", [](Request& r) { r.rules.bias = {{128, 1.0}}; });
  refuse(ErrorCode::usage, "not planned", [](Request& r) { r.policy = parse_policy("sluice"); });
  refuse(ErrorCode::tokenizer, "tokenizer.json", [](Request& r) { r.sampling.stop = {"x"}; });
  EXPECT_EQ(batcher.stats().refused, 14u);
  const auto refuse_options = [&](const char* text, const auto& change) {
    BatcherOptions bad = options();
    change(bad);
    expect_error(ErrorCode::usage, text, [&] { Batcher never(engine_, bad); });
  };
  refuse_options("`context`", [](BatcherOptions& o) { o.context = 0; });
  refuse_options("`running`", [](BatcherOptions& o) { o.running = 0; });
  refuse_options("`cached`", [](BatcherOptions& o) { o.cached = -1; });
  refuse_options("`prefill_ms`", [](BatcherOptions& o) { o.prefill_ms = NAN; });
}

// ---- Order and ends

TEST_F(BatcherTest, ServesHigherPrioritiesFirst) {
  BatcherOptions one = options();
  one.running = 1;
  Batcher batcher(engine_, one);
  Request slow = request(10, 300, 1);
  slow.rules.mask = [](std::span<const TokenId>, std::span<float>) {
    std::this_thread::sleep_for(1ms);
  };
  Stream low = batcher.submit(slow);
  while (batcher.stats().running == 0) std::this_thread::sleep_for(1ms);
  Request urgent = request(10, 5, 2);
  urgent.priority = 1;
  Stream high = batcher.submit(urgent);
  read_all(high);
  EXPECT_FALSE(low.ended());
  const Served served = read_all(low)[0];
  EXPECT_EQ(low.usage().preemptions, 1);
  expect_alone(tokens_alone(engine_, request(10, 300, 1), kContext, Policy()), served);
}

TEST_F(BatcherTest, EndsAtADeadlineWaitingOrRunning) {
  BatcherOptions one = options();
  one.running = 1;
  Batcher batcher(engine_, one);
  Request slow = request(10, 690);
  slow.rules.mask = [](std::span<const TokenId>, std::span<float>) {
    std::this_thread::sleep_for(5ms);
  };
  slow.deadline = std::chrono::steady_clock::now() + 300ms;
  Stream running = batcher.submit(slow);
  Request late = request(10, 5);
  late.deadline = std::chrono::steady_clock::now() + 50ms;
  Stream waiting = batcher.submit(late);
  EXPECT_EQ(read_all(waiting)[0].reason, FinishReason::deadline);
  const Served cut = read_all(running)[0];
  EXPECT_EQ(cut.reason, FinishReason::deadline);
  EXPECT_LT(cut.tokens.size(), 690u);
}

TEST_F(BatcherTest, IsCancelledFromAnyThread) {
  Batcher batcher(engine_, options());
  Request endless = request(10, 690);
  std::atomic<int> drawn = 0;
  endless.rules.mask = [&](std::span<const TokenId>, std::span<float>) {
    ++drawn;
    std::this_thread::sleep_for(1ms);
  };
  Stream stream = batcher.submit(endless);
  Stream other = batcher.submit(request(10, 30));
  std::jthread canceller([&] {
    while (drawn < 3) std::this_thread::sleep_for(1ms);
    stream.cancel();
  });
  const Served served = read_all(stream)[0];
  EXPECT_EQ(served.reason, FinishReason::interrupted);
  EXPECT_LT(served.tokens.size(), 690u);
  EXPECT_EQ(read_all(other)[0].tokens.size(), 30u);
  // A stream that is dropped is cancelled, too.
  { const Stream dropped = batcher.submit(endless); }
  batcher.drain(10s);
  EXPECT_EQ(batcher.stats().running, 0);
}

TEST_F(BatcherTest, EndsARequestWhoseCallbackThrowsAlone) {
  Batcher batcher(engine_, options());
  Request bad = request(10, 20);
  bad.choices = 2;
  bad.rules.mask = [](std::span<const TokenId> answer, std::span<float>) {
    if (answer.size() == 5) throw std::runtime_error("enough");
  };
  Request nan = request(10, 20, 2);
  nan.rules.mask = [](std::span<const TokenId>, std::span<float> logits) { logits[0] = NAN; };
  Stream first = batcher.submit(bad);
  Stream second = batcher.submit(nan);
  Stream good = batcher.submit(request(10, 20, 3));
  expect_error(ErrorCode::usage, "enough", [&] { read_all(first, 2); });
  expect_error(ErrorCode::numeric, "logit", [&] { read_all(second); });
  EXPECT_EQ(read_all(good)[0].tokens.size(), 20u);
  EXPECT_EQ(batcher.stats().failed, 2u);
}

TEST_F(BatcherTest, DrainsAndThenRefuses) {
  Batcher batcher(engine_, options());
  Stream stream = batcher.submit(request(10, 40));
  batcher.drain(60s);
  EXPECT_EQ(read_all(stream)[0].tokens.size(), 40u);
  expect_error(ErrorCode::memory, "no more requests", [&] { batcher.submit(request(10, 4)); });
}

// ---- What is drawn

TEST_F(BatcherTest, ScoresTokensAsAPlainSessionDoes) {
  Batcher batcher(engine_, options());
  Request scored = request(300, 5);
  scored.logprobs = 3;
  scored.prompt_logprobs = 2;
  Stream warm = batcher.submit(request(300, 1));  // leaves the prompt in the cache
  read_all(warm);
  Stream stream = batcher.submit(scored);
  const Served served = read_all(stream)[0];
  Session session = engine_.new_session(kContext);
  const std::vector<float> expected = session.score(scored.prompt);
  const std::vector<ScoredToken> prompt = stream.prompt_scores();
  ASSERT_EQ(prompt.size(), 300u);
  EXPECT_TRUE(std::isnan(prompt[0].logprob));
  for (std::size_t i = 1; i < 300; ++i) {
    EXPECT_EQ(prompt[i].token, scored.prompt[i]);
    EXPECT_NEAR(prompt[i].logprob, expected[i - 1], 1e-4) << i;
    ASSERT_EQ(prompt[i].top.size(), 2u);
    EXPECT_GE(prompt[i].top[0].logprob, prompt[i].top[1].logprob);
  }
  for (const ScoredToken& token : served.scored) {
    ASSERT_EQ(token.top.size(), 3u);
    EXPECT_EQ(token.top[0].token, token.token);  // greedy
    EXPECT_EQ(token.top[0].logprob, token.logprob);
  }
}

TEST_F(BatcherTest, ComputesAPromptAlone) {
  Batcher batcher(engine_, options());
  Request scored = request(70, 0);
  scored.prompt_logprobs = 0;
  Stream stream = batcher.submit(scored);
  const Served served = read_all(stream)[0];
  EXPECT_TRUE(served.tokens.empty());
  EXPECT_EQ(served.reason, FinishReason::max_tokens);
  EXPECT_EQ(stream.prompt_scores().size(), 70u);
}

TEST_F(BatcherTest, AppliesRulesAndPenalties) {
  Batcher batcher(engine_, options());
  Request ruled = request(60, 25);
  ruled.rules.presence_penalty = 2.0;
  ruled.rules.frequency_penalty = 1.0;
  ruled.rules.bias = {{7, 3.0}};
  ruled.sampling.repetition_penalty = 1.2;
  Stream stream = batcher.submit(ruled);
  expect_alone(tokens_alone(engine_, ruled, kContext, Policy()), read_all(stream)[0]);
  Request only = request(60, 25);
  only.rules.mask = [](std::span<const TokenId> answer, std::span<float> logits) {
    const std::size_t wanted = answer.size() % logits.size();
    for (std::size_t i = 0; i < logits.size(); ++i) {
      if (i != wanted) logits[i] = -std::numeric_limits<float>::infinity();
    }
  };
  Stream masked = batcher.submit(only);
  const Served served = read_all(masked)[0];
  for (std::size_t i = 0; i < 25; ++i) EXPECT_EQ(served.tokens[i], static_cast<TokenId>(i));
}

TEST_F(BatcherTest, EndsAtEndTokens) {
  Batcher batcher(engine_, options());
  Request plain = request(60, 25);
  Stream first = batcher.submit(plain);
  const std::vector<TokenId> tokens = read_all(first)[0].tokens;
  plain.end_tokens = {tokens[10]};
  const auto end = std::find(tokens.begin(), tokens.end(), tokens[10]);
  Stream second = batcher.submit(plain);
  const Served cut = read_all(second)[0];
  EXPECT_EQ(cut.reason, FinishReason::end_of_text);
  EXPECT_EQ(cut.tokens, std::vector<TokenId>(tokens.begin(), end));
  plain.ignore_eos = true;
  Stream third = batcher.submit(plain);
  EXPECT_EQ(read_all(third)[0].tokens, tokens);
}

TEST_F(BatcherTest, ServesRequestsOfDifferentPoliciesAtOnce) {
  BatcherOptions several = options();
  several.policies = {Policy(), parse_policy("sluice cap=64 recent=16"),
                      parse_policy("tidaldecode anchors=2 dense=0,1 correct=8"),
                      parse_policy("zipvl")};
  Batcher batcher(engine_, several);
  std::vector<Request> requests;
  std::vector<Stream> streams;
  for (std::size_t i = 0; i < 8; ++i) {
    Request one = request(300 + 20 * i, 20, i);
    one.policy = several.policies[i % 4];
    requests.push_back(one);
    streams.push_back(batcher.submit(one));
  }
  for (std::size_t i = 0; i < 8; ++i) {
    SCOPED_TRACE(i);
    expect_alone(tokens_alone(engine_, requests[i], kContext, *requests[i].policy, 0.02f),
                 read_all(streams[i])[0]);
  }
}

// Blocks of queries choose pages, so prefixes are shared and prompts cut in whole blocks only.
TEST_F(BatcherTest, SharesPromptsThatAttendToPages) {
  Engine engine = open(128);
  BatcherOptions pages = options();
  pages.policies = {parse_policy("dense prefill=pages(0.8)")};
  Batcher batcher(engine, pages);
  const std::vector<TokenId> prefix = random_prompt(450, 78);
  Stream decoding = batcher.submit(request(10, 300));
  std::vector<Request> requests;
  std::vector<Stream> streams;
  for (std::uint64_t i = 0; i < 3; ++i) {
    Request one = request(100, 10, i);
    one.prompt.insert(one.prompt.begin(), prefix.begin(), prefix.end());
    requests.push_back(one);
    streams.push_back(batcher.submit(one));
  }
  for (std::size_t i = 0; i < streams.size(); ++i) {
    SCOPED_TRACE(i);
    expect_alone(tokens_alone(engine, requests[i], kContext, pages.policies[0], 0.02f),
                 read_all(streams[i])[0]);
  }
  EXPECT_EQ(batcher.stats().reused_tokens, 2 * 384u);
  read_all(decoding);
}

// ---- At random

// Requests of several threads in a pool that is too small for them, some of them cancelled. Every
// answer has to be the one that the request has alone, or the beginning of it; nothing is lost, and
// all memory comes back. SLUICE_SERVED=N runs N seeds, from SLUICE_SEED on.
class RandomRequests : public BatcherTest {
 protected:
  struct Sent {
    Request request;
    int cancel_after = -1;  // tokens
    std::vector<Served> served;
    Usage usage;
  };

  static Request draw(Random& random, const std::vector<TokenId>& book) {
    Request request;
    const auto from = static_cast<std::ptrdiff_t>(64 * random.integer(0, 2));
    const auto size = static_cast<std::ptrdiff_t>(random.integer(1, 350));
    request.prompt.assign(book.begin() + from, book.begin() + from + size);
    const std::vector<TokenId> own =
        random_prompt(static_cast<std::size_t>(random.integer(0, 20)), random.engine()());
    request.prompt.insert(request.prompt.end(), own.begin(), own.end());
    request.sampling.max_tokens = static_cast<int>(random.integer(1, 80));
    request.priority = static_cast<int>(random.integer(0, 2));
    request.choices = random.integer(0, 5) == 0 ? 2 : 1;
    if (random.integer(0, 3) == 0) request.rules.frequency_penalty = 0.7;
    if (random.integer(0, 5) == 0) request.logprobs = 1;
    if (random.integer(0, 7) == 0) request.prompt_logprobs = 0;
    return request;
  }

  void run(std::uint64_t seed) {
    SCOPED_TRACE(testing::seed_message(seed));
    Random random(seed);
    BatcherOptions small;
    small.context = 512;
    small.running = static_cast<int>(random.integer(2, 6));
    small.cached = static_cast<int>(random.integer(0, 3));
    small.tokens = random.integer(512, 1600);
    const std::vector<TokenId> book = random_prompt(512, seed);
    constexpr std::size_t kThreads = 3;
    constexpr std::size_t kEach = 6;
    std::vector<Sent> all(kThreads * kEach);
    for (Sent& sent : all) {
      sent.request = draw(random, book);
      if (random.integer(0, 4) == 0) sent.cancel_after = static_cast<int>(random.integer(0, 5));
    }
    {
      Batcher batcher(engine_, small);
      {
        std::vector<std::jthread> clients;
        for (std::size_t i = 0; i < kThreads; ++i) {
          clients.emplace_back(
              [&, i] { serve(batcher, std::span(all).subspan(i * kEach, kEach)); });
        }
      }
      const BatcherStats stats = batcher.stats();
      EXPECT_EQ(stats.submitted, all.size());
      EXPECT_EQ(stats.failed, 0u);
      EXPECT_EQ(stats.running + stats.queued, 0);
      if (small.cached == 0) {
        EXPECT_EQ(stats.free_tokens, stats.planned_tokens);
      }
    }
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Request& request = all[i].request;
      SCOPED_TRACE("request " + std::to_string(i) + ": " + std::to_string(request.prompt.size()) +
                   " tokens, priority " + std::to_string(request.priority) + ", choices " +
                   std::to_string(request.choices) + ", penalty " +
                   std::to_string(request.rules.frequency_penalty) +
                   (request.logprobs ? ", logprobs" : "") +
                   (request.prompt_logprobs ? ", prompt_logprobs" : ""));
      compare(all[i]);
    }
  }

  // All streams of a thread at once.
  static void serve(Batcher& batcher, std::span<Sent> requests) {
    std::vector<Stream> streams;
    for (const Sent& sent : requests) streams.push_back(batcher.submit(sent.request));
    for (std::size_t i = 0; i < requests.size(); ++i) {
      Sent& sent = requests[i];
      sent.served.resize(static_cast<std::size_t>(sent.request.choices));
      int tokens = 0;
      if (sent.cancel_after == 0) streams[i].cancel();
      while (std::optional<Piece> piece = streams[i].next()) {
        Served& one = sent.served.at(static_cast<std::size_t>(piece->choice));
        for (const ScoredToken& token : piece->tokens) one.tokens.push_back(token.token);
        if (piece->finish) one.reason = piece->finish;
        tokens += static_cast<int>(piece->tokens.size());
        if (sent.cancel_after >= 0 && tokens >= sent.cancel_after) streams[i].cancel();
      }
      sent.usage = streams[i].usage();
    }
  }

  void compare(const Sent& sent) {
    const Alone alone = tokens_alone(engine_, sent.request, 512, Policy());
    for (std::size_t choice = 0; choice < sent.served.size(); ++choice) {
      SCOPED_TRACE("choice " + std::to_string(choice) + ", preempted " +
                   std::to_string(sent.usage.preemptions) + " times, reused " +
                   std::to_string(sent.usage.reused_tokens));
      const Served& served = sent.served[choice];
      ASSERT_TRUE(served.reason) << "the last piece is missing";
      if (*served.reason == FinishReason::interrupted) {
        EXPECT_GE(sent.cancel_after, 0);
        const std::size_t both = std::min(served.tokens.size(), alone.tokens.size());
        EXPECT_TRUE(std::equal(alone.tokens.begin(),
                               alone.tokens.begin() + static_cast<std::ptrdiff_t>(both),
                               served.tokens.begin()));
        continue;
      }
      expect_alone(alone, served);
    }
  }
};

TEST_F(RandomRequests, GetTheAnswersThatTheyHaveAlone) {
  const char* const count = std::getenv("SLUICE_SERVED");
  const int seeds = count != nullptr ? static_cast<int>(std::strtol(count, nullptr, 10)) : 8;
  const std::uint64_t first = testing::seed(1);
  for (int i = 0; i < seeds && !HasFailure(); ++i) run(first + static_cast<std::uint64_t>(i));
}

// ---- Rows on disk

class BatcherOnDisk : public BatcherTest {
 protected:
  void SetUp() override {
    const auto found = testing::disk_directory();
    if (!found) GTEST_SKIP() << "no directory on a disk; set SLUICE_TEST_DISK";
    disk_ = *found;
    EngineConfig config = config_of(64);
    config.disk = DiskConfig{{disk_}, {}};
    on_disk_ = std::make_unique<Engine>(Engine::open(config));
  }

  // A batcher that cannot hold the rows of a request in host memory.
  std::unique_ptr<Batcher> open_batcher() {
    BatcherOptions small = options();
    small.running = 2;
    small.cached = 0;
    for (std::uint64_t cap = 256 << 10;; cap += cap / 8) {
      small.host_memory = cap;
      try {
        auto batcher = std::make_unique<Batcher>(*on_disk_, small);
        EXPECT_FALSE(testing::row_files(disk_).empty());
        return batcher;
      } catch (const Error& error) {
        if (error.code() != ErrorCode::memory) throw;
      }
    }
  }
  // Spoils the rows while these tokens of the answer are drawn.
  Request spoiled(std::set<int> at) {
    Request wanted = request(500, 40);
    wanted.rules.mask = [this, at = std::move(at), count = 0](auto&&...) mutable {
      if (at.contains(count++)) testing::spoil_row_files(disk_);
    };
    return wanted;
  }

  std::filesystem::path disk_;
  std::unique_ptr<Engine> on_disk_;
};

TEST_F(BatcherOnDisk, ComputesRowsAgainThatTheDiskLost) {
  const std::unique_ptr<Batcher> batcher = open_batcher();
  Stream stream = batcher->submit(spoiled({5}));
  expect_alone(tokens_alone(engine_, request(500, 40), kContext, Policy()), read_all(stream)[0]);
  EXPECT_EQ(batcher->stats().preemptions, 1u);
  EXPECT_EQ(batcher->stats().failed, 0u);
}

TEST_F(BatcherOnDisk, EndsARequestWhoseRowsAreLostAgain) {
  const std::unique_ptr<Batcher> batcher = open_batcher();
  Stream stream = batcher->submit(spoiled({5, 10}));
  expect_error(ErrorCode::corrupt, "", [&] { read_all(stream); });
  EXPECT_EQ(batcher->stats().failed, 1u);
  Stream next = batcher->submit(request(500, 40));
  expect_alone(tokens_alone(engine_, request(500, 40), kContext, Policy()), read_all(next)[0]);
}

}  // namespace
}  // namespace sluice
