// Prefixes that one batcher saves and the next one loads: requests that begin with them compute
// only what is new, and get the same answers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sluice/batcher.h"
#include "sluice/engine.h"
#include "sluice/errors.h"
#include "tests/support/expect.h"
#include "tests/support/served.h"
#include "tests/support/small_sessions.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_disk.h"

namespace sluice {
namespace {

using testing::config_of;
using ::testing::ElementsAre;
using testing::expect_error;
using ::testing::HasSubstr;
using testing::OnDisk;
using testing::random_tokens;
using testing::RandomCheckpoint;
using testing::TempDir;

namespace fs = std::filesystem;

constexpr std::int64_t kPrompt = 300;

BatcherOptions options_of(const Engine& engine, const std::vector<std::string>& policies) {
  BatcherOptions options;
  options.context = testing::kSmallContext;
  options.running = 2;
  options.cached = 3;
  options.loads_prefixes = true;
  for (const std::string& policy : policies) options.policies.push_back(engine.policy(policy));
  return options;
}

std::vector<TokenId> prompt_of(std::uint64_t seed) {
  return random_tokens(static_cast<std::size_t>(kPrompt), seed);
}

struct Answer {
  std::vector<TokenId> tokens;
  std::int64_t reused = 0;  // of the prompt
};

Answer answer_to(Batcher& batcher, std::vector<TokenId> prompt,
                 const std::optional<Policy>& policy = {}) {
  Request request;
  request.prompt = std::move(prompt);
  request.sampling.max_tokens = 6;
  request.policy = policy;
  Stream stream = batcher.submit(std::move(request));
  Answer answer;
  answer.tokens = testing::read_all(stream).front().tokens;
  answer.reused = stream.usage().reused_tokens;
  return answer;
}

std::vector<std::string> names_in(const fs::path& directory) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

class OfPolicy : public ::testing::TestWithParam<const char*> {};

TEST_P(OfPolicy, NextBatcherGoesOnFromThem) {
  const RandomCheckpoint model(1);
  Engine engine = Engine::open(config_of(model));
  const BatcherOptions options = options_of(engine, {GetParam()});
  const TempDir dir;
  std::vector<Answer> expected;
  {
    Batcher batcher(engine, options);
    for (const std::uint64_t seed : {1, 2}) expected.push_back(answer_to(batcher, prompt_of(seed)));
    const SavedPrefixes saved = batcher.save_prefixes(dir.path() / "new");
    EXPECT_EQ(saved.sessions, 2);
    EXPECT_GE(saved.tokens, 2 * kPrompt);
    EXPECT_THAT(saved.skipped, ElementsAre());
  }
  Batcher batcher(engine, options);
  const SavedPrefixes loaded = batcher.load_prefixes(dir.path() / "new");
  EXPECT_EQ(loaded.sessions, 2);
  EXPECT_EQ(batcher.stats().cached, 2);
  const bool in_pages = options.policies.front().prefill.pages > 0.0;
  for (const std::uint64_t seed : {2, 1}) {
    const Answer answer = answer_to(batcher, prompt_of(seed));
    EXPECT_EQ(answer.reused, in_pages ? 2 * kPageTokens : kPrompt - 1);
    EXPECT_EQ(answer.tokens, expected[seed - 1].tokens);
  }
  // What is there already is not written again.
  EXPECT_EQ(batcher.save_prefixes(dir.path() / "new").sessions, 2);
  EXPECT_EQ(names_in(dir.path() / "new").size(), 2u);
}

INSTANTIATE_TEST_SUITE_P(SavedPrefixes, OfPolicy,
                         ::testing::Values("dense", "values", "compact prefill=pages(0.9)",
                                           "tidaldecode anchors=2"));

TEST_F(OnDisk, PrefixesAreAttachedToAPoolOnDisk) {
  const RandomCheckpoint model(2);
  EngineConfig config = config_of(model);
  config.disk = DiskConfig{{parent_}, {}};
  Engine engine = Engine::open(config);
  BatcherOptions options = options_of(engine, {"values"});
  options.context = 20 * testing::kSmallContext;
  const TempDir dir;
  Answer expected;
  {
    Batcher batcher(engine, options);
    expected = answer_to(batcher, prompt_of(1));
    batcher.save_prefixes(dir.path());
  }
  options.host_memory = 12 << 20;
  options.device_memory = 12 << 20;
  Batcher batcher(engine, options);
  ASSERT_TRUE(batcher.plan().on_disk);
  EXPECT_EQ(batcher.load_prefixes(dir.path()).sessions, 1);
  const Answer answer = answer_to(batcher, prompt_of(1));
  EXPECT_EQ(answer.reused, kPrompt - 1);
  EXPECT_EQ(answer.tokens, expected.tokens);
}

TEST(SavedPrefixes, OfTheCallersOwnSessionsAreTakenAndLeft) {
  const RandomCheckpoint model(3);
  Engine engine = Engine::open(config_of(model));
  const TempDir dir;
  Session session = engine.new_session(testing::kSmallContext);
  session.prefill(prompt_of(1));
  session.save(dir.path() / "book", "a note of the caller's");
  BatcherOptions options = options_of(engine, {"values", "values prefill=pages(0.9)"});
  options.cached = 1;
  Batcher batcher(engine, options);
  EXPECT_EQ(batcher.load_prefixes(dir.path()).sessions, 1);
  std::vector<TokenId> prompt = prompt_of(1);
  prompt.push_back(5);
  // Rows of a dense prompt are no rows of a sparse one.
  EXPECT_EQ(answer_to(batcher, prompt, options.policies[1]).reused, 0);
  EXPECT_EQ(batcher.load_prefixes(dir.path()).sessions, 1);
  EXPECT_EQ(answer_to(batcher, prompt).reused, kPrompt);
  for (const std::uint64_t seed : {2, 3}) {
    answer_to(batcher, prompt_of(seed));
    const SavedPrefixes saved = batcher.save_prefixes(dir.path() / "");
    EXPECT_EQ(saved.sessions, 1);
    EXPECT_THAT(saved.skipped, ElementsAre());
  }
  // Of its own, the newest one is left.
  EXPECT_THAT(names_in(dir.path()), ElementsAre("book", HasSubstr("prefix-")));
  Batcher next(engine, options);
  next.load_prefixes(dir.path());
  EXPECT_EQ(answer_to(next, prompt_of(3)).reused, kPrompt - 1);
}

TEST(SavedPrefixes, ThatAddLittleAreSavedOnce) {
  const RandomCheckpoint model(4);
  Engine engine = Engine::open(config_of(model));
  const BatcherOptions options = options_of(engine, {"dense"});
  const TempDir dir;
  Batcher batcher(engine, options);
  for (const TokenId question : {1, 2, 3}) {
    std::vector<TokenId> prompt = prompt_of(1);
    prompt.push_back(question);
    answer_to(batcher, std::move(prompt));
  }
  EXPECT_EQ(batcher.stats().cached, 3);
  EXPECT_EQ(batcher.save_prefixes(dir.path()).sessions, 1);
}

TEST(SavedPrefixes, ThatDoNotFitAreSkippedAndLeft) {
  const RandomCheckpoint model(5);
  const RandomCheckpoint other_model(6);
  Engine engine = Engine::open(config_of(model));
  Engine other = Engine::open(config_of(other_model));
  const TempDir dir;
  const auto save = [&](Engine& of, std::size_t tokens, const std::string& name) {
    Session session = of.new_session(testing::kSmallContext);
    session.prefill(random_tokens(tokens, tokens));
    session.save(dir.path() / name);
  };
  save(other, 200, "prefix-of-other");
  save(engine, 900, "long");
  save(engine, 250, "prefix-damaged");
  { std::ofstream(dir.path() / "prefix-damaged" / "manifest.json") << "no JSON"; }
  save(engine, 220, "good");
  fs::create_directory(dir.path() / "empty");
  { std::ofstream(dir.path() / "file") << "text"; }
  BatcherOptions options = options_of(engine, {"values"});
  options.context = 400;
  Batcher batcher(engine, options);
  const SavedPrefixes loaded = batcher.load_prefixes(dir.path());
  EXPECT_EQ(loaded.sessions, 1);
  EXPECT_EQ(loaded.tokens, 220);
  EXPECT_THAT(loaded.skipped, ::testing::UnorderedElementsAre(
                                  HasSubstr("another model"), HasSubstr("900 tokens"),
                                  HasSubstr("is not JSON"), HasSubstr("no saved session")));
  answer_to(batcher, prompt_of(1));
  batcher.save_prefixes(dir.path());
  EXPECT_EQ(names_in(dir.path()).size(), 7u);
}

TEST(SavedPrefixes, AreAsManyAsThereIsRoomFor) {
  const RandomCheckpoint model(9);
  Engine engine = Engine::open(config_of(model));
  const TempDir dir;
  for (const std::uint64_t seed : {1, 2, 3, 4}) {
    Session session = engine.new_session(testing::kSmallContext);
    session.prefill(random_tokens(1000, seed));
    session.save(dir.path() / std::to_string(seed));
  }
  BatcherOptions options = options_of(engine, {"values"});
  options.tokens = options.context;
  options.cached = 4;
  Batcher batcher(engine, options);
  const SavedPrefixes loaded = batcher.load_prefixes(dir.path());
  EXPECT_GE(loaded.sessions, 1);
  EXPECT_LT(loaded.sessions, 4);
  EXPECT_THAT(loaded.skipped, ElementsAre(HasSubstr("no room")));
  // The newest is there, and requests get the room of the others.
  std::vector<TokenId> prompt = random_tokens(1000, 4);
  prompt.push_back(1);
  EXPECT_EQ(answer_to(batcher, prompt).reused, 1000);
  EXPECT_EQ(answer_to(batcher, random_tokens(1100, 5)).tokens.size(), 6u);
}

TEST(SavedPrefixes, AreSavedWhileRequestsRun) {
  const RandomCheckpoint model(7);
  Engine engine = Engine::open(config_of(model));
  const BatcherOptions options = options_of(engine, {"values"});
  Batcher batcher(engine, options);
  const Answer expected = answer_to(batcher, prompt_of(1));
  answer_to(batcher, prompt_of(2));
  const TempDir dir;
  Request request;
  request.prompt = prompt_of(3);
  request.sampling.max_tokens = 200;
  request.ignore_eos = true;
  Stream stream = batcher.submit(std::move(request));
  for (int i = 0; i < 5; ++i) EXPECT_EQ(batcher.save_prefixes(dir.path()).sessions, 2);
  EXPECT_EQ(testing::read_all(stream).front().tokens.size(), 200u);
  Batcher next(engine, options);
  next.load_prefixes(dir.path());
  EXPECT_EQ(answer_to(next, prompt_of(1)).tokens, expected.tokens);
}

TEST(SavedPrefixes, NeedADirectoryAndABufferThatWasPlanned) {
  const RandomCheckpoint model(8);
  Engine engine = Engine::open(config_of(model));
  BatcherOptions options = options_of(engine, {"values"});
  const TempDir dir;
  const fs::path file = dir.write("file", "text");
  Batcher batcher(engine, options);
  for (const fs::path& path : {file, dir.path() / "none" / "none"}) {
    expect_error(ErrorCode::io, "directory for prefixes", [&] { batcher.load_prefixes(path); });
    expect_error(ErrorCode::io, "directory for prefixes", [&] { batcher.save_prefixes(path); });
  }
  EXPECT_EQ(answer_to(batcher, prompt_of(1)).tokens.size(), 6u);
  options.loads_prefixes = false;
  Batcher without(engine, options);
  expect_error(ErrorCode::usage, "`loads_prefixes`", [&] { without.load_prefixes(dir.path()); });
}

}  // namespace
}  // namespace sluice
