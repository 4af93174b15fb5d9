#include "engine/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <tuple>

#include "sluice/half.h"
#include "tests/io/test_files.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using Shape = std::vector<std::int64_t>;
using testing::entry;
using testing::expect_error;
using testing::safetensors;
using testing::TempDir;

// A tensor in the dtype of the checkpoint, row-major.
std::vector<std::byte> load(const Checkpoint& checkpoint, std::string_view name,
                            const Shape& shape) {
  checkpoint.require(name, shape);
  std::vector<std::byte> data(static_cast<std::size_t>(checkpoint.info(name).bytes()));
  checkpoint.read(name, 0, data);
  return data;
}

constexpr const char* kConfig = R"({"model_type": "llama", "hidden_size": 64,
  "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 2,
  "max_position_embeddings": 16})";
constexpr const char* kEmbedding = "model.embed_tokens.weight";

// A file with the embedding [2, 64] in fp16 and one with the norm [64] in fp32.
std::string embedding_file() {
  return safetensors("{" + entry(kEmbedding, "F16", "[2,64]", 0, 256) + "}", std::string(256, 'e'));
}
std::string norm_file() {
  return safetensors("{" + entry("model.norm.weight", "F32", "[64]", 0, 256) + "}",
                     std::string(256, 'n'));
}

std::string index_of(const nlohmann::json& weight_map) {
  return nlohmann::json{{"metadata", {{"total_size", 512}}}, {"weight_map", weight_map}}.dump();
}

void write_shards(const TempDir& dir, const nlohmann::json& weight_map) {
  dir.write("config.json", kConfig);
  dir.write("one.safetensors", embedding_file());
  dir.write("two.safetensors", norm_file());
  dir.write("model.safetensors.index.json", index_of(weight_map));
}

nlohmann::json whole_map() {
  return {{kEmbedding, "one.safetensors"}, {"model.norm.weight", "two.safetensors"}};
}

TEST(Checkpoint, OpensTheDemoModel) {
  const Checkpoint checkpoint =
      Checkpoint::open(std::filesystem::path(SLUICE_SOURCE_DIR) / "models/sluice-22m");
  EXPECT_EQ(checkpoint.dtype(), DType::bf16);
  EXPECT_EQ(checkpoint.config().num_hidden_layers, 12);
  EXPECT_EQ(checkpoint.parameters(), 21636480);
  EXPECT_EQ(checkpoint.parameter_bytes(), 2 * 21636480u);
  EXPECT_TRUE(checkpoint.has("model.layers.11.self_attn.q_proj.weight"));
  EXPECT_FALSE(checkpoint.has("lm_head.weight"));
  EXPECT_EQ(checkpoint.info(kEmbedding).shape, (Shape{4096, 384}));

  const std::vector<std::byte> norm = load(checkpoint, "model.norm.weight", {384});
  ASSERT_EQ(norm.size(), 768u);
  double sum = 0.0;
  for (std::size_t i = 0; i < 384; ++i) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, &norm[2 * i], sizeof(bits));
    sum += bf16_to_float(bits);
  }
  EXPECT_GT(sum / 384, 0.1) << "a trained RMSNorm weight is positive on average";
  EXPECT_LT(sum / 384, 100.0);
}

TEST(Checkpoint, OpensEveryArchitecture) {
  const std::filesystem::path golden = std::filesystem::path(SLUICE_TEST_DATA) / "golden";
  for (const char* name :
       {"llama3_rope", "llama_d80", "llama_mqa128", "mistral", "qwen2", "qwen3"}) {
    SCOPED_TRACE(name);
    const Checkpoint checkpoint = Checkpoint::open(golden / name);
    const ModelConfig& c = checkpoint.config();
    const std::string attention = "model.layers.2.self_attn.";
    const std::int64_t query = std::int64_t{c.num_attention_heads} * c.head_dim;
    const std::int64_t key = std::int64_t{c.num_key_value_heads} * c.head_dim;
    EXPECT_EQ(load(checkpoint, attention + "q_proj.weight", {query, c.hidden_size}).size(),
              static_cast<std::size_t>(query * c.hidden_size * 2));
    EXPECT_NO_THROW(load(checkpoint, attention + "k_proj.weight", {key, c.hidden_size}));
    EXPECT_EQ(checkpoint.has(attention + "v_proj.bias"), c.qkv_bias);
    EXPECT_EQ(checkpoint.has(attention + "o_proj.bias"), c.o_bias);
    EXPECT_EQ(checkpoint.has(attention + "k_norm.weight"), c.qk_norm);
    EXPECT_EQ(checkpoint.has("lm_head.weight"), !c.tie_word_embeddings);
  }
}

TEST(Checkpoint, ReadsShards) {
  const TempDir dir;
  write_shards(dir, whole_map());
  const Checkpoint checkpoint = Checkpoint::open(dir.path());
  EXPECT_EQ(checkpoint.dtype(), DType::f16);
  EXPECT_EQ(checkpoint.parameters(), 192);
  EXPECT_EQ(checkpoint.parameter_bytes(), 512u);
  EXPECT_EQ(checkpoint.info(kEmbedding).dtype, DType::f16);
  EXPECT_EQ(load(checkpoint, kEmbedding, {2, 64}), std::vector<std::byte>(256, std::byte{'e'}));
  EXPECT_EQ(checkpoint.info("model.norm.weight").dtype, DType::f32);
  EXPECT_EQ(load(checkpoint, "model.norm.weight", {64}),
            std::vector<std::byte>(256, std::byte{'n'}));
}

TEST(Checkpoint, WhatTheIndexDoesNotNameIsNotLeftOut) {
  const TempDir dir;
  write_shards(dir, whole_map());
  dir.write("two.safetensors",
            safetensors("{" + entry("model.norm.weight", "F32", "[64]", 0, 256) + "," +
                            entry("model.norm.bias", "F32", "[1]", 256, 260) + "}",
                        std::string(260, 'n')));
  expect_error(ErrorCode::corrupt,
               "two.safetensors: has a tensor 'model.norm.bias' that model.safetensors.index.json",
               [&] { Checkpoint::open(dir.path()); });
}

TEST(Checkpoint, AMissingTensorOrAnotherShapeIsNamed) {
  const TempDir dir;
  dir.write("config.json", kConfig);
  dir.write("model.safetensors", embedding_file());
  const Checkpoint checkpoint = Checkpoint::open(dir.path());
  expect_error(ErrorCode::corrupt, "has no tensor 'lm_head.weight'", [&] {
    load(checkpoint, "lm_head.weight", {2, 64});
  });
  expect_error(ErrorCode::corrupt, "has no tensor 'lm_head.weight'",
               [&] { std::ignore = checkpoint.info("lm_head.weight"); });
  expect_error(ErrorCode::corrupt,
               "model.safetensors: tensor 'model.embed_tokens.weight' is [2, 64] but config.json "
               "calls for [64, 2]",
               [&] {
                 load(checkpoint, kEmbedding, {64, 2});
               });
  expect_error(ErrorCode::corrupt, "calls for [128]", [&] { load(checkpoint, kEmbedding, {128}); });
}

TEST(Checkpoint, ATensorWithoutValuesIsNamedForThat) {
  const TempDir dir;
  dir.write("config.json", kConfig);
  dir.write("model.safetensors",
            safetensors("{" + entry(kEmbedding, "F16", "[0]", 0, 0) + "}", std::string()));
  const Checkpoint checkpoint = Checkpoint::open(dir.path());
  expect_error(ErrorCode::corrupt, "is [0], so it was saved without its values", [&] {
    checkpoint.require(kEmbedding, {2, 64});
  });
}

TEST(Checkpoint, MissingFilesAreNotFound) {
  const TempDir dir;
  expect_error(ErrorCode::not_found, "config.json", [&] { Checkpoint::open(dir.path()); });
  dir.write("config.json", kConfig);
  expect_error(ErrorCode::not_found, "neither model.safetensors nor",
               [&] { Checkpoint::open(dir.path()); });
  expect_error(ErrorCode::not_found, "config.json",
               [&] { Checkpoint::open(dir.path() / "missing"); });
  write_shards(dir, whole_map());
  std::filesystem::remove(dir.path() / "two.safetensors");
  expect_error(ErrorCode::not_found, "two.safetensors: there is no such file",
               [&] { Checkpoint::open(dir.path()); });
}

TEST(Checkpoint, AMissingShardIsNamedByTheIndex) {
  const TempDir dir;
  write_shards(dir, whole_map());
  std::filesystem::remove(dir.path() / "two.safetensors");
  expect_error(ErrorCode::not_found,
               "two.safetensors: there is no such file, but model.safetensors.index.json names it",
               [&] { Checkpoint::open(dir.path()); });
  std::filesystem::create_symlink("../blobs/2", dir.path() / "two.safetensors");
  expect_error(ErrorCode::not_found, "is a link to ../blobs/2, where there is no file",
               [&] { Checkpoint::open(dir.path()); });
}

// blobs/..., and snapshots/REVISION/NAME that lead to them.
TEST(Checkpoint, ReadsTheLinksOfACache) {
  const TempDir cache;
  const TempDir files;
  write_shards(files, whole_map());
  const std::filesystem::path snapshot = cache.path() / "snapshots" / "0a1b";
  std::filesystem::create_directories(snapshot);
  std::filesystem::create_directory(cache.path() / "blobs");
  for (const auto& file : std::filesystem::directory_iterator(files.path())) {
    const std::string name = file.path().filename();
    std::filesystem::copy(file.path(), cache.path() / "blobs" / ("f" + name));
    std::filesystem::create_symlink("../../blobs/f" + name, snapshot / name);
  }
  EXPECT_EQ(Checkpoint::open(snapshot).parameters(), 192);
  expect_error(ErrorCode::not_found, "such as " + snapshot.string(),
               [&] { Checkpoint::open(cache.path()); });
}

TEST(Checkpoint, FilesThatChangeWhileTheyAreReadAreNoticed) {
  const TempDir dir;
  dir.write("config.json", kConfig);
  const std::filesystem::path path = dir.write("model.safetensors", embedding_file());
  const Checkpoint checkpoint = Checkpoint::open(dir.path());
  EXPECT_NO_THROW(checkpoint.require_unchanged());
  std::filesystem::rename(dir.write("other", std::string(99, 'x')), path);
  EXPECT_NO_THROW(checkpoint.require_unchanged()) << "the one that was opened is as it was";
  EXPECT_NO_THROW(load(checkpoint, kEmbedding, {2, 64}));

  dir.write("model.safetensors", embedding_file());
  const Checkpoint written = Checkpoint::open(dir.path());
  dir.write("model.safetensors", embedding_file());
  std::filesystem::last_write_time(
      path, std::filesystem::file_time_type::clock::now() + std::chrono::seconds(1));
  expect_error(ErrorCode::io, "was changed while it was being read",
               [&] { written.require_unchanged(); });
  std::filesystem::resize_file(path, 300);
  expect_error(ErrorCode::io, "became shorter", [&] { load(written, kEmbedding, {2, 64}); });
  expect_error(ErrorCode::io, "was changed while", [&] { written.require_unchanged(); });
}

TEST(Checkpoint, TheEmbeddingMustBeThereInADtypeThatLoads) {
  const TempDir dir;
  dir.write("config.json", kConfig);
  dir.write("model.safetensors", norm_file());
  expect_error(ErrorCode::corrupt, "no tensor 'model.embed_tokens.weight'",
               [&] { Checkpoint::open(dir.path()); });
  dir.write("model.safetensors",
            safetensors("{" + entry(kEmbedding, "F64", "[1]", 0, 8) + "}", "12345678"));
  expect_error(ErrorCode::unsupported, "is F64", [&] { Checkpoint::open(dir.path()); });
}

// A checkpoint under a config that ties the embeddings.
void write_tied(const TempDir& dir, const std::string& tensors, const std::string& data) {
  nlohmann::json config = nlohmann::json::parse(kConfig);
  config["tie_word_embeddings"] = true;
  dir.write("config.json", config.dump());
  dir.write("model.safetensors", safetensors("{" + tensors + "}", data));
}

// As transformers 5 has it.
TEST(Checkpoint, AHeadThatDiffersIsNotTied) {
  const std::string both = entry(kEmbedding, "F16", "[2,64]", 0, 256) + "," +
                           entry("lm_head.weight", "F16", "[2,64]", 256, 512);
  const TempDir dir;
  std::string data(512, 'e');
  write_tied(dir, both, data);
  EXPECT_TRUE(Checkpoint::open(dir.path()).config().tie_word_embeddings);
  for (const std::size_t place : {256, 300, 511}) {
    std::string other = data;
    other[place] = 'h';
    write_tied(dir, both, other);
    EXPECT_FALSE(Checkpoint::open(dir.path()).config().tie_word_embeddings) << place;
  }
  write_tied(dir,
             entry(kEmbedding, "F16", "[2,64]", 0, 256) + "," +
                 entry("lm_head.weight", "BF16", "[2,64]", 256, 512),
             data);
  EXPECT_FALSE(Checkpoint::open(dir.path()).config().tie_word_embeddings) << "another dtype";
}

TEST(Checkpoint, ATiedHeadAloneIsTheEmbedding) {
  const TempDir dir;
  const std::string head = entry("lm_head.weight", "F16", "[2,64]", 0, 256);
  write_tied(dir, head, std::string(256, 'h'));
  const Checkpoint checkpoint = Checkpoint::open(dir.path());
  EXPECT_TRUE(checkpoint.config().tie_word_embeddings);
  EXPECT_EQ(load(checkpoint, kEmbedding, {2, 64}), std::vector<std::byte>(256, std::byte{'h'}));
  EXPECT_EQ(checkpoint.parameters(), 128);
  write_tied(dir, entry("lm_head.weight", "F16", "[1,64]", 0, 128), std::string(128, 'h'));
  expect_error(ErrorCode::corrupt, "tensor 'lm_head.weight' is [1, 64]",
               [&] { Checkpoint::open(dir.path()); });
  write_tied(dir, head, std::string(256, 'h'));
  dir.write("config.json", kConfig);
  expect_error(ErrorCode::corrupt, "no tensor 'model.embed_tokens.weight'",
               [&] { Checkpoint::open(dir.path()); });
}

TEST(Checkpoint, ATensorInAnotherDtypeIsRefusedWhenItIsLoaded) {
  const TempDir dir;
  dir.write("config.json", kConfig);
  dir.write("model.safetensors", safetensors("{" + entry(kEmbedding, "F16", "[1]", 0, 2) + "," +
                                                 entry("norm", "I16", "[1]", 2, 4) + "}",
                                             "eenn"));
  const Checkpoint checkpoint = Checkpoint::open(dir.path());
  expect_error(ErrorCode::unsupported, "tensor 'norm' is I16",
               [&] { load(checkpoint, "norm", {1}); });
}

TEST(Checkpoint, TheIndexMustNotLeadOutOfTheDirectory) {
  const TempDir outside;
  const std::string target = outside.write("one.safetensors", embedding_file()).string();
  for (const std::string& name :
       {std::string("../one.safetensors"), target, std::string("sub/one.safetensors"),
        std::string(".."), std::string("."), std::string(), std::string("sub\\one.safetensors"),
        std::string("one\n.safetensors"), std::string("one\0.safetensors", 16),
        std::string(300, 'a')}) {
    SCOPED_TRACE(name);
    const TempDir dir;
    write_shards(dir, {{kEmbedding, name}});
    expect_error(ErrorCode::corrupt, "which is no plain file name",
                 [&] { Checkpoint::open(dir.path()); });
  }
}

TEST(Checkpoint, TheIndexMustSayWhereTensorsReallyAre) {
  const TempDir dir;
  const auto refused = [&](const nlohmann::json& weight_map, const std::string& part) {
    write_shards(dir, weight_map);
    expect_error(ErrorCode::corrupt, part, [&] { Checkpoint::open(dir.path()); });
  };
  refused({{kEmbedding, "two.safetensors"}},
          "weight_map.'model.embed_tokens.weight' should lie in two.safetensors but does not");
  refused({{kEmbedding, "one.safetensors"}, {"lm_head.weight", "two.safetensors"}},
          "'lm_head.weight' should lie in two.safetensors");
  refused({{kEmbedding, 1}}, "has no file name");
  refused("one.safetensors", "weight_map is a string, not an object");
  refused(nlohmann::json::array(), "weight_map is an array, not an object");
  refused(nullptr, "weight_map is missing");
  refused(nlohmann::json::object(), "has no tensor 'model.embed_tokens.weight'");

  const std::string name = "model.safetensors.index.json";
  const auto refused_text = [&](const std::string& text, const std::string& part) {
    dir.write(name, text);
    expect_error(ErrorCode::corrupt, name + ": " + part, [&] { Checkpoint::open(dir.path()); });
  };
  refused_text("{\"weight_map\": {", "is not JSON");
  refused_text("[]", "the document is an array");
  refused_text(R"({"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}})",
               "has the key 'a' twice");
  refused_text("{\"weight_map\": " + std::string(100'000, '['), "is nested deeper");
}

TEST(Checkpoint, ADamagedIndexGivesAnErrorOrAWorkingCheckpoint) {
  const std::uint64_t seed = testing::seed(20240609);
  SCOPED_TRACE(testing::seed_message(seed));
  testing::Random random(seed);
  const TempDir dir;
  write_shards(dir, whole_map());
  const std::string valid = index_of(whole_map());
  for (int round = 0; round < 2000; ++round) {
    std::string text = valid;
    text[static_cast<std::size_t>(random.integer(0, std::ssize(text) - 1))] =
        static_cast<char>(random.integer(0, 255));
    dir.write("model.safetensors.index.json", text);
    try {
      const Checkpoint checkpoint = Checkpoint::open(dir.path());
      EXPECT_EQ(load(checkpoint, kEmbedding, {2, 64}).size(), 256u);
    } catch (const Error& error) {
      EXPECT_TRUE(error.code() == ErrorCode::corrupt || error.code() == ErrorCode::not_found)
          << error.what();
    }
  }
}

}  // namespace
}  // namespace sluice
