// Models in GGUF files compute what the same weights compute from a Hugging Face folder.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "engine/checkpoint.h"
#include "engine/checkpoint_source.h"
#include "engine/value_basis.h"
#include "io/gguf_type.h"
#include "sluice/chat.h"
#include "sluice/engine.h"
#include "sluice/generate.h"
#include "tests/support/expect.h"
#include "tests/support/gguf_checkpoint.h"
#include "tests/support/golden.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using testing::add_rope;
using testing::add_tensors;
using testing::add_tokenizer;
using testing::decoded;
using testing::encoded;
using testing::gguf_keys;
using testing::gguf_tensor_name;
using testing::GgufWriter;
using testing::Golden;
using testing::largest_difference;
using testing::le_bytes;
using testing::TempDir;

const std::filesystem::path kShipped = SLUICE_SOURCE_DIR "/models/sluice-22m";

EngineConfig exact(const std::filesystem::path& model, std::optional<WeightFormat> weights) {
  EngineConfig config;
  config.model = model;
  config.device = "cpu";
  config.compute = DType::f32;
  config.kv_dtype = DType::f32;
  config.weights = weights;
  return config;
}

// Logits after the tokens as a prompt, and after one decoded token.
std::vector<float> logits_of(const std::filesystem::path& model, const std::vector<TokenId>& ids,
                             std::optional<WeightFormat> weights = WeightCode::elements) {
  Engine engine = Engine::open(exact(model, weights));
  Session session = engine.new_session(static_cast<std::int64_t>(ids.size()) + 1);
  const std::span<const float> prompt = session.prefill(ids);
  std::vector<float> all(prompt.begin(), prompt.end());
  const std::span<const float> next = session.decode(ids.front());
  all.insert(all.end(), next.begin(), next.end());
  return all;
}

// The checkpoint of a folder as a GGUF file with matrices of `dtype`.
std::filesystem::path as_gguf(const TempDir& dir, const std::filesystem::path& folder,
                              DType dtype) {
  const Checkpoint checkpoint = Checkpoint::open(folder);
  GgufWriter writer = gguf_keys(checkpoint.config());
  add_rope(writer, checkpoint.config());
  add_tensors(writer, checkpoint, dtype);
  return dir.write(folder.filename().string() + ".gguf", writer.bytes());
}

// A golden's folder. GGUF files cannot say that yarn's interpolation begins between channels, so
// there it begins at one.
std::filesystem::path folder_of(const Golden& golden, const TempDir& dir) {
  if (golden.name != "llama_mqa128_yarn") return golden.model;
  const auto config = golden.model / "config.json";
  nlohmann::json json = nlohmann::json::parse(testing::read_bytes(config));
  json["rope_parameters"]["truncate"] = true;
  dir.write("config.json", json.dump());
  std::filesystem::create_symlink(golden.model / "model.safetensors",
                                  dir.path() / "model.safetensors");
  return dir.path();
}

// Every architecture and scaling of RoPE. The numbers are the same, and so are the logits, except
// where a factor of RoPE is rounded to a float of the metadata, and where matrices in F32 are
// multiplied in another order than in BF16.
TEST(GgufModel, LogitsAreThoseOfTheFolder) {
  constexpr double kRounding = 1e-4;
  for (const Golden& golden : testing::load_goldens()) {
    if (golden.model.filename() == "sluice-22m") continue;
    SCOPED_TRACE(golden.name);
    const TempDir dir;
    const std::filesystem::path folder = folder_of(golden, dir);
    const std::vector<float> expected = logits_of(folder, golden.ids);
    EXPECT_GT(largest_difference(expected, std::vector<float>(expected.size())), 0.1);
    const std::vector<float> same = logits_of(as_gguf(dir, folder, DType::bf16), golden.ids);
    const bool rounds = golden.name == "llama3_rope" || golden.name == "llama_mqa128_yarn";
    EXPECT_LE(largest_difference(expected, same), rounds ? kRounding : 0.0);
    const std::filesystem::path wide = as_gguf(dir, folder, DType::f32);
    EXPECT_LT(largest_difference(expected, logits_of(wide, golden.ids)), kRounding);
    EXPECT_EQ(value_basis(Checkpoint::open(wide), 1), value_basis(Checkpoint::open(folder), 1));
  }
}

struct BlockType {
  std::uint32_t id;
  const char* name;
  std::vector<std::size_t> scales;  // offsets of f16 numbers in a block
  std::vector<float> sizes;         // which make the weights about 1
  WeightCode code;                  // that holds the codes
  double loses;                     // most that logits differ by, of their deviation
};

// Of the K-quants, the second number scales what the first does not centre.
const std::vector<BlockType>& block_types() {
  constexpr auto k8 = WeightCode::int8;
  constexpr auto kLevels = WeightCode::int4;
  constexpr auto kLine = WeightCode::uint4;
  constexpr double kNothing = 1e-4;   // sums in another order
  constexpr double kRounds = 0.01;    // scales
  constexpr double kRegroups = 0.05;  // two scales into one
  static const std::vector<BlockType> types = {
      {8, "Q8_0", {0}, {1.0f / 74}, k8, kNothing},
      {2, "Q4_0", {0}, {1.0f / 4.6f}, kLine, kNothing},
      {3, "Q4_1", {0, 2}, {1.0f / 4.6f, -7.5f / 4.6f}, kLine, kNothing},
      {6, "Q5_0", {0}, {1.0f / 9.2f}, k8, kNothing},
      {7, "Q5_1", {0, 2}, {1.0f / 9.2f, -15.5f / 9.2f}, k8, kNothing},
      {12, "Q4_K", {0, 2}, {1.0f / 330, 7.5f / 330}, kLine, kRounds},
      {13, "Q5_K", {0, 2}, {1.0f / 660, 15.5f / 660}, k8, kRounds},
      {14, "Q6_K", {208}, {1.0f / 1360}, k8, kRegroups},
      {20, "IQ4_NL", {0}, {1.0f / 67}, kLevels, kNothing},
      {23, "IQ4_XS", {0}, {1.0f / 1240}, kLevels, kRounds},
  };
  return types;
}

// Random blocks whose weights have a deviation of about `deviation`.
std::string random_blocks(std::mt19937_64& random, const BlockType& type, std::int64_t weights,
                          float deviation) {
  const GgufType& layout = *find_gguf_type(type.id);
  std::string bytes(static_cast<std::size_t>(weights / layout.block * layout.bytes), '\0');
  for (char& byte : bytes) byte = static_cast<char>(random() & 0xFF);
  const auto block_bytes = static_cast<std::size_t>(layout.bytes);
  for (std::size_t at = 0; at < bytes.size(); at += block_bytes) {
    const float wobble = 0.75f + static_cast<float>(random() % 1000) / 2000.0f;
    for (std::size_t i = 0; i < type.scales.size(); ++i) {
      const auto scale = le_bytes(float_to_f16(type.sizes[i] * deviation * wobble));
      bytes.replace(at + type.scales[i], 2, scale);
    }
  }
  return bytes;
}

std::vector<float> weights_of(std::uint32_t type, const std::string& blocks) {
  const GgufType& layout = *find_gguf_type(type);
  const std::int64_t count = static_cast<std::int64_t>(blocks.size()) / layout.bytes;
  std::vector<float> weights(static_cast<std::size_t>(count * layout.block));
  layout.decode(reinterpret_cast<const std::byte*>(blocks.data()), count, weights.data());
  return weights;
}

// A model of random blocks as a GGUF file, and its weights as a folder in `dtype`.
class QuantisedPair {
 public:
  static constexpr int kSize = 256;  // hidden and intermediate, and 4 heads of 64
  static constexpr int kKeys = 128;  // 2 KV heads
  static constexpr int kTokens = 96;
  static constexpr int kMatrixRows = 2 * kTokens + 2 * (5 * kSize + 2 * kKeys);

  // `all`: the type of every matrix; null: another for each.
  QuantisedPair(std::uint64_t seed, const BlockType* all, DType dtype)
      : random_(seed), all_(all), dtype_(dtype) {
    ModelConfig c;
    c.architecture = "llama";
    c.hidden_size = c.intermediate_size = kSize;
    c.num_hidden_layers = 2;
    c.num_attention_heads = 4;
    c.num_key_value_heads = 2;
    c.head_dim = 64;
    c.max_position_embeddings = 4096;
    c.rms_norm_eps = 1e-5f;
    writer_ = gguf_keys(c);
    add_matrix("model.embed_tokens", kTokens, 1.0f);
    if (dtype_ == DType::f16) add_f16_head();
    if (dtype_ != DType::f16) add_matrix("lm_head", kTokens, 1.0f / 16);
    add_norm("model.norm");
    for (int layer = 0; layer < c.num_hidden_layers; ++layer) {
      const std::string name = "model.layers." + std::to_string(layer) + ".";
      add_norm(name + "input_layernorm");
      add_norm(name + "post_attention_layernorm");
      for (const char* part : {"self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj",
                               "mlp.up_proj", "mlp.down_proj"}) {
        add_matrix(name + part, kSize, 1.0f / 16);
      }
      for (const char* part : {"self_attn.k_proj", "self_attn.v_proj"}) {
        add_matrix(name + part, kKeys, 1.0f / 16);
      }
    }
    gguf_ = directory_.write("model.gguf", writer_.bytes());
    directory_.write("config.json", kConfig);
    directory_.write("model.safetensors", testing::safetensors("{" + header_ + "}", data_));
  }

  const std::filesystem::path& gguf() const { return gguf_; }
  const std::filesystem::path& folder() const { return directory_.path(); }

 private:
  static constexpr const char* kConfig = R"({"model_type": "llama", "hidden_size": 256,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 96, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": false})";

  void add_matrix(const std::string& name, int rows, float deviation) {
    const BlockType& type = all_ != nullptr ? *all_ : block_types()[next_++ % block_types().size()];
    const std::string blocks = random_blocks(random_, type, std::int64_t{rows} * kSize, deviation);
    const auto count = static_cast<std::uint64_t>(rows);
    writer_.add_tensor(gguf_tensor_name(name) + ".weight", type.id, {count, kSize}, blocks);
    const std::vector<float> stored = weights_of(type.id, blocks);
    add(name, dtype_, "[" + std::to_string(rows) + ",256]",
        testing::is_turned(name) ? in_halves(stored) : stored);
  }

  // The inverse of in_pairs().
  static std::vector<float> in_halves(const std::vector<float>& rows) {
    std::vector<float> halves(rows.size());
    for (std::size_t row = 0; row < rows.size() / kSize; ++row) {
      const std::size_t to = row / 64 * 64 + row % 2 * 32 + row % 64 / 2;
      std::copy_n(rows.begin() + static_cast<std::ptrdiff_t>(row * kSize), kSize,
                  halves.begin() + static_cast<std::ptrdiff_t>(to * kSize));
    }
    return halves;
  }

  // A matrix that says that all others become f16.
  void add_f16_head() {
    std::vector<float> values(std::size_t{kTokens} * kSize);
    for (float& value : values) value = std::normal_distribution<float>(0.0f, 0.0625f)(random_);
    const std::vector<std::byte> bytes = encoded(values, DType::f16);
    writer_.add_tensor("output.weight", testing::kGgufF16, {kTokens, kSize},
                       {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    add("lm_head", DType::f16, "[96,256]", values);
  }

  void add_norm(const std::string& name) {
    std::vector<float> values(kSize);
    for (float& value : values) value = std::normal_distribution<float>(1.0f, 0.1f)(random_);
    const std::vector<std::byte> bytes = encoded(values, DType::f32);
    writer_.add_tensor(gguf_tensor_name(name) + ".weight", testing::kGgufF32, {kSize},
                       {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    add(name, DType::f32, "[256]", values);
  }

  void add(const std::string& name, DType dtype, const std::string& shape,
           const std::vector<float>& values) {
    const std::vector<std::byte> bytes = encoded(values, dtype);
    const std::size_t begin = data_.size();
    data_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if (!header_.empty()) header_ += ",";
    const char* const stored = dtype == DType::f32 ? "F32" : dtype == DType::f16 ? "F16" : "BF16";
    header_ += testing::entry(name + ".weight", stored, shape, begin, data_.size());
  }

  std::mt19937_64 random_;
  const BlockType* all_;
  DType dtype_;
  std::size_t next_ = 0;
  GgufWriter writer_;
  std::string header_;
  std::string data_;
  TempDir directory_;
  std::filesystem::path gguf_;
};

std::vector<TokenId> some_tokens() {
  std::vector<TokenId> ids;
  for (int i = 0; i < 40; ++i) ids.push_back((i * 37 + 11) % QuantisedPair::kTokens);
  return ids;
}

void expect_same_logits(const QuantisedPair& pair) {
  const std::vector<float> gguf = logits_of(pair.gguf(), some_tokens());
  EXPECT_EQ(gguf, logits_of(pair.folder(), some_tokens()));
  double squares = 0.0;
  for (const float logit : gguf) {
    ASSERT_TRUE(std::isfinite(logit));
    squares += logit * logit;
  }
  EXPECT_GT(squares / static_cast<double>(gguf.size()), 0.01) << "the weights do something";
}

TEST(GgufModel, LogitsAreThoseOfTheDecodedWeights) {
  const std::uint64_t seed = testing::seed(42);
  SCOPED_TRACE(testing::seed_message(seed));
  for (const BlockType& type : block_types()) {
    SCOPED_TRACE(type.name);
    expect_same_logits(QuantisedPair(seed, &type, DType::bf16));
  }
}

double deviation_of(const std::vector<float>& logits) {
  double squares = 0.0;
  for (const float logit : logits) squares += double{logit} * logit;
  return std::sqrt(squares / static_cast<double>(logits.size()));
}

// Files keep their codes, in the bytes that these take, unless elements are asked for.
TEST(GgufModel, KeepsTheCodesOfFiles) {
  const std::uint64_t seed = testing::seed(42);
  SCOPED_TRACE(testing::seed_message(seed));
  for (const BlockType& type : block_types()) {
    SCOPED_TRACE(type.name);
    const QuantisedPair pair(seed, &type, DType::f32);
    const std::vector<float> expected = logits_of(pair.folder(), some_tokens());
    const std::vector<float> actual = logits_of(pair.gguf(), some_tokens(), std::nullopt);
    const double loss = largest_difference(expected, actual) / deviation_of(expected);
    EXPECT_LE(loss, type.loses);
    Engine engine = Engine::open(exact(pair.gguf(), std::nullopt));
    EXPECT_TRUE(engine.info().has_codes);
    Engine coded = Engine::open(exact(pair.gguf(), WeightCode::int8));
    const auto bytes = [](const Engine& of) {
      return static_cast<std::int64_t>(of.plan(64).weight_bytes);
    };
    const auto in = [](WeightFormat format) {
      return static_cast<std::int64_t>(format.row_bytes(QuantisedPair::kSize));
    };
    EXPECT_EQ(bytes(engine) - bytes(coded),
              QuantisedPair::kMatrixRows * (in(type.code) - in(WeightCode::int8)));
  }
}

// Files of small models mix types; one matrix in F16 makes all of them f16.
TEST(GgufModel, TypesMayBeMixed) {
  const std::uint64_t seed = testing::seed(42);
  SCOPED_TRACE(testing::seed_message(seed));
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const QuantisedPair pair(seed, nullptr, dtype);
    expect_same_logits(pair);
    const Checkpoint checkpoint = Checkpoint::open(pair.gguf());
    EXPECT_EQ(checkpoint.dtype(), dtype);
    EXPECT_EQ(checkpoint.info("model.norm.weight").dtype, DType::f32);
    EXPECT_LT(checkpoint.parameter_bytes(),
              static_cast<std::uint64_t>(checkpoint.parameters()) * 3 / 2);
  }
}

// Any run of elements is the same as of the whole tensor.
TEST(GgufModel, TensorsAreReadFromAnyElementOn) {
  const QuantisedPair pair(7, nullptr, DType::bf16);
  const Checkpoint checkpoint = Checkpoint::open(pair.gguf());
  for (const std::string_view name : checkpoint.names()) {
    SCOPED_TRACE(name);
    const TensorInfo& info = checkpoint.info(name);
    std::vector<std::byte> whole(static_cast<std::size_t>(info.bytes()));
    checkpoint.read(name, 0, whole);
    const std::size_t element = size_of(*info.dtype);
    std::mt19937_64 random(3);
    for (int i = 0; i < 50; ++i) {
      const std::size_t first = random() % (whole.size() / element);
      const std::size_t count = 1 + random() % (whole.size() / element - first);
      std::vector<std::byte> some(count * element);
      checkpoint.read(name, first * element, some);
      ASSERT_TRUE(std::equal(some.begin(), some.end(),
                             whole.begin() + static_cast<std::ptrdiff_t>(first * element)));
    }
  }
}

TEST(GgufModel, WeightsCanBeCoded) {
  const QuantisedPair pair(11, &block_types().front(), DType::bf16);
  for (const WeightCode code : {WeightCode::int8, WeightCode::int4}) {
    const auto logits = [&](const std::filesystem::path& model) {
      EngineConfig config;
      config.model = model;
      config.device = "cpu";
      config.weights = code;
      Engine engine = Engine::open(config);
      Session session = engine.new_session(64);
      const std::span<const float> row = session.prefill(some_tokens());
      return std::vector<float>(row.begin(), row.end());
    };
    EXPECT_EQ(logits(pair.gguf()), logits(pair.folder()));
  }
}

// The shipped model, with its tokenizer.
class ShippedGguf {
 public:
  ShippedGguf() {
    const Checkpoint checkpoint = Checkpoint::open(kShipped);
    GgufWriter writer = gguf_keys(checkpoint.config());
    add_tokenizer(writer, kShipped / "tokenizer.json", "llama-bpe");
    writer.add_u32("tokenizer.ggml.bos_token_id", 0);
    writer.add_u32("tokenizer.ggml.eos_token_id", 1);
    add_tensors(writer, checkpoint, DType::bf16);
    path_ = directory_.write("sluice-22m.gguf", writer.bytes());
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  TempDir directory_;
  std::filesystem::path path_;
};

std::string continuation(const std::filesystem::path& model, const std::string& prompt) {
  EngineConfig config;
  config.model = model;
  config.device = "cpu";
  Engine engine = Engine::open(config);
  Session session = engine.new_session(256);
  GenerateOptions options;
  options.sampling.temperature = 0.0f;
  options.sampling.max_tokens = 32;
  return generate(engine, session, engine.encode_prompt(prompt), options).text;
}

TEST(GgufModel, TextIsThatOfTheFolder) {
  const ShippedGguf shipped;
  for (const char* prompt : {"The prince went to the", "In 1812, the army's", ""}) {
    SCOPED_TRACE(prompt);
    EXPECT_EQ(continuation(shipped.path(), prompt), continuation(kShipped, prompt));
  }
  const ModelConfig folder = Checkpoint::open(kShipped).config();
  const ModelConfig gguf = Checkpoint::open(shipped.path()).config();
  EXPECT_EQ(gguf.bos_token_id, folder.bos_token_id);
  EXPECT_EQ(gguf.eos_token_ids, folder.eos_token_ids);
  EXPECT_EQ(gguf.rope.theta, folder.rope.theta);
  EXPECT_TRUE(gguf.tie_word_embeddings);
}

}  // namespace
}  // namespace sluice
