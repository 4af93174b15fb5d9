// Every other operation of a queue against its definition in fp64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "sluice/errors.h"
#include "tests/support/backends.h"
#include "tests/support/device.h"
#include "tests/support/elements.h"
#include "tests/support/expect.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using testing::download;
using testing::encoded;
using testing::NamedBackend;
using testing::Random;
using testing::rounded;
using testing::upload;

// fp32 arithmetic may be off by a few roundings of each term; the tests' terms are of order 1.
constexpr double kFloat = 16 * 0x1p-24;

class OpsParity : public ::testing::TestWithParam<NamedBackend> {
 protected:
  void SetUp() override {
    backend_ = testing::make_or_skip(GetParam());
    if (backend_ != nullptr) compute_ = backend_->info().compute_dtype;
  }
  // The relative error of a result that is stored as `dtype`, with 8 or 11 significant bits.
  static double rounding(DType dtype) {
    return dtype == DType::f32 ? kFloat : dtype == DType::bf16 ? 0x1.01p-8 : 0x1.01p-11;
  }
  Buffer zeros(std::size_t count, DType dtype) {
    return backend_->allocate(backend_->info().compute_tier, count * size_of(dtype));
  }
  std::vector<float> values_of(const Buffer& buffer, DType dtype) {
    return testing::values_of(*backend_, buffer, dtype);
  }
  void expect_near(float actual, double expected, double relative, double absolute) {
    EXPECT_NEAR(actual, expected, std::abs(expected) * relative + absolute);
  }

  const std::uint64_t seed_ = testing::seed(7);
  Random random_{seed_};
  std::unique_ptr<testing::Device> backend_;
  DType compute_ = DType::f32;
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};
};

TEST_P(OpsParity, EmbedCopiesRowsOfTheTableAndZerosForWhatItLacks) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const std::vector<float> table = rounded(random_.normal(7 * 33), dtype);
    const Buffer device = upload(*backend_, encoded(table, dtype));
    const std::vector<TokenId> ids = {6, 0, -1, 3, 3, 7, std::numeric_limits<TokenId>::max()};
    const Buffer device_ids = upload(*backend_, ids);
    const Buffer y = upload(*backend_, random_.normal(7 * 33));
    backend_->queue->run(EmbedParams{{device.data(), dtype, 7, 33, 33},
                                     reinterpret_cast<const TokenId*>(device_ids.data()),
                                     {y.data(), DType::f32, 7, 33, 33}});
    const std::vector<float> actual = values_of(y, DType::f32);
    for (std::size_t i = 0; i < actual.size(); ++i) {
      const TokenId id = ids[i / 33];
      const bool known = id >= 0 && id < 7;
      ASSERT_EQ(actual[i], known ? table[static_cast<std::size_t>(id) * 33 + i % 33] : 0.0f) << i;
    }
  }
}

TEST_P(OpsParity, LinearMultipliesAddsBiasAndAccumulates) {
  constexpr std::int64_t kInputs = 96;
  constexpr std::int64_t kOutputs = 80;
  for (const std::int64_t tokens : {1, 5, 33}) {
    for (const bool accumulate : {false, true}) {
      const std::vector<float> x = rounded(random_.normal(tokens * kInputs), compute_);
      std::vector<float> w = rounded(random_.normal(kOutputs * kInputs), compute_);
      const std::vector<float> bias = random_.normal(kOutputs);
      const std::vector<float> before = random_.normal(tokens * kOutputs);
      const auto weight =
          backend_->backend->prepare_weight({w.data(), DType::f32, kOutputs, kInputs, kInputs});
      ASSERT_EQ(weight->outputs(), kOutputs);
      ASSERT_EQ(weight->inputs(), kInputs);
      const Buffer device_x = upload(*backend_, encoded(x, compute_));
      const Buffer device_bias = upload(*backend_, bias);
      const Buffer y = upload(*backend_, before);
      LinearParams p;
      p.x = {device_x.data(), compute_, tokens, kInputs, kInputs};
      p.weight = weight.get();
      p.bias = device_bias.floats();
      p.y = {y.data(), DType::f32, tokens, kOutputs, kOutputs};
      p.accumulate = accumulate;
      backend_->queue->run(p);
      const std::vector<float> actual = values_of(y, DType::f32);
      for (std::size_t i = 0; i < actual.size(); ++i) {
        double expected = bias[i % kOutputs] + (accumulate ? before[i] : 0.0f);
        for (std::size_t j = 0; j < kInputs; ++j) {
          expected +=
              static_cast<double>(x[i / kOutputs * kInputs + j]) * w[i % kOutputs * kInputs + j];
        }
        // Inputs are exact in the compute dtype, and both sum products in fp32: 96 terms of
        // order 1.
        ASSERT_NEAR(actual[i], expected, kInputs * kFloat) << i;
      }
    }
  }
}

// Two queues, each with every other piece, from memory of the backend's, in any dtype. Products
// with unit vectors are the weights themselves.
TEST_P(OpsParity, WriteWeightTakesPiecesOfAnyDtypeFromSeveralQueues) {
  constexpr std::int64_t kInputs = 96;
  const std::int64_t block = backend_->backend->weight_rows(backend_->backend->weight_format());
  const std::int64_t outputs = 5 * std::max<std::int64_t>(block, 16) + 8;
  std::vector<float> units(kInputs * kInputs);
  for (std::size_t i = 0; i < kInputs; ++i) units[i * kInputs + i] = 1.0f;
  const Buffer x = upload(*backend_, encoded(units, compute_));
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const std::vector<float> w = rounded(random_.normal(outputs * kInputs), dtype);
    const std::vector<std::byte> bytes = encoded(w, dtype);
    const Buffer host = backend_->allocate(Tier::host, bytes.size());
    std::copy(bytes.begin(), bytes.end(), host.data());
    const std::unique_ptr<Weight> weight =
        backend_->backend->make_weight({outputs, kInputs, backend_->backend->weight_format()});
    const std::unique_ptr<Queue> other = backend_->backend->make_queue({.computes = false});
    const std::int64_t step = std::max<std::int64_t>(block, 16);
    for (std::int64_t first = 0; first < outputs; first += step) {
      Queue& queue = first / step % 2 == 0 ? *backend_->queue : *other;
      std::byte* const from =
          host.data() + static_cast<std::size_t>(first * kInputs) * size_of(dtype);
      queue.run(WriteWeightParams{
          weight.get(), first, {from, dtype, std::min(step, outputs - first), kInputs}});
    }
    other->synchronize();
    const Buffer y = zeros(static_cast<std::size_t>(outputs * kInputs), DType::f32);
    backend_->queue->run(LinearParams{{x.data(), compute_, kInputs, kInputs, kInputs},
                                      weight.get(),
                                      nullptr,
                                      {y.data(), DType::f32, kInputs, outputs, outputs}});
    const std::vector<float> actual = values_of(y, DType::f32);
    const std::vector<float> expected = rounded(w, compute_);
    for (std::size_t i = 0; i < actual.size(); ++i) {
      const std::size_t output = i % static_cast<std::size_t>(outputs);
      ASSERT_EQ(actual[i], expected[output * kInputs + i / static_cast<std::size_t>(outputs)]) << i;
    }
  }
}

TEST_P(OpsParity, MakeWeightRefusesAFormatThatIsNotStored) {
  Backend& backend = *backend_->backend;
  const std::uint64_t before = backend.account(backend.info().compute_tier).used();
  int refused = 0;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    if (backend.stores(dtype)) continue;
    ++refused;
    testing::expect_error(ErrorCode::unsupported,
                          "does not store weights in " + std::string(to_string(dtype)), [&] {
                            static_cast<void>(backend.make_weight({64, 64, dtype}));
                          });
  }
  EXPECT_EQ(refused, 2);
  EXPECT_EQ(backend.account(backend.info().compute_tier).used(), before);
}

// What a chain computes, and how far off it may be.
struct ChainValue {
  double value = 0.0;
  double error = 0.0;
};

TEST_P(OpsParity, LinearChainIsItsPartsInOrder) {
  constexpr std::int64_t kInputs = 192;
  constexpr std::int64_t kOutputs = 80;
  constexpr float kEpsilon = 1e-3f;
  for (const std::int64_t tokens : {1, 3}) {
    const std::vector<float> x = random_.normal(tokens * kInputs, 3.0f);
    const std::vector<float> norm = random_.normal(kInputs);
    const std::vector<float> w = rounded(random_.normal(kOutputs * kInputs, 0.1f), compute_);
    const std::vector<float> bias = random_.normal(kOutputs);
    const std::vector<float> before = random_.normal(tokens * kOutputs);
    const auto weight = backend_->backend->prepare_weight(
        {const_cast<float*>(w.data()), DType::f32, kOutputs, kInputs, kInputs});
    const Buffer device_x = upload(*backend_, x);
    const Buffer device_norm = upload(*backend_, norm);
    const Buffer device_bias = upload(*backend_, bias);
    const Buffer between = zeros(x.size(), compute_);
    const Matrix from = {device_x.data(), DType::f32, tokens, kInputs, kInputs};
    const Matrix inputs = {between.data(), compute_, tokens, kInputs, kInputs};
    // The product of token `t` and row `o`; its inputs are rounded once.
    const auto product = [&](std::size_t t, std::size_t o, bool normed) {
      double squares = 0.0;
      for (std::size_t j = 0; j < kInputs; ++j) squares += std::pow(x[t * kInputs + j], 2.0);
      ChainValue sum;
      for (std::size_t j = 0; j < kInputs; ++j) {
        const double factor = normed ? norm[j] / std::sqrt(squares / kInputs + kEpsilon) : 1.0;
        const double term = x[t * kInputs + j] * factor * w[o * kInputs + j];
        sum.value += term;
        sum.error += std::abs(term) * (rounding(compute_) + kFloat);
      }
      return sum;
    };
    for (const bool normed : {false, true}) {
      LinearChain chain;
      if (normed) chain.norm = {from, device_norm.floats(), kEpsilon, inputs};
      if (!normed) chain.cast = {from, inputs};
      const Buffer y = upload(*backend_, before);
      chain.linear = {inputs,
                      weight.get(),
                      device_bias.floats(),
                      {y.data(), DType::f32, tokens, kOutputs, kOutputs},
                      true};
      backend_->queue->run(chain);
      const std::vector<float> actual = values_of(y, DType::f32);
      for (std::size_t i = 0; i < actual.size(); ++i) {
        const ChainValue sum = product(i / kOutputs, i % kOutputs, normed);
        ASSERT_NEAR(actual[i], sum.value + bias[i % kOutputs] + before[i], sum.error) << i;
      }
      // The first half of the rows gates the second.
      constexpr std::int64_t kHalf = kOutputs / 2;
      const Buffer gated = zeros(static_cast<std::size_t>(tokens * kHalf), compute_);
      chain.linear.bias = nullptr;
      chain.linear.accumulate = false;
      chain.swiglu = {chain.linear.y, {gated.data(), compute_, tokens, kHalf, kHalf}};
      backend_->queue->run(chain);
      const std::vector<float> halves = values_of(gated, compute_);
      for (std::size_t i = 0; i < halves.size(); ++i) {
        const ChainValue gate = product(i / kHalf, i % kHalf, normed);
        const ChainValue up = product(i / kHalf, i % kHalf + kHalf, normed);
        const double silu = gate.value / (1.0 + std::exp(-gate.value));
        // silu is nowhere steeper than 1.1.
        const double error =
            1.1 * gate.error * (std::abs(up.value) + up.error) + std::abs(silu) * up.error;
        expect_near(halves[i], silu * up.value, rounding(compute_) + kFloat, error + kFloat);
      }
    }
  }
}

TEST_P(OpsParity, RmsNormScalesEveryRow) {
  for (const DType dtype : {DType::f32, compute_}) {
    const std::vector<float> x = random_.normal(3 * 100);
    const std::vector<float> weight = random_.normal(90);
    const Buffer device_x = upload(*backend_, x);
    const Buffer device_weight = upload(*backend_, weight);
    const Buffer y = zeros(3 * 90, dtype);
    // Rows of 90 in a matrix whose stride is 100.
    backend_->queue->run(RmsNormParams{{device_x.data(), DType::f32, 3, 90, 100},
                                       device_weight.floats(),
                                       1e-2f,
                                       {y.data(), dtype, 3, 90, 90}});
    const std::vector<float> actual = values_of(y, dtype);
    for (std::size_t i = 0; i < actual.size(); ++i) {
      double squares = 0;
      for (std::size_t j = 0; j < 90; ++j) squares += std::pow(x[i / 90 * 100 + j], 2.0);
      const double expected =
          x[i / 90 * 100 + i % 90] / std::sqrt(squares / 90 + 1e-2f) * weight[i % 90];
      expect_near(actual[i], expected, rounding(dtype), kFloat);
    }
  }
}

TEST_P(OpsParity, SwigluGatesWithSilu) {
  std::vector<float> gate_up = random_.normal(2 * 2 * 37, 3.0f);
  gate_up[0] = -200.0f;  // exp(200) is infinite in fp32
  gate_up[1] = 200.0f;
  const Buffer device = upload(*backend_, gate_up);
  const Buffer y = zeros(2 * 37, compute_);
  backend_->queue->run(
      SwigluParams{{device.data(), DType::f32, 2, 74, 74}, {y.data(), compute_, 2, 37, 37}});
  const std::vector<float> actual = values_of(y, compute_);
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double gate = gate_up[i / 37 * 74 + i % 37];
    const double up = gate_up[i / 37 * 74 + 37 + i % 37];
    expect_near(actual[i], gate / (1 + std::exp(-gate)) * up, rounding(compute_) + kFloat, kFloat);
  }
}

TEST_P(OpsParity, ReadHeadsConvertsScalesAndMarksWhatIsNoNumber) {
  constexpr std::int64_t kTokens = 3;
  constexpr int kHeads = 5;
  constexpr int kDim = 20;
  struct Strides {
    std::int64_t token, head;
  };
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    // Dense; heads in a wider row; and one head after the other.
    for (const auto& [token, head] : {Strides{100, 20}, Strides{160, 30}, Strides{20, 64}}) {
      const auto at = [&](std::int64_t vector, std::int64_t c) {
        return static_cast<std::size_t>(vector / kHeads * token + vector % kHeads * head + c);
      };
      std::vector<float> x = rounded(random_.normal(480, 10.0f), dtype);
      x[at(4, 7)] = NAN;
      x[at(9, 0)] = -INFINITY;
      x[at(14, 19)] = 500.0f;
      const Buffer from = upload(*backend_, encoded(x, dtype));
      const Buffer to = upload(*backend_, random_.normal(kTokens * kHeads * kDim));
      const Buffer bad = backend_->allocate(Tier::host, kTokens * kHeads * sizeof(std::int32_t));
      auto* const marks = reinterpret_cast<std::int32_t*>(bad.data());
      ReadHeadsParams params;
      params.from = {from.data(), dtype, kTokens, kHeads, kDim, token, head};
      params.factor = 0.25f;
      params.limit = 125.0f;
      params.to = to.floats();
      params.bad = marks;
      backend_->queue->run(params);
      const std::vector<float> actual = values_of(to, DType::f32);
      for (std::int64_t v = 0; v < kTokens * kHeads; ++v) {
        EXPECT_EQ(marks[v], v == 4 || v == 9 || v == 14 ? 1 : 0) << v;
        for (std::int64_t c = 0; c < kDim; ++c) {
          const float value = x[at(v, c)] * 0.25f;
          const float expected = std::abs(value) < 125.0f ? value : 0.0f;
          ASSERT_EQ(actual[static_cast<std::size_t>(v * kDim + c)], expected) << v << ' ' << c;
        }
      }
    }
  }
}

TEST_P(OpsParity, CastRoundsToNearest) {
  std::vector<float> x = random_.normal(4 * 50, 10.0f);
  x[0] = 1.0f + 0x1p-8f;  // halfway between two bf16 numbers
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const Buffer from = upload(*backend_, x);
    const Buffer to = zeros(4 * 45, dtype);
    backend_->queue->run(
        CastParams{{from.data(), DType::f32, 4, 45, 50}, {to.data(), dtype, 4, 45, 45}});
    const std::vector<float> expected = rounded(x, dtype);
    const std::vector<float> actual = values_of(to, dtype);
    for (std::size_t i = 0; i < actual.size(); ++i) {
      ASSERT_EQ(actual[i], expected[i / 45 * 50 + i % 45]) << to_string(dtype) << ' ' << i;
    }
  }
}

TEST_P(OpsParity, MemoryIsZeroedAlignedAndCharged) {
  for (const Tier tier : {Tier::device, Tier::host}) {
    // Small, and large enough to come from the kernel directly.
    for (const std::size_t bytes : {std::size_t{1000}, std::size_t{9} << 20}) {
      const std::uint64_t before = backend_->backend->account(tier).used();
      {
        const Buffer buffer = backend_->allocate(tier, bytes);
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % kRowAlignment, 0u);
        EXPECT_EQ(backend_->backend->account(tier).used(), before + bytes);
        const std::vector<std::byte> values = download<std::byte>(*backend_, buffer);
        EXPECT_TRUE(std::all_of(values.begin(), values.end(),
                                [](std::byte value) { return value == std::byte{0}; }));
      }
      EXPECT_EQ(backend_->backend->account(tier).used(), before);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, OpsParity, ::testing::ValuesIn(testing::backends()), testing::name_of);

TEST(ReferenceBackendTest, CapsHold) {
  cpu::ReferenceBackend backend(1000, 5000);
  const Buffer most = backend.allocate(Tier::device, 900);
  EXPECT_THROW(static_cast<void>(backend.allocate(Tier::device, 101)), Error);
  EXPECT_NO_THROW(static_cast<void>(backend.allocate(Tier::host, 5000)));
  EXPECT_EQ(backend.account(Tier::device).peak(), 900u);
}

}  // namespace
}  // namespace sluice
