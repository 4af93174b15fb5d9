// Every other operation of Backend against its definition in fp64.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "lib/half.h"
#include "sluice/errors.h"
#include "tests/support/backends.h"
#include "tests/support/device.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using testing::download;
using testing::NamedBackend;
using testing::Random;
using testing::upload;

// fp32 arithmetic may be off by a few roundings of each term; the tests' terms are of order 1.
constexpr double kFloat = 16 * 0x1p-24;

class OpsParity : public ::testing::TestWithParam<NamedBackend> {
 protected:
  void SetUp() override {
    backend_ = testing::make_or_skip(GetParam());
    if (backend_ != nullptr) compute_ = backend_->info().compute_dtype;
  }
  // Of rows.
  std::vector<DType> row_dtypes() const {
    std::vector<DType> all = {DType::f16, DType::bf16};
    if (backend_->info().f32_rows) all.push_back(DType::f32);
    return all;
  }
  // The relative error of a result that is stored as `dtype`, with 8 or 11 significant bits.
  static double rounding(DType dtype) {
    return dtype == DType::f32 ? kFloat : dtype == DType::bf16 ? 0x1.01p-8 : 0x1.01p-11;
  }
  std::vector<float> rounded(std::vector<float> values, DType dtype) const {
    for (float& value : values) {
      if (dtype == DType::bf16) value = bf16_to_float(float_to_bf16(value));
      if (dtype == DType::f16) value = f16_to_float(float_to_f16(value));
    }
    return values;
  }
  // The bytes of `values` as `dtype`.
  static std::vector<std::byte> encoded(const std::vector<float>& values, DType dtype) {
    std::vector<std::byte> bytes(values.size() * size_of(dtype));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::uint16_t half =
          dtype == DType::bf16 ? float_to_bf16(values[i]) : float_to_f16(values[i]);
      if (dtype == DType::f32) std::memcpy(&bytes[4 * i], &values[i], 4);
      if (dtype != DType::f32) std::memcpy(&bytes[2 * i], &half, 2);
    }
    return bytes;
  }
  static std::vector<float> decoded(const std::vector<std::byte>& bytes, DType dtype) {
    std::vector<float> values(bytes.size() / size_of(dtype));
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::uint16_t half = 0;
      if (dtype == DType::f32) std::memcpy(&values[i], &bytes[4 * i], 4);
      if (dtype != DType::f32) std::memcpy(&half, &bytes[2 * i], 2);
      if (dtype == DType::bf16) values[i] = bf16_to_float(half);
      if (dtype == DType::f16) values[i] = f16_to_float(half);
    }
    return values;
  }
  Buffer zeros(std::size_t count, DType dtype) {
    return backend_->allocate(backend_->info().compute_tier, count * size_of(dtype));
  }
  std::vector<float> values_of(const Buffer& buffer, DType dtype) {
    return decoded(download<std::byte>(*backend_, buffer), dtype);
  }
  void expect_near(float actual, double expected, double relative, double absolute) {
    EXPECT_NEAR(actual, expected, std::abs(expected) * relative + absolute);
  }

  const std::uint64_t seed_ = testing::seed(7);
  Random random_{seed_};
  std::unique_ptr<Backend> backend_;
  DType compute_ = DType::f32;
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};
};

TEST_P(OpsParity, EmbedCopiesRowsOfTheTable) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const std::vector<float> table = rounded(random_.normal(7 * 33), dtype);
    const Buffer device = upload(*backend_, encoded(table, dtype));
    const std::vector<TokenId> ids = {6, 0, 3, 3};
    const Buffer y = zeros(ids.size() * 33, DType::f32);
    backend_->embed({device.data(), dtype, 7, 33, 33}, ids, {y.data(), DType::f32, 4, 33, 33});
    const std::vector<float> actual = values_of(y, DType::f32);
    for (std::size_t i = 0; i < actual.size(); ++i) {
      ASSERT_EQ(actual[i], table[static_cast<std::size_t>(ids[i / 33]) * 33 + i % 33]) << i;
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
          backend_->prepare_weight({w.data(), DType::f32, kOutputs, kInputs, kInputs});
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
      backend_->linear(p);
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
    const auto weight = backend_->prepare_weight(
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
      backend_->linear_chain(chain);
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
      backend_->linear_chain(chain);
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
    backend_->rms_norm({{device_x.data(), DType::f32, 3, 90, 100},
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

TEST_P(OpsParity, RopeNormalisesAndRotatesHalves) {
  constexpr int kHeads = 3;
  constexpr int kQueryHeads = 2;
  for (const int d : {40, 64}) {
    const auto half = static_cast<std::size_t>(d / 2);
    const std::size_t stride = static_cast<std::size_t>(kHeads) * static_cast<std::size_t>(d) + 8;
    for (const bool norm : {false, true}) {
      std::vector<float> frequency(half);
      for (std::size_t i = 0; i < half; ++i) {
        frequency[i] =
            static_cast<float>(std::pow(1e4, -static_cast<double>(i) / static_cast<double>(half)));
      }
      const std::vector<float> x = random_.normal(2 * static_cast<std::int64_t>(stride));
      const std::vector<float> weights[2] = {random_.normal(d), random_.normal(d)};
      const Buffer device_x = upload(*backend_, x);
      const Buffer query_norm = upload(*backend_, weights[0]);
      const Buffer key_norm = upload(*backend_, weights[1]);
      RopeParams p;
      p.x = device_x.floats();
      p.tokens = 2;
      p.stride = static_cast<std::int64_t>(stride);
      p.query_heads = kQueryHeads;
      p.key_heads = kHeads - kQueryHeads;
      p.head_dim = d;
      p.first_position = 1000;
      p.inverse_frequency = frequency.data();
      p.query_norm = norm ? query_norm.floats() : nullptr;
      p.key_norm = norm ? key_norm.floats() : nullptr;
      p.norm_epsilon = 1e-3f;
      backend_->rope(p);
      const std::vector<float> actual = values_of(device_x, DType::f32);
      for (std::size_t i = 0; i < actual.size(); ++i) {
        const std::size_t column = i % stride;
        if (column >= static_cast<std::size_t>(kHeads) * static_cast<std::size_t>(d)) {
          ASSERT_EQ(actual[i], x[i]) << "past the heads";
          continue;
        }
        const std::size_t head = i - column % static_cast<std::size_t>(d);
        const std::size_t c = i - head;
        const auto& weight = weights[column < kQueryHeads * static_cast<std::size_t>(d) ? 0 : 1];
        double squares = 0;
        for (std::size_t j = 0; j < 2 * half; ++j) squares += std::pow(x[head + j], 2.0);
        const double factor = norm ? 1 / std::sqrt(squares / d + 1e-3f) : 1.0;
        const auto input = [&](std::size_t j) {
          return x[head + j] * factor * (norm ? weight[j] : 1.0f);
        };
        const std::size_t token = i / stride;
        const double angle = (1000.0 + static_cast<double>(token)) * frequency[c % half];
        const double expected =
            c < half ? input(c) * std::cos(angle) - input(c + half) * std::sin(angle)
                     : input(c) * std::cos(angle) + input(c - half) * std::sin(angle);
        // The angle in fp32 is off by 1000 * 2^-24 at most.
        ASSERT_NEAR(actual[i], expected, 4 * (kFloat + 1000 * 0x1p-24)) << i;
      }
    }
  }
}

TEST_P(OpsParity, SwigluGatesWithSilu) {
  std::vector<float> gate_up = random_.normal(2 * 2 * 37, 3.0f);
  gate_up[0] = -200.0f;  // exp(200) is infinite in fp32
  gate_up[1] = 200.0f;
  const Buffer device = upload(*backend_, gate_up);
  const Buffer y = zeros(2 * 37, compute_);
  backend_->swiglu({{device.data(), DType::f32, 2, 74, 74}, {y.data(), compute_, 2, 37, 37}});
  const std::vector<float> actual = values_of(y, compute_);
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double gate = gate_up[i / 37 * 74 + i % 37];
    const double up = gate_up[i / 37 * 74 + 37 + i % 37];
    expect_near(actual[i], gate / (1 + std::exp(-gate)) * up, rounding(compute_) + kFloat, kFloat);
  }
}

TEST_P(OpsParity, CastRoundsToNearest) {
  std::vector<float> x = random_.normal(4 * 50, 10.0f);
  x[0] = 1.0f + 0x1p-8f;  // halfway between two bf16 numbers
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const Buffer from = upload(*backend_, x);
    const Buffer to = zeros(4 * 45, dtype);
    backend_->cast({from.data(), DType::f32, 4, 45, 50}, {to.data(), dtype, 4, 45, 45});
    const std::vector<float> expected = rounded(x, dtype);
    const std::vector<float> actual = values_of(to, dtype);
    for (std::size_t i = 0; i < actual.size(); ++i) {
      ASSERT_EQ(actual[i], expected[i / 45 * 50 + i % 45]) << to_string(dtype) << ' ' << i;
    }
  }
}

// Few rows and many reach their home in different ways.
TEST_P(OpsParity, AppendWritesKThenVOfEveryHeadAndItsHome) {
  for (const auto& [d, tokens] : {std::pair{40, 3}, {64, 3}, {64, 300}}) {
    for (const DType dtype : row_dtypes()) {
      SCOPED_TRACE(std::string(to_string(dtype)) + " head_dim " + std::to_string(d));
      const KvShape shape = {
          .layers = 1, .query_heads = 4, .kv_heads = 2, .head_dim = d, .dtype = dtype};
      const std::int64_t stride = 4 * d;  // K and V side by side, as one projection writes them
      const std::vector<float> kv = random_.normal(tokens * stride);
      const Buffer device = upload(*backend_, kv);
      const std::size_t bytes = static_cast<std::size_t>(tokens) * shape.row_bytes();
      const auto two = [&](Tier tier) {
        return std::array{backend_->allocate(tier, bytes), backend_->allocate(tier, bytes)};
      };
      const std::array<Buffer, 2> rows = two(backend_->info().compute_tier);
      const std::array<Buffer, 2> home = two(Tier::host);
      std::byte* const to[] = {rows[0].data(), rows[1].data()};
      std::byte* const home_to[] = {home[0].data(), home[1].data()};
      backend_->append(
          {device.floats(), device.floats() + 2 * d, tokens, stride, shape, to, home_to});
      const std::vector<float> expected = rounded(kv, dtype);
      const std::size_t width = shape.row_bytes() / size_of(dtype);
      const auto channels = static_cast<std::size_t>(d);
      for (std::size_t head = 0; head < 2; ++head) {
        const std::vector<float> actual = values_of(rows[head], dtype);
        EXPECT_EQ(values_of(home[head], dtype), actual);
        for (std::size_t i = 0; i < static_cast<std::size_t>(tokens) * 2 * channels; ++i) {
          const std::size_t token = i / (2 * channels);
          const std::size_t c = i % (2 * channels);
          const std::size_t source = c < channels ? c : 2 * channels + c - channels;
          ASSERT_EQ(actual[token * width + c],
                    expected[token * static_cast<std::size_t>(stride) + head * channels + source])
              << "token " << token << " head " << head << " element " << c;
        }
      }
    }
  }
}

TEST_P(OpsParity, MemoryIsZeroedAlignedAndCharged) {
  for (const Tier tier : {Tier::device, Tier::host}) {
    // Small, and large enough to come from the kernel directly.
    for (const std::size_t bytes : {std::size_t{1000}, std::size_t{9} << 20}) {
      const std::uint64_t before = backend_->account(tier).used();
      {
        const Buffer buffer = backend_->allocate(tier, bytes);
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % kRowAlignment, 0u);
        EXPECT_EQ(backend_->account(tier).used(), before + bytes);
        const std::vector<std::byte> values = download<std::byte>(*backend_, buffer);
        EXPECT_TRUE(std::all_of(values.begin(), values.end(),
                                [](std::byte value) { return value == std::byte{0}; }));
      }
      EXPECT_EQ(backend_->account(tier).used(), before);
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
