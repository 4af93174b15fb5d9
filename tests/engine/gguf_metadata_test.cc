// Configs, tokenizers and chat templates from the metadata of GGUF files, right and wrong ones.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <nlohmann/json.hpp>

#include "engine/byte_level.h"
#include "engine/checkpoint.h"
#include "engine/checkpoint_source.h"
#include "engine/gguf/pre_tokenizers.h"
#include "engine/split.h"
#include "engine/tensors.h"
#include "sluice/chat.h"
#include "sluice/engine.h"
#include "sluice/tokenizer.h"
#include "tests/support/gguf_checkpoint.h"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using testing::expect_error;
using testing::GgufWriter;
using ::testing::IsEmpty;
using testing::TempDir;

const std::filesystem::path kShipped = SLUICE_SOURCE_DIR "/models/sluice-22m";
constexpr std::uint32_t kF32 = 0;

// A model of one layer, in numbers that a test may change, and without weights of its own.
struct SmallModel {
  std::string architecture = "llama";
  std::map<std::string, std::uint32_t> numbers = {
      {"embedding_length", 64}, {"feed_forward_length", 32}, {"block_count", 1},
      {"context_length", 128},  {"attention.head_count", 4}, {"attention.head_count_kv", 2},
      {"vocab_size", 8},
  };
  std::map<std::string, float> floats = {{"attention.layer_norm_rms_epsilon", 1e-5f}};
  std::map<std::string, std::string> texts;
  std::vector<std::string> left_out;  // tensors
  std::function<void(GgufWriter&)> more = [](GgufWriter&) {};

  GgufWriter writer() const {
    GgufWriter writer;
    writer.add_string("general.architecture", architecture);
    for (const auto& [key, value] : numbers) writer.add_u32(architecture + "." + key, value);
    for (const auto& [key, value] : floats) writer.add_f32(architecture + "." + key, value);
    for (const auto& [key, value] : texts) writer.add_string(architecture + "." + key, value);
    const auto add = [&](const std::string& name, const std::vector<std::uint64_t>& shape) {
      if (std::find(left_out.begin(), left_out.end(), name) != left_out.end()) return;
      std::uint64_t bytes = 4;
      for (const std::uint64_t size : shape) bytes *= size;
      writer.add_tensor(name, kF32, shape, std::string(bytes, '\0'));
    };
    add("token_embd.weight", {8, 64});
    add("output_norm.weight", {64});
    for (const char* norm : {"attn_norm", "ffn_norm"}) add(layer(norm), {64});
    add(layer("attn_q"), {64, 64});
    add(layer("attn_k"), {32, 64});
    add(layer("attn_v"), {32, 64});
    add(layer("attn_output"), {64, 64});
    add(layer("ffn_gate"), {32, 64});
    add(layer("ffn_up"), {32, 64});
    add(layer("ffn_down"), {64, 32});
    more(writer);
    return writer;
  }

  static std::string layer(const std::string& part) { return "blk.0." + part + ".weight"; }
};

Checkpoint open(const SmallModel& model) {
  const TempDir dir;
  Checkpoint checkpoint = Checkpoint::open(dir.write("m.gguf", model.writer().bytes()));
  check_tensors(checkpoint);
  return checkpoint;
}

void expect_refused(ErrorCode code, const std::string& part, const SmallModel& model) {
  SCOPED_TRACE(part);
  expect_error(code, part, [&] { open(model); });
  expect_error(code, "m.gguf: ", [&] { open(model); });
}

TEST(GgufConfig, ReadsWhatIsGivenAndDefaults) {
  SmallModel model;
  const ModelConfig plain = open(model).config();
  EXPECT_EQ(plain.architecture, "llama");
  EXPECT_EQ(plain.head_dim, 16);
  EXPECT_EQ(plain.vocab_size, 8);
  EXPECT_EQ(plain.rms_norm_eps, 1e-5f);
  EXPECT_EQ(plain.rope.theta, 10000.0);
  EXPECT_TRUE(plain.tie_word_embeddings);
  EXPECT_FALSE(plain.qkv_bias || plain.o_bias || plain.qk_norm || plain.window);
  EXPECT_FALSE(plain.bos_token_id);
  model.numbers.erase("vocab_size");
  model.numbers["attention.sliding_window"] = 64;
  model.numbers["expert_count"] = 0;
  model.texts["rope.scaling.type"] = "none";
  model.more = [](GgufWriter& writer) {
    writer.add_tensor("output.weight", kF32, {8, 64}, std::string(2048, '\0'));
    writer.add_u32("tokenizer.ggml.bos_token_id", 3);
    writer.add_u32("tokenizer.ggml.eos_token_id", 4);
    writer.add_u32("tokenizer.ggml.eot_token_id", 5);
    writer.add_bool("llama.attention.causal", true);
    for (const char* part : {"attn_q", "attn_k", "attn_v", "attn_output"}) {
      const std::uint64_t rows = part[5] == 'k' || part[5] == 'v' ? 32 : 64;
      writer.add_tensor("blk.0." + std::string(part) + ".bias", kF32, {rows},
                        std::string(4 * rows, '\0'));
    }
  };
  const ModelConfig full = open(model).config();
  EXPECT_EQ(full.vocab_size, 8);
  EXPECT_EQ(full.window, 64);
  EXPECT_FALSE(full.tie_word_embeddings);
  EXPECT_TRUE(full.qkv_bias && full.o_bias);
  EXPECT_EQ(full.bos_token_id, 3);
  EXPECT_THAT(full.eos_token_ids, ElementsAre(4, 5));
}

TEST(GgufConfig, HeadCountsPerLayerMayAgree) {
  SmallModel model;
  model.numbers.erase("attention.head_count");
  model.more = [](GgufWriter& writer) { writer.add_i32s("llama.attention.head_count", {4, 4}); };
  EXPECT_EQ(open(model).config().num_attention_heads, 4);
  model.more = [](GgufWriter& writer) { writer.add_i32s("llama.attention.head_count", {4, 2}); };
  expect_refused(ErrorCode::unsupported, "llama.attention.head_count differs from layer to layer",
                 model);
  model.more = [](GgufWriter& writer) { writer.add_i32s("llama.attention.head_count", {}); };
  expect_refused(ErrorCode::corrupt, "llama.attention.head_count is empty", model);
}

TEST(GgufConfig, WrongNumbersAreNamed) {
  const auto refused = [](const std::string& key, std::uint32_t value, ErrorCode code,
                          const std::string& part) {
    SmallModel model;
    model.numbers[key] = value;
    expect_refused(code, part, model);
  };
  const ErrorCode corrupt = ErrorCode::corrupt;
  refused("embedding_length", 0, corrupt, "llama.embedding_length is not between 1 and 131072");
  refused("block_count", 4'000'000'000u, corrupt, "llama.block_count is not between 1 and 1024");
  refused("feed_forward_length", 1u << 30, corrupt, "llama.feed_forward_length is not between");
  refused("attention.head_count_kv", 3, corrupt,
          "(4) is not a multiple of attention.head_count_kv");
  refused("attention.head_count", 6, corrupt, "llama.embedding_length is not a multiple of");
  refused("vocab_size", 9, corrupt, "llama.vocab_size is 9, but 'token_embd.weight' has 8 rows");
  refused("attention.key_length", 8, ErrorCode::unsupported, "llama.attention.key_length is 8");
  refused("attention.value_length", 32, ErrorCode::unsupported,
          "llama.attention.value_length is 32");
  refused("rope.dimension_count", 8, ErrorCode::unsupported, "llama.rope.dimension_count is 8");
  refused("expert_count", 8, ErrorCode::unsupported, "llama.expert_count is 8, a feature");
  refused("rope.dimension_sections", 8, ErrorCode::unsupported,
          "llama.rope.dimension_sections is set");
  refused("block_count", 2, corrupt, "has no tensor 'blk.1.attn_norm.weight', which its metadata");
  refused("embedding_length", 128, corrupt,
          "tensor 'token_embd.weight' does not have rows of embedding_length (128)");
  refused("feed_forward_length", 33, corrupt,
          "tensor 'blk.0.ffn_gate.weight' is [32, 64] but metadata calls for [33, 64]");
  SmallModel model;
  model.numbers.erase("context_length");
  expect_refused(corrupt, "llama.context_length is missing", model);
  model = {};
  model.floats["attention.layer_norm_rms_epsilon"] = -1.0f;
  expect_refused(corrupt, "llama.attention.layer_norm_rms_epsilon is not between", model);
  model = {};
  model.floats["final_logit_softcapping"] = 30.0f;
  expect_refused(ErrorCode::unsupported, "llama.final_logit_softcapping is 30, a feature", model);
  model = {};
  model.more = [](GgufWriter& w) { w.add_u32("tokenizer.ggml.bos_token_id", 8); };
  expect_refused(corrupt, "tokenizer.ggml.bos_token_id is not between 0 and 7", model);
}

TEST(GgufConfig, WrongTensorsAreNamed) {
  SmallModel model;
  model.left_out = {"token_embd.weight"};
  expect_refused(ErrorCode::corrupt, "has no tensor 'token_embd.weight', so it has no model",
                 model);
  model.left_out = {"blk.0.ffn_up.weight"};
  expect_refused(ErrorCode::corrupt, "has no tensor 'blk.0.ffn_up.weight'", model);
  model = {};
  model.more = [](GgufWriter& w) { w.add_tensor("blk.0.x.weight", kF32, {1}, "xxxx"); };
  expect_refused(ErrorCode::unsupported, "has a tensor 'blk.0.x.weight', which no llama", model);
  model.more = [](GgufWriter& w) { w.add_tensor("model.norm.weight", kF32, {1}, "xxxx"); };
  expect_refused(ErrorCode::unsupported, "'model.norm.weight' has a name of the Hugging Face",
                 model);
  model.left_out = {"blk.0.attn_norm.weight"};
  constexpr std::uint32_t kI32 = 26;
  model.more = [&](GgufWriter& w) {
    w.add_tensor("blk.0.attn_norm.weight", kI32, {64}, std::string(256, '\0'));
  };
  expect_refused(ErrorCode::unsupported, "tensor 'blk.0.attn_norm.weight' is I32, but Sluice",
                 model);
  model.left_out = {"token_embd.weight"};
  model.numbers["embedding_length"] = 256;
  model.more = [](GgufWriter& w) {
    w.add_tensor("token_embd.weight", 10, {8, 256}, std::string(8 * 84, '\0'));
  };
  expect_refused(ErrorCode::unsupported, "tensor 'token_embd.weight' is Q2_K, but Sluice decodes",
                 model);
}

TEST(GgufConfig, OtherArchitecturesAreNamed) {
  for (const char* name : {"gemma2", "phi3", "qwen2moe", "mamba", ""}) {
    SmallModel model;
    model.architecture = name;
    expect_refused(ErrorCode::unsupported,
                   "general.architecture is '" + std::string(name) + "', but", model);
  }
}

TEST(GgufConfig, ReadsScalingOfRope) {
  SmallModel model;
  model.floats["rope.freq_base"] = 1e6f;
  model.floats["rope.scaling.factor"] = 4.0f;
  EXPECT_EQ(std::get<LinearScaling>(open(model).config().rope.scaling).factor, 4.0);
  model.texts["rope.scaling.type"] = "yarn";
  model.numbers["rope.scaling.original_context_length"] = 32;
  const RopeConfig yarn = open(model).config().rope;
  EXPECT_EQ(yarn.theta, 1e6);
  EXPECT_EQ(std::get<YarnScaling>(yarn.scaling).original_max_position_embeddings, 32.0);
  EXPECT_NEAR(yarn.attention_factor(), 1.0 + 0.1 * std::log(4.0), 1e-12);
  model.floats["rope.scaling.yarn_ext_factor"] = 0.5f;
  expect_refused(ErrorCode::unsupported, "yarn_ext_factor is not 1", model);
  model.floats["rope.scaling.yarn_ext_factor"] = 1.0f;
  model.floats["rope.scaling.yarn_log_multiplier"] = 0.1f;
  expect_refused(ErrorCode::unsupported, "llama.rope.scaling.yarn_log_multiplier is 0.1", model);
  model = {};
  model.texts["rope.scaling.type"] = "longrope";
  expect_refused(ErrorCode::unsupported, "llama.rope.scaling.type is 'longrope'", model);
  model = {};
  model.floats["rope.scale_linear"] = 2.0f;
  EXPECT_EQ(std::get<LinearScaling>(open(model).config().rope.scaling).factor, 2.0);

  const auto with_factors = [](std::vector<float> factors) {
    SmallModel scaled;
    scaled.more = [factors](GgufWriter& w) {
      w.add_tensor("rope_freqs.weight", kF32, {factors.size()},
                   {reinterpret_cast<const char*>(factors.data()), factors.size() * 4});
    };
    return scaled;
  };
  const std::vector<float> factors = {1, 1, 1, 2, 4, 8, 8, 8};
  const ModelConfig scaled = open(with_factors(factors)).config();
  const std::vector<float> plain = inverse_frequencies({10000.0, {}}, 16);
  const std::vector<float> divided = inverse_frequencies(scaled);
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_EQ(divided[i], plain[i] / factors[i]);
  expect_refused(ErrorCode::corrupt, "'rope_freqs.weight' is not F32 [8]", with_factors({1, 1}));
  expect_refused(ErrorCode::corrupt, "'rope_freqs.weight' has a factor of 0",
                 with_factors({1, 1, 1, 1, 1, 1, 1, 0}));
  model = with_factors(factors);
  model.floats["rope.scaling.factor"] = 4.0f;
  expect_refused(ErrorCode::unsupported, "stands beside a tensor 'rope_freqs.weight'", model);
}

// The shipped tokenizer as metadata.
GgufWriter shipped_tokenizer(const std::string& pre) {
  GgufWriter writer;
  testing::add_tokenizer(writer, kShipped / "tokenizer.json", pre);
  writer.add_u32("tokenizer.ggml.bos_token_id", 0);
  return writer;
}

Tokenizer load(const GgufWriter& writer, int vocabulary = 4096) {
  const TempDir dir;
  return Tokenizer::load_checkpoint(dir.write("m.gguf", writer.bytes()), vocabulary);
}

TEST(GgufTokenizer, GivesTheIdsOfTheTokenizerJson) {
  const Tokenizer folder = Tokenizer::load_checkpoint(kShipped, 4096, 0);
  const Tokenizer gguf = load(shipped_tokenizer("llama-bpe"));
  std::vector<std::string> texts = {testing::read_bytes(SLUICE_TEST_DATA "/needle_6k.txt"),
                                    "<|begin_of_text|>It's 12345 o'clock\r\n\r\n  x",
                                    "naïve ÅNGSTRÖM 東京 \U0001F600 \t\n<|end_of_text|>"};
  const auto cases =
      nlohmann::json::parse(testing::read_bytes(SLUICE_TEST_DATA "/golden/tokenizer_cases.json"));
  for (const nlohmann::json& entry : cases) {
    if (entry.is_object() && entry.contains("text")) texts.push_back(entry["text"]);
  }
  for (const std::string& text : texts) {
    SCOPED_TRACE(text.substr(0, 80));
    EXPECT_EQ(gguf.encode(text), folder.encode(text));
    EXPECT_EQ(gguf.encode_plain(text), folder.encode_plain(text));
    EXPECT_EQ(gguf.decode(gguf.encode(text), true), text);
  }
  EXPECT_THAT(gguf.prefix(), ElementsAre(0));
  EXPECT_EQ(gguf.size(), folder.size());
}

TEST(GgufTokenizer, MetadataSaysIfTextsBeginWithTheBosToken) {
  GgufWriter writer = shipped_tokenizer("llama-bpe");
  writer.add_bool("tokenizer.ggml.add_bos_token", false);
  EXPECT_THAT(load(writer).prefix(), IsEmpty());
  EXPECT_THAT(load(shipped_tokenizer("gpt-2")).prefix(), IsEmpty());
  writer = shipped_tokenizer("gpt-2");
  writer.add_bool("tokenizer.ggml.add_bos_token", true);
  EXPECT_THAT(load(writer).prefix(), ElementsAre(0));
}

// What every name does to a text; "|" stands between the pieces, which are those that Hugging
// Face's tokenizers 0.23.3 gives with the expressions of the original tokenizer.json.
TEST(GgufTokenizer, NamesSayHowTextIsCut) {
  const auto cut = [](const char* name, const std::string& text) {
    const gguf::PreTokenizer* const pre = gguf::find_pre_tokenizer(name);
    if (pre == nullptr) return std::string("no such name");
    const Splitter splitter({pre->patterns.begin(), pre->patterns.end()});
    std::string pieces;
    Splitter::Run run(splitter, text.size());
    run.split(text, [&](std::string_view piece) {
      pieces += (pieces.empty() ? "" : "|") + std::string(piece);
    });
    return pieces;
  };
  const std::string text = "It'S 12345 JSONValue's a+b=c/\n\n  x";
  EXPECT_EQ(cut("llama-bpe", text), "It|'S| |123|45| JSONValue|'s| a|+b|=c|/\n\n| | x");
  EXPECT_EQ(cut("llama3", text), cut("llama-bpe", text));
  EXPECT_EQ(cut("qwen2", text), "It|'S| |1|2|3|4|5| JSONValue|'s| a|+b|=c|/\n\n| | x");
  EXPECT_EQ(cut("tekken", text), "It|'S| |1|2|3|4|5| JSONValue|'s| a|+b|=c|/\n\n| | x");
  EXPECT_EQ(cut("gpt-2", text), "It|'|S| 12345| JSONValue|'s| a|+|b|=|c|/|\n\n | x");
  EXPECT_EQ(cut("smollm", text), "It|'|S| |1|2|3|4|5| JSONValue|'s| a|+|b|=|c|/|\n\n | x");
  EXPECT_EQ(cut("default", text), "It|'|S| |123|45| JSONValue|'|s| a|+|b|=|c|/|\n\n | x");
}

void expect_tokenizer_refused(ErrorCode code, const std::string& part, const GgufWriter& writer,
                              int vocabulary = 4096) {
  SCOPED_TRACE(part);
  expect_error(code, part, [&] { load(writer, vocabulary); });
  expect_error(code, "m.gguf: ", [&] { load(writer, vocabulary); });
}

TEST(GgufTokenizer, OtherKindsAreNamed) {
  for (const char* kind : {"llama", "bert", "t5", "rwkv", "gemma4"}) {
    GgufWriter writer;
    writer.add_string("tokenizer.ggml.model", kind);
    expect_tokenizer_refused(ErrorCode::unsupported,
                             "tokenizer.ggml.model is '" + std::string(kind) + "', but", writer);
  }
  expect_tokenizer_refused(ErrorCode::unsupported,
                           "tokenizer.ggml.pre is 'viking', but Sluice knows",
                           shipped_tokenizer("viking"));
  GgufWriter writer;
  writer.add_string("tokenizer.ggml.model", "gpt2");
  expect_tokenizer_refused(ErrorCode::unsupported, "tokenizer.ggml.pre is missing", writer);
  writer = shipped_tokenizer("llama-bpe");
  writer.add_bool("tokenizer.ggml.add_eos_token", true);
  expect_tokenizer_refused(ErrorCode::unsupported, "tokenizer.ggml.add_eos_token asks", writer);
  expect_tokenizer_refused(ErrorCode::corrupt, "tokenizer.ggml.tokens has 4096 entries, more than",
                           shipped_tokenizer("llama-bpe"), 4095);
}

// A tokenizer of all bytes and `tokens`, of `types`.
GgufWriter small_tokenizer(const std::vector<std::string>& tokens,
                           const std::vector<std::int32_t>& types,
                           const std::vector<std::string>& merges = {}) {
  std::vector<std::string> texts;
  for (int byte = 0; byte < 256; ++byte) {
    texts.push_back(byte_symbol(static_cast<std::uint8_t>(byte)));
  }
  std::vector<std::int32_t> all_types(256, 1);
  texts.insert(texts.end(), tokens.begin(), tokens.end());
  all_types.insert(all_types.end(), types.begin(), types.end());
  GgufWriter writer;
  writer.add_string("tokenizer.ggml.model", "gpt2");
  writer.add_string("tokenizer.ggml.pre", "gpt-2");
  writer.add_strings("tokenizer.ggml.tokens", texts);
  writer.add_i32s("tokenizer.ggml.token_type", all_types);
  writer.add_strings("tokenizer.ggml.merges", merges);
  return writer;
}

TEST(GgufTokenizer, TypesSayWhatATokenIs) {
  const Tokenizer tokenizer = load(
      small_tokenizer({"ab", "<|control|>", "<user defined>", "[PAD]"}, {1, 3, 4, 5}, {"a b"}));
  EXPECT_THAT(tokenizer.encode("ab<|control|><user defined>"), ElementsAre(256, 257, 258));
  EXPECT_EQ(tokenizer.decode({{256, 257, 258}}), "ab<user defined>");
  EXPECT_EQ(tokenizer.encode("[PAD]").size(), 5u) << "an unused token is none";
  EXPECT_EQ(tokenizer.encode_plain("<|control|>").size(), 11u);
}

TEST(GgufTokenizer, BrokenTokensAreNamed) {
  const auto refused = [](const std::string& part, const GgufWriter& writer) {
    expect_tokenizer_refused(ErrorCode::tokenizer, part, writer);
  };
  refused("has \"a\" twice, as tokens 97 and 256", small_tokenizer({"a"}, {1}));
  refused("has token 256, \"\", which is empty", small_tokenizer({""}, {1}));
  refused("which is no UTF-8", small_tokenizer({"\xff"}, {1}));
  refused("which has 2000 bytes", small_tokenizer({std::string(2000, 'x')}, {3}));
  refused("says that token 256 is of type 6", small_tokenizer({"<0x00>"}, {6}));
  refused("token_type has 257 entries for 258 tokens", small_tokenizer({"xy", "yz"}, {1}));
  refused("[0] has \"xy\", which is no token", small_tokenizer({}, {}, {"xy z"}));
  refused("[0] has \"xy\", which is no token", small_tokenizer({}, {}, {"x y"}));
  refused("[0] is not a pair of tokens", small_tokenizer({}, {}, {"xy"}));
  refused("[0] is not a pair of tokens", small_tokenizer({}, {}, {"x y z"}));
  GgufWriter writer = small_tokenizer({}, {});
  writer.add_bool("tokenizer.ggml.add_bos_token", true);
  refused("tokenizer.ggml.bos_token_id is missing", writer);
  writer = GgufWriter();
  writer.add_string("tokenizer.ggml.model", "gpt2");
  writer.add_string("tokenizer.ggml.pre", "gpt-2");
  writer.add_strings("tokenizer.ggml.tokens", {"a"});
  refused("tokenizer.ggml.tokens has no token for byte 0x00", writer);
}

TEST(GgufTokenizer, ControlTokensThatEndATextAreFoundByTheirTexts) {
  SmallModel model;
  model.numbers.erase("vocab_size");
  model.more = [](GgufWriter& writer) {
    writer.add_u32("tokenizer.ggml.eos_token_id", 2);
    writer.add_strings("tokenizer.ggml.tokens",
                       {"a", "<|eot_id|>", "<|end_of_text|>", "<|im_end|>", "b", "c", "d", "e"});
    writer.add_i32s("tokenizer.ggml.token_type", {1, 3, 3, 1, 1, 1, 1, 1});
  };
  EXPECT_THAT(open(model).config().eos_token_ids, ElementsAre(2, 1));
}

// A conversation as a folder with the same template renders it.
TEST(GgufChat, RendersTheTemplateOfTheMetadata) {
  constexpr const char* kTemplate =
      "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}"
      "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
  SmallModel model;
  const auto write = [&](const TempDir& dir, bool with_template) {
    GgufWriter writer = model.writer();
    testing::add_tokenizer(writer, kShipped / "tokenizer.json", "llama-bpe");
    writer.add_u32("tokenizer.ggml.bos_token_id", 0);
    writer.add_u32("tokenizer.ggml.eos_token_id", 1);
    if (with_template) writer.add_string("tokenizer.chat_template", kTemplate);
    return dir.write("m.gguf", writer.bytes());
  };
  model.numbers.erase("vocab_size");
  model.left_out = {"token_embd.weight"};
  model.more = [](GgufWriter& writer) {
    writer.add_tensor("token_embd.weight", kF32, {4096, 64}, std::string(4096 * 256, '\0'));
  };
  const TempDir dir;
  const std::filesystem::path file = write(dir, true);
  const Tokenizer tokenizer = Tokenizer::load_checkpoint(file, 4096);
  const ChatFormat format = ChatFormat::load(file, tokenizer);
  EXPECT_EQ(format.file(), file);
  EXPECT_THAT(format.end_tokens(), ElementsAre(1));
  const std::vector<ChatTurn> turns = {{"What is it?", "", {}}};
  EXPECT_EQ(tokenizer.decode(format.render("Be short.", turns), true),
            "<|begin_of_text|><|system|>Be short.<|end_of_text|><|user|>What is it?<|end_of_text|>"
            "<|assistant|>");
  expect_error(ErrorCode::unsupported, "m.gguf: this checkpoint has no chat template",
               [&] { ChatFormat::load(write(dir, false), tokenizer); });
}

TEST(GgufSource, FilesAndFoldersAreTold) {
  const TempDir dir;
  const auto open_path = [&](const std::filesystem::path& path) {
    return [path] { std::ignore = CheckpointSource::open(path); };
  };
  const auto file = dir.write("model-Q4_0.gguf", "GGUF");
  expect_error(ErrorCode::corrupt, "too few for a GGUF file", open_path(file));
  expect_error(ErrorCode::not_found, "give a GGUF file in it, such as " + file.string(),
               open_path(dir.path()));
  expect_error(ErrorCode::not_found, "none.gguf: there is no such file",
               open_path(dir.path() / "none.gguf"));
  expect_error(ErrorCode::not_found, "is a file, but no GGUF file",
               open_path(dir.write("x.safetensors", "xxxxxxxx")));
  const auto blob = dir.write("sha256-0a1b", SmallModel().writer().bytes());
  EXPECT_EQ(Checkpoint::open(blob).config().vocab_size, 8) << "a GGUF file by another name";
  expect_error(ErrorCode::tokenizer, "sha256-0a1b: has no tokenizer", [&] {
    EngineConfig config;
    config.model = blob;
    config.device = "reference";
    std::ignore = Engine::open(config).tokenizer();
  });
}

}  // namespace
}  // namespace sluice
