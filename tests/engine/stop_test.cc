#include "engine/stop.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>

namespace sluice {
namespace {

struct Outcome {
  std::string text;
  bool stopped = false;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

std::ostream& operator<<(std::ostream& out, const Outcome& outcome) {
  return out << '"' << outcome.text << "\" " << (outcome.stopped ? "stopped" : "went on");
}

Outcome run(const std::vector<std::string>& stops, const std::vector<std::string>& pieces) {
  StopMatcher matcher(stops);
  Outcome outcome;
  for (const std::string& piece : pieces) outcome.text += matcher.push(piece);
  outcome.text += matcher.finish();
  outcome.stopped = matcher.stopped();
  return outcome;
}

// The definition: the shortest prefix of the text that ends with a stop string, without that.
Outcome by_definition(const std::vector<std::string>& stops, const std::string& text) {
  for (std::size_t end = 1; end <= text.size(); ++end) {
    std::size_t longest = 0;
    for (const std::string& stop : stops) {
      if (std::string_view(text).substr(0, end).ends_with(stop)) {
        longest = std::max(longest, stop.size());
      }
    }
    if (longest > 0) return {text.substr(0, end - longest), true};
  }
  return {text, false};
}

TEST(StopMatcher, WithoutStopStringsEverythingPasses) {
  StopMatcher matcher({});
  EXPECT_EQ(matcher.push("abc"), "abc");
  EXPECT_EQ(matcher.push(""), "");
  EXPECT_EQ(matcher.finish(), "");
  EXPECT_FALSE(matcher.stopped());
}

TEST(StopMatcher, HoldsBackOnlyWhatMayBecomeAStopString) {
  const std::vector<std::string> stops = {"###"};
  StopMatcher matcher(stops);
  EXPECT_EQ(matcher.push("one #"), "one ");
  EXPECT_EQ(matcher.push("#"), "");
  EXPECT_EQ(matcher.push("two##"), "##two");
  EXPECT_FALSE(matcher.stopped());
  EXPECT_EQ(matcher.finish(), "##");
  EXPECT_EQ(matcher.finish(), "");
}

TEST(StopMatcher, CutsBeforeAStopStringThatSpansPieces) {
  const std::vector<std::string> stops = {"END"};
  StopMatcher matcher(stops);
  EXPECT_EQ(matcher.push("text E"), "text ");
  EXPECT_EQ(matcher.push("N"), "");
  EXPECT_EQ(matcher.push("D and more"), "");
  EXPECT_TRUE(matcher.stopped());
  EXPECT_EQ(matcher.push("more"), "");
  EXPECT_EQ(matcher.finish(), "");
}

TEST(StopMatcher, TheFirstToBeCompleteCounts) {
  EXPECT_EQ(run({"abcd", "c"}, {"xabcd"}), (Outcome{"xab", true}));
  EXPECT_EQ(run({"c", "abc"}, {"xa", "bcd"}), (Outcome{"x", true})) << "the longest at one place";
  EXPECT_EQ(run({"aab"}, {"aaab"}), (Outcome{"a", true})) << "candidates overlap";
  EXPECT_EQ(run({"abab!"}, {"ab", "ababx"}), (Outcome{"abababx", false}));
  EXPECT_EQ(run({"\u00e9"}, {"\u00e8\u00e9"}), (Outcome{"\u00e8", true}));
  EXPECT_EQ(run({"x"}, {"x"}), (Outcome{"", true}));
}

const std::vector<SpecialToken> kSpecial = {{1, "ab"}, {2, "b"}, {3, "abb"}};

// Letters are text; digits are the special tokens of these ids.
Outcome run_stream(const std::vector<std::string>& stops, const std::vector<std::string>& pieces) {
  StopMatcher matcher(stops, kSpecial);
  Outcome outcome;
  for (const std::string& piece : pieces) {
    const bool special = !piece.empty() && piece[0] >= '0' && piece[0] <= '9';
    const TokenId id = special ? piece[0] - '0' : 0;
    if (special && !matcher.asks_for(id)) continue;
    outcome.text += special ? matcher.push_special(id) : matcher.push(piece);
  }
  outcome.text += matcher.finish();
  outcome.stopped = matcher.stopped();
  return outcome;
}

std::string letters_of(std::string text) {
  std::erase_if(text, [](char c) { return c < 'a'; });
  return text;
}

// A stop string with digits for the tokens in it, the leftmost first and the longest of those.
std::string with_tokens(const std::string& stop) {
  std::string result;
  for (std::size_t at = 0; at < stop.size();) {
    const std::string_view rest = std::string_view(stop).substr(at);
    const auto begins = [&](const char* token) { return rest.starts_with(token); };
    const char token = begins("abb") ? '3' : begins("ab") ? '1' : begins("b") ? '2' : '0';
    result += token == '0' ? stop[at] : token;
    at += token == '3' ? 3 : token == '1' ? 2 : 1;
  }
  return result;
}

// The shortest prefix of the stream that ends with a stop string, as text or with its tokens; other
// special tokens are as if they were not there.
Outcome by_definition_with_tokens(const std::vector<std::string>& stops,
                                  const std::string& stream) {
  for (std::size_t end = 1; end <= stream.size(); ++end) {
    const std::string prefix = stream.substr(0, end);
    std::optional<std::size_t> longest;
    for (const std::string& stop : stops) {
      for (const std::string& form : {stop, with_tokens(stop)}) {
        std::string seen = prefix;
        std::erase_if(seen, [&](char c) { return c < 'a' && form.find(c) == std::string::npos; });
        const bool ends = seen.ends_with(form) && seen.back() == prefix.back();
        if (ends) longest = std::max(longest.value_or(0), letters_of(form).size());
      }
    }
    const std::string text = letters_of(prefix);
    if (longest) return {text.substr(0, text.size() - *longest), true};
  }
  return {letters_of(stream), false};
}

TEST(StopMatcher, StopsAtSpecialTokensThatAStringAsksFor) {
  EXPECT_EQ(run_stream({"ab"}, {"xy", "2", "1", "z"}), (Outcome{"xy", true})) << "the token";
  EXPECT_EQ(run_stream({"ab"}, {"xa", "bz"}), (Outcome{"x", true})) << "the same as text";
  EXPECT_EQ(run_stream({"ab"}, {"xa", "2", "z"}), (Outcome{"xaz", false})) << "half of each";
  EXPECT_EQ(run_stream({"ab"}, {"xa", "1"}), (Outcome{"xa", true}));
  EXPECT_EQ(run_stream({"yab"}, {"xy", "1"}), (Outcome{"x", true})) << "text in front of it";
  EXPECT_EQ(run_stream({"yab"}, {"xy", "z", "1"}), (Outcome{"xyz", false}));
  EXPECT_EQ(run_stream({"abz"}, {"x", "1", "z"}), (Outcome{"x", true})) << "text behind it";
  EXPECT_EQ(run_stream({"abz"}, {"x", "1", "y", "z"}), (Outcome{"xyz", false}));
  EXPECT_EQ(run_stream({"abzab"}, {"x", "1", "3", "z", "1"}), (Outcome{"x", true}));
  EXPECT_EQ(run_stream({"xz"}, {"x", "1", "z"}), (Outcome{"", true}))
      << "one that is not asked for";
  EXPECT_EQ(run_stream({"abb"}, {"x", "1", "y", "3"}), (Outcome{"xy", true})) << "the longest";
}

TEST(StopMatcher, HoldsBackTextInFrontOfASpecialToken) {
  const std::vector<std::string> stops = {"zab"};
  StopMatcher matcher(stops, kSpecial);
  EXPECT_EQ(matcher.push("xz"), "x");
  EXPECT_EQ(matcher.push_special(3), "") << "asked for by no string, so the text goes on";
  EXPECT_EQ(matcher.push("y"), "zy");
  EXPECT_EQ(matcher.push("z"), "");
  EXPECT_EQ(matcher.push_special(1), "");
  EXPECT_TRUE(matcher.stopped());
  EXPECT_EQ(matcher.push("more"), "");
  EXPECT_EQ(matcher.push_special(1), "");
}

TEST(StopMatcher, AgreesWithTheDefinitionHoweverTextIsCut) {
  for (std::uint64_t seed = 0; seed < 20000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto word = [&](std::size_t least, std::size_t most) {
      std::string letters;
      for (std::size_t i = least + random() % (most - least + 1); i > 0; --i) {
        letters += static_cast<char>('a' + random() % 2);
      }
      return letters;
    };
    std::vector<std::string> stops;
    for (std::size_t i = random() % 4; i > 0; --i) stops.push_back(word(1, 6));
    std::vector<std::string> pieces;
    std::string stream;
    const bool tokens = seed % 2 == 1;
    for (std::size_t i = random() % 10; i > 0; --i) {
      const bool token = tokens && random() % 2 == 0;
      stream += pieces.emplace_back(token ? std::string(1, static_cast<char>('1' + random() % 4))
                                          : word(0, 4));
    }
    if (!tokens) {
      ASSERT_EQ(run(stops, pieces), by_definition(stops, stream)) << stream;
    }
    ASSERT_EQ(run_stream(stops, pieces), by_definition_with_tokens(stops, stream)) << stream;
  }
}

TEST(StopMatcherDeathTest, RefusesAnEmptyStopString) {
  const std::vector<std::string> stops = {""};
  EXPECT_DEATH(StopMatcher{stops}, "empty stop string");
}

}  // namespace
}  // namespace sluice
