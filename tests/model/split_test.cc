#include "model/split.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>

#include "model/onig.h"
#include "tests/io/test_files.h"
#include "tests/model/random_text.h"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using testing::expect_error;

constexpr const char* kLlama =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

std::vector<std::string> split(const Splitter& splitter, std::string_view text) {
  std::vector<std::string> pieces;
  Splitter::Run run(splitter, text.size());
  run.split(text, [&](std::string_view piece) { pieces.emplace_back(piece); });
  return pieces;
}

TEST(Splitter, CutsAsLlamaDoes) {
  const Splitter splitter({kLlama});
  EXPECT_THAT(split(splitter, ""), ElementsAre());
  EXPECT_THAT(split(splitter, "It's 12345  fine!\n\n x"),
              ElementsAre("It", "'s", " ", "123", "45", " ", " fine", "!\n\n", " x"));
  EXPECT_THAT(split(splitter, "WE'LL  "), ElementsAre("WE", "'LL", "  "));
  EXPECT_THAT(split(splitter, "\u00e9t\u00e9\u3000\u6f22\u5b57"),
              ElementsAre("\u00e9t\u00e9", "\u3000\u6f22\u5b57"));
}

TEST(Splitter, MongolianVowelSeparatorIsNoSpace) {
  const Splitter splitter({R"(\s+)"});
  EXPECT_THAT(split(splitter, "a\u0085\u1680b\u180ec"),
              ElementsAre("a", "\u0085\u1680", "b\u180ec"));
}

TEST(Splitter, EscapesKnowUnicode) {
  EXPECT_THAT(split(Splitter({R"(\d+)"}), "a1\u0663b"), ElementsAre("a", "1\u0663", "b"));
  EXPECT_THAT(split(Splitter({R"((?i:s))"}), "a\u017fS"), ElementsAre("a", "\u017f", "S"));
}

TEST(Splitter, WhatLiesBetweenMatchesIsAPiece) {
  EXPECT_THAT(split(Splitter({R"(\d)"}), "ab12c"), ElementsAre("ab", "1", "2", "c"));
  EXPECT_THAT(split(Splitter({}), "ab 12"), ElementsAre("ab 12"));
}

TEST(Splitter, LaterExpressionsCutThePiecesOfEarlierOnes) {
  const Splitter splitter({R"(\p{N}{1,3})", R"([a-z]+)"});
  EXPECT_THAT(split(splitter, "ab-1234cd"), ElementsAre("ab", "-", "123", "4", "cd"));
}

TEST(Splitter, EmptyMatchesCutOnce) {
  EXPECT_THAT(split(Splitter({R"((?=b))"}), "\u00e9bb"), ElementsAre("\u00e9", "b", "b"));
  EXPECT_THAT(split(Splitter({R"(x*)"}), "axb"), ElementsAre("a", "x", "b"));
}

TEST(Splitter, PiecesAreTheTextWhateverItIs) {
  const Splitter splitter({R"(\p{N})", kLlama});
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const std::string text = testing::random_text(random, 40);
    std::string joined;
    for (const std::string& piece : split(splitter, text)) {
      ASSERT_FALSE(piece.empty());
      joined += piece;
    }
    ASSERT_EQ(joined, text);
  }
}

TEST(Splitter, LongWhiteSpaceIsNoProblem) {
  const Splitter splitter({kLlama});
  const std::string spaces(1 << 20, ' ');
  EXPECT_THAT(split(splitter, spaces), ElementsAre(spaces));
  EXPECT_EQ(split(splitter, spaces + "x").size(), 2u);
}

TEST(Splitter, AnExpressionThatDoesNotComeBackIsAnError) {
  const Splitter splitter({"(?:a|aa|aaa)+b"});
  expect_error(ErrorCode::tokenizer, "match limit",
               [&] { split(splitter, std::string(200, 'a') + "cb"); });
}

TEST(Splitter, TheLimitIsForTheWholeText) {
  // 2^20 ways at each place, which none of them by itself would forbid.
  for (const char* pattern : {"(?:(?:a|a){20}b|.)", "(?:a|a){20}b"}) {
    SCOPED_TRACE(pattern);
    const Splitter splitter({pattern});
    const auto start = std::chrono::steady_clock::now();
    expect_error(ErrorCode::tokenizer, "a text of 2000 bytes again and again (match limit",
                 [&] { split(splitter, std::string(1998, 'a') + "cb"); });
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
  }
  const Splitter splitter({"(?:(?:a|a){20}b|.)"});
  Splitter::Run run(splitter, 2000);
  const auto ignore = [](std::string_view) {};
  expect_error(ErrorCode::tokenizer, "match limit", [&] {
    for (int part = 0; part < 80; ++part) run.split(std::string(25, 'a'), ignore);
  });
}

TEST(Splitter, BacktrackingChangesNoPiece) {
  // More steps than are free, at the first place and at the last.
  const std::string run(14, 'a');
  EXPECT_THAT(split(Splitter({"(?:a|a){14}b|x"}), "-" + run + "b\u00e9x" + run + "cx"),
              ElementsAre("-", run + "b", "\u00e9", "x", run + "c", "x"));
}

TEST(Splitter, AfterBacktrackingOtherTextIsCutAsBefore) {
  const std::string costly = "(?:z|z){14}b|";
  for (const std::string& pattern : {costly + kLlama, costly + R"(\p{N}{1,3})", costly + "(?=a)"}) {
    const Splitter splitter({pattern});
    const auto cut = [&](Splitter::Run& run, const std::string& text) {
      std::vector<std::string> pieces;
      run.split(text, [&](std::string_view piece) { pieces.emplace_back(piece); });
      return pieces;
    };
    for (std::uint64_t seed = 0; seed < 300; ++seed) {
      SCOPED_TRACE(pattern + ", seed " + std::to_string(seed));
      std::mt19937_64 random(seed);
      const std::string text = testing::random_text(random, 60);
      Splitter::Run fresh(splitter, text.size());
      Splitter::Run burdened(splitter, text.size());
      cut(burdened, std::string(15, 'z'));
      ASSERT_EQ(cut(burdened, text), cut(fresh, text));
    }
  }
}

TEST(Splitter, ABrokenExpressionIsAnError) {
  expect_error(ErrorCode::tokenizer, "does not compile", [] { Splitter({"(a"}); });
  expect_error(ErrorCode::tokenizer, "does not compile", [] { Splitter({"a\\"}); });
  expect_error(ErrorCode::tokenizer, "does not compile", [] { Splitter({R"(\p{Nonsense})"}); });
  expect_error(ErrorCode::unsupported, "65537 bytes", [] { Splitter({std::string(65537, 'a')}); });
}

TEST(Onig, PassesWhatBothDialectsReadAlike) {
  EXPECT_EQ(onig_to_pcre2(R"([^\s\S]\s)"), R"([^\p{White_Space}\P{White_Space}]\p{White_Space})");
  EXPECT_EQ(onig_to_pcre2(R"(\\s\u4e00\x{41}+)"), R"(\\s\x{4e00}\x{41}+)");
  EXPECT_EQ(onig_to_pcre2(R"((?i:a)(?>b)(c){2,3}[\[\]&]++)"), R"((?i:a)(?>b)(c){2,3}[\[\]&]++)");
}

TEST(Onig, RefusesByNameWhatTheyReadDifferently) {
  for (const char* construct : {R"(\w)", R"(\b)", R"(\h)", R"(\1)", "(?<name>a)", "(?i)", "(*UTF)",
                                "a{,2}", "a{2}+", "[a&&b]", "[a[b]]", "[]a]", R"(\p)", R"(\x41)"}) {
    SCOPED_TRACE(construct);
    expect_error(ErrorCode::unsupported, "does not support",
                 [&] { onig_to_pcre2(std::string("x") + construct); });
  }
}

}  // namespace
}  // namespace sluice
