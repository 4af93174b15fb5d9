#include "engine/special_tokens.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "sluice/tokenizer.h"
#include "tests/io/test_files.h"

namespace sluice {
namespace {

using Json = nlohmann::json;
using testing::expect_error;

constexpr int kVocabulary = 300;
constexpr TokenId kBos = 258;

const Json& recorded() {
  static const Json json = Json::parse(
      testing::read_bytes(std::filesystem::path(SLUICE_TEST_DATA) / "special_token_cases.json"));
  return json;
}

// The files of a case, written as make_special_token_cases.py writes them.
class Files {
 public:
  explicit Files(const Json& entry) {
    Json tokenizer = recorded()["base"];
    tokenizer.merge_patch(entry["tokenizer"]);  // which takes "normalizer": null away
    directory_.write("tokenizer.json", tokenizer.dump());
    directory_.write("config.json", Json({{"model_type", entry["model_type"]}}).dump());
    for (const auto& [name, text] : entry["files"].items()) {
      directory_.write(name + ".json", text.get<std::string>());
    }
  }

  Tokenizer load() const {
    return Tokenizer::load_checkpoint(directory_.path(), kVocabulary, kBos);
  }

 private:
  testing::TempDir directory_;
};

std::vector<TokenId> to_ids(const std::string& text) {
  std::istringstream stream(text);
  std::vector<TokenId> ids;
  for (TokenId id = 0; stream >> id;) ids.push_back(id);
  return ids;
}

// Of the ids up to the highest; ids that no token has are none.
std::vector<TokenId> special_ids(const Tokenizer& tokenizer) {
  std::vector<TokenId> special;
  for (TokenId id = 256; id < std::min(tokenizer.size(), kVocabulary); ++id) {
    if (tokenizer.decode(std::span(&id, 1)) != tokenizer.decode(std::span(&id, 1), true)) {
      special.push_back(id);
    }
  }
  return special;
}

void expect_answer(const Tokenizer& tokenizer, const Json& answer, const Json& entry) {
  const Json& texts = recorded()["texts"];
  ASSERT_EQ(answer["ids"].size(), texts.size());
  for (std::size_t i = 0; i < answer["ids"].size(); ++i) {
    SCOPED_TRACE(texts[i].dump(-1, ' ', true));
    EXPECT_EQ(tokenizer.encode(texts[i].get<std::string>()),
              to_ids(recorded()["ids"][answer["ids"][i].get<std::size_t>()].get<std::string>()));
  }
  const Json& prefix = entry.contains("prefix") ? entry["prefix"] : answer["prefix"];
  EXPECT_THAT(tokenizer.prefix(), ::testing::ElementsAreArray(prefix.get<std::vector<TokenId>>()));
  auto special = answer["special"].get<std::vector<TokenId>>();
  std::erase_if(special, [](TokenId id) { return id >= kVocabulary; });
  EXPECT_EQ(special_ids(tokenizer), special);
}

TEST(SpecialTokens, AreThoseOfTransformers) {
  int refused = 0;
  for (const Json& entry : recorded()["cases"]) {
    SCOPED_TRACE(entry["name"].get<std::string>());
    const Files files(entry);
    const auto follow = entry["follow"].get<std::string>();
    if (follow == "refused") {
      ++refused;
      const bool broken = entry["code"] == "corrupt";
      expect_error(broken ? ErrorCode::corrupt : ErrorCode::unsupported,
                   entry["refusal"].get<std::string>(), [&] { files.load(); });
      continue;
    }
    const Json& answers = entry["answers"];
    try {
      expect_answer(files.load(), answers.contains(follow) ? answers[follow] : answers["both"],
                    entry);
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
  }
  EXPECT_GE(recorded()["cases"].size(), 100u);
  EXPECT_EQ(refused, 7);
}

// A case with these files in place of its own.
Files files_with(const Json& files) {
  Json entry = {{"tokenizer", Json::object()}, {"model_type", "llama"}};
  for (const auto& [name, json] : files.items()) entry["files"][name] = json.dump();
  return Files(entry);
}

void expect_corrupt(const std::string& part, const char* file, const Json& json) {
  SCOPED_TRACE(part);
  const Files files = files_with({{file, json}});
  expect_error(ErrorCode::corrupt, part, [&] { files.load(); });
  expect_error(ErrorCode::corrupt, std::string(file) + ".json: ", [&] { files.load(); });
}

TEST(SpecialTokens, BrokenFilesAreRefusedByName) {
  constexpr const char* kConfig = "tokenizer_config";
  constexpr const char* kMap = "special_tokens_map";
  constexpr const char* kAdded = "added_tokens";
  for (const char* file : {kConfig, kMap, kAdded}) {
    expect_corrupt("is an array, not an object", file, Json::array());
  }
  const auto listed = [](const Json& entries) { return Json{{"added_tokens_decoder", entries}}; };
  expect_corrupt("added_tokens_decoder is no object", kConfig, listed(Json::array()));
  expect_corrupt("added_tokens_decoder is no object", kConfig, listed(nullptr));
  for (const char* id : {"x", "", "-1", "2.5", "1x", "99999999999"}) {
    expect_corrupt("\"" + std::string(id) + "\", which is no token id", kConfig,
                   listed({{id, {{"content", "<im>"}}}}));
  }
  expect_corrupt("has an entry that is no object", kConfig, listed({{"260", "<im>"}}));
  expect_corrupt("holds something that is no token", kConfig, listed({{"260", Json::object()}}));
  expect_corrupt("token \"<im>\": lstrip is a number", kConfig,
                 listed({{"260", {{"content", "<im>"}, {"lstrip", 1}}}}));
  expect_corrupt("more than 1024 bytes", kConfig,
                 listed({{"260", {{"content", std::string(1025, 'x')}}}}));
  expect_corrupt("pad_token holds something that is no token", kConfig, {{"pad_token", 7}});
  expect_corrupt("pad_token holds something that is no token", kMap, {{"pad_token", {"<pad>"}}});
  expect_corrupt("additional_special_tokens is no list", kConfig,
                 {{"additional_special_tokens", "<im>"}});
  expect_corrupt("additional_special_tokens holds something that is no token", kConfig,
                 {{"additional_special_tokens", {1}}});
  expect_corrupt("extra_special_tokens is neither", kConfig, {{"extra_special_tokens", 1}});
  expect_corrupt("tokenizer_class is a number", kConfig, {{"tokenizer_class", 1}});
  expect_corrupt("add_bos_token is a string", kConfig, {{"add_bos_token", "no"}});
  for (const Json& id : {Json("260"), Json(-1), Json(2.5), Json(std::uint64_t{1} << 31)}) {
    expect_corrupt("token \"<im>\" has no id", kAdded, {{"<im>", id}});
  }
  expect_corrupt("has the id 260 of another token", kAdded, {{"<im>", 260}, {"<im_end>", 260}});
}

TEST(SpecialTokens, ABosTokenBeyondTheModelIsRefused) {
  Json tokens = Json::array();
  for (int i = 0; i < 50; ++i) tokens.push_back("<im" + std::to_string(i) + ">");
  Json config = {
      {"tokenizer_class", "LlamaTokenizer"}, {"bos_token", "<bos>"}, {"add_bos_token", true}};
  EXPECT_THAT(files_with({{"tokenizer_config", config}}).load().prefix(),
              ::testing::ElementsAre(kBos));
  config["additional_special_tokens"] = tokens;
  config["bos_token"] = "<im49>";
  config["added_tokens_decoder"] = Json::object();
  for (std::size_t i = 0; i < 50; ++i) {
    config["added_tokens_decoder"][std::to_string(300 + i)] = {{"content", tokens[i]}};
  }
  expect_error(ErrorCode::tokenizer, "texts begin with token 309, but the model has only 300", [&] {
    files_with({{"tokenizer_config", config}}).load();
  });
}

// Nothing but an error or a tokenizer comes of any damage, and no list takes quadratic time.
TEST(SpecialTokens, DamageIsNeverMoreThanAnError) {
  std::vector<Json> configs;
  for (const Json& entry : recorded()["cases"]) {
    if (entry["files"].contains("tokenizer_config")) configs.push_back(entry);
  }
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    Json entry = configs[random() % configs.size()];
    auto text = entry["files"]["tokenizer_config"].get<std::string>();
    for (std::size_t i = 1 + random() % 3; i > 0; --i) {
      text[random() % text.size()] = static_cast<char>(0x20 + random() % 0x5F);
    }
    entry["files"]["tokenizer_config"] = text;
    try {
      Files(entry).load().encode("<bos>ab<im>");
    } catch (const Error& error) {
      ASSERT_EQ(std::string_view(error.what()).find('\n'), std::string_view::npos);
    }
  }
  Json tokens = Json::array();
  for (int i = 0; i < 100'000; ++i) tokens.push_back("<im" + std::to_string(i) + ">");
  const auto start = std::chrono::steady_clock::now();
  const Tokenizer tokenizer =
      files_with({{"tokenizer_config", {{"additional_special_tokens", tokens}}}}).load();
  EXPECT_EQ(tokenizer.encode("<im99999>"), std::vector<TokenId>{100'259});
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

}  // namespace
}  // namespace sluice
