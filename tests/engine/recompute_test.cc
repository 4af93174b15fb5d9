// Sessions whose rows a disk loses: they are computed again, and the text goes on.
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sluice/chat.h"
#include "sluice/errors.h"
#include "sluice/generate.h"
#include "tests/support/chat_checkpoint.h"
#include "tests/support/expect.h"
#include "tests/support/model_sessions.h"
#include "tests/support/test_disk.h"

namespace sluice {
namespace {

constexpr std::int64_t kContext = 700;
constexpr std::size_t kPrompt = 420;
constexpr int kAnswer = 24;

using testing::expect_error;

// In the smallest memory that is enough.
Session least_session(Engine& engine, SessionOptions options) {
  for (std::uint64_t cap = 256 << 10;; cap += cap / 8) {
    options.host_memory = cap;
    try {
      return engine.new_session(options);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::memory) throw;
    }
  }
}

// With the newest page on the device and all others on disk.
class LostRows : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const auto found = testing::disk_directory();
    if (!found) GTEST_SKIP() << "no directory on a disk; set SLUICE_TEST_DISK";
    disk_ = *found;
    EngineConfig config = testing::config_for();
    config.disk = DiskConfig{{disk_}, {}};
    engine_.emplace(Engine::open(config));
    prompt_ = testing::book_tokens(*engine_, kPrompt);
  }

  SessionOptions options() const {
    SessionOptions options;
    options.context = kContext;
    options.policies = {engine_->policy(GetParam())};
    return options;
  }
  Session session_on_disk(int sequences = 1) {
    SessionOptions capped = options();
    capped.sequences = sequences;
    Session session = least_session(*engine_, capped);
    EXPECT_TRUE(session.plan().on_disk);
    return session;
  }
  void spoil() const { testing::spoil_row_files(disk_); }

  GenerateResult generate(Session& session, GenerateOptions wanted) {
    wanted.sampling.max_tokens = kAnswer;
    wanted.ignore_eos = true;
    return sluice::generate(*engine_, session, prompt_, wanted);
  }
  std::vector<TokenId> tokens_alone() {
    Session session = engine_->new_session(options());
    return generate(session, {}).tokens;
  }

  std::filesystem::path disk_;
  std::optional<Engine> engine_;
  std::vector<TokenId> prompt_;
};

TEST_P(LostRows, AreComputedAgainWhileATextIsGenerated) {
  const std::vector<TokenId> expected = tokens_alone();
  Session session = session_on_disk();
  GenerateOptions wanted;
  int steps = 0;
  std::int64_t lost_at = 0;
  wanted.on_decode = [&](const Session& at) {
    if (++steps != 10) return;
    lost_at = at.length();
    spoil();
  };
  std::int64_t again = 0;
  wanted.on_recompute = [&](std::int64_t done, std::int64_t of) {
    EXPECT_GE(of, lost_at);
    again = done;
    return true;
  };
  const GenerateResult result = generate(session, wanted);
  EXPECT_EQ(result.tokens, expected);
  EXPECT_GE(result.recomputed_tokens, lost_at);
  EXPECT_EQ(again, result.recomputed_tokens);
  EXPECT_EQ(session.length(), static_cast<std::int64_t>(kPrompt) + kAnswer - 1);
  // The ledger has both computations.
  const Ledger& ledger = session.ledger();
  EXPECT_GE(ledger.tokens(Phase::prefill),
            kPrompt + static_cast<std::size_t>(result.recomputed_tokens));
}

TEST_P(LostRows, AreComputedAgainWhileThePromptIsRead) {
  const std::vector<TokenId> expected = tokens_alone();
  Session session = session_on_disk();
  GenerateOptions wanted;
  bool spoiled = false;
  wanted.on_prefill = [&](std::int64_t done, std::int64_t) {
    if (done >= 256 && !std::exchange(spoiled, true)) spoil();
    return true;
  };
  const GenerateResult result = generate(session, wanted);
  EXPECT_TRUE(spoiled);
  EXPECT_EQ(result.tokens, expected);
  EXPECT_GE(result.recomputed_tokens, 256);
}

TEST_P(LostRows, EndATextTheSecondTime) {
  Session session = session_on_disk();
  GenerateOptions wanted;
  int steps = 0;
  wanted.on_decode = [&](const Session&) {
    ++steps;
    if (steps == 4 || steps == 8) spoil();
  };
  expect_error(ErrorCode::corrupt, "", [&] { generate(session, wanted); });
  expect_error(ErrorCode::internal, "start a new one", [&] { session.decode(1); });
  // Nothing but the disk was at fault.
  session.recompute();
  EXPECT_GE(session.length(), static_cast<std::int64_t>(kPrompt) + 8);
  session.decode(1);
}

TEST_P(LostRows, StopBeingComputedWhenInterrupted) {
  Session session = session_on_disk();
  GenerateOptions wanted;
  int steps = 0;
  wanted.on_decode = [&](const Session&) {
    if (++steps == 4) spoil();
  };
  wanted.on_recompute = [](std::int64_t done, std::int64_t) { return done < 256; };
  const GenerateResult result = generate(session, wanted);
  EXPECT_EQ(result.reason, FinishReason::interrupted);
  EXPECT_EQ(result.tokens.size(), 5u);
  EXPECT_EQ(session.length(), 256);
}

TEST_P(LostRows, LeaveAForkWithItsOwn) {
  Session session = session_on_disk(2);
  session.prefill(prompt_);
  Session fork = session.fork();
  spoil();
  expect_error(ErrorCode::corrupt, "", [&] { session.prefill(std::span(prompt_).first(200)); });
  EXPECT_FALSE(session.recompute().empty());
  EXPECT_TRUE(std::ranges::equal(session.tokens(), prompt_));
  expect_error(ErrorCode::corrupt, "", [&] { fork.prefill(std::span(prompt_).first(200)); });
  // What is left of memory has no room for the rows of both.
  { const Session ended = std::move(session); }
  fork.recompute();
  EXPECT_EQ(fork.length(), static_cast<std::int64_t>(kPrompt));
}

INSTANTIATE_TEST_SUITE_P(Policies, LostRows,
                         ::testing::Values("dense", "values", "values correct=8"));

// Rows are lost between two questions, and twice within one.
TEST(RowsLostByAChat, AreComputedAgain) {
  const auto disk = testing::disk_directory();
  if (!disk) GTEST_SKIP() << "no directory on a disk; set SLUICE_TEST_DISK";
  const testing::ChatCheckpoint checkpoint(testing::ChatCheckpoint::format("qwen3"));
  EngineConfig config = testing::config_for();
  config.model = checkpoint.path();
  config.disk = DiskConfig{{*disk}, {}};
  Engine engine = Engine::open(config);
  SessionOptions options;
  options.context = 1500;
  const auto chat_in = [&](Session session) {
    return Chat(engine, std::move(session),
                ChatFormat::load(checkpoint.path(), engine.tokenizer()));
  };
  Chat expected = chat_in(engine.new_session(options));
  Chat chat = chat_in(least_session(engine, options));
  ASSERT_TRUE(chat.session().plan().on_disk);
  GenerateOptions most;
  most.sampling.max_tokens = 16;
  const std::string question(300, 'q');
  EXPECT_EQ(chat.ask(question, most).text, expected.ask(question, most).text);
  testing::spoil_row_files(*disk);
  EXPECT_EQ(chat.ask(question, most).text, expected.ask(question, most).text);
  GenerateOptions spoiled = most;
  int steps = 0;
  spoiled.on_decode = [&](const Session&) {
    ++steps;
    if (steps == 3 || steps == 6) testing::spoil_row_files(*disk);
  };
  spoiled.ignore_eos = true;
  expect_error(ErrorCode::corrupt, "", [&] { chat.ask(question, spoiled); });
  EXPECT_EQ(chat.ask(question, most).text, expected.ask(question, most).text);
}

TEST(Recompute, OfAnEmptySessionChangesNothing) {
  Engine engine = Engine::open(testing::config_for());
  Session session = engine.new_session(256);
  EXPECT_TRUE(session.recompute().empty());
  EXPECT_EQ(session.length(), 0);
}

TEST(Recompute, OfWholeRowsGivesTheLogitsOfAPrompt) {
  Engine engine = Engine::open(testing::config_for());
  const std::vector<TokenId> prompt = testing::book_tokens(engine, 200);
  Session session = engine.new_session(256);
  const std::vector<float> expected = testing::copy_of(session.prefill(prompt));
  EXPECT_EQ(testing::copy_of(session.recompute()), expected);
  EXPECT_EQ(session.length(), 200);
}

}  // namespace
}  // namespace sluice
