// Calls of several sessions of one engine take turns, and memory that runs out meanwhile leaves
// every session as it was.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "sluice/engine.h"
#include "sluice/errors.h"
#include "tests/support/expect.h"
#include "tests/support/model_sessions.h"

namespace sluice {
namespace {

using testing::book_tokens;
using testing::config_for;
using testing::continuation;
using testing::copy_of;
using testing::expect_error;
using testing::largest_difference;
using testing::likeliest;

// A prompt does not keep other sessions waiting until it is through: their steps come between its
// pieces, and nobody's answer changes.
TEST(Turns, StepsComeBetweenThePiecesOfAPrompt) {
  Engine engine = Engine::open(config_for());
  const std::vector<TokenId> book = book_tokens(engine, 2600);
  SessionOptions options;
  options.context = 2700;
  options.sequences = 3;
  Session answering = engine.new_session(options);
  Session alone = answering.sibling();
  Session reading = answering.sibling();
  const std::span<const TokenId> prompt = std::span(book).first(100);
  const std::vector<TokenId> expected = continuation(alone, prompt, 12);
  TokenId next = likeliest(answering.prefill(prompt));

  std::atomic<std::int64_t> pieces = 0;
  std::atomic<bool> is_through = false;
  std::thread reader([&] {
    reading.prefill(book, [&](std::int64_t, std::int64_t) {
      ++pieces;
      return true;
    });
    is_through = true;
  });
  while (pieces == 0) std::this_thread::yield();
  std::vector<TokenId> actual = {next};
  int between = 0;
  while (actual.size() < expected.size()) {
    next = likeliest(answering.decode(next));
    actual.push_back(next);
    if (!is_through) ++between;
  }
  // A call for the session that is reading waits for the whole prompt.
  reading.decode(book.front());
  EXPECT_EQ(reading.length(), 2601);
  reader.join();
  EXPECT_EQ(actual, expected);
  EXPECT_GE(between, 5);
}

// Memory that ran out, partway or before a correction, leaves the tokens that there were.
TEST(Room, ThatIsMissingChangesNothing) {
  Engine engine = Engine::open(config_for());
  const std::vector<TokenId> book = book_tokens(engine, 900);
  SessionOptions options;
  options.context = 900;
  options.sequences = 2;
  options.tokens = 900;  // and a block for each sequence
  options.policies = {engine.policy("tidaldecode correct=32")};
  auto first = std::make_unique<Session>(engine.new_session(options));
  Session second = first->sibling();
  first->prefill(std::span(book).first(400));
  expect_error(ErrorCode::memory, "", [&] { second.prefill(book); });
  EXPECT_EQ(second.length(), 0);
  second.prefill(std::span(book).first(500));
  EXPECT_EQ(second.length(), 500);
}

TEST(Room, ThatIsMissingForACorrectionChangesNothing) {
  Engine engine = Engine::open(config_for());
  const std::vector<TokenId> book = book_tokens(engine, 400);
  SessionOptions options;
  options.context = 400;
  options.sequences = 4;
  options.tokens = 400;  // and a block for each sequence
  options.policies = {engine.policy("tidaldecode correct=32")};
  Session parent = engine.new_session(options);
  parent.prefill(std::span(book).first(200));
  for (std::size_t i = 200; i < 203; ++i) parent.decode(book[i]);
  Session child = parent.fork();
  // Others take what is left of the memory.
  Session fillers[] = {parent.sibling(), parent.sibling()};
  for (Session& filler : fillers) {
    try {
      for (const TokenId token : book) filler.prefill({&token, 1});
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), ErrorCode::memory) << error.what();
    }
  }
  // What was decoded is to be corrected first, in a block that the parent has, too.
  const std::span<const TokenId> more = std::span(book).subspan(203, 2);
  expect_error(ErrorCode::memory, "", [&] { child.prefill(more); });
  EXPECT_EQ(child.length(), 203);
  fillers[0].truncate(0);
  const std::vector<float> late = copy_of(child.prefill(more));
  Session alone = engine.new_session(options);
  alone.prefill(std::span(book).first(200));
  for (std::size_t i = 200; i < 203; ++i) alone.decode(book[i]);
  EXPECT_LT(largest_difference(late, alone.prefill(more)), 1e-3f);
}

}  // namespace
}  // namespace sluice
