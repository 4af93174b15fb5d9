#include "model/stop.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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

TEST(StopMatcher, AgreesWithTheDefinitionHoweverTextIsCut) {
  for (std::uint64_t seed = 0; seed < 5000; ++seed) {
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
    std::string text;
    for (std::size_t i = random() % 10; i > 0; --i) text += pieces.emplace_back(word(0, 4));
    ASSERT_EQ(run(stops, pieces), by_definition(stops, text)) << text;
  }
}

TEST(StopMatcherDeathTest, RefusesAnEmptyStopString) {
  const std::vector<std::string> stops = {""};
  EXPECT_DEATH(StopMatcher{stops}, "empty stop string");
}

}  // namespace
}  // namespace sluice
