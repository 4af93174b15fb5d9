#include "lib/text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "sluice/errors.h"

namespace sluice {
namespace {

using ::testing::EndsWith;
using ::testing::StartsWith;

TEST(Text, WhatIsReadableStays) {
  const std::string text = "models/\u6f22\u5b57 caf\u00e9 \U0001f600: \"100%\" \\x";
  EXPECT_EQ(one_line(text), text);
  EXPECT_EQ(in_quotes("model.norm"), "'model.norm'");
  EXPECT_EQ(in_quotes("\u6f22"), "'\u6f22'");
}

TEST(Text, WhatMovesOrHidesTextIsEscaped) {
  EXPECT_EQ(one_line("a\n\x1b[31m\x7f"), R"(a\x0a\x1b[31m\x7f)");
  EXPECT_EQ(one_line(std::string_view("\0", 1)), R"(\x00)");
  EXPECT_EQ(one_line("\xff\xe6\xbc"), R"(\xff\xe6\xbc)") << "no UTF-8";
  EXPECT_EQ(one_line("\xed\xa0\x80"), R"(\xed\xa0\x80)") << "a surrogate";
  EXPECT_EQ(one_line("\u0085"), R"(\xc2\x85)") << "a control character of Latin-1";
  EXPECT_EQ(one_line("a\u202eb"), R"(a\xe2\x80\xaeb)") << "right to left from here on";
  EXPECT_EQ(one_line("\u2028\u2029"), R"(\xe2\x80\xa8\xe2\x80\xa9)") << "line separators";
  EXPECT_EQ(one_line("\u200b\ufeff"), R"(\xe2\x80\x8b\xef\xbb\xbf)") << "no width";
}

TEST(Text, ALongLineKeepsItsBeginningAndItsEnd) {
  const std::string line = one_line("file: " + std::string(1 << 20, 'a') + "; what to do");
  EXPECT_LE(line.size(), 2000u);
  EXPECT_THAT(line, StartsWith("file: aaa"));
  EXPECT_THAT(line, EndsWith("aaa; what to do"));
  EXPECT_LE(one_line(std::string(1 << 20, '\n')).size(), 2000u);
  EXPECT_LT(in_quotes(std::string(1 << 20, 'a')).size(), 110u);
}

TEST(Text, WhateverItIsItIsOneLineOfUtf8AndStaysThat) {
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    std::string text(random() % 6000, '\0');
    // Mostly bytes of multi-byte characters, so that cuts fall into them.
    for (char& c : text) c = static_cast<char>(random() % 3 == 0 ? random() : 0xe6 + random() % 2);
    const std::string line = one_line(text);
    EXPECT_LE(line.size(), 2000u);
    EXPECT_EQ(one_line(line), line) << "not printable, or not UTF-8";
  }
}

TEST(Text, ErrorsAreOneLine) {
  const Error error(ErrorCode::corrupt, "a\nb" + std::string(1 << 20, 'c'));
  EXPECT_THAT(error.what(), StartsWith("a\\x0ab"));
  EXPECT_LE(std::string_view(error.what()).size(), 2000u);
}

}  // namespace
}  // namespace sluice
