#include "engine/unicode/code_set.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bitset>
#include <cstdint>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/unicode/code_classes.h"

namespace sluice {
namespace {

constexpr char32_t kEnd = CodeSet::kLast + 1;
using Bits = std::bitset<kEnd>;

// Ranges that meet, overlap and repeat, some at the ends of all code points.
std::vector<CodeRange> random_ranges(std::mt19937_64& random) {
  std::vector<CodeRange> ranges;
  for (std::uint64_t left = random() % 8; left > 0; --left) {
    const char32_t first = random() % 4 == 0 ? static_cast<char32_t>(random() % kEnd)
                                             : static_cast<char32_t>(random() % 40);
    const char32_t length = random() % 4 == 0 ? kEnd : static_cast<char32_t>(random() % 6);
    ranges.push_back({first, std::min<char32_t>(first + length, CodeSet::kLast)});
  }
  return ranges;
}

std::unique_ptr<Bits> bits_of(std::span<const CodeRange> ranges) {
  auto bits = std::make_unique<Bits>();
  for (const CodeRange& range : ranges) {
    for (char32_t c = range.first; c <= range.last; ++c) bits->set(c);
  }
  return bits;
}

TEST(CodeSet, IsWhatOneBitForEachCodePointIs) {
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const std::vector<CodeRange> first = random_ranges(random);
    const std::vector<CodeRange> second = random_ranges(random);
    const CodeSet a(first);
    const CodeSet b(second);
    const auto a_bits = bits_of(first);
    const auto b_bits = bits_of(second);
    EXPECT_TRUE(*bits_of(a.ranges()) == *a_bits);
    EXPECT_TRUE(*bits_of((~a).ranges()) == ~*a_bits);
    EXPECT_TRUE(*bits_of((a | b).ranges()) == (*a_bits | *b_bits));
    EXPECT_TRUE(*bits_of((a & b).ranges()) == (*a_bits & *b_bits));
    EXPECT_EQ(~~a, a);
    for (const char32_t c : {U'\0', U'\x10', U'\x20', CodeSet::kLast}) {
      EXPECT_EQ(a.contains(c), a_bits->test(c));
    }
  }
}

TEST(CodeClasses, TellApartWhatSetsTellApartAndNothingElse) {
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const std::vector<CodeSet> sets = {CodeSet(random_ranges(random)),
                                       CodeSet(random_ranges(random)),
                                       CodeSet(random_ranges(random))};
    const CodeClasses classes(sets);
    std::set<std::pair<std::string, std::uint8_t>> seen;  // which sets have it, its class
    for (char32_t c = 0; c < kEnd; ++c) {
      std::string in;
      for (std::size_t i = 0; i < sets.size(); ++i) {
        in += sets[i].contains(c) ? '1' : '0';
        const auto members = classes.of(i);
        const bool member = std::find(members.begin(), members.end(), classes[c]) != members.end();
        ASSERT_EQ(member, sets[i].contains(c)) << static_cast<std::uint32_t>(c);
      }
      seen.emplace(in, classes[c]);
    }
    std::set<std::string> kinds;
    std::set<std::uint8_t> numbers;
    for (const auto& [in, number] : seen) {
      kinds.insert(in);
      numbers.insert(number);
    }
    EXPECT_EQ(kinds.size(), seen.size());
    EXPECT_EQ(numbers.size(), seen.size());
  }
}

TEST(CodeClasses, ClassifiesEveryCharacterOfAText) {
  const CodeClasses classes(
      std::vector<CodeSet>{{{'a', 'z'}}, {{0x4E00, 0x4E00}}, {{0x1F600, 0x1F600}}});
  std::string result = "old";
  classes.classify("aZ\u4e00\u00e9\U0001f600", result);
  const auto as_char = [&](char32_t c) { return static_cast<char>(classes[c]); };
  EXPECT_EQ(result, (std::string{as_char('b'), as_char('Z'), as_char(0x4E00), as_char('Z'),
                                 as_char(0x1F600)}));
  EXPECT_EQ(std::set<char>(result.begin(), result.end()).size(), 4u);
}

}  // namespace
}  // namespace sluice
