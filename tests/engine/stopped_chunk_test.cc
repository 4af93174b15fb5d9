// Prompts that are stopped in the middle of a chunk, from a callback, another thread or a deadline.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "sluice/batcher.h"
#include "sluice/engine.h"
#include "sluice/errors.h"
#include "sluice/generate.h"
#include "tests/support/backends.h"
#include "tests/support/model_sessions.h"
#include "tests/support/test_disk.h"

namespace sluice {
namespace {

using testing::book_tokens;
using testing::config_for;
using testing::continuation;
using Clock = std::chrono::steady_clock;

constexpr int kLayers = 12;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Says stop at question `number`, counted from 1.
class StopAt {
 public:
  explicit StopAt(int number) : left_(number) {}
  Stop stop() {
    return [this] {
      ++asked_;
      return --left_ <= 0;
    };
  }
  int asked() const { return asked_; }

 private:
  int left_;
  int asked_ = 0;
};

class StoppedChunks : public ::testing::TestWithParam<std::string> {
 protected:
  // Engines whose rows are in place, and behind a cap.
  static std::vector<Engine> engines(const std::string& device) {
    std::vector<Engine> engines;
    engines.push_back(Engine::open(config_for(device)));
    if (device != "cpu") return engines;
    EngineConfig capped = config_for();
    capped.device_memory = std::uint64_t{7} << 20;
    engines.push_back(Engine::open(capped));
    return engines;
  }
};

// Question 1 comes before the chunk, the others between its layers. Lengths end in the middle of a
// page and at its end.
TEST_P(StoppedChunks, LeaveWhatThereWas) {
  const std::string& device = GetParam();
  if (testing::skips(device)) return;
  for (Engine& engine : engines(device)) {
    const std::vector<TokenId> book = book_tokens(engine, 1000);
    const auto part = [&](std::size_t first, std::size_t count) {
      return std::span<const TokenId>(book).subspan(first, count);
    };
    for (const char* const line :
         {"dense", "values", "quest", "values prefill=pages(0.9)", "dense prefill=zipvl(0.9)"}) {
      SCOPED_TRACE(line);
      const SessionOptions planned = {700, {engine.policy(line)}, 1};
      for (const std::size_t before : {std::size_t{0}, std::size_t{300}}) {
        std::optional<Session> fresh = engine.new_session(planned);
        if (before > 0) fresh->prefill(part(0, before));
        const std::vector<TokenId> expected = continuation(*fresh, part(300, 200), 6);
        fresh.reset();
        Session session = engine.new_session(planned);
        if (before > 0) session.prefill(part(0, before));
        const std::uint64_t counted = session.ledger().tokens(Phase::prefill);
        for (const int number : {1, 2, kLayers / 2, kLayers}) {
          StopAt at(number);
          EXPECT_TRUE(session.prefill(part(600, 100), {}, at.stop()).empty()) << number;
          EXPECT_EQ(at.asked(), number);
          EXPECT_EQ(session.length(), static_cast<std::int64_t>(before)) << number;
          EXPECT_EQ(session.ledger().tokens(Phase::prefill), counted) << number;
        }
        const Stop throws = [asked = 0]() mutable -> bool {
          if (++asked == 4) throw 5;
          return false;
        };
        EXPECT_THROW(session.prefill(part(600, 100), {}, throws), int);
        EXPECT_EQ(session.length(), static_cast<std::int64_t>(before));
        EXPECT_EQ(continuation(session, part(300, 200), 6), expected) << before;
      }
    }
  }
}

// Chunks that were done stay; here a chunk has 128 tokens.
TEST_P(StoppedChunks, KeepTheChunksBefore) {
  const std::string& device = GetParam();
  if (testing::skips(device)) return;
  Engine engine = Engine::open(config_for(device));
  const std::vector<TokenId> book = book_tokens(engine, 500);
  const std::span<const TokenId> prompt(book);
  SessionOptions planned;
  planned.context = 600;
  planned.policies = {engine.policy("values")};
  Session whole = engine.new_session(planned);
  const std::vector<TokenId> expected = continuation(whole, prompt, 6);
  Session session = engine.new_session(planned);
  StopAt at(2 * kLayers + 5);
  EXPECT_TRUE(session.prefill(prompt, {}, at.stop()).empty());
  EXPECT_EQ(session.length(), 256);
  EXPECT_EQ(continuation(session, prompt.subspan(256), 6), expected);
}

// A fork shares a page with the session whose chunk is stopped.
TEST_P(StoppedChunks, LeaveForksAsTheyWere) {
  const std::string& device = GetParam();
  if (testing::skips(device)) return;
  for (Engine& engine : engines(device)) {
    const std::vector<TokenId> book = book_tokens(engine, 600);
    const auto part = [&](std::size_t first, std::size_t count) {
      return std::span<const TokenId>(book).subspan(first, count);
    };
    SessionOptions planned;
    planned.context = 600;
    planned.policies = {engine.policy("values")};
    planned.sequences = 3;
    planned.tokens = 1400;
    Session session = engine.new_session(planned);
    session.prefill(part(0, 200));
    Session other = session.fork();
    const std::vector<TokenId> expected = [&] {
      Session third = session.fork();
      return continuation(third, part(200, 150), 6);
    }();
    for (const int number : {2, 7}) {
      StopAt at(number);
      EXPECT_TRUE(session.prefill(part(400, 150), {}, at.stop()).empty());
      EXPECT_EQ(session.length(), 200);
    }
    EXPECT_EQ(continuation(other, part(200, 150), 6), expected);
    other.truncate(0);
    EXPECT_EQ(continuation(session, part(200, 150), 6), expected);
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, StoppedChunks, ::testing::ValuesIn(testing::devices()),
                         [](const auto& device) { return device.param; });

class StoppedChunksOnDisk : public testing::OnDisk {};

// Behind a part of a page a chunk goes on to its end, because the part lies on no disk.
TEST_F(StoppedChunksOnDisk, LeaveWhatThereWas) {
  EngineConfig config = config_for();
  config.disk = DiskConfig{{parent_}, {}};
  Engine engine = Engine::open(config);
  const std::vector<TokenId> book = book_tokens(engine, 900);
  const std::span<const TokenId> tokens(book);
  SessionOptions planned;
  planned.context = 8000;  // 94 MiB of rows
  planned.policies = {engine.policy("values")};
  planned.device_memory = std::uint64_t{24} << 20;
  planned.host_memory = std::uint64_t{40} << 20;
  Session session = engine.new_session(planned);
  ASSERT_TRUE(session.plan().on_disk);
  session.prefill(tokens.first(256));
  const std::vector<TokenId> expected = continuation(session, tokens.subspan(256, 200), 6);
  session.truncate(256);
  for (const int number : {2, 5, kLayers}) {
    StopAt at(number);
    EXPECT_TRUE(session.prefill(tokens.subspan(600, 128), {}, at.stop()).empty());
    EXPECT_EQ(session.length(), 256);
  }
  EXPECT_EQ(continuation(session, tokens.subspan(256, 200), 6), expected);
  session.truncate(300);
  StopAt at(2);
  session.prefill(tokens.subspan(300, 128), {}, at.stop());
  EXPECT_EQ(at.asked(), 1);
  EXPECT_EQ(session.length(), 428);
}

// One chunk that takes long, on the CPU.
class LongChunks : public ::testing::Test {
 protected:
  static constexpr std::size_t kTokens = 3000;

  static Engine open() {
    EngineConfig config = config_for();
    config.chunk = 4096;
    return Engine::open(config);
  }
  double seconds_of_all() {
    Session session = engine_.new_session(3200);
    const auto start = Clock::now();
    session.prefill(prompt());
    return seconds_since(start);
  }
  std::span<const TokenId> prompt() const { return std::span(book_).first(kTokens); }

  Engine engine_ = open();
  std::vector<TokenId> book_ = book_tokens(engine_, 3100);
};

TEST_F(LongChunks, EndOnceAnotherThreadSaysSo) {
  const double whole = seconds_of_all();
  Session session = engine_.new_session(3200);
  std::atomic<bool> interrupt = false;
  GenerateOptions options;
  options.sampling.max_tokens = 5;
  options.interrupt = [&] { return interrupt.load(); };
  const auto start = Clock::now();
  std::jthread other([&] {
    std::this_thread::sleep_for(std::chrono::duration<double>(whole / 10));
    interrupt = true;
  });
  const GenerateResult result = generate(engine_, session, prompt(), options);
  EXPECT_LT(seconds_since(start), 0.6 * whole);
  EXPECT_EQ(result.reason, FinishReason::interrupted);
  EXPECT_EQ(session.length(), 0);
  // It goes on as if nothing had been.
  const std::span<const TokenId> part = prompt().first(200);
  Session fresh = engine_.new_session(3200);
  EXPECT_EQ(continuation(session, part, 8), continuation(fresh, part, 8));
}

TEST_F(LongChunks, OfABatcherEndByCancelAndDeadline) {
  const double whole = seconds_of_all();
  BatcherOptions options;
  options.context = 3200;
  options.running = 2;
  Batcher batcher(engine_, options);
  Request request;
  request.prompt.assign(prompt().begin(), prompt().end());
  request.sampling.max_tokens = 5;
  const auto end_of = [](Stream& stream) {
    std::optional<FinishReason> reason;
    while (const std::optional<Piece> piece = stream.next()) reason = piece->finish;
    return reason;
  };
  auto start = Clock::now();
  Stream cancelled = batcher.submit(request);
  std::this_thread::sleep_for(std::chrono::duration<double>(whole / 10));
  cancelled.cancel();
  EXPECT_EQ(end_of(cancelled), FinishReason::interrupted);
  EXPECT_LT(seconds_since(start), 0.6 * whole);
  start = Clock::now();
  request.deadline = start + std::chrono::milliseconds(static_cast<int>(whole * 100));
  Stream late = batcher.submit(request);
  EXPECT_EQ(end_of(late), FinishReason::deadline);
  EXPECT_LT(seconds_since(start), 0.6 * whole);
  request.deadline.reset();
  request.prompt.resize(200);
  Stream goes_on = batcher.submit(request);
  EXPECT_EQ(end_of(goes_on), FinishReason::max_tokens);
}

}  // namespace
}  // namespace sluice
