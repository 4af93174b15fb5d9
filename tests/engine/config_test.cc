#include "engine/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "tests/io/test_files.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using Json = nlohmann::json;
using ::testing::ElementsAre;
using testing::expect_error;
using testing::TempDir;

Json llama() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"hidden_size", 4096},
          {"intermediate_size", 14336},
          {"num_hidden_layers", 32},
          {"num_attention_heads", 32},
          {"num_key_value_heads", 8},
          {"vocab_size", 128256},
          {"max_position_embeddings", 131072},
          {"rms_norm_eps", 1e-5},
          {"rope_theta", 500000.0}};
}

Json of_type(const std::string& model_type, const std::string& class_name) {
  Json json = llama();
  json["model_type"] = model_type;
  json["architectures"] = {class_name};
  if (model_type == "mistral") json["sliding_window"] = nullptr;
  return json;
}

Json llama3_scaling() {
  return {{"rope_type", "llama3"},
          {"factor", 8.0},
          {"low_freq_factor", 1.0},
          {"high_freq_factor", 4.0},
          {"original_max_position_embeddings", 8192}};
}

ModelConfig parse_text(const std::string& text, const std::string& generation = {}) {
  const TempDir dir;
  dir.write("config.json", text);
  if (!generation.empty()) dir.write("generation_config.json", generation);
  return read_config(dir.path());
}

ModelConfig parse(const Json& json) { return parse_text(json.dump()); }

// llama() or `base` with this key changed.
Json with(const std::string& key, const Json& value, Json base = llama()) {
  base[key] = value;
  return base;
}

void expect_refused(ErrorCode code, const Json& json, const std::string& part) {
  SCOPED_TRACE(part);
  expect_error(code, "config.json: " + part, [&] { parse(json); });
}

void expect_corrupt(const std::string& key, const Json& value, const std::string& part) {
  expect_refused(ErrorCode::corrupt, with(key, value), part);
}

void expect_unsupported(const std::string& key, const Json& value, const std::string& part) {
  expect_refused(ErrorCode::unsupported, with(key, value), part);
}

TEST(Config, ReadsTheDemoModel) {
  const ModelConfig c = read_config(std::filesystem::path(SLUICE_SOURCE_DIR) / "models/sluice-22m");
  EXPECT_EQ(c.architecture, "llama");
  EXPECT_EQ(c.hidden_size, 384);
  EXPECT_EQ(c.intermediate_size, 1024);
  EXPECT_EQ(c.num_hidden_layers, 12);
  EXPECT_EQ(c.num_attention_heads, 8);
  EXPECT_EQ(c.num_key_value_heads, 2);
  EXPECT_EQ(c.head_dim, 64);
  EXPECT_EQ(c.vocab_size, 4096);
  EXPECT_EQ(c.max_position_embeddings, 131072);
  EXPECT_FLOAT_EQ(c.rms_norm_eps, 1e-5f);
  EXPECT_TRUE(c.tie_word_embeddings);
  EXPECT_FALSE(c.qkv_bias || c.o_bias || c.qk_norm);
  EXPECT_EQ(c.rope.theta, 500000.0);
  EXPECT_EQ(c.rope.scaling.index(), 0u);
  EXPECT_EQ(c.bos_token_id, 0);
  EXPECT_THAT(c.eos_token_ids, ElementsAre(1));
}

TEST(Config, ReadsWhatTransformers5Writes) {
  const auto golden = [](const char* name) {
    return read_config(std::filesystem::path(SLUICE_TEST_DATA) / "golden" / name);
  };
  const ModelConfig stretched = golden("llama3_rope");
  EXPECT_EQ(stretched.rope.theta, 500000.0);
  const auto* const llama3 = std::get_if<Llama3Scaling>(&stretched.rope.scaling);
  ASSERT_NE(llama3, nullptr);
  EXPECT_EQ(llama3->factor, 8.0);
  EXPECT_EQ(llama3->original_max_position_embeddings, 256.0);
  EXPECT_EQ(golden("llama_d80").head_dim, 80);
  EXPECT_EQ(golden("llama_mqa128").num_key_value_heads, 1);
  EXPECT_EQ(golden("mistral").architecture, "mistral");

  const ModelConfig qwen2 = golden("qwen2");
  EXPECT_EQ(qwen2.head_dim, 16 * 96 / 96) << "hidden_size / num_attention_heads";
  EXPECT_TRUE(qwen2.qkv_bias && qwen2.tie_word_embeddings);
  EXPECT_FALSE(qwen2.o_bias || qwen2.qk_norm);
  const ModelConfig qwen3 = golden("qwen3");
  EXPECT_TRUE(qwen3.qk_norm);
  EXPECT_FALSE(qwen3.qkv_bias || qwen3.o_bias);
}

TEST(Config, MissingKeysHaveTransformersDefaults) {
  Json json = llama();
  for (const char* key : {"num_key_value_heads", "rms_norm_eps", "rope_theta"}) json.erase(key);
  const ModelConfig c = parse(json);
  EXPECT_EQ(c.num_key_value_heads, 32);
  EXPECT_EQ(c.head_dim, 128);
  EXPECT_FLOAT_EQ(c.rms_norm_eps, 1e-6f);
  EXPECT_EQ(c.rope.theta, 10000.0);
  EXPECT_FALSE(c.tie_word_embeddings);
  EXPECT_FALSE(c.bos_token_id);
  EXPECT_TRUE(c.eos_token_ids.empty());
  EXPECT_EQ(parse(with("head_dim", nullptr)).head_dim, 128);
  EXPECT_EQ(parse(with("num_key_value_heads", nullptr)).num_key_value_heads, 32);
  // Qwen3's head_dim does not follow from hidden_size.
  const Json qwen3 = of_type("qwen3", "Qwen3ForCausalLM");
  EXPECT_EQ(parse(with("hidden_size", 2048, qwen3)).head_dim, 128);
}

TEST(Config, EveryRequiredKeyIsNamedWhenItIsMissing) {
  for (const char* key : {"model_type", "hidden_size", "intermediate_size", "num_hidden_layers",
                          "num_attention_heads", "vocab_size", "max_position_embeddings"}) {
    Json json = llama();
    json.erase(key);
    expect_refused(ErrorCode::corrupt, json, std::string(key) + " is missing");
    expect_corrupt(key, nullptr, std::string(key) + " is missing");
  }
}

TEST(Config, NumbersAreBoundedIntegers) {
  for (const char* key :
       {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "vocab_size", "max_position_embeddings", "head_dim"}) {
    const std::string name = key;
    for (const Json& value : {Json(0), Json(-1), Json(UINT64_MAX), Json(std::int64_t{1} << 40)}) {
      expect_corrupt(key, value, name + " is " + value.dump() + "; it must be 1 to ");
    }
    expect_corrupt(key, 32.0, name + " is a fraction, not an integer");
    expect_corrupt(key, "32", name + " is a string, not an integer");
    expect_corrupt(key, {32}, name + " is an array, not an integer");
    expect_corrupt(key, true, name + " is a boolean, not an integer");
  }
  expect_corrupt("rms_norm_eps", 0, "rms_norm_eps is 0; it must be 1e-12 to 1");
  expect_corrupt("rms_norm_eps", "1e-5", "rms_norm_eps is a string, not a number");
  expect_corrupt("rope_theta", -1.0, "rope_theta is -1");
  expect_corrupt("tie_word_embeddings", 1, "tie_word_embeddings is a number, not true or false");
  expect_corrupt("attention_bias", "no", "attention_bias is a string");
}

TEST(Config, HeadsMustFitEachOther) {
  expect_corrupt("num_key_value_heads", 5, "num_attention_heads (32) is not a multiple");
  expect_corrupt("hidden_size", 4100, "hidden_size is not a multiple of num_attention_heads");
  EXPECT_EQ(parse(with("head_dim", 96, with("hidden_size", 4100))).head_dim, 96);
  for (const int head_dim : {8, 14, 33, 258, 512}) {
    expect_unsupported("head_dim", head_dim, "head_dim is " + std::to_string(head_dim));
  }
  EXPECT_EQ(parse(with("head_dim", 16)).head_dim, 16);
  EXPECT_EQ(parse(with("head_dim", 256)).head_dim, 256);
}

TEST(Config, BiasesFollowTheArchitecture) {
  const ModelConfig biased = parse(with("attention_bias", true));
  EXPECT_TRUE(biased.qkv_bias && biased.o_bias);
  const ModelConfig qwen3 =
      parse(with("attention_bias", true, of_type("qwen3", "Qwen3ForCausalLM")));
  EXPECT_TRUE(qwen3.qkv_bias && qwen3.o_bias && qwen3.qk_norm);
  const ModelConfig qwen2 = parse(of_type("qwen2", "Qwen2ForCausalLM"));
  EXPECT_TRUE(qwen2.qkv_bias);
  EXPECT_FALSE(qwen2.o_bias);
  expect_refused(ErrorCode::unsupported,
                 with("attention_bias", true, of_type("mistral", "MistralForCausalLM")),
                 "attention_bias is true");
}

TEST(Config, UnknownArchitecturesAreRefusedByName) {
  expect_unsupported("model_type", "gemma2", "model_type is 'gemma2'");
  expect_unsupported("model_type", "mixtral", "model_type is 'mixtral'");
  expect_unsupported("model_type", "", "model_type is ''");
  expect_unsupported("architectures", {"LlamaForSequenceClassification"},
                     "architectures names 'LlamaForSequenceClassification'");
  expect_corrupt("architectures", "LlamaForCausalLM", "architectures is not an array");
  expect_corrupt("architectures", Json::array(), "architectures is not an array");
  expect_corrupt("model_type", 3, "model_type is a number, not a string");
}

TEST(Config, FeaturesThatTheDecoderLacksAreRefusedByName) {
  expect_unsupported("hidden_act", "gelu", "hidden_act is 'gelu'");
  expect_unsupported("mlp_bias", true, "mlp_bias is true");
  expect_unsupported("partial_rotary_factor", 0.5, "partial_rotary_factor is not 1");
  expect_unsupported("quantization_config", {{"quant_method", "quark"}},
                     "quantization_config.quant_method is 'quark'");
  expect_unsupported("attn_logit_softcapping", 50.0, "attn_logit_softcapping is 50.0");
  expect_unsupported("final_logit_softcapping", 30.0, "final_logit_softcapping is");
  expect_unsupported("dual_chunk_attention_config", Json::object(), "dual_chunk_attention_config");
  expect_unsupported("is_causal", false, "is_causal is false");
  expect_corrupt("mlp_bias", "yes", "mlp_bias is not a boolean");
  EXPECT_NO_THROW(parse(with("quantization_config", nullptr)));
  EXPECT_NO_THROW(parse(with("hidden_act", "silu")));
}

// As MistralConfig, Qwen2Config and Qwen3Config of transformers 5 have it.
TEST(Config, AWindowIsWhatSomeLayerHas) {
  Json mistral = of_type("mistral", "MistralForCausalLM");
  EXPECT_EQ(parse(mistral).window, std::nullopt) << "null";
  EXPECT_EQ(parse(with("sliding_window", 1024, mistral)).window, 1024);
  EXPECT_EQ(parse(with("use_sliding_window", false, with("sliding_window", 1024, mistral))).window,
            1024)
      << "a switch that Mistral does not have";
  mistral.erase("sliding_window");
  EXPECT_EQ(parse(mistral).window, 4096);
  EXPECT_EQ(parse(llama()).window, std::nullopt);
  EXPECT_EQ(parse(with("sliding_window", 512)).window, 512);

  for (const auto& [type, name] :
       {std::pair{"qwen2", "Qwen2ForCausalLM"}, std::pair{"qwen3", "Qwen3ForCausalLM"}}) {
    const Json off = with("sliding_window", 131072, of_type(type, name));
    EXPECT_EQ(parse(off).window, std::nullopt);
    EXPECT_EQ(parse(with("use_sliding_window", false, off)).window, std::nullopt);
    const Json on = with("use_sliding_window", true, off);
    EXPECT_EQ(parse(on).window, 131072) << "behind the first 28 layers";
    EXPECT_EQ(parse(with("max_window_layers", 31, on)).window, 131072);
    EXPECT_EQ(parse(with("max_window_layers", 32, on)).window, std::nullopt);
    EXPECT_EQ(parse(with("sliding_window", nullptr, on)).window, std::nullopt);
    EXPECT_EQ(parse(with("layer_types", Json(32, "full_attention"), on)).window, std::nullopt);
    Json types(32, "full_attention");
    types[3] = "sliding_attention";
    EXPECT_EQ(parse(with("max_window_layers", 32, with("layer_types", types, on))).window, 131072);
    expect_refused(ErrorCode::corrupt, with("sliding_window", 0, on), "sliding_window is 0");
    expect_refused(ErrorCode::corrupt, with("max_window_layers", -1, on), "max_window_layers is");
  }
}

TEST(Config, AWindowIsOfTheLayersThatTransformersGivesIt) {
  const Json mistral = of_type("mistral", "MistralForCausalLM");
  const auto windows = [](const Json& json) { return parse(json).windows; };
  EXPECT_TRUE(windows(mistral).empty());
  EXPECT_EQ(windows(with("sliding_window", 1024, mistral)), std::vector<std::int64_t>(32, 1024));
  EXPECT_TRUE(windows(with("sliding_window", 512)).empty()) << "Llama's, which reads no window";
  Json qwen = with("sliding_window", 512, of_type("qwen2", "Qwen2ForCausalLM"));
  EXPECT_TRUE(windows(qwen).empty());
  qwen["use_sliding_window"] = true;
  std::vector<std::int64_t> last(32);
  std::fill(last.begin() + 28, last.end(), 512);
  EXPECT_EQ(windows(qwen), last);
  qwen["max_window_layers"] = 0;
  EXPECT_EQ(windows(qwen), std::vector<std::int64_t>(32, 512));
  Json types(32, "full_attention");
  types[3] = "sliding_attention";
  std::vector<std::int64_t> fourth(32);
  fourth[3] = 512;
  EXPECT_EQ(windows(with("layer_types", types, qwen)), fourth);
}

TEST(Config, LayersAttendInWaysThatAreKnown) {
  Json types(32, "full_attention");
  EXPECT_NO_THROW(parse(with("layer_types", types)));
  types[31] = "chunked_attention";
  expect_unsupported("layer_types", types, "layer_types has 'chunked_attention'");
  types[31] = 1;
  expect_corrupt("layer_types", types, "layer_types has an entry that is no string");
  types.erase(31);
  expect_corrupt("layer_types", types, "layer_types is not an array with an entry per layer");
}

TEST(Config, TokenIdsLieInTheVocabulary) {
  const ModelConfig c = parse(with("eos_token_id", {128001, 128009}, with("bos_token_id", 128000)));
  EXPECT_EQ(c.bos_token_id, 128000);
  EXPECT_THAT(c.eos_token_ids, ElementsAre(128001, 128009));
  EXPECT_TRUE(parse(with("eos_token_id", nullptr)).eos_token_ids.empty());
  for (const Json& id : {Json(128256), Json(-1), Json(UINT64_MAX)}) {
    expect_corrupt("bos_token_id", id, "bos_token_id names token " + id.dump());
    expect_corrupt("eos_token_id", {1, id}, "eos_token_id names token " + id.dump());
  }
  expect_corrupt("eos_token_id", "</s>", "eos_token_id is a string, not a token id");
  expect_corrupt("bos_token_id", 1.0, "bos_token_id is a fraction, not a token id");
  expect_corrupt("eos_token_id", Json(std::vector<int>(100, 1)), "eos_token_id names more than 64");
}

TEST(Config, TheGenerationConfigsEosTokensCountToo) {
  const std::string text = with("eos_token_id", 128009).dump();
  const auto eos = [&](const std::string& generation) {
    return parse_text(text, generation).eos_token_ids;
  };
  EXPECT_THAT(eos(R"({"eos_token_id": [128001, 128009]})"), ElementsAre(128009, 128001));
  EXPECT_THAT(eos(R"({"eos_token_id": 7})"), ElementsAre(128009, 7));
  EXPECT_THAT(eos(R"({"temperature": 0.6})"), ElementsAre(128009));
  EXPECT_THAT(eos(R"({"eos_token_id": null})"), ElementsAre(128009));
  expect_error(ErrorCode::corrupt, "generation_config.json: eos_token_id names token -5",
               [&] { eos(R"({"eos_token_id": -5})"); });
  expect_error(ErrorCode::corrupt, "generation_config.json: is not JSON", [&] { eos("{"); });
}

TEST(Config, NumbersThatAreNotFiniteAreNamedWhereTheyMatter) {
  const std::string text = llama().dump();
  const auto changed = [&](const std::string& members) {
    return text.substr(0, text.size() - 1) + ", " + members + "}";
  };
  EXPECT_EQ(parse_text(changed(R"("time_step_limit": [0.0, Infinity], "x": {"y": -Infinity})"),
                       R"({"eos_token_id": 7, "max_time": NaN})")
                .eos_token_ids,
            std::vector<TokenId>{7});
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"("head_dim": NaN)", "head_dim is NaN, not an integer"},
      {R"("partial_rotary_factor": NaN)", "partial_rotary_factor is NaN; it must be 0 to 1"},
      {R"("bos_token_id": -Infinity)", "bos_token_id is -Infinity, not a token id"},
      {R"("eos_token_id": [1, NaN])", "eos_token_id is NaN, not a token id"},
      {R"("rope_scaling": {"rope_type": "linear", "factor": Infinity})",
       "rope_scaling.factor is Infinity; it must be"},
      {R"("tie_word_embeddings": NaN)", "tie_word_embeddings is NaN, not true or false"}};
  for (const auto& [members, part] : cases) {
    expect_error(ErrorCode::corrupt, part, [&] { parse_text(changed(members)); });
  }
  expect_error(ErrorCode::unsupported, "logit_scale is NaN",
               [&] { parse_text(changed(R"("logit_scale": NaN)")); });
  expect_error(ErrorCode::corrupt, "generation_config.json: eos_token_id is NaN",
               [&] { parse_text(text, R"({"eos_token_id": NaN})"); });
}

TEST(Config, FilesThatAreNoConfigAreCorrupt) {
  expect_error(ErrorCode::corrupt, "config.json: is not JSON", [] { parse_text("{\"a\": "); });
  expect_error(ErrorCode::corrupt, "the document is an array", [] { parse_text("[]"); });
  expect_error(ErrorCode::corrupt, "nested deeper", [] { parse_text(std::string(5000, '[')); });
  expect_error(ErrorCode::corrupt, "more than the",
               [] { parse_text("{}" + std::string(2 << 20, ' ')); });
  const TempDir dir;
  expect_error(ErrorCode::not_found, "config.json: there is no such file",
               [&] { read_config(dir.path()); });
}

TEST(Config, DamagedFilesGiveAnErrorOrABoundedConfig) {
  const std::uint64_t seed = testing::seed(20240608);
  SCOPED_TRACE(testing::seed_message(seed));
  testing::Random random(seed);
  const std::string valid = with("rope_scaling", llama3_scaling()).dump();
  int accepted = 0;
  for (int round = 0; round < 1500; ++round) {
    std::string text = valid;
    const auto any = [&] {
      return static_cast<std::size_t>(random.integer(0, std::ssize(text) - 1));
    };
    for (std::int64_t flips = random.integer(1, 3); flips > 0; --flips) {
      text[any()] = static_cast<char>(random.integer(0, 127));
    }
    if (random.integer(0, 7) == 0) text.resize(any());
    try {
      const ModelConfig c = parse_text(text);
      ++accepted;
      EXPECT_GE(c.hidden_size, 1);
      EXPECT_LE(c.num_hidden_layers, 1024);
      EXPECT_EQ(c.num_attention_heads % c.num_key_value_heads, 0);
      EXPECT_EQ(c.head_dim % 2, 0);
      EXPECT_LE(c.head_dim, 256);
      for (const float frequency : inverse_frequencies(c)) EXPECT_TRUE(std::isfinite(frequency));
    } catch (const Error& error) {
      EXPECT_TRUE(error.code() == ErrorCode::corrupt || error.code() == ErrorCode::unsupported)
          << error.what();
    }
  }
  EXPECT_GT(accepted, 5);
  EXPECT_LT(accepted, 1000);
}

}  // namespace
}  // namespace sluice
