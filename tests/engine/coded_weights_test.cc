// Models whose weights are coded while they are loaded: the loss, memory as planned, and refusals.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine_impl.h"
#include "engine/weights.h"
#include "sluice/engine.h"
#include "sluice/errors.h"
#include "tests/io/test_files.h"
#include "tests/support/backends.h"
#include "tests/support/expect.h"
#include "tests/support/far_backend.h"
#include "tests/support/random.h"
#include "tests/support/random_checkpoint.h"

namespace sluice {
namespace {

using testing::expect_error;
using testing::NamedBackend;
using testing::RandomCheckpoint;

using Format = std::optional<WeightFormat>;

const std::filesystem::path kModel = std::filesystem::path(SLUICE_SOURCE_DIR) / "models/sluice-22m";
constexpr WeightFormat kFormats[] = {WeightCode::int8, WeightCode::int4};

EngineConfig exact(const std::filesystem::path& model, const Format& weights) {
  EngineConfig config;
  config.model = model;
  config.compute = DType::f32;
  config.kv_dtype = DType::f32;
  config.threads = 2;
  config.weights = weights;
  return config;
}

std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Logits after each of the later tokens of pieces of a book, decoded.
std::vector<std::vector<float>> book_logits(const Format& weights) {
  constexpr std::size_t kPieces = 3;
  constexpr std::size_t kTokens = 384;
  const std::string book =
      read_text(std::filesystem::path(SLUICE_SOURCE_DIR) / "data/war-and-peace.txt");
  Engine engine = Engine::open(exact(kModel, weights));
  SessionOptions options;
  options.context = kTokens;
  options.decode_batch = 32;
  std::vector<std::vector<float>> all;
  for (std::size_t piece = 1; piece <= kPieces; ++piece) {
    const std::size_t first = book.find('\n', book.size() / (kPieces + 1) * piece);
    std::vector<TokenId> ids = engine.encode_prompt(book.substr(first, 6 * kTokens));
    EXPECT_GE(ids.size(), kTokens);
    ids.resize(kTokens);
    Session session = engine.new_session(options);
    session.decode_known(ids, [&](std::size_t i, std::span<const float> logits) {
      if (i >= kTokens / 4) all.emplace_back(logits.begin(), logits.end());
    });
  }
  return all;
}

std::vector<double> log_softmax(const std::vector<float>& logits) {
  const double most = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (const float logit : logits) sum += std::exp(logit - most);
  std::vector<double> logs;
  for (const float logit : logits) logs.push_back(logit - most - std::log(sum));
  return logs;
}

double divergence(const std::vector<float>& from, const std::vector<float>& to) {
  const std::vector<double> p = log_softmax(from);
  const std::vector<double> q = log_softmax(to);
  double sum = 0.0;
  for (std::size_t i = 0; i < p.size(); ++i) sum += std::exp(p[i]) * (p[i] - q[i]);
  return sum;
}

std::ptrdiff_t likeliest(const std::vector<float>& logits) {
  return std::max_element(logits.begin(), logits.end()) - logits.begin();
}

struct Loss {
  double kl = 0.0;
  double top1 = 0.0;
};

Loss loss_of(const std::vector<std::vector<float>>& wanted, const WeightFormat& format) {
  const std::vector<std::vector<float>> actual = book_logits(format);
  Loss loss;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    loss.kl += divergence(wanted[i], actual[i]);
    loss.top1 += likeliest(wanted[i]) == likeliest(actual[i]) ? 1.0 : 0.0;
  }
  const auto count = static_cast<double>(wanted.size());
  return {loss.kl / count, loss.top1 / count};
}

// int4 is held to its measured loss: this model of 22 million weights loses more than 0.01 with 4
// bits in any single kind of matrix.
TEST(CodedModel, LosesLittle) {
  const std::vector<std::vector<float>> wanted = book_logits(std::nullopt);
  const Loss int8 = loss_of(wanted, WeightCode::int8);
  EXPECT_LT(int8.kl, 0.0005);
  EXPECT_GT(int8.top1, 0.975);
  const Loss int4 = loss_of(wanted, WeightCode::int4);
  std::printf("int8: KL %.5f, top-1 %.3f; int4: KL %.4f, top-1 %.3f\n", int8.kl, int8.top1, int4.kl,
              int4.top1);
  EXPECT_LT(int4.kl, 0.09);
  EXPECT_GT(int4.top1, 0.8);
}

class CodedModelOn : public ::testing::TestWithParam<NamedBackend> {};

// Tied embeddings are those of the coded head; others are coded themselves.
TEST_P(CodedModelOn, HoldsTheBytesThatWereTold) {
  const RandomCheckpoint untied(testing::seed(61));
  for (const std::filesystem::path& model : {kModel, untied.path()}) {
    const Checkpoint checkpoint = Checkpoint::open(model);
    for (const WeightFormat& format : kFormats) {
      SCOPED_TRACE(model.string() + ' ' + to_string(format));
      const std::unique_ptr<testing::Device> device = testing::make_or_skip(GetParam());
      if (device == nullptr) return;
      Backend& backend = *device->backend;
      if (!backend.stores(format)) GTEST_SKIP() << "this backend stores no coded weights";
      const MemoryAccount& account = backend.account(backend.info().compute_tier);
      const std::uint64_t before = account.used();
      const ModelWeights weights = load_weights(checkpoint, backend, format, 2, {});
      const WeightSizes sizes = weight_sizes(checkpoint, backend, format, 2);
      EXPECT_EQ(account.used() - before, sizes.total);
      EXPECT_LE(account.peak() - before, sizes.total + sizes.transient);
      EXPECT_EQ(weights.embedding.bytes(), 0u);
      const bool is_tied = checkpoint.config().tie_word_embeddings;
      EXPECT_EQ(weights.coded_table == weights.lm_head.get(), is_tied);
      EXPECT_EQ(weights.coded_table->outputs(), checkpoint.config().vocab_size);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, CodedModelOn, ::testing::ValuesIn(testing::backends()),
                         testing::name_of);

TEST(CodedModel, PlansExactlyTheBytesOfCodes) {
  constexpr std::uint64_t kVocabulary = 4096, kHidden = 384, kIntermediate = 1024, kLayers = 12;
  constexpr std::uint64_t kQkv = (8 + 2 + 2) * 64, kMixed = 8 * 64;
  const std::uint64_t norms = (2 * kLayers + 1) * kHidden * sizeof(float);
  const std::uint64_t others =
      kVocabulary * kHidden + kLayers * (kMixed * kHidden + 3 * kIntermediate * kHidden);
  const std::uint64_t qkv = kLayers * kQkv * kHidden;
  // A tile of 64 outputs of each of two threads, for prompts.
  const std::uint64_t tiles = 2 * 64 * kIntermediate * sizeof(float);
  const auto bytes = [](const WeightFormat& format) {
    return Engine::open(exact(kModel, format)).plan(64).weight_bytes;
  };
  EXPECT_EQ(bytes(WeightCode::int8), (others + qkv) * 9 / 8 + norms + tiles);
  EXPECT_EQ(bytes(WeightCode::int4), others * 9 / 16 + qkv * 9 / 8 + norms + tiles);
}

// One token at a time, a prompt at once, and the slow definition.
TEST(CodedModel, DecodesAsItPrefillsOnEveryDevice) {
  const RandomCheckpoint model(testing::seed(62));
  const std::vector<TokenId> ids = {5, 6, 7, 100, 3, 3, 90, 12, 40, 41, 42, 127, 0, 1, 2, 77, 9, 8};
  for (const WeightFormat& format : kFormats) {
    std::vector<std::vector<float>> all;
    for (const std::string device : {"cpu", "reference"}) {
      EngineConfig config = exact(model.path(), format);
      config.device = device;
      Engine engine = Engine::open(config);
      Session at_once = engine.new_session(32);
      const auto logits = at_once.prefill(ids);
      all.emplace_back(logits.begin(), logits.end());
      Session one_by_one = engine.new_session(32);
      std::span<const float> last;
      for (const TokenId id : ids) last = one_by_one.decode(id);
      all.emplace_back(last.begin(), last.end());
    }
    for (const std::vector<float>& logits : all) {
      EXPECT_LT(testing::largest_difference(logits, all.back()), 2e-4) << to_string(format);
    }
  }
}

class CodedModelDevice : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (GetParam() == "cpu") return;
    const auto device = testing::make_or_skip(testing::gpu_backends().front());
  }
};

// Prompts, tokens that are known and single ones take different products. Rows of f16 lose little;
// codes in the wrong place would lose everything. Nothing is on the device that was not planned.
TEST_P(CodedModelDevice, GivesTheLogitsOfTheCodesWithinThePlan) {
  constexpr std::int64_t kContext = 300;
  const RandomCheckpoint model(testing::seed(64));
  testing::Random random(testing::seed(65));
  std::vector<TokenId> ids;
  while (std::ssize(ids) < kContext) {
    ids.push_back(static_cast<TokenId>(random.integer(0, RandomCheckpoint::kVocabulary - 1)));
  }
  for (const WeightFormat& format : kFormats) {
    SCOPED_TRACE(to_string(format));
    Engine slow = Engine::open(exact(model.path(), format));
    Session expected = slow.new_session(kContext);
    EngineConfig config = exact(model.path(), format);
    config.device = GetParam();
    config.kv_dtype = DType::f16;
    for (const DType compute : {DType::f32, DType::bf16}) {
      if (compute == DType::bf16 && GetParam() == "cpu") continue;  // not on every processor
      SCOPED_TRACE(to_string(compute));
      config.compute = compute;
      Engine engine = Engine::open(config);
      SessionOptions options;
      options.context = kContext;
      options.decode_batch = 12;
      const Plan plan = engine.plan(options);
      Session session = engine.new_session(options);
      const double most = compute == DType::f32 ? 1e-4 : 1e-2;
      const std::span<const TokenId> all = ids;
      const auto expect_close = [&](std::span<const float> wanted, std::span<const float> actual) {
        EXPECT_LT(divergence({wanted.begin(), wanted.end()}, {actual.begin(), actual.end()}), most);
      };
      expected.truncate(0);
      expect_close(expected.prefill(all.first(200)), session.prefill(all.first(200)));
      std::vector<std::vector<float>> known;
      session.decode_known(all.subspan(200, 50), [&](std::size_t, std::span<const float> logits) {
        known.emplace_back(logits.begin(), logits.end());
      });
      for (std::size_t i = 0; i < 50; ++i) expect_close(expected.decode(all[200 + i]), known.at(i));
      for (std::size_t i = 250; i < 260; ++i) {
        expect_close(expected.decode(all[i]), session.decode(all[i]));
      }
      expect_close(expected.prefill(all.subspan(260)), session.prefill(all.subspan(260)));
      EXPECT_EQ(engine.memory().device_peak, plan.device_bytes());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, CodedModelDevice, ::testing::ValuesIn(testing::devices()),
                         [](const auto& parameter) { return parameter.param; });

// One layer whose matrices have 48 inputs. All weights are zero.
void write_odd_model(const testing::TempDir& directory) {
  constexpr int kHidden = 48;
  nlohmann::json header;
  std::size_t end = 0;
  const auto add = [&](const std::string& name, const std::vector<std::int64_t>& shape) {
    const std::size_t begin = end;
    std::size_t bytes = 2;
    for (const std::int64_t size : shape) bytes *= static_cast<std::size_t>(size);
    end += bytes;
    header[name + ".weight"] = {
        {"dtype", "BF16"}, {"shape", shape}, {"data_offsets", {begin, end}}};
  };
  add("model.embed_tokens", {64, kHidden});
  add("model.norm", {kHidden});
  for (const char* const norm : {"input_layernorm", "post_attention_layernorm"}) {
    add(std::string("model.layers.0.") + norm, {kHidden});
  }
  for (const char* const matrix :
       {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}) {
    add(std::string("model.layers.0.") + matrix, {kHidden, kHidden});
  }
  directory.write("config.json", R"({"model_type": "llama", "hidden_size": 48,
    "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 64, "tie_word_embeddings": true})");
  directory.write("model.safetensors", testing::safetensors(header.dump(), std::string(end, '\0')));
}

class WithoutCodes : public testing::FarBackend {
 public:
  using FarBackend::FarBackend;
  bool stores(const WeightFormat& format) const override { return format == weight_format(); }
};

TEST(CodedModel, RefusesWhatCannotBe) {
  const RandomCheckpoint model(testing::seed(63));
  expect_error(ErrorCode::unsupported, "device far does not store weights in int4 (`weights`)",
               [&] {
                 Engine::Impl::open(exact(model.path(), WeightCode::int4), [](DType weights) {
                   return std::make_unique<WithoutCodes>(cpu::CpuOptions{1, DType::f32, weights});
                 });
               });
  expect_error(ErrorCode::usage, "only files have uint4",
               [&] { Engine::open(exact(model.path(), WeightCode::uint4)); });
  const testing::TempDir odd;
  write_odd_model(odd);
  EXPECT_EQ(Engine::open(exact(odd.path(), std::nullopt)).info().hidden, 48);
  for (const WeightFormat& format : kFormats) {
    expect_error(ErrorCode::unsupported,
                 to_string(format) + " weights come in groups of 32, which do not divide the 48",
                 [&] { Engine::open(exact(odd.path(), format)); });
  }
}

}  // namespace
}  // namespace sluice
