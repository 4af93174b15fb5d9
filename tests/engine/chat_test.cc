// A conversation in one session: what the session holds is what the template writes, and a
// question costs what it adds.
#include "sluice/chat.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/support/chat_checkpoint.h"

namespace sluice {
namespace {

using testing::ChatCheckpoint;
using testing::expect_error;

const std::vector<std::string> kQuestions = {"Hello", "  And\nthen? ", "\u00e9\u65e5", "", "x"};

Engine open(const ChatCheckpoint& checkpoint) {
  EngineConfig config;
  config.model = checkpoint.path();
  config.compute = DType::f32;
  config.kv_dtype = DType::f32;
  config.chunk = 32;
  return Engine::open(config);
}

ChatFormat format_of(const ChatCheckpoint& checkpoint, const Engine& engine) {
  return ChatFormat::load(checkpoint.path(), engine.tokenizer());
}

GenerateOptions at_most(int tokens) {
  GenerateOptions options;
  options.sampling.max_tokens = tokens;
  return options;
}

std::vector<TokenId> copy_of(std::span<const TokenId> ids) { return {ids.begin(), ids.end()}; }

std::size_t common(std::span<const TokenId> a, std::span<const TokenId> b) {
  const std::size_t most = std::min(a.size(), b.size());
  std::size_t i = 0;
  while (i < most && a[i] == b[i]) ++i;
  return i;
}

// Whether the last answer may be written otherwise than it was drawn: with a control token in it
// that is no text, or with white space around it (or a part of such a character) that is removed.
bool is_written_anew(const Chat& chat, const Tokenizer& tokenizer, bool trims) {
  if (chat.turns().empty()) return false;
  const ChatTurn& turn = chat.turns().back();
  if (tokenizer.decode(turn.tokens, true) != turn.answer) return true;
  const auto may_be_space = [](char c) { return c <= ' '; };
  return trims && !turn.answer.empty() &&
         (may_be_space(turn.answer.front()) || may_be_space(turn.answer.back()));
}

class ChatTest : public ::testing::TestWithParam<const char*> {};

TEST_P(ChatTest, TheSessionHoldsWhatTheTemplateWrites) {
  const ChatCheckpoint checkpoint(ChatCheckpoint::format(GetParam()));
  Engine engine = open(checkpoint);
  const ChatFormat format = format_of(checkpoint, engine);
  for (const std::string& system : {std::string(), std::string("Be brief.")}) {
    SCOPED_TRACE(system);
    Chat chat(engine, engine.new_session(1000), format_of(checkpoint, engine), system);
    std::uint64_t prefilled = 0;
    for (const std::string& question : kQuestions) {
      SCOPED_TRACE(question);
      std::vector<ChatTurn> turns(chat.turns().begin(), chat.turns().end());
      turns.push_back({question, {}, {}});
      const std::vector<TokenId> written = format.render(system, turns);
      const std::vector<TokenId> before = copy_of(chat.tokens());
      const std::size_t kept = common(before, written);
      const bool moved = !system.empty() && format.moves_system();
      const bool trims = GetParam() == std::string_view("llama31");
      if (!moved && !is_written_anew(chat, engine.tokenizer(), trims)) {
        EXPECT_EQ(kept, before.size());
      }

      const GenerateResult result = chat.ask(question, at_most(7));
      EXPECT_EQ(result.timings.prefill_tokens, static_cast<std::int64_t>(written.size() - kept));
      prefilled += written.size() - kept;
      EXPECT_EQ(chat.session().ledger().tokens(Phase::prefill), prefilled);
      std::vector<TokenId> expected = written;
      expected.insert(expected.end(), result.tokens.begin(), result.tokens.end());
      expected.resize(static_cast<std::size_t>(chat.session().length()));
      EXPECT_EQ(copy_of(chat.tokens()), expected);
      EXPECT_GE(expected.size() + 1, written.size() + result.tokens.size());
      ASSERT_EQ(chat.turns().size(), turns.size());
      EXPECT_EQ(chat.turns().back().answer, result.text);

      // A session that gets the whole conversation at once says the same.
      Session fresh = engine.new_session(1000);
      GenerateOptions options = at_most(7);
      options.end_tokens = copy_of(format.end_tokens());
      EXPECT_EQ(generate(engine, fresh, written, options).tokens, result.tokens);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, ChatTest,
                         ::testing::Values("chatml_default", "qwen3", "llama31", "mistral3",
                                           "mistral7"),
                         [](const auto& tested) { return std::string(tested.param); });

TEST(Chat, AnswersEndAtTheTemplatesToken) {
  const nlohmann::json format = ChatCheckpoint::format("mistral7");
  GenerateOptions options = at_most(20);
  options.sampling.temperature = 1;
  options.sampling.seed = 3;
  std::vector<TokenId> drawn;
  {
    const ChatCheckpoint checkpoint(format);
    Engine engine = open(checkpoint);
    Chat chat(engine, engine.new_session(100), format_of(checkpoint, engine));
    drawn = chat.ask("Hello", options).tokens;
  }
  // The first token drawn that neither came before it nor stands in the question.
  const auto is_new = [&](std::size_t i) {
    return drawn[i] > 'o' && std::find(drawn.begin(), drawn.begin() + static_cast<int>(i),
                                       drawn[i]) == drawn.begin() + static_cast<int>(i);
  };
  std::size_t at = 1;
  while (at < drawn.size() && !is_new(at)) ++at;
  ASSERT_LT(at, drawn.size());
  const ChatCheckpoint plain(format);
  const TokenId end = format_of(plain, open(plain)).end_tokens()[0];
  // That token is now written </s>, and the model says it as before.
  const ChatCheckpoint checkpoint(format, drawn[at], end);
  Engine engine = open(checkpoint);
  Chat chat(engine, engine.new_session(100), format_of(checkpoint, engine));
  const GenerateResult result = chat.ask("Hello", options);
  EXPECT_EQ(result.reason, FinishReason::end_of_text);
  EXPECT_EQ(result.tokens.size(), at);
  // It is fed with the next question.
  chat.ask("More", at_most(2));
  EXPECT_EQ(std::count(chat.tokens().begin(), chat.tokens().end(), drawn[at]), 1);
}

TEST(Chat, AFullContextIsAnErrorThatChangesNothing) {
  const ChatCheckpoint checkpoint(ChatCheckpoint::format("chatml"));
  Engine engine = open(checkpoint);
  Chat chat(engine, engine.new_session(80), format_of(checkpoint, engine));
  std::size_t answered = 0;
  const auto ask = [&] {
    for (; answered < 10; ++answered) chat.ask("Hello", at_most(4));
  };
  expect_error(ErrorCode::prompt, "the planned context of 80 has no room", ask);
  EXPECT_GT(answered, 0u);
  EXPECT_EQ(chat.turns().size(), answered);
  expect_error(ErrorCode::prompt, "no room", ask);
  chat.reset();
  EXPECT_EQ(chat.session().length(), 0);
  // An answer ends where the context does.
  const GenerateResult result = chat.ask("Hi", at_most(1000));
  EXPECT_EQ(result.reason, FinishReason::max_tokens);
  EXPECT_LE(chat.session().length(), 80);
  EXPECT_GT(chat.session().length(), 70);
}

TEST(Chat, MovesAndLeavesNothing) {
  const ChatCheckpoint checkpoint(ChatCheckpoint::format("chatml"));
  Engine engine = open(checkpoint);
  Chat chat(engine, engine.new_session(200), format_of(checkpoint, engine));
  Chat moved = std::move(chat);
  // NOLINTNEXTLINE(bugprone-use-after-move): what is left is what is tried
  expect_error(ErrorCode::usage, "moved from", [&] { chat.ask("x", at_most(1)); });
  expect_error(ErrorCode::usage, "moved from", [&] { chat.reset(); });
  EXPECT_EQ(moved.ask("x", at_most(2)).tokens.size(), 2u);
}

TEST(Chat, WhatIsNotAnsweredWasNotAsked) {
  const ChatCheckpoint checkpoint(ChatCheckpoint::format("chatml"));
  Engine engine = open(checkpoint);
  const auto answers = [&](bool disturbed) {
    Chat chat(engine, engine.new_session(1000), format_of(checkpoint, engine));
    std::vector<TokenId> all = chat.ask("Hello", at_most(5)).tokens;
    if (disturbed) {
      std::atomic<bool> interrupt = false;
      GenerateOptions options = at_most(5);
      options.interrupt = [&] { return interrupt.load(); };
      options.on_prefill = [&](std::int64_t done, std::int64_t) {
        interrupt = done >= 64;
        return true;
      };
      const GenerateResult result = chat.ask(std::string(200, 'x'), options);
      EXPECT_EQ(result.reason, FinishReason::interrupted);
      EXPECT_TRUE(result.tokens.empty());
      GenerateOptions throwing = at_most(5);
      throwing.on_text = [](std::string_view) { throw std::runtime_error("no room on the disk"); };
      const std::size_t held = chat.tokens().size();
      EXPECT_THROW(chat.ask("And you?", throwing), std::runtime_error);
      EXPECT_LE(chat.tokens().size(), held) << "nothing of what failed";
      throwing.on_text = [&](std::string_view) { chat.ask("And you?", at_most(1)); };
      expect_error(ErrorCode::usage, "callback", [&] { chat.ask("Why?", throwing); });
      throwing.on_text = [&](std::string_view) { chat.reset(); };
      expect_error(ErrorCode::usage, "callback", [&] { chat.ask("Why?", throwing); });
      expect_error(ErrorCode::prompt, "not UTF-8", [&] { chat.ask("\xFF", at_most(1)); });
      expect_error(ErrorCode::usage, "temperature", [&] {
        GenerateOptions wrong = at_most(1);
        wrong.sampling.temperature = -1;
        chat.ask("And you?", wrong);
      });
    }
    EXPECT_EQ(chat.turns().size(), 1u);
    const std::vector<TokenId> next = chat.ask("What?", at_most(5)).tokens;
    all.insert(all.end(), next.begin(), next.end());
    return all;
  };
  EXPECT_EQ(answers(true), answers(false));
}

TEST(Chat, PenalizesTheWholeConversation) {
  const ChatCheckpoint checkpoint(ChatCheckpoint::format("chatml"));
  Engine engine = open(checkpoint);
  Chat chat(engine, engine.new_session(400), format_of(checkpoint, engine));
  GenerateOptions options = at_most(8);
  options.ignore_eos = true;
  options.sampling.repetition_penalty = 1e6;  // no token comes twice
  std::vector<TokenId> answers = chat.ask("Hello", options).tokens;
  for (const char* question : {"And", "then"}) {
    const std::vector<TokenId> more = chat.ask(question, options).tokens;
    answers.insert(answers.end(), more.begin(), more.end());
  }
  ASSERT_EQ(answers.size(), 24u);
  std::sort(answers.begin(), answers.end());
  EXPECT_EQ(std::unique(answers.begin(), answers.end()), answers.end());
}

TEST(Chat, AnInterruptedAnswerIsClosedAndTheTalkGoesOn) {
  const ChatCheckpoint checkpoint(ChatCheckpoint::format("chatml"));
  Engine engine = open(checkpoint);
  const ChatFormat format = format_of(checkpoint, engine);
  Chat chat(engine, engine.new_session(1000), format_of(checkpoint, engine));
  std::atomic<bool> interrupt = false;
  GenerateOptions options = at_most(50);
  options.interrupt = [&] { return interrupt.load(); };
  options.on_text = [&](std::string_view) { interrupt = true; };
  const GenerateResult result = chat.ask("Hello", options);
  EXPECT_EQ(result.reason, FinishReason::interrupted);
  EXPECT_LT(result.tokens.size(), 50u);
  ASSERT_EQ(chat.turns().size(), 1u);
  chat.ask("More", at_most(2));
  const std::string text = engine.tokenizer().decode(chat.tokens(), true);
  EXPECT_THAT(text, ::testing::HasSubstr(result.text + "<|im_end|>\n<|im_start|>user\nMore"));
}

}  // namespace
}  // namespace sluice
