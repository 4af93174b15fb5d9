#include "engine/split.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>

#include "engine/onig.h"
#include "engine/utf8.h"
#include "tests/engine/random_text.h"
#include "tests/io/test_files.h"

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
  for (const char* pattern : {"a)", "[a", "[a[b]", "*", "a|+", "{2}", "^*", "[z-a]", "\xFF"}) {
    SCOPED_TRACE(pattern);
    expect_error(ErrorCode::tokenizer, "does not compile", [&] { Splitter({pattern}); });
  }
}

TEST(Splitter, AnExpressionPastALimitIsAnError) {
  expect_error(ErrorCode::unsupported, "65537 bytes", [] { Splitter({std::string(65537, 'a')}); });
  std::string ideographs;
  for (char32_t c = 0x4E00; c < 0x4E00 + 300; ++c) append_utf8(ideographs, c);
  expect_error(ErrorCode::unsupported, "256 kinds of characters", [&] { Splitter({ideographs}); });
  EXPECT_THAT(split(Splitter({"[" + ideographs + "]+"}), "a\u4e00\u4e01"),
              ElementsAre("a", "\u4e00\u4e01"));
  for (const std::string open : {"(", "[a"}) {
    std::string nested;
    for (int i = 0; i < 10000; ++i) nested += open;
    expect_error(ErrorCode::unsupported, open == "(" ? "((((" : "[[[[",
                 [&] { Splitter({nested}); });
  }
  // Classes of 1,001 kinds that fall into few: {a}, {a, b}, ...
  std::string classes;
  for (char32_t c = 0x4E01; c < 0x4E00 + 1100; ++c) {
    classes += "[\u4e00-";
    append_utf8(classes, c);
    classes += "]";
  }
  expect_error(ErrorCode::unsupported, "1000 different", [&] { Splitter({classes}); });
  expect_error(ErrorCode::unsupported, "65535", [] { Splitter({"a{65536}"}); });
  expect_error(ErrorCode::unsupported, "PCRE2", [] { Splitter({"(?:[ab]{60000}){60000}"}); });
}

TEST(Onig, WritesClassesOfCharactersForCharacters) {
  // \s is one class, all else the other.
  const ClassExpression spaces = translate_onig(R"(\s+(?!\S)|[^\s\S])");
  EXPECT_EQ(spaces.pattern, R"([\x01]+(?![\x00])|[^\x00-\xff])");
  EXPECT_EQ(spaces.classes[U'a'], 0);
  EXPECT_EQ(spaces.classes[U'\u3000'], 1);
  EXPECT_EQ(spaces.classes[0x10FFFF], 0);
  EXPECT_EQ(translate_onig(R"((?>a)(b){2,}?c{,3}[ab]++)").pattern,
            R"((?>[\x01])(?:[\x02]){2,}?[\x03]{0,3}[\x01\x02]++)");
}

TEST(Onig, PossessiveGroupsLeaveWhatIsBeforeThem) {
  EXPECT_THAT(split(Splitter({"[ab]+(?:cS)?+b"}), "aabc"), ElementsAre("aab", "c"));
  EXPECT_THAT(split(Splitter({R"(a+\R*+a)"}), "aaa\n\nac"), ElementsAre("aaa\n\na", "c"));
  EXPECT_THAT(split(Splitter({"(ab)++a|b"}), "ababa-abab"),
              ElementsAre("ababa", "-a", "b", "a", "b"));
}

TEST(Onig, ScriptsAreNoScriptExtensions) {
  EXPECT_THAT(split(Splitter({R"(\p{Han}+)"}), "\u6f22\u5b57\u3001\u6f22"),
              ElementsAre("\u6f22\u5b57", "\u3001", "\u6f22"));
  EXPECT_THAT(split(Splitter({R"([\p{Arabic}]+)"}), "\u0639\u060c\u0639"),
              ElementsAre("\u0639", "\u060c", "\u0639"));
}

TEST(Onig, RefusesByNameWhatItDoesNotHave) {
  const std::pair<const char*, const char*> cases[] = {
      {R"(\p{Letter}+)", R"('\p{Letter}')"},
      {R"([^\P{Alnum}])", R"('\P{Alnum}')"},
      {R"(\p{In_Cyrillic})", "In_Cyrillic"},
      {R"(\p{Nonsense})", "Nonsense"},
      {"[[:alpha:]]", "'[:alpha:'"},
      {"[]a]", "'[]'"},
      {"[a&&-b]", "'&&-'"},
      {R"((a)\1)", R"('\1')"},
      {R"(\X)", R"('\X')"},
      {"(?<name>a)", "'(?<n'"},
      {"(?m:a)", "'(?m:'"},
      {"(*UTF)", "'(*'"},
      {"a{2}+", "'}+'"},
      {"a{2}?", "'{n}?'"},
      {"(?i:[\u00df])", "'(?i:[\u00df])'"},
      {"(?i:s(?:s))", "(?i) with 's'"},
  };
  for (const auto& [pattern, named] : cases) {
    SCOPED_TRACE(pattern);
    expect_error(ErrorCode::unsupported, named, [&] { translate_onig(pattern); });
  }
}

}  // namespace
}  // namespace sluice
