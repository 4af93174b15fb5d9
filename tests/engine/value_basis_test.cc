// The basis of values is that of the principal components of the weights, by their definition.
#include "engine/value_basis.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/checkpoint.h"
#include "lib/value_tiles.h"
#include "sluice/element.h"
#include "sluice/engine.h"
#include "sluice/errors.h"
#include "sluice/kv_cache.h"
#include "sluice/value_basis.h"
#include "tests/support/expect.h"
#include "tests/support/golden.h"
#include "tests/support/model_sessions.h"
#include "tests/support/random.h"
#include "tests/support/random_checkpoint.h"

namespace sluice {
namespace {

using testing::expect_error;
using testing::RandomCheckpoint;

using Square = std::vector<double>;  // [d, d]

double product(const double* a, const double* b, std::size_t d) {
  double sum = 0.0;
  for (std::size_t i = 0; i < d; ++i) sum += a[i] * b[i];
  return sum;
}

// W W^T of a KV head.
Square products_of(const Checkpoint& checkpoint, int layer, int head) {
  const ModelConfig& config = checkpoint.config();
  const auto d = static_cast<std::size_t>(config.head_dim);
  const auto hidden = static_cast<std::size_t>(config.hidden_size);
  const std::string name = "model.layers." + std::to_string(layer) + ".self_attn.v_proj.weight";
  const DType dtype = checkpoint.info(name).dtype.value();
  std::vector<std::byte> bytes(d * hidden * size_of(dtype));
  checkpoint.read(name, static_cast<std::size_t>(head) * bytes.size(), bytes);
  std::vector<double> weights;
  for (std::size_t i = 0; i < d * hidden; ++i) {
    weights.push_back(static_cast<double>(read_element(bytes.data() + i * size_of(dtype), dtype)));
  }
  Square products;
  for (std::size_t a = 0; a < d; ++a) {
    for (std::size_t b = 0; b < d; ++b) {
      products.push_back(product(&weights[a * hidden], &weights[b * hidden], hidden));
    }
  }
  return products;
}

// Takes the basis' part out of a vector.
void take_out(const std::vector<double>& basis, std::vector<double>& x) {
  const std::size_t d = x.size();
  for (std::size_t i = 0; i < basis.size() / d; ++i) {
    const double part = product(&basis[i * d], x.data(), d);
    for (std::size_t c = 0; c < d; ++c) x[c] -= part * basis[i * d + c];
  }
}

// The largest eigenvalue among vectors that are orthogonal to the basis, by power iteration.
double largest_beside(const Square& products, const std::vector<double>& basis, std::size_t d) {
  testing::Random random(5);
  const std::vector<float> start = random.normal(static_cast<std::int64_t>(d));
  std::vector<double> x(start.begin(), start.end());
  for (int step = 0; step < 300; ++step) {
    take_out(basis, x);
    const double length = std::sqrt(product(x.data(), x.data(), d));
    if (length == 0.0) return 0.0;
    for (double& element : x) element /= length;
    std::vector<double> next;
    for (std::size_t a = 0; a < d; ++a) next.push_back(product(&products[a * d], x.data(), d));
    x = next;
  }
  take_out(basis, x);
  return std::sqrt(product(x.data(), x.data(), d));
}

// One KV head's vectors: orthonormal, eigenvectors, and none beside them has a larger eigenvalue.
void expect_components(const Square& products, const float* of_head, std::size_t d) {
  const std::vector<double> basis(of_head, of_head + d / 2 * d);
  const double largest = std::sqrt(product(products.data(), products.data(), d * d));
  double last = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < d / 2; ++i) {
    const double* const vector = &basis[i * d];
    for (std::size_t other = 0; other <= i; ++other) {
      ASSERT_NEAR(product(vector, &basis[other * d], d), i == other ? 1.0 : 0.0, 1e-6);
    }
    std::vector<double> image;
    for (std::size_t a = 0; a < d; ++a) image.push_back(product(&products[a * d], vector, d));
    const double value = product(vector, image.data(), d);
    for (std::size_t c = 0; c < d; ++c) {
      ASSERT_NEAR(image[c], value * vector[c], 1e-6 * largest) << i;
    }
    ASSERT_LE(value, last + 1e-6 * largest);
    last = value;
  }
  EXPECT_LE(largest_beside(products, basis, d), last * (1 + 1e-6));
}

TEST(ValueBasis, HasThePrincipalComponentsOfEveryHeadsWeights) {
  for (const testing::Golden& golden : testing::load_goldens()) {
    SCOPED_TRACE(golden.name);
    const Checkpoint checkpoint = Checkpoint::open(golden.model);
    const ModelConfig& config = checkpoint.config();
    const auto d = static_cast<std::size_t>(config.head_dim);
    const std::vector<float> bases = value_basis(checkpoint, 2);
    ASSERT_EQ(bases.size() * sizeof(float), value_basis_bytes(config));
    const auto step = static_cast<std::size_t>(ValueTiles::basis_floats(config.head_dim));
    for (int layer = 0; layer < config.num_hidden_layers; ++layer) {
      for (int head = 0; head < config.num_key_value_heads; ++head) {
        const auto at = static_cast<std::size_t>(layer * config.num_key_value_heads + head);
        expect_components(products_of(checkpoint, layer, head), &bases[at * step], d);
      }
    }
    EXPECT_EQ(value_basis(checkpoint, 1), bases) << "on another number of threads";
  }
}

TEST(ValueBasis, RefusesWeightsThatAreNoNumbers) {
  const RandomCheckpoint model(1, 0, std::numeric_limits<float>::quiet_NaN());
  expect_error(ErrorCode::numeric, "v_proj.weight: value basis: weights are NaN or infinite",
               [&] { value_basis(Checkpoint::open(model.path()), 1); });
}

TEST(ValueBasis, IsOfPoliciesThatKeepHalfTheComponents) {
  const auto halves = [](const char* text) {
    const Policy policy = parse_policy(text);
    return halves_values({&policy, 1}, 3);
  };
  EXPECT_TRUE(halves("select=int4 prune=top_k(8) compensate=values(components=half)"));
  EXPECT_TRUE(halves("values 2:compensate=values(components=half)"));
  EXPECT_FALSE(halves("values"));
  EXPECT_FALSE(halves("dense"));
}

constexpr const char* kHalf = "select=int4 prune=top_k(8) compensate=values(components=half)";

SessionOptions options_for(const char* policy) {
  SessionOptions options;
  options.context = 1000;
  options.policies = {parse_policy(policy)};
  return options;
}

// The plan has the bases' bytes once, whichever session comes first.
TEST(ValueBasis, IsPlannedAndKeptOnce) {
  const RandomCheckpoint model(2);
  EngineConfig config;
  config.model = model.path();
  config.threads = 1;
  Engine engine = Engine::open(config);
  const std::uint64_t bytes = value_basis_bytes(Checkpoint::open(model.path()).config());
  const std::uint64_t without = engine.plan(options_for("values")).weight_bytes;
  EXPECT_EQ(engine.plan(options_for("values")).value_basis_bytes, 0u);
  EXPECT_EQ(engine.plan(options_for(kHalf)).value_basis_bytes, bytes);
  EXPECT_EQ(engine.plan(options_for(kHalf)).weight_bytes, without + bytes);
  const Session first = engine.new_session(options_for("values"));
  const std::uint64_t before = engine.memory().host_bytes;
  {
    const Session half = engine.new_session(options_for(kHalf));
    const Session again = engine.new_session(options_for(kHalf));
  }
  EXPECT_EQ(engine.memory().host_bytes, before + bytes);
  EXPECT_EQ(engine.plan(options_for("values")).weight_bytes, without + bytes) << "it stays";
}

double divergence(std::span<const float> from, std::span<const float> logits) {
  const auto log_sum = [](std::span<const float> x) {
    double sum = 0.0;
    for (const float logit : x) sum += std::exp(static_cast<double>(logit));
    return std::log(sum);
  };
  const double a = log_sum(from);
  const double b = log_sum(logits);
  double sum = 0.0;
  for (std::size_t i = 0; i < from.size(); ++i) {
    const double p = static_cast<double>(from[i]) - a;
    sum += std::exp(p) * (p - static_cast<double>(logits[i]) + b);
  }
  return sum;
}

// Few exact rows, so that most of the weight is on components: half of them lose little, whatever
// format the weights are multiplied in.
TEST(ValueBasis, ServesEveryWeightFormat) {
  constexpr std::int64_t kPrompt = 1300;
  constexpr int kDecoded = 20;
  for (const auto weights :
       {std::optional<WeightFormat>(), std::optional<WeightFormat>(WeightCode::int8),
        std::optional<WeightFormat>(WeightCode::int4)}) {
    EngineConfig config = testing::config_for();
    config.weights = weights;
    config.chunk = 512;
    Engine engine = Engine::open(config);
    const std::vector<TokenId> tokens = testing::book_tokens(engine, kPrompt + kDecoded);
    SessionOptions options = options_for("compact prune=top_k(16) bits=4");
    options.context = kPrompt + kDecoded;
    Session half = engine.new_session(options);
    Session dense = engine.new_session(options.context);
    half.prefill(std::span(tokens).first(kPrompt));
    dense.prefill(std::span(tokens).first(kPrompt));
    double sum = 0.0;
    for (const TokenId token : std::span(tokens).subspan(kPrompt)) {
      const std::vector<float> expected = testing::copy_of(dense.decode(token));
      sum += divergence(expected, half.decode(token)) / kDecoded;
    }
    EXPECT_GT(sum, 1e-6);
    EXPECT_LT(sum, 0.02) << (weights ? to_string(*weights) : "as stored");
  }
}

// What callers with a model of their own compute from weights that they hold.
TEST(ValueBasis, OfAHeadsWeightsIsThatOfTheCheckpoint) {
  for (const testing::Golden& golden : testing::load_goldens()) {
    SCOPED_TRACE(golden.name);
    const Checkpoint checkpoint = Checkpoint::open(golden.model);
    const ModelConfig& config = checkpoint.config();
    const std::vector<float> bases = value_basis(checkpoint, 1);
    const std::string name = "model.layers.0.self_attn.v_proj.weight";
    const DType dtype = checkpoint.info(name).dtype.value();
    std::vector<std::byte> weights(static_cast<std::size_t>(config.head_dim) *
                                   static_cast<std::size_t>(config.hidden_size) * size_of(dtype));
    checkpoint.read(name, 0, weights);
    const std::vector<float> own = value_basis(weights, dtype, config.head_dim);
    ASSERT_EQ(std::ssize(own), ValueTiles::basis_floats(config.head_dim));
    EXPECT_TRUE(std::equal(own.begin(), own.end(), bases.begin()));
  }
}

TEST(ValueBasis, OfAHeadsWeightsNamesWhatIsWrong) {
  std::vector<float> weights(8 * 12, 1.0f);
  const auto basis = [&](int head_dim) {
    return value_basis(std::as_bytes(std::span(weights)), DType::f32, head_dim);
  };
  EXPECT_EQ(basis(8).size(), 32u);
  for (const int head_dim : {-2, 0, 7, 258}) {
    expect_error(ErrorCode::usage, "head_dim is even, 2 to 256", [&] { basis(head_dim); });
  }
  expect_error(ErrorCode::usage, "not 10 rows", [&] { basis(10); });
  weights[5] = std::numeric_limits<float>::infinity();
  expect_error(ErrorCode::numeric, "NaN or infinite", [&] { basis(8); });
  weights.clear();
  expect_error(ErrorCode::usage, "not 8 rows", [&] { basis(8); });
}

TEST(ValueBasis, IsNotAskedOfACacheWithoutAModel) {
  KvConfig config;
  config.shape = {2, 4, 2, 32, DType::f32};
  config.context = 1000;
  config.policies = {parse_policy(kHalf)};
  expect_error(ErrorCode::unsupported,
               "components=half takes a basis from the weights of the model's value projection; "
               "give the cache its value_basis",
               [&] { KvCache{config}; });
}

TEST(ValueBasis, RefusesPoliciesThatKeepValuesInBothWays) {
  const RandomCheckpoint model(3);
  EngineConfig config;
  config.model = model.path();
  Engine engine = Engine::open(config);
  SessionOptions options = options_for("select=int4 prune=top_k(8) compensate=values");
  options.policies.push_back(parse_policy(kHalf));
  expect_error(ErrorCode::usage, "both all and half of their components",
               [&] { engine.plan(options); });
}

}  // namespace
}  // namespace sluice
