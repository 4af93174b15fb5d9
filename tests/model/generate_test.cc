// Generating while callbacks do what they may, and what they may not.
#include "sluice/generate.h"

#include <gtest/gtest.h>

#include <optional>
#include <string_view>
#include <vector>

#include "sluice/errors.h"
#include "tests/support/expect.h"
#include "tests/support/model_sessions.h"

namespace sluice {
namespace {

using testing::book_tokens;
using testing::config_for;
using testing::expect_error;

class Generate : public ::testing::Test {
 protected:
  Generate() : engine_(Engine::open(config_for())), prompt_(book_tokens(engine_, 200)) {
    options_.sampling.max_tokens = 6;
    options_.sampling.temperature = 0.0;
    options_.ignore_eos = true;
  }
  GenerateResult run(Session& session) { return generate(engine_, session, prompt_, options_); }

  Engine engine_;
  std::vector<TokenId> prompt_;
  GenerateOptions options_;
};

TEST_F(Generate, EndsWithItsSession) {
  std::optional<Session> session;
  options_.on_text = [&](std::string_view) { session.reset(); };
  session = engine_.new_session(300);
  GenerateResult result = run(*session);
  EXPECT_EQ(result.reason, FinishReason::interrupted);
  EXPECT_EQ(result.tokens.size(), 1u);
  options_.on_text = {};
  options_.on_decode = [&](const Session& own) {
    session.reset();
    EXPECT_EQ(own.length(), 201);
  };
  session = engine_.new_session(300);
  EXPECT_EQ(run(*session).reason, FinishReason::interrupted);
  options_.on_decode = {};
  options_.on_prefill = [&](std::int64_t, std::int64_t) {
    session.reset();
    return true;
  };
  session = engine_.new_session(300);
  EXPECT_TRUE(run(*session).tokens.empty());
}

TEST_F(Generate, RefusesToGoOnWithTokensThatACallbackChanged) {
  Session session = engine_.new_session(300);
  options_.on_text = [&](std::string_view) { session.truncate(1); };
  expect_error(ErrorCode::usage, "callback", [&] { run(session); });
  session.truncate(0);
  options_.on_text = {};
  options_.on_decode = [&](const Session&) { session.decode(5); };
  expect_error(ErrorCode::usage, "callback", [&] { run(session); });
}

TEST_F(Generate, LetsCallbacksComputeWithOthers) {
  Session alone = engine_.new_session(300);
  const std::vector<TokenId> expected = run(alone).tokens;
  Session session = engine_.new_session(300);
  Session other = engine_.new_session(300);
  options_.on_decode = [&](const Session&) {
    other.prefill(prompt_);
    other.truncate(0);
  };
  EXPECT_EQ(run(session).tokens, expected);
}

TEST_F(Generate, StopsWhereverThePrefillIsToldTo) {
  for (const bool late : {false, true}) {
    Session session = engine_.new_session(300);
    options_.on_prefill = [&](std::int64_t done, std::int64_t total) {
      return late ? done < total : done == 0;
    };
    const GenerateResult result = run(session);
    EXPECT_EQ(result.reason, FinishReason::interrupted) << late;
    EXPECT_TRUE(result.tokens.empty()) << late;
    EXPECT_EQ(session.length(), late ? 200 : 128);
  }
}

}  // namespace
}  // namespace sluice
