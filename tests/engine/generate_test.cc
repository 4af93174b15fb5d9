// Generating while callbacks do what they may, and what they may not.
#include "sluice/generate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/errors.h"
#include "tests/support/expect.h"
#include "tests/support/model_sessions.h"
#include "tests/support/temp_dir.h"

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

// An answer in pieces, each of which begins with what was pending of the one before.
std::vector<TokenId> in_pieces(const Engine& engine, Session& session, std::vector<TokenId> prompt,
                               GenerateOptions options, int pieces) {
  std::vector<TokenId> tokens;
  for (int i = 0; i < pieces; ++i) {
    const GenerateResult result = generate(engine, session, prompt, options);
    tokens.insert(tokens.end(), result.tokens.begin(), result.tokens.end());
    options.history.insert(options.history.end(), prompt.begin(), prompt.end());
    options.history.insert(options.history.end(), result.tokens.begin(), result.tokens.end());
    prompt = {result.pending.value()};
  }
  return tokens;
}

std::uint64_t decoded_rows(const Session& session) {
  return session.ledger().total(Phase::decode, Tier::host, Tier::host, Cause::hit).rows;
}

TEST_F(Generate, GoesOnAfterWhatWasPendingAsIfNeverCutOff) {
  const std::vector<TokenId> prompt = book_tokens(engine_, 500);
  for (const char* policy :
       {"values", "sparq prune=top_k(32)", "streaming recent=128", "sparq correct=5"}) {
    SCOPED_TRACE(policy);
    options_.sampling.repetition_penalty = policy == std::string("values") ? 1.3 : 1.0;
    options_.sampling.max_tokens = 12;
    const SessionOptions planned = {600, {engine_.policy(policy)}, 1};
    Session whole = engine_.new_session(planned);
    const GenerateResult expected = generate(engine_, whole, prompt, options_);
    options_.sampling.max_tokens = 4;
    Session cut = engine_.new_session(planned);
    EXPECT_EQ(in_pieces(engine_, cut, prompt, options_, 3), expected.tokens);
    EXPECT_EQ(cut.length(), whole.length());
    EXPECT_EQ(decoded_rows(cut), decoded_rows(whole));
  }
}

// Whatever draws, a draw is of the position: where logits are, on the host and after a cut.
TEST_F(Generate, SampledAnswersGoOnAsIfNeverCutOff) {
  options_.sampling.temperature = 1.0;
  options_.sampling.seed = 3;
  for (const double penalty : {1.0, 1.2}) {
    SCOPED_TRACE(penalty);
    options_.sampling.repetition_penalty = penalty;
    options_.sampling.max_tokens = 24;
    Session whole = engine_.new_session(300);
    const std::vector<TokenId> expected = run(whole).tokens;
    options_.sampling.max_tokens = 8;
    Session cut = engine_.new_session(300);
    EXPECT_EQ(in_pieces(engine_, cut, prompt_, options_, 3), expected);
    options_.sampling.seed = 4;
    Session other = engine_.new_session(300);
    EXPECT_NE(in_pieces(engine_, other, prompt_, options_, 3), expected);
    options_.sampling.seed = 3;
  }
}

TEST_F(Generate, DrawsAsASamplerDoesFromTheLogits) {
  options_.sampling.temperature = 1.0;
  options_.sampling.seed = 9;
  options_.sampling.max_tokens = 12;
  Session session = engine_.new_session(300);
  const std::vector<TokenId> expected = run(session).tokens;
  const Sampler sampler(options_.sampling);
  Session by_hand = engine_.new_session(300);
  std::span<const float> logits = by_hand.prefill(prompt_);
  std::vector<TokenId> tokens;
  while (tokens.size() < expected.size()) {
    tokens.push_back(sampler.next(logits, {}, by_hand.length()));
    logits = by_hand.decode(tokens.back());
  }
  EXPECT_EQ(tokens, expected);
}

TEST_F(Generate, APendingTokenCanBeStoppedAsAPromptCan) {
  for (const bool late : {false, true}) {
    SCOPED_TRACE(late ? "late" : "early");
    Session session = engine_.new_session(300);
    options_.on_prefill = {};
    const std::vector<TokenId> pending = {run(session).pending.value()};
    const std::int64_t before = session.length();
    options_.on_prefill = [&](std::int64_t done, std::int64_t total) {
      return late && done < total;
    };
    const GenerateResult result = generate(engine_, session, pending, options_);
    EXPECT_EQ(result.reason, FinishReason::interrupted);
    EXPECT_TRUE(result.tokens.empty());
    EXPECT_EQ(session.length(), before + (late ? 1 : 0));
    session.truncate(before);
    options_.on_prefill = [&](std::int64_t done, std::int64_t total) -> bool {
      if (late == (done == total)) throw std::runtime_error("no");
      return true;
    };
    EXPECT_THROW(generate(engine_, session, pending, options_), std::runtime_error);
    EXPECT_EQ(session.length(), before);
    options_.on_prefill = [&](std::int64_t done, std::int64_t total) {
      if (late == (done == total)) session.truncate(1);
      return true;
    };
    expect_error(ErrorCode::usage, "callback",
                 [&] { generate(engine_, session, pending, options_); });
  }
}

TEST_F(Generate, RefusesATokenOfTheHistoryThatThereIsNot) {
  options_.history = {1, 1 << 30};
  Session session = engine_.new_session(300);
  EXPECT_EQ(run(session).tokens.size(), 6u) << "nothing is penalised";
  options_.sampling.repetition_penalty = 1.1;
  session.truncate(0);
  expect_error(ErrorCode::usage, "of the history", [&] { run(session); });
  EXPECT_EQ(session.length(), 0);
}

// sluice-22m, in which a token has another text and is special.
void write_model(const testing::TempDir& dir, TokenId id, const std::string& text) {
  std::ifstream file(testing::kModel / "tokenizer.json");
  nlohmann::json json = nlohmann::json::parse(file);
  nlohmann::json& vocabulary = json["model"]["vocab"];
  std::string old;
  for (const auto& [content, of] : vocabulary.items()) {
    if (of == id) old = content;
  }
  vocabulary.erase(old);
  vocabulary[text] = id;
  nlohmann::json merges = nlohmann::json::array();
  for (const nlohmann::json& merge : json["model"]["merges"]) {
    if (merge[0] != old && merge[1] != old &&
        merge[0].get<std::string>() + merge[1].get<std::string>() != old) {
      merges.push_back(merge);
    }
  }
  json["model"]["merges"] = merges;
  json["added_tokens"].push_back({{"id", id},
                                  {"content", text},
                                  {"special", true},
                                  {"single_word", false},
                                  {"lstrip", false},
                                  {"rstrip", false},
                                  {"normalized", false}});
  dir.write("tokenizer.json", json.dump());
  for (const char* name : {"config.json", "model.safetensors"}) {
    std::filesystem::create_symlink(testing::kModel / name, dir.path() / name);
  }
}

TEST_F(Generate, StopsAtSpecialTokensThatStopStringsAskFor) {
  options_.sampling.max_tokens = 12;
  Session plain = engine_.new_session(300);
  const std::vector<TokenId> tokens = run(plain).tokens;
  const auto is_new = [&](std::size_t at) {
    return std::find(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(at),
                     tokens[at]) == tokens.begin() + static_cast<std::ptrdiff_t>(at);
  };
  std::size_t at = 4;
  while (at < tokens.size() && !is_new(at)) ++at;
  ASSERT_LT(at, tokens.size());
  const testing::TempDir dir;
  write_model(dir, tokens[at], "<|stop|>");
  EngineConfig config = config_for();
  config.model = dir.path();
  Engine engine = Engine::open(config);
  const std::span<const TokenId> before = std::span(tokens).first(at);
  const std::string text = engine.tokenizer().decode(before);
  const std::string last = engine.tokenizer().decode(before.last(1));
  const std::string rest = engine.tokenizer().decode(std::span(tokens).subspan(at));
  struct Case {
    std::string stop;
    std::string text;
  };
  for (const Case& c : {Case{"<|stop|>", text},
                        {last + "<|stop|>", text.substr(0, text.size() - last.size())},
                        {"<|stop|>" + rest.substr(0, 3), text}}) {
    SCOPED_TRACE(c.stop);
    std::string streamed;
    GenerateOptions stopping = options_;
    stopping.on_text = [&](std::string_view piece) { streamed += piece; };
    stopping.sampling.stop = {c.stop};
    Session session = engine.new_session(300);
    const GenerateResult result = generate(engine, session, prompt_, stopping);
    EXPECT_EQ(result.reason, FinishReason::stop_string);
    EXPECT_EQ(result.text, c.text);
    EXPECT_EQ(streamed, c.text);
    // One that ends the text anyway is taken for what was asked for.
    if (!c.stop.ends_with("<|stop|>")) continue;
    GenerateOptions ending = stopping;
    ending.ignore_eos = false;
    ending.end_tokens = {tokens[at]};
    session.truncate(0);
    const GenerateResult ended = generate(engine, session, prompt_, ending);
    EXPECT_EQ(ended.reason, FinishReason::stop_string);
    EXPECT_EQ(ended.text, c.text);
    EXPECT_EQ(ended.tokens.size(), at);
  }
  options_.sampling.stop = {"<|stop|> is not what follows"};
  Session session = engine.new_session(300);
  EXPECT_EQ(generate(engine, session, prompt_, options_).text, text + rest);
}

}  // namespace
}  // namespace sluice
