#include "sluice/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "engine/utf8.h"
#include "tests/engine/random_text.h"
#include "tests/io/test_files.h"

namespace sluice {
namespace {

using Json = nlohmann::json;
using ::testing::ElementsAre;
using testing::expect_error;

constexpr int kVocabulary = 4096;
const std::filesystem::path kSource = SLUICE_SOURCE_DIR;
const std::filesystem::path kShipped = kSource / "models/sluice-22m/tokenizer.json";
const std::filesystem::path kData = SLUICE_TEST_DATA;

Json read_json(const std::filesystem::path& path) { return Json::parse(testing::read_bytes(path)); }

const Tokenizer& shipped() {
  static const Tokenizer tokenizer = Tokenizer::load(kShipped, kVocabulary);
  return tokenizer;
}

Tokenizer load_json(const Json& file) {
  const testing::TempDir directory;
  return Tokenizer::load(directory.write("tokenizer.json", file.dump()), kVocabulary + 100);
}

std::string stream(const Tokenizer& tokenizer, const std::vector<TokenId>& ids) {
  StreamDecoder decoder(tokenizer);
  std::string text;
  for (const TokenId id : ids) {
    text += decoder.push(id);
    EXPECT_EQ(find_invalid_utf8(text), std::nullopt) << "half a character was handed out";
  }
  return text + decoder.finish();
}

void expect_case(const Tokenizer& tokenizer, const Json& expected) {
  const auto text = expected["text"].get<std::string>();
  SCOPED_TRACE(expected["text"].dump(-1, ' ', true));
  const auto ids = expected["ids"].get<std::vector<TokenId>>();
  EXPECT_EQ(tokenizer.encode(text), ids);
  EXPECT_EQ(tokenizer.decode(ids), expected["decoded"].get<std::string>());
  EXPECT_EQ(stream(tokenizer, ids), expected["decoded"].get<std::string>());
  if (expected.contains("decoded_with_special")) {
    EXPECT_EQ(tokenizer.decode(ids, true), expected["decoded_with_special"].get<std::string>());
  }
}

TEST(Tokenizer, ShippedFileAgreesWithHuggingFace) {
  const Json cases = read_json(kData / "golden/tokenizer_cases.json");
  ASSERT_GE(cases.size(), 14u);
  for (const Json& expected : cases) expect_case(shipped(), expected);
  EXPECT_EQ(shipped().size(), kVocabulary);
  EXPECT_FALSE(shipped().has_post_processor());
  EXPECT_TRUE(shipped().prefix().empty());
}

TEST(Tokenizer, VariantsAgreeWithHuggingFace) {
  const Json recorded = read_json(kData / "tokenizer_more_cases.json");
  ASSERT_EQ(recorded["variants"].size(), 7u);
  for (const Json& variant : recorded["variants"]) {
    SCOPED_TRACE(variant["name"].get<std::string>());
    Json file = read_json(kShipped);
    file.merge_patch(variant["patch"]);
    const Tokenizer tokenizer = load_json(file);
    const std::vector<TokenId> prefix(tokenizer.prefix().begin(), tokenizer.prefix().end());
    EXPECT_EQ(prefix, variant["prefix"].get<std::vector<TokenId>>());
    EXPECT_EQ(tokenizer.has_post_processor(), variant["patch"].contains("post_processor"));
    ASSERT_GE(variant["cases"].size(), 38u);
    for (const Json& expected : variant["cases"]) expect_case(tokenizer, expected);
  }
}

TEST(Tokenizer, MergesMayBeStrings) {
  Json file = read_json(kShipped);
  for (Json& merge : file["model"]["merges"]) {
    merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
  }
  const Tokenizer tokenizer = load_json(file);
  for (const Json& expected : read_json(kData / "golden/tokenizer_cases.json")) {
    expect_case(tokenizer, expected);
  }
}

TEST(Tokenizer, IgnoreMergesFindsTokensThatNoMergeMakes) {
  Json file = read_json(kShipped);
  file["model"]["vocab"]["qzxj"] = 4096;
  EXPECT_THAT(load_json(file).encode("qzxj qzxj"), ::testing::Contains(4096).Times(1));
  file["model"]["ignore_merges"] = false;
  EXPECT_THAT(load_json(file).encode("qzxj"), ::testing::Not(::testing::Contains(4096)));
}

TEST(Tokenizer, EncodesBooksAndGetsThemBack) {
  for (const char* name : {"data/war-and-peace.txt", "data/tinyshakespeare.txt"}) {
    const std::string book = testing::read_bytes(kSource / name);
    ASSERT_GT(book.size(), 1'000'000u);
    const std::vector<TokenId> ids = shipped().encode(book);
    EXPECT_LT(ids.size(), book.size() / 2);
    EXPECT_EQ(shipped().decode(ids), book);
  }
}

TEST(Tokenizer, DecodeUndoesEncode) {
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const std::string text = testing::random_text(random, 60);
    const std::vector<TokenId> ids = shipped().encode(text);
    ASSERT_EQ(shipped().decode(ids, true), text);
    ASSERT_EQ(stream(shipped(), ids), text);
  }
}

TEST(Tokenizer, StreamsDecodeAnyIdsAsAWhole) {
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    std::vector<TokenId> ids;
    // Low ids are special tokens and single bytes, so characters break off and never begin.
    for (std::size_t i = random() % 40; i > 0; --i) {
      ids.push_back(static_cast<TokenId>(random() % (random() % 4 == 0 ? kVocabulary : 258)));
    }
    const std::string text = shipped().decode(ids);
    ASSERT_EQ(find_invalid_utf8(text), std::nullopt);
    ASSERT_EQ(stream(shipped(), ids), text);
  }
}

TEST(Tokenizer, WorstCasesDoNotTakeQuadraticTime) {
  constexpr std::size_t kLength = 1'000'000;
  std::string marks = "a";
  while (marks.size() < kLength) marks += "\u0301\u0323";
  for (const std::string& text :
       {std::string(kLength, 'a'), std::string(kLength, ' '), std::string(kLength, '\n'),
        std::string(kLength, ' ') + "x", std::string(kLength, '<'), marks}) {
    EXPECT_EQ(shipped().decode(shipped().encode(text)), text);
  }
}

TEST(Tokenizer, StreamDecoderHoldsAnUnfinishedCharacterBack) {
  const std::vector<TokenId> ids = shipped().encode("\U0001f600");
  ASSERT_EQ(ids.size(), 4u) << "one token per byte";
  StreamDecoder decoder(shipped());
  EXPECT_EQ(decoder.push(ids[0]), "");
  EXPECT_EQ(decoder.push(ids[1]), "");
  EXPECT_EQ(decoder.push(1), "") << "a special token says nothing";
  EXPECT_EQ(decoder.push(ids[2]), "");
  EXPECT_EQ(decoder.push(ids[3]), "\U0001f600");
  EXPECT_EQ(decoder.push(ids[0]), "");
  EXPECT_EQ(decoder.push(ids[0]), "\uFFFD");
  EXPECT_EQ(decoder.finish(), "\uFFFD");
  EXPECT_EQ(decoder.finish(), "");
}

TEST(Tokenizer, SpecialTokensAreLeftOutUnlessKept) {
  EXPECT_THAT(shipped().encode("<|begin_of_text|>a<|end_of_text|>"),
              ElementsAre(0, shipped().encode("a")[0], 1));
  const std::vector<TokenId> ids = shipped().encode("<|begin_of_text|>a<|end_of_text|>");
  EXPECT_EQ(shipped().decode(ids), "a");
  EXPECT_EQ(shipped().decode(ids, true), "<|begin_of_text|>a<|end_of_text|>");
  EXPECT_EQ(shipped().bytes(0), "");
  EXPECT_EQ(shipped().bytes(ids[1]), "a");
}

TEST(Tokenizer, TextThatIsNotUtf8IsAnErrorWithTheOffset) {
  expect_error(ErrorCode::prompt, "offset 2 ", [] { shipped().encode("ab\xFF"); });
  expect_error(ErrorCode::prompt, "offset 3 ", [] { shipped().encode("abc\xE2\x82"); });
}

TEST(Tokenizer, UnknownIdsAreErrors) {
  for (const TokenId id : {-1, kVocabulary, 1 << 30}) {
    const std::vector<TokenId> ids = {5, id};
    const std::string name = "the id " + std::to_string(id);
    expect_error(ErrorCode::tokenizer, name, [&] { shipped().decode(ids); });
    expect_error(ErrorCode::tokenizer, name, [&] { shipped().bytes(id); });
    StreamDecoder decoder(shipped());
    expect_error(ErrorCode::tokenizer, name, [&] { decoder.push(id); });
  }
}

TEST(Tokenizer, IdsMayHaveGaps) {
  Json file = read_json(kShipped);
  file["model"]["vocab"]["<extra>"] = 4100;
  file["added_tokens"].push_back({{"id", 4100}, {"content", "<extra>"}, {"special", false}});
  const Tokenizer tokenizer = load_json(file);
  EXPECT_EQ(tokenizer.size(), 4101);
  EXPECT_THAT(tokenizer.encode("<extra>"), ElementsAre(4100));
  EXPECT_EQ(tokenizer.bytes(4100), "<extra>");
  // Nor need the last ids of a model have tokens.
  for (const TokenId id : {4099, 4101, kVocabulary + 99}) {
    EXPECT_EQ(tokenizer.bytes(id), "");
    EXPECT_EQ(tokenizer.decode(std::vector<TokenId>{id, 4100}, true), "<extra>");
    StreamDecoder decoder(tokenizer);
    EXPECT_EQ(decoder.push(id), "");
  }
  expect_error(ErrorCode::tokenizer, "the id 4196", [&] { tokenizer.bytes(kVocabulary + 100); });
}

TEST(Tokenizer, BytesThatUtf8NeverHasNeedNoToken) {
  Json file = read_json(kShipped);
  file["model"]["vocab"].erase("\u00c0");
  file["model"]["vocab"].erase("\u00ff");
  EXPECT_THAT(load_json(file).encode("a").size(), 1u);
}

}  // namespace
}  // namespace sluice
