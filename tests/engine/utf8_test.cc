#include "engine/utf8.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <set>

#include "engine/byte_level.h"
#include "engine/nfc.h"
#include "tests/engine/random_text.h"

namespace sluice {
namespace {

const std::string kBad = "\xEF\xBF\xBD";

TEST(Utf8, FindsTheFirstInvalidByte) {
  EXPECT_EQ(find_invalid_utf8(""), std::nullopt);
  EXPECT_EQ(find_invalid_utf8("plain and \u00e9\u6f22\U0001f600 mixed, past a word"), std::nullopt);
  EXPECT_EQ(find_invalid_utf8("0123456789\x80"), 10u);
  EXPECT_EQ(find_invalid_utf8("\u00e9\xC3"), 2u) << "cut off";
  EXPECT_EQ(find_invalid_utf8("\xC0\xAF"), 0u) << "overlong";
  EXPECT_EQ(find_invalid_utf8("\xE0\x9F\xBF"), 0u) << "overlong";
  EXPECT_EQ(find_invalid_utf8("a\xED\xA0\x80"), 1u) << "a surrogate";
  EXPECT_EQ(find_invalid_utf8("\xF4\x90\x80\x80"), 0u) << "above U+10FFFF";
  EXPECT_EQ(find_invalid_utf8("\xF0\x8F\xBF\xBF"), 0u) << "overlong";
}

// The examples of Rust's documentation of Utf8Chunks and of the Unicode Standard, table 3-8.
TEST(Utf8, ReplacesMaximalSubparts) {
  EXPECT_EQ(to_valid_utf8("foo\xF1\x80"
                          "bar\xF1\x80\x80"
                          "baz"),
            "foo" + kBad + "bar" + kBad + "baz");
  EXPECT_EQ(to_valid_utf8("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41"),
            kBad + kBad + kBad + kBad + kBad + kBad + kBad + kBad + "A");
  EXPECT_EQ(to_valid_utf8("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41"),
            kBad + kBad + kBad + kBad + kBad + kBad + kBad + kBad + "A");
  EXPECT_EQ(to_valid_utf8("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41"), kBad + kBad + kBad + kBad + "A");
  EXPECT_EQ(to_valid_utf8("\xE2\x82"), kBad);
}

TEST(Utf8, StreamsGiveWhatTheWholeGives) {
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const std::string bytes = testing::random_bytes(random, 24);
    std::string pending;
    std::string streamed;
    for (const char byte : bytes) {
      pending += byte;
      streamed += take_valid_utf8(pending);
      ASSERT_EQ(find_invalid_utf8(streamed), std::nullopt);
      ASSERT_LT(pending.size(), 4u);
    }
    ASSERT_EQ(streamed + to_valid_utf8(pending), to_valid_utf8(bytes));
  }
}

TEST(Utf8, CodePointsSurviveWritingAndReading) {
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c == 0xD800) c = 0xE000;
    std::string text;
    append_utf8(text, c);
    ASSERT_EQ(first_code_point(text), c);
    ASSERT_EQ(next_utf8_unit(text).length, text.size());
    ASSERT_EQ(next_utf8_unit(text).kind, Utf8Unit::Kind::character);
  }
}

TEST(ByteLevel, EveryByteHasASymbolOfItsOwn) {
  std::set<std::string> symbols;
  for (int byte = 0; byte < 256; ++byte) {
    const std::string symbol = byte_symbol(static_cast<std::uint8_t>(byte));
    symbols.insert(symbol);
    EXPECT_EQ(symbols_to_bytes(symbol), std::string(1, static_cast<char>(byte)));
  }
  EXPECT_EQ(symbols.size(), 256u);
  EXPECT_EQ(byte_symbol('A'), "A");
  EXPECT_EQ(byte_symbol(' '), "\u0120");
  EXPECT_EQ(byte_symbol(0xAD), "\u0143");
  EXPECT_EQ(symbols_to_bytes("\u0120the"), " the");
  EXPECT_EQ(symbols_to_bytes("the "), std::nullopt);
  EXPECT_EQ(symbols_to_bytes("\u0144"), std::nullopt);
}

TEST(Nfc, ComposesDecomposesAndOrders) {
  EXPECT_EQ(to_nfc("plain, \u00e9 stays"), "plain, \u00e9 stays");
  EXPECT_EQ(to_nfc("e\u0301"), "\u00e9");
  EXPECT_EQ(to_nfc("a\u0301\u0323"), "\u1ea1\u0301") << "marks are ordered before they compose";
  EXPECT_EQ(to_nfc("\u212b"), "\u00c5") << "a singleton";
  EXPECT_EQ(to_nfc("\u0958"), "\u0915\u093c") << "excluded from composition";
  EXPECT_EQ(to_nfc("\u1112\u1161\u11ab"), "\ud55c");
  EXPECT_EQ(to_nfc("\uac00\u11a7"), "\uac00\u11a7") << "U+11A7 is no trailing consonant";
  EXPECT_EQ(to_nfc("\ufb01"), "\ufb01") << "compatibility characters stay";
}

TEST(Nfc, IsIdempotentAndBlocksDoNotMatter) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const std::string text = testing::random_text(random, 40);
    const std::string once = to_nfc(text);
    ASSERT_EQ(to_nfc(once), once);
    // Enough in front that the text lies across the end of a block.
    const std::string filler = std::string((1 << 16) - random() % 32, 'x') + ' ';
    ASSERT_EQ(to_nfc(filler + text), filler + once);
  }
}

TEST(Nfc, LongRunsOfMarksDoNotTakeQuadraticTime) {
  std::string text = "a";
  for (int i = 0; i < 300'000; ++i) text += "\u0301\u0323";
  const std::string composed = to_nfc(text);
  EXPECT_EQ(composed.substr(0, 5), "\u1ea1\u0323");
  EXPECT_EQ(composed.size(), text.size());
}

}  // namespace
}  // namespace sluice
