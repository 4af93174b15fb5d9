// Files that are no tokenizer Sluice can use: one clear line each, and the right code.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>

#include "sluice/tokenizer.h"
#include "tests/io/test_files.h"

namespace sluice {
namespace {

using Json = nlohmann::json;
using testing::expect_error;

constexpr int kVocabulary = 300;

// The smallest complete file: 256 bytes, two merges, one special token.
Json small_file() {
  Json vocab = Json::object();
  TokenId id = 0;
  const auto add = [&](char32_t c) {
    const std::string symbol = Json::parse("\"\\u" + [&] {
      std::string hex(4, '0');
      for (int i = 3; i >= 0; --i, c >>= 4) {
        hex[static_cast<std::size_t>(i)] = "0123456789abcdef"[c & 15];
      }
      return hex;
    }() + "\"");
    vocab[symbol] = id++;
  };
  for (char32_t c = 0x21; c <= 0x7E; ++c) add(c);
  for (char32_t c = 0xA1; c <= 0xFF; ++c) {
    if (c != 0xAD) add(c);
  }
  for (char32_t c = 0x100; c < 0x144; ++c) add(c);
  vocab["ab"] = 256;
  vocab["abc"] = 257;
  return {{"added_tokens", {{{"id", 258}, {"content", "<end>"}, {"special", true}}}},
          {"normalizer", nullptr},
          {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
          {"post_processor", nullptr},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", {"a b", "ab c"}}}}};
}

Tokenizer load_text(const std::string& text) {
  const testing::TempDir directory;
  return Tokenizer::load(directory.write("tokenizer.json", text), kVocabulary);
}

// What loading gives after `edit`: an error of this code that names the file and `part`.
void expect_refused(ErrorCode code, const std::string& part,
                    const std::function<void(Json&)>& edit) {
  SCOPED_TRACE(part);
  Json file = small_file();
  edit(file);
  const auto load = [&] { load_text(file.dump()); };
  expect_error(code, part, load);
  expect_error(code, "tokenizer.json: ", load);
}

Json split(const std::string& regex) {
  return {{"type", "Split"}, {"pattern", {{"Regex", regex}}}, {"behavior", "Isolated"}};
}

Json sequence(const char* parts, const Json& list) { return {{"type", "Sequence"}, {parts, list}}; }

TEST(TokenizerFile, TheSmallFileLoads) {
  const Tokenizer tokenizer = load_text(small_file().dump());
  EXPECT_THAT(tokenizer.encode("abc<end>ab"), ::testing::ElementsAre(257, 258, 256));
  EXPECT_EQ(tokenizer.size(), 259);
}

TEST(TokenizerFile, BrokenFiles) {
  expect_error(ErrorCode::not_found, "nowhere/tokenizer.json",
               [] { Tokenizer::load("nowhere/tokenizer.json", kVocabulary); });
  for (const std::string& text : {std::string(), std::string("{"), std::string("{\"a\": 1} x"),
                                  small_file().dump().substr(0, 1000), std::string("\xFF\xFE"),
                                  std::string("{\"model\": 1e999}"), std::string(5000, '[')}) {
    SCOPED_TRACE(text.substr(0, 20));
    expect_error(ErrorCode::tokenizer, "tokenizer.json: ", [&] { load_text(text); });
  }
  for (const char* text : {"null", "[]", "1", "{}", "{\"model\": []}"}) {
    SCOPED_TRACE(text);
    expect_error(ErrorCode::tokenizer, "model: is missing", [&] { load_text(text); });
  }
}

TEST(TokenizerFile, Ids) {
  constexpr auto kCode = ErrorCode::tokenizer;
  expect_refused(kCode, "no token has the id for byte 0x61 (written a)",
                 [](Json& f) { f["model"]["vocab"].erase("a"); });
  expect_refused(kCode, "token \"ab\" has no id",
                 [](Json& f) { f["model"]["vocab"]["ab"] = nullptr; });
  expect_refused(kCode, "token \"ab\" has no id", [](Json& f) { f["model"]["vocab"]["ab"] = -1; });
  expect_refused(kCode, "token \"ab\" has no id", [](Json& f) { f["model"]["vocab"]["ab"] = 2.5; });
  expect_refused(kCode, "token \"ab\" has no id",
                 [](Json& f) { f["model"]["vocab"]["ab"] = std::uint64_t{1} << 40; });
  expect_refused(kCode, "have the same id 257", [](Json& f) { f["model"]["vocab"]["ab"] = 257; });
  expect_refused(kCode, "\"ab\" has the id 300, but the model has only 300 tokens",
                 [](Json& f) { f["model"]["vocab"]["ab"] = 300; });
  expect_refused(kCode, "model.vocab: is missing", [](Json& f) { f["model"]["vocab"] = 3; });
}

TEST(TokenizerFile, AddedTokens) {
  constexpr auto kCode = ErrorCode::tokenizer;
  const auto add = [](const Json& token) {
    return [token](Json& f) { f["added_tokens"].push_back(token); };
  };
  expect_refused(kCode, "is not a list", [](Json& f) { f["added_tokens"] = 1; });
  expect_refused(kCode, "has no 'content'", add(1));
  expect_refused(kCode, "without content", add({{"id", 259}, {"content", ""}}));
  expect_refused(kCode, "\"x\" has no id", add({{"content", "x"}}));
  expect_refused(kCode, "special: is neither",
                 add({{"id", 259}, {"content", "x"}, {"special", 1}}));
  expect_refused(kCode, "have the same id 258", add({{"id", 258}, {"content", "<other>"}}));
  expect_refused(kCode, "\"<end>\" has two entries", add({{"id", 259}, {"content", "<end>"}}));
  expect_refused(kCode, "\"abc\" has two entries", add({{"id", 259}, {"content", "abc"}}));
  expect_refused(kCode, "has 1025 bytes, more than 1024",
                 add({{"id", 259}, {"content", std::string(1025, 'x')}}));
  expect_refused(ErrorCode::unsupported, "'single_word'",
                 add({{"id", 259}, {"content", "word"}, {"single_word", true}}));
}

// As of padding that was added to a model of 259 tokens. A text with such a token has no answer;
// all others do.
TEST(TokenizerFile, AddedTokensMayLieBeyondTheModel) {
  Json file = small_file();
  file["added_tokens"].push_back({{"id", 259}, {"content", "[PAD]"}, {"special", true}});
  const testing::TempDir directory;
  const Tokenizer tokenizer = Tokenizer::load(directory.write("tokenizer.json", file.dump()), 259);
  EXPECT_EQ(tokenizer.encode("abc"), std::vector<TokenId>{257});
  EXPECT_EQ(tokenizer.encode("abc[PAD]"), (std::vector<TokenId>{257, 259}));
}

// tests/data/special_token_cases.json has more of this.
TEST(TokenizerFile, AddedTokensAreNumberedByTheirOrder) {
  Json file = small_file();
  for (const int id : {2'000'000'000, 270, 265}) {
    file["added_tokens"].push_back({{"id", id}, {"content", "<" + std::to_string(id) + ">"}});
  }
  const Tokenizer tokenizer = load_text(file.dump());
  EXPECT_THAT(tokenizer.encode("<265><270><2000000000>"), ::testing::ElementsAre(261, 260, 259));
  EXPECT_EQ(tokenizer.size(), 262);
}

// The library counts tokens, so new ones take ids that a vocabulary with gaps has given away, and
// its versions count differently.
TEST(TokenizerFile, AVocabularyWithGapsLeavesNoIdsForAddedTokens) {
  constexpr auto kCode = ErrorCode::tokenizer;
  const auto gap = [](TokenId id, bool is_added) {
    return [=](Json& f) {
      f["model"]["vocab"]["last"] = id;
      f["added_tokens"] = Json::array();
      if (is_added) f["added_tokens"].push_back({{"id", id}, {"content", "last"}});
      f["added_tokens"].push_back({{"id", 281}, {"content", "<end>"}});
    };
  };
  expect_refused(kCode, "\"<end>\" gets the id 259, which token \"last\" has", gap(259, false));
  expect_refused(kCode, "\"<end>\" gets another id from other versions", gap(280, true));
  Json file = small_file();
  gap(280, false)(file);
  EXPECT_THAT(load_text(file.dump()).encode("ab<end>"), ::testing::ElementsAre(256, 259));
}

TEST(TokenizerFile, WhiteSpaceThatIsAlsoATokenTakesLinearTime) {
  Json file = small_file();
  file["added_tokens"].push_back({{"id", 259}, {"content", "\n"}, {"rstrip", true}});
  const Tokenizer tokenizer = load_text(file.dump());
  EXPECT_THAT(tokenizer.encode("\n\nab\n \n"), ::testing::ElementsAre(259, 259, 256, 259, 259));
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(tokenizer.encode(std::string(1 << 20, '\n')).size(), std::size_t{1} << 20);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

TEST(TokenizerFile, NoSequenceIsTooLong) {
  const auto splits = [](int count) {
    return [count](Json& f) {
      const Json split = {
          {"type", "Split"}, {"pattern", {{"Regex", "a"}}}, {"behavior", "Isolated"}};
      Json steps = Json::array();
      for (int i = 0; i < count; ++i) steps.push_back(split);
      steps.push_back(f["pre_tokenizer"]);
      f["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", steps}};
    };
  };
  Json file = small_file();
  splits(31)(file);
  EXPECT_THAT(load_text(file.dump()).encode("abc"), ::testing::SizeIs(3));
  expect_refused(ErrorCode::unsupported, "pre_tokenizer: a Sequence of more than 32", splits(32));
  expect_refused(ErrorCode::unsupported, "pre_tokenizer: a Sequence of more than 32",
                 splits(80'000));
}

TEST(TokenizerFile, Merges) {
  constexpr auto kCode = ErrorCode::tokenizer;
  const auto merge = [](const Json& pair) {
    return [pair](Json& f) { f["model"]["merges"].push_back(pair); };
  };
  expect_refused(kCode, "model.merges[2]: token \"zz\" is not in model.vocab", merge("zz a"));
  expect_refused(kCode, "model.merges[2]: token \"ba\" is not in model.vocab", merge({"b", "a"}));
  for (const Json& pair : {Json("ab"), Json("a b c"), Json({"a"}), Json({"a", 1}), Json(7)}) {
    SCOPED_TRACE(pair.dump());
    expect_refused(kCode, "model.merges[2]: is not a pair", merge(pair));
  }
  expect_refused(kCode, "model.merges: is missing", [](Json& f) { f["model"].erase("merges"); });
}

TEST(TokenizerFile, OtherKindsAreRefusedByName) {
  constexpr auto kCode = ErrorCode::unsupported;
  for (const char* type : {"Unigram", "WordPiece", "WordLevel"}) {
    expect_refused(kCode, type, [&](Json& f) { f["model"] = {{"type", type}}; });
  }
  expect_refused(kCode, "model.byte_fallback", [](Json& f) { f["model"]["byte_fallback"] = true; });
  expect_refused(kCode, "model.dropout", [](Json& f) { f["model"]["dropout"] = 0.1; });
  expect_refused(kCode, "model.continuing_subword_prefix",
                 [](Json& f) { f["model"]["continuing_subword_prefix"] = "##"; });
  expect_refused(kCode, "model.end_of_word_suffix",
                 [](Json& f) { f["model"]["end_of_word_suffix"] = "</w>"; });
  expect_refused(kCode, "\"NFKC\"", [](Json& f) { f["normalizer"] = {{"type", "NFKC"}}; });
  expect_refused(kCode, "\"Lowercase\"", [](Json& f) {
    f["normalizer"] = sequence("normalizers", {{{"type", "NFC"}}, {{"type", "Lowercase"}}});
  });
  expect_refused(kCode, "\"Fuse\"", [](Json& f) { f["decoder"] = {{"type", "Fuse"}}; });
  expect_refused(kCode, "decoder", [](Json& f) { f.erase("decoder"); });
}

TEST(TokenizerFile, PreTokenizers) {
  constexpr auto kCode = ErrorCode::unsupported;
  const Json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}};
  const auto with = [&](const Json& first, const Json& second) {
    return [=](Json& f) { f["pre_tokenizer"] = sequence("pretokenizers", {first, second}); };
  };
  const auto edited = [](const char* key, const Json& value) {
    Json step = split("a");
    step[key] = value;
    return step;
  };
  expect_refused(kCode, "without ByteLevel", [](Json& f) { f["pre_tokenizer"] = nullptr; });
  expect_refused(kCode, "\"Metaspace\"", [](Json& f) {
    f["pre_tokenizer"] = {{"type", "Metaspace"}};
  });
  expect_refused(kCode, "'add_prefix_space'",
                 [](Json& f) { f["pre_tokenizer"]["add_prefix_space"] = true; });
  expect_refused(kCode, "\"Split\" after ByteLevel", with(byte_level, split("a")));
  expect_refused(kCode, "behavior \"Removed\"", with(edited("behavior", "Removed"), byte_level));
  expect_refused(kCode, "'invert'", with(edited("invert", true), byte_level));
  expect_refused(kCode, "other than a Regex",
                 with(edited("pattern", {{"String", "a"}}), byte_level));
  expect_refused(kCode, "\\X", with(split("\\X+"), byte_level));
  expect_refused(ErrorCode::tokenizer, "does not compile", with(split("(a"), byte_level));
  expect_refused(ErrorCode::tokenizer, "no 'pretokenizers'", [](Json& f) {
    f["pre_tokenizer"] = {{"type", "Sequence"}};
  });
  expect_refused(ErrorCode::tokenizer, "has no type",
                 [](Json& f) { f["pre_tokenizer"] = sequence("pretokenizers", {nullptr}); });
  expect_refused(ErrorCode::tokenizer, "has no 'type'", [](Json& f) { f["pre_tokenizer"] = 1; });
}

TEST(TokenizerFile, PostProcessors) {
  const Json text = {{"Sequence", {{"id", "A"}}}};
  const Json end = {{"SpecialToken", {{"id", "<end>"}}}};
  const auto processor = [](const Json& single, const Json& ids) {
    return [=](Json& f) {
      f["post_processor"] = {{"type", "TemplateProcessing"},
                             {"single", single},
                             {"special_tokens", {{"<end>", {{"ids", ids}}}}}};
    };
  };
  Json file = small_file();
  processor({end, end, text}, {258, 0})(file);
  const Tokenizer tokenizer = load_text(file.dump());
  EXPECT_THAT(tokenizer.prefix(), ::testing::ElementsAre(258, 0, 258, 0));
  EXPECT_TRUE(tokenizer.has_post_processor());

  expect_refused(ErrorCode::unsupported, "after the sequence", processor({text, end}, {258}));
  expect_refused(ErrorCode::tokenizer, "no sequence", processor(Json::array({end}), {258}));
  expect_refused(ErrorCode::tokenizer, "no token has the id 259", processor({end, text}, {259}));
  expect_refused(ErrorCode::tokenizer, "other than ids", processor({end, text}, {"x"}));
  expect_refused(ErrorCode::tokenizer, "has no ids", processor({end, text}, nullptr));
  expect_refused(ErrorCode::unsupported, "\"BertProcessing\"", [](Json& f) {
    f["post_processor"] = {{"type", "BertProcessing"}};
  });
}

// Every cut of a valid file, and random changes of single bytes: an error or a tokenizer, nothing
// else.
TEST(TokenizerFile, DamageIsNeverMoreThanAnError) {
  const std::string text = small_file().dump();
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    std::string damaged = text;
    for (std::size_t i = 1 + random() % 3; i > 0; --i) {
      damaged[random() % damaged.size()] = static_cast<char>(random() % 256);
    }
    if (random() % 4 == 0) damaged.resize(random() % damaged.size());
    try {
      load_text(damaged).encode("abc ab\u00e9");
    } catch (const Error& error) {
      const bool expected =
          error.code() == ErrorCode::tokenizer || error.code() == ErrorCode::unsupported;
      ASSERT_TRUE(expected) << error.what();
      ASSERT_EQ(std::string_view(error.what()).find('\n'), std::string_view::npos);
    }
  }
}

}  // namespace
}  // namespace sluice
