// Engines by themselves, and what they make of checkpoints whose files do not say all, or not the
// same.
#include "sluice/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "sluice/half.h"
#include "tests/io/test_files.h"
#include "tests/support/model_sessions.h"

namespace sluice {
namespace {

using Json = nlohmann::json;
using testing::copy_of;
using testing::expect_error;
using testing::read_bytes;
using testing::TempDir;

const std::filesystem::path kGolden = std::filesystem::path(SLUICE_TEST_DATA) / "golden";

// `changes` to config.json; null is a value.
std::string config_with(const std::filesystem::path& checkpoint, const Json& changes) {
  Json config = Json::parse(read_bytes(checkpoint / "config.json"));
  for (const auto& [key, value] : changes.items()) config[key] = value;
  return config.dump();
}

Engine open(const std::filesystem::path& checkpoint) {
  EngineConfig config = testing::config_for();
  config.model = checkpoint;
  return Engine::open(config);
}

// A checkpoint that ties its embeddings, with an lm_head.weight added: the embedding's rows, the
// last one first.
std::string with_other_head(const std::string& file) {
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof(length));
  Json header = Json::parse(file.substr(8, length));
  std::string data = file.substr(8 + length);
  const Json embedding = header["model.embed_tokens.weight"];
  const auto begin = embedding["data_offsets"][0].get<std::size_t>();
  const auto end = embedding["data_offsets"][1].get<std::size_t>();
  const std::size_t row = (end - begin) / embedding["shape"][0].get<std::size_t>();
  const std::size_t head = data.size();
  for (std::size_t at = end; at > begin; at -= row) data += data.substr(at - row, row);
  header["lm_head.weight"] = embedding;
  header["lm_head.weight"]["data_offsets"] = {head, data.size()};
  return testing::safetensors(header.dump(), data);
}

std::vector<float> logits_of(const std::filesystem::path& checkpoint) {
  Engine engine = open(checkpoint);
  Session session = engine.new_session(16);
  return copy_of(session.prefill(std::vector<TokenId>{5, 6, 7, 300}));
}

TEST(Engine, RefusesAnEmptyPath) {
  expect_error(ErrorCode::usage, "`model` is empty", [] { open({}); });
}

TEST(Engine, WeightsThatChangeWhileTheyAreLoadedAreNotUsed) {
  const TempDir dir;
  for (const auto& file : std::filesystem::directory_iterator(kGolden / "qwen2")) {
    std::filesystem::copy(file.path(), dir.path() / file.path().filename());
  }
  const std::filesystem::path weights = dir.path() / "model.safetensors";
  Engine engine = open(dir.path());
  std::filesystem::last_write_time(
      weights, std::filesystem::last_write_time(weights) - std::chrono::seconds(5));
  expect_error(ErrorCode::io, "was changed while it was being read",
               [&] { engine.load_weights(); });
  expect_error(ErrorCode::io, "was changed while it was being read",
               [&] { engine.new_session(16); });
  EXPECT_EQ(logits_of(dir.path()), logits_of(kGolden / "qwen2"));
}

// As transformers 5 has it: whatever the config says, both are used.
TEST(Engine, UsesAHeadThatDiffersFromTheEmbedding) {
  const std::filesystem::path model = kGolden / "qwen2";
  const TempDir dir;
  dir.write("config.json", config_with(model, {{"tie_word_embeddings", true}}));
  dir.write("model.safetensors", with_other_head(read_bytes(model / "model.safetensors")));
  EXPECT_FALSE(open(dir.path()).info().tied_embeddings);
  std::vector<float> logits = logits_of(dir.path());
  std::reverse(logits.begin(), logits.end());
  EXPECT_EQ(logits, logits_of(model));
}

// A checkpoint of bf16 with the tensors that `wide` names in f32, numbers of one layer's among them
// that bf16 does not have.
std::string widened(const std::string& file, const std::function<bool(std::string_view)>& wide) {
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof(length));
  Json header = Json::parse(file.substr(8, length));
  const std::string from = file.substr(8 + length);
  std::string data;
  for (const auto& [name, tensor] : header.items()) {
    if (name == "__metadata__") continue;
    const auto begin = tensor["data_offsets"][0].get<std::size_t>();
    const auto end = tensor["data_offsets"][1].get<std::size_t>();
    const std::size_t first = data.size();
    for (std::size_t at = begin; at < end; at += 2) {
      if (!wide(name)) {
        data += from.substr(at, 2);
        continue;
      }
      std::uint16_t bits = 0;
      std::memcpy(&bits, &from[at], sizeof(bits));
      const bool is_fine = name == "model.layers.1.mlp.down_proj.weight";
      const float number = bf16_to_float(bits) * (is_fine ? 1.0009765625f : 1.0f);
      data.append(reinterpret_cast<const char*>(&number), sizeof(number));
    }
    if (wide(name)) tensor["dtype"] = "F32";
    tensor["data_offsets"] = {first, data.size()};
  }
  return testing::safetensors(header.dump(), data);
}

// Products keep what any of the matrices has, whatever the embeddings are.
TEST(Engine, NarrowsNoMatrixOfACheckpointOfSeveralDTypes) {
  const std::filesystem::path model = kGolden / "llama_d80";
  const std::string file = read_bytes(model / "model.safetensors");
  const auto logits = [&](const std::function<bool(std::string_view)>& wide, DType dtype) {
    const TempDir dir;
    dir.write("config.json", read_bytes(model / "config.json"));
    dir.write("model.safetensors", widened(file, wide));
    EXPECT_EQ(open(dir.path()).info().weight_dtype, dtype);
    return logits_of(dir.path());
  };
  const auto expected = logits([](std::string_view) { return true; }, DType::f32);
  EXPECT_EQ(
      logits([](std::string_view name) { return name.ends_with("down_proj.weight"); }, DType::f32),
      expected);
  EXPECT_EQ(
      logits([](std::string_view name) { return !name.starts_with("model.embed"); }, DType::f32),
      expected);
  const auto narrow = logits([](std::string_view) { return false; }, DType::bf16);
  EXPECT_NE(narrow, expected);
  EXPECT_EQ(
      logits([](std::string_view name) { return name.starts_with("model.embed"); }, DType::bf16),
      narrow);
}

// A copy of a golden checkpoint with another config.json.
class ChangedCheckpoint {
 public:
  ChangedCheckpoint(const char* golden, const Json& changes) {
    const std::filesystem::path model = kGolden / golden;
    std::filesystem::copy_file(model / "model.safetensors", dir_.path() / "model.safetensors");
    dir_.write("config.json", config_with(model, changes));
  }
  std::filesystem::path path() const { return dir_.path(); }

 private:
  TempDir dir_;
};

TEST(Engine, GivesAModelNoMoreThanAWindowOfUnknownLayers) {
  const ChangedCheckpoint model("llama_d80", {{"sliding_window", 16}});
  Engine engine = open(model.path());
  EXPECT_EQ(engine.info().window, 16);
  EXPECT_TRUE(engine.info().window_limits);
  expect_error(ErrorCode::unsupported, "newest 16 tokens alone", [&] { engine.new_session(17); });
  expect_error(ErrorCode::unsupported, "`context` of 16", [&] { engine.plan(17); });
  EXPECT_EQ(logits_of(model.path()), logits_of(kGolden / "llama_d80"));
}

std::vector<TokenId> some_tokens(std::size_t count, TokenId first) {
  std::vector<TokenId> tokens;
  for (std::size_t i = 0; i < count; ++i) {
    tokens.push_back(static_cast<TokenId>((first + 37 * static_cast<TokenId>(i)) % 384));
  }
  return tokens;
}

float difference(std::span<const float> a, std::span<const float> b) {
  float most = 0.0f;
  for (std::size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
  return most;
}

// Through 3 layers with windows of 8 tokens nothing is seen of a token 3 * 7 + 1 before.
TEST(Engine, AWindowHidesWhatAllLayersTogetherCannotReach) {
  const ChangedCheckpoint model("mistral", {{"sliding_window", 8}});
  Engine engine = open(model.path());
  EXPECT_EQ(engine.info().window, 8);
  EXPECT_FALSE(engine.info().window_limits);
  std::vector<TokenId> tokens = some_tokens(300, 5);
  const auto logits = [&](std::span<const TokenId> prompt) {
    Session session = engine.new_session(400);
    return copy_of(session.prefill(prompt));
  };
  const std::vector<float> before = logits(tokens);
  constexpr std::size_t kReach = 3 * (8 - 1);
  const std::vector<TokenId> others = some_tokens(300 - kReach - 1, 100);
  std::copy(others.begin(), others.end(), tokens.begin());
  EXPECT_LT(difference(logits(tokens), before), 1e-5f);
  tokens[300 - kReach - 1] ^= 1;
  EXPECT_GT(difference(logits(tokens), before), 1e-5f) << "the last token that it reaches";
}

TEST(Engine, DecodesThroughAWindowAsItReadsAPrompt) {
  const ChangedCheckpoint model("mistral", {{"sliding_window", 130}});
  Engine engine = open(model.path());
  const std::vector<TokenId> tokens = some_tokens(300, 9);
  for (const char* const policy : {"dense", "select=int4 prune=top_k(16)"}) {
    SessionOptions options;
    options.context = 400;
    options.policies = {parse_policy(policy)};
    Session whole = engine.new_session(options);
    Session single = engine.new_session(options);
    const std::vector<float> expected = copy_of(whole.prefill(tokens));
    single.prefill(std::span(tokens).first(120));
    std::vector<float> got;
    for (std::size_t i = 120; i < tokens.size(); ++i) got = copy_of(single.decode(tokens[i]));
    EXPECT_LT(difference(got, expected), 1e-3f) << policy;
  }
  // Every layer of this model has the window, so a policy changes nothing.
  const ChangedCheckpoint wide("mistral", {{"sliding_window", 500}});
  EXPECT_EQ(logits_of(wide.path()), logits_of(kGolden / "mistral"));
}

TEST(Engine, CountsWhatYarnAddsToTheContext) {
  const std::filesystem::path model = kGolden / "mistral";
  const TempDir dir;
  std::filesystem::copy_file(model / "model.safetensors", dir.path() / "model.safetensors");
  const Json yarn = {{"rope_type", "yarn"},
                     {"rope_theta", 1e4},
                     {"factor", 4.0},
                     {"original_max_position_embeddings", 2048}};
  dir.write("config.json", config_with(model, {{"rope_parameters", yarn}}));
  EXPECT_EQ(open(dir.path()).info().trained_context, 8192);
  EXPECT_NE(logits_of(dir.path()), logits_of(model));
}

TEST(Engine, MayEndWhileItsWeightsLoad) {
  std::optional<Engine> engine = Engine::open(testing::config_for());
  std::optional<Engine> moved;
  engine->load_weights([&](double) {
    if (engine) moved = std::move(*engine);
    engine.reset();
  });
  ASSERT_TRUE(moved);
  int calls = 0;
  moved->load_weights([&](double) { ++calls; });
  EXPECT_EQ(calls, 0) << "they are there";
  moved.emplace(Engine::open(testing::config_for()));
  moved->load_weights([&](double) { moved.reset(); });
  EXPECT_FALSE(moved);
}

TEST(Engine, RefusesDTypesThatThereAreNot) {
  const auto refused = [](const auto& change) {
    EngineConfig config = testing::config_for();
    change(config);
    expect_error(ErrorCode::usage, "`kv_dtype` must be bf16, f16, f32, int8 or k8v4, and `compute`",
                 [&] { Engine::open(config); });
  };
  refused([](EngineConfig& config) { config.compute = static_cast<DType>(9); });
  refused([](EngineConfig& config) { config.kv_dtype = static_cast<DType>(9); });
  refused([](EngineConfig& config) { config.kv_dtype = static_cast<RowCode>(9); });
}

TEST(Engine, RefusesAContextBeyondAllSizesFirst) {
  expect_error(ErrorCode::usage, "`context` must be 1 to 2147483647 tokens, not", [] {
    SessionOptions options;
    options.context = std::numeric_limits<std::int64_t>::max() / 4;
    options.policies = {parse_policy("dense prefill=zipvl(0.9)")};
    Engine::open(testing::config_for()).plan(options);
  });
}

class PromptStart : public ::testing::Test {
 protected:
  PromptStart() {
    for (const char* file : {"config.json", "model.safetensors", "tokenizer.json"}) {
      std::filesystem::copy_file(testing::kModel / file, dir_.path() / file);
    }
  }

  TokenId first() const { return open(dir_.path()).encode_prompt("Once upon a time").front(); }
  TokenId first_with(const Json& tokenizer_config) const {
    dir_.write("tokenizer_config.json", tokenizer_config.dump());
    return first();
  }

  TempDir dir_;
};

constexpr TokenId kBos = 0;

// tests/engine/special_tokens_test.cc has the rules.
TEST_F(PromptStart, IsBosUnlessThereIsATokenizersConfig) {
  const Json named = {{"bos_token", "<|begin_of_text|>"}, {"tokenizer_class", "LlamaTokenizer"}};
  const auto with = [&](const char* key, const Json& value) {
    Json config = named;
    config[key] = value;
    return first_with(config);
  };
  EXPECT_EQ(first(), kBos);
  EXPECT_NE(first_with(Json::object()), kBos);
  EXPECT_NE(first_with(named), kBos);
  EXPECT_EQ(with("add_bos_token", true), kBos);
  EXPECT_NE(with("add_bos_token", false), kBos);
  EXPECT_NE(first_with({{"add_bos_token", true}, {"bos_token", nullptr}}), kBos);
  EXPECT_NE(first_with({{"add_bos_token", true}, {"tokenizer_class", "GPT2Tokenizer"}}), kBos);
  expect_error(ErrorCode::corrupt, "tokenizer_config.json: add_bos_token is a string", [&] {
    first_with({{"add_bos_token", "no"}});
  });
}

TEST_F(PromptStart, IsThePostProcessorsWhereThereIsOne) {
  Json tokenizer = Json::parse(read_bytes(testing::kModel / "tokenizer.json"));
  tokenizer["post_processor"] = {{"type", "ByteLevel"}};
  dir_.write("tokenizer.json", tokenizer.dump());
  EXPECT_NE(first(), kBos);
  EXPECT_NE(first_with({{"add_bos_token", true}}), kBos);
}

}  // namespace
}  // namespace sluice
