// Products and embeddings by coded weights against fp64 sums over the weights that the codes stand
// for. A backend that stores no coded weights refuses them.
#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "lib/weight_code.h"
#include "tests/support/backends.h"
#include "tests/support/device.h"
#include "tests/support/elements.h"
#include "tests/support/expect.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using testing::encoded;
using testing::NamedBackend;
using testing::Random;
using testing::rounded;
using testing::upload;

constexpr WeightFormat kFormats[] = {WeightCode::int8, WeightCode::int4, WeightCode::uint4};

// A row of groups as files have them: codes from the least weight to the largest.
void put_lines(const float* weights, std::int64_t inputs, std::byte* row) {
  const WeightFormat format = WeightCode::uint4;
  const CodedRow at(format, inputs);
  for (std::size_t group = 0; group < at.groups; ++group, weights += kWeightGroup) {
    const auto [least, most] = std::minmax_element(weights, weights + kWeightGroup);
    CodedGroup line = {format.code, {}, (*most - *least) / 15.0f, *least};
    for (std::size_t i = 0; i < line.codes.size(); ++i) {
      line.codes[i] =
          static_cast<std::uint8_t>(std::lround((weights[i] - line.offset) / line.scale));
    }
    put_group(line, group, format, at, row);
  }
}

// Coded rows, and the weights that their codes stand for.
struct Coded {
  std::vector<std::byte> bytes;
  std::vector<float> weights;

  Coded(std::vector<float> values, std::int64_t inputs, const WeightFormat& format)
      : bytes(encoded(values, DType::f32)), weights(values.size()) {
    const std::int64_t rows = std::ssize(values) / inputs;
    const auto row_of = [&](std::int64_t row) {
      return bytes.data() + static_cast<std::size_t>(row) * format.row_bytes(inputs);
    };
    if (format.code == WeightCode::uint4) {
      for (std::int64_t row = 0; row < rows; ++row) {
        put_lines(values.data() + row * inputs, inputs, row_of(row));
      }
    } else {
      std::vector<float> scratch(static_cast<std::size_t>(inputs));
      encode_rows({bytes.data(), DType::f32, rows, inputs}, format, scratch.data());
    }
    bytes.resize(static_cast<std::size_t>(rows) * format.row_bytes(inputs));
    for (std::int64_t row = 0; row < rows; ++row) {
      decode_row(row_of(row), format, inputs, weights.data() + row * inputs);
    }
  }
};

class CodedWeights : public ::testing::TestWithParam<NamedBackend> {
 protected:
  void SetUp() override {
    device_ = testing::make_or_skip(GetParam());
    if (device_ == nullptr) return;
    compute_ = device_->info().compute_dtype;
    if (!device_->backend->stores(kFormats[0])) {
      expect_refused(64, "does not store weights in int8");
      device_.reset();
      GTEST_SKIP() << "this backend stores no coded weights";
    }
  }

  // Those of kFormats that the backend stores.
  std::vector<WeightFormat> formats() const {
    std::vector<WeightFormat> stored;
    std::copy_if(std::begin(kFormats), std::end(kFormats), std::back_inserter(stored),
                 [&](const WeightFormat& format) { return device_->backend->stores(format); });
    return stored;
  }

  void expect_refused(std::int64_t inputs, const std::string& why) {
    Backend& backend = *device_->backend;
    const std::uint64_t before = backend.account(backend.info().compute_tier).used();
    testing::expect_error(ErrorCode::unsupported, why, [&] {
      static_cast<void>(backend.make_weight({64, inputs, kFormats[0]}));
    });
    EXPECT_EQ(backend.account(backend.info().compute_tier).used(), before);
  }

  // A weight written in pieces of rows in `format`, the last one first. Rows begin `offset` bytes
  // after an aligned address.
  std::unique_ptr<Weight> written(const std::vector<std::byte>& rows, const WeightFormat& format,
                                  const WeightShape& shape, std::size_t offset = 0) {
    Backend& backend = *device_->backend;
    const Buffer host = backend.allocate(Tier::host, rows.size() + offset);
    std::copy(rows.begin(), rows.end(), host.data() + offset);
    std::unique_ptr<Weight> weight = backend.make_weight(shape);
    const std::int64_t step = backend.weight_rows(shape.format) * random_.integer(1, 4);
    for (std::int64_t first = (shape.outputs - 1) / step * step; first >= 0; first -= step) {
      std::byte* const from =
          host.data() + offset + static_cast<std::size_t>(first) * format.row_bytes(shape.inputs);
      device_->queue->run(
          WriteWeightParams{weight.get(),
                            first,
                            {from, format, std::min(step, shape.outputs - first), shape.inputs}});
    }
    device_->queue->synchronize();
    return weight;
  }
  std::unique_ptr<Weight> written(const Coded& coded, const WeightShape& shape) {
    return written(coded.bytes, shape.format, shape);
  }

  // What embed() finds in the rows of a weight.
  std::vector<float> rows_of(const Weight& weight) {
    std::vector<TokenId> ids(static_cast<std::size_t>(weight.outputs()));
    std::iota(ids.begin(), ids.end(), 0);
    const Buffer device_ids = upload(*device_, ids);
    const Buffer y = upload(*device_, random_.normal(weight.outputs() * weight.inputs()));
    device_->queue->run(
        EmbedParams{{},
                    reinterpret_cast<const TokenId*>(device_ids.data()),
                    {y.data(), DType::f32, weight.outputs(), weight.inputs(), weight.inputs()},
                    &weight});
    return testing::values_of(*device_, y, DType::f32);
  }

  // Inputs are exact in the compute dtype; weights may be rounded to it, and their scale and offset
  // before, from three tokens on. Sums are fp32, of groups that each have a scale. Every `step`-th
  // token is compared.
  void expect_product(const WeightShape& shape, std::int64_t tokens, bool adds,
                      std::size_t step = 1) {
    expect_product_of(random_.normal(tokens * shape.inputs), 1.0f, shape, tokens, adds, step);
  }
  // `unit`: the largest inputs are a few times this.
  void expect_product_of(const std::vector<float>& inputs_of, float unit, const WeightShape& shape,
                         std::int64_t tokens, bool adds, std::size_t step = 1) {
    SCOPED_TRACE(::testing::Message()
                 << to_string(shape.format) << ' ' << shape.outputs << " x " << shape.inputs << ", "
                 << tokens << " tokens, unit " << unit);
    const Coded coded(random_.normal(shape.outputs * shape.inputs), shape.inputs, shape.format);
    const std::unique_ptr<Weight> weight = written(coded, shape);
    const std::vector<float> x = rounded(inputs_of, compute_);
    const std::vector<float> bias = random_.normal(shape.outputs);
    const std::vector<float> before = random_.normal(tokens * shape.outputs);
    const Buffer device_x = upload(*device_, encoded(x, compute_));
    const Buffer device_bias = upload(*device_, bias);
    const Buffer y = upload(*device_, before);
    LinearParams p;
    p.x = {device_x.data(), compute_, tokens, shape.inputs, shape.inputs};
    p.weight = weight.get();
    p.bias = adds ? device_bias.floats() : nullptr;
    p.y = {y.data(), DType::f32, tokens, shape.outputs, shape.outputs};
    p.accumulate = adds;
    device_->queue->run(p);
    const std::vector<float> actual = testing::values_of(*device_, y, DType::f32);
    const double rounding = compute_ == DType::f32   ? 0x1p-24
                            : compute_ == DType::f16 ? 0x1.01p-11
                                                     : 0x1.01p-8;
    const auto inputs = static_cast<std::size_t>(shape.inputs);
    const auto outputs = static_cast<std::size_t>(shape.outputs);
    for (std::size_t i = 0; i < actual.size(); ++i) {
      if (i / outputs % step != 0) continue;
      const std::size_t o = i % outputs;
      double sum = adds ? double{bias[o]} + before[i] : 0.0;
      double size = std::abs(sum) + double{unit};
      for (std::size_t j = 0; j < inputs; ++j) {
        const double term = double{x[i / outputs * inputs + j]} * coded.weights[o * inputs + j];
        sum += term;
        // Codes are up to 30 times the weights of a group whose offset cancels them.
        size += std::abs(term) * (tokens > 2 ? rounding * 0x1p24 : 1.0) + double{unit};
      }
      ASSERT_NEAR(actual[i], sum, 8 * 0x1p-24 * size) << i;
    }
  }

  enum class Before { nothing, norm, cast };

  // Rounding of the inputs may differ in their last bit, because a sum of squares has no order.
  void expect_chain(std::int64_t tokens, std::int64_t inputs, std::int64_t outputs, Before before,
                    bool is_gated, const WeightFormat& format) {
    SCOPED_TRACE(::testing::Message()
                 << to_string(format) << ' ' << outputs << " x " << inputs << ", " << tokens
                 << " tokens, before " << static_cast<int>(before) << ", gated " << is_gated);
    const Coded coded(random_.normal(outputs * inputs), inputs, format);
    const std::unique_ptr<Weight> weight = written(coded, {outputs, inputs, format});
    const std::vector<float> from = random_.normal(tokens * inputs);
    const Buffer device_from = upload(*device_, from);
    const Buffer norm = upload(*device_, random_.normal(inputs));
    const Buffer bias = upload(*device_, random_.normal(outputs));
    const Buffer x = upload(*device_, encoded(from, compute_));
    const Buffer y = upload(*device_, random_.normal(tokens * outputs));
    const Buffer product =
        upload(*device_, encoded(random_.normal(tokens * outputs / 2), compute_));
    const auto view = [&](const Buffer& buffer, DType dtype, std::int64_t columns) {
      return Matrix{buffer.data(), dtype, tokens, columns, columns};
    };
    LinearChain chain;
    const Matrix f32_from = view(device_from, DType::f32, inputs);
    const Matrix to = view(x, compute_, inputs);
    if (before == Before::norm) chain.norm = {f32_from, norm.floats(), 1e-5f, to};
    if (before == Before::cast) chain.cast = {f32_from, to};
    chain.linear.x = to;
    chain.linear.weight = weight.get();
    chain.linear.bias = is_gated ? nullptr : bias.floats();
    chain.linear.y = view(y, DType::f32, outputs);
    if (is_gated) {
      chain.swiglu = {chain.linear.y, view(product, compute_, outputs / 2)};
    }
    device_->queue->run(chain);
    const std::vector<float> actual = is_gated ? testing::values_of(*device_, product, compute_)
                                               : testing::values_of(*device_, y, DType::f32);
    if (before == Before::norm) device_->queue->run(*chain.norm);
    if (before == Before::cast) device_->queue->run(*chain.cast);
    const std::vector<float> in = testing::values_of(*device_, x, compute_);
    const std::vector<float> biases = testing::values_of(*device_, bias, DType::f32);
    // Of f32, room for a sum of a thousand terms.
    const double rounding = compute_ == DType::f32   ? 0x1p-19
                            : compute_ == DType::f16 ? 0x1p-11
                                                     : 0x1p-8;
    const auto dot = [&](std::int64_t token, std::int64_t output, double& slack) {
      double sum = is_gated ? 0.0 : biases[static_cast<std::size_t>(output)];
      double squares = 1.0;
      for (std::int64_t i = 0; i < inputs; ++i) {
        const double term = double{in[static_cast<std::size_t>(token * inputs + i)]} *
                            coded.weights[static_cast<std::size_t>(output * inputs + i)];
        sum += term;
        squares += term * term;
      }
      slack = 4.0 * rounding * std::sqrt(squares);
      return sum;
    };
    const std::int64_t columns = is_gated ? outputs / 2 : outputs;
    for (std::int64_t i = 0; i < tokens * columns; ++i) {
      double slack = 0.0;
      double wanted = dot(i / columns, i % columns, slack);
      if (is_gated) {
        double up_slack = 0.0;
        const double up = dot(i / columns, columns + i % columns, up_slack);
        const double silu = wanted / (1.0 + std::exp(-wanted));
        slack = 1.1 * slack * (std::abs(up) + up_slack) + std::abs(silu) * up_slack;
        wanted = silu * up;
        slack += rounding * std::abs(wanted);
      }
      ASSERT_NEAR(actual[static_cast<std::size_t>(i)], wanted, slack) << i;
    }
  }

  const std::uint64_t seed_ = testing::seed(51);
  Random random_{seed_};
  std::unique_ptr<testing::Device> device_;
  DType compute_ = DType::f32;
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};
};

// Outputs that fill blocks and that do not; tokens that are few and many.
TEST_P(CodedWeights, LinearIsTheProductByWhatTheCodesStandFor) {
  for (const WeightFormat& format : formats()) {
    for (const std::int64_t tokens :
         {1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 32, 33, 48, 64, 65, 128, 200, 300}) {
      expect_product({80, 96, format}, tokens, tokens % 2 == 0);
      expect_product({random_.integer(1, 200), 32 * random_.integer(1, 9), format}, tokens,
                     tokens % 2 != 0);
    }
    expect_product({1000, 512, format}, 1, true);
  }
}

// Inputs of one magnitude, zeros, columns of tiles of several, and one that exceeds its neighbours.
TEST_P(CodedWeights, InputsOfEveryMagnitude) {
  constexpr std::int64_t kInputs = 4 * 128;
  constexpr float kScales[] = {0x1p-110f, 0x1p-30f, 0x1p-14f, 0x1p-3f, 0x1p9f, 0.0f};
  for (const WeightFormat& format : formats()) {
    for (const std::int64_t tokens : {1, 2, 3}) {
      const WeightShape shape = {50, kInputs, format};
      const std::vector<float> x = random_.normal(tokens * kInputs);
      for (const float scale : kScales) {
        std::vector<float> scaled = x;
        for (float& number : scaled) number *= scale;
        expect_product_of(scaled, scale, shape, tokens, false);
      }
      std::vector<float> mixed = x;
      for (std::size_t i = 0; i < mixed.size(); ++i) mixed[i] *= kScales[i / 128 % 4 + 2];
      expect_product_of(mixed, 0x1p9f, shape, tokens, true);
      std::vector<float> peaked = x;
      peaked[131] = -0x1p12f;
      expect_product_of(peaked, 0x1p12f, shape, tokens, false);
    }
  }
}

// Products of what is not a number are none, and those of other tokens stay.
TEST_P(CodedWeights, InputsThatAreNoNumbersReachEveryOutput) {
  constexpr std::int64_t kInputs = 3 * 128;
  constexpr std::int64_t kOutputs = 50;
  for (const WeightFormat& format : formats()) {
    const Coded coded(random_.normal(kOutputs * kInputs), kInputs, format);
    const std::unique_ptr<Weight> weight = written(coded, {kOutputs, kInputs, format});
    for (const float strange :
         {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
      for (const std::int64_t tokens : {1, 2, 3}) {
        SCOPED_TRACE(::testing::Message() << to_string(format) << " " << strange << ", " << tokens);
        std::vector<float> x = random_.normal(tokens * kInputs);
        x[static_cast<std::size_t>((tokens - 1) * kInputs + 200)] = strange;
        const Buffer device_x = upload(*device_, encoded(x, compute_));
        const Buffer y = upload(*device_, random_.normal(tokens * kOutputs));
        LinearParams p;
        p.x = {device_x.data(), compute_, tokens, kInputs, kInputs};
        p.weight = weight.get();
        p.y = {y.data(), DType::f32, tokens, kOutputs, kOutputs};
        device_->queue->run(p);
        const std::vector<float> actual = testing::values_of(*device_, y, DType::f32);
        for (std::size_t i = 0; i < actual.size(); ++i) {
          const bool is_last = static_cast<std::int64_t>(i) / kOutputs == tokens - 1;
          ASSERT_EQ(std::isfinite(actual[i]), !is_last) << i;
        }
      }
    }
  }
}

// Enough bytes that the work is shared, and tiles narrower than the widest.
TEST_P(CodedWeights, LargeMatricesAreSharedByThreads) {
  if (device_->info().name == "reference") GTEST_SKIP() << "one thread, slow";
  for (const WeightFormat& format : formats()) {
    expect_product({1023, 1024, format}, 3, true);
    expect_product({70, 8192, format}, 17, true);
    expect_product({50, 14336, format}, 1, false);
    expect_product({50, 14336, format}, 8, true);
    expect_product({530, 4096, format}, 64, true, 9);
  }
}

// More than a GPU decodes into its scratch memory at once, in every dtype.
TEST_P(CodedWeights, PromptsAreMultipliedByLargeMatricesInParts) {
  if (!device_->info().name.starts_with("cuda")) GTEST_SKIP() << "slow; parts are a GPU's";
  for (const WeightFormat& format : formats()) expect_product({1050, 28672, format}, 130, true, 43);
}

// The last result of a chain, whose inputs are what the operation before the product gives.
TEST_P(CodedWeights, ChainsAreTheirOperations) {
  for (const WeightFormat& format : formats()) {
    for (const std::int64_t tokens : {1, 3}) {
      for (const std::int64_t inputs : {96, 1024}) {
        expect_chain(tokens, inputs, 64, Before::norm, true, format);
        expect_chain(tokens, inputs, 96, Before::norm, true, format);
        expect_chain(tokens, inputs, 70, Before::norm, false, format);
        expect_chain(tokens, inputs, 70, Before::cast, false, format);
        expect_chain(tokens, inputs, 64, Before::nothing, true, format);
      }
    }
  }
}

TEST_P(CodedWeights, EmbedDecodesRows) {
  constexpr std::int64_t kRows = 37;
  constexpr std::int64_t kColumns = 96;
  for (const WeightFormat& format : formats()) {
    const Coded coded(random_.normal(kRows * kColumns), kColumns, format);
    const std::unique_ptr<Weight> weight = written(coded, {kRows, kColumns, format});
    const std::vector<TokenId> ids = {36, 0, -1, 15, 16, 37, 17, 36};
    const Buffer device_ids = upload(*device_, ids);
    const Buffer y = upload(*device_, random_.normal(std::ssize(ids) * kColumns));
    device_->queue->run(EmbedParams{{},
                                    reinterpret_cast<const TokenId*>(device_ids.data()),
                                    {y.data(), DType::f32, std::ssize(ids), kColumns, kColumns},
                                    weight.get()});
    const std::vector<float> actual = testing::values_of(*device_, y, DType::f32);
    for (std::size_t i = 0; i < actual.size(); ++i) {
      const TokenId id = ids[i / kColumns];
      const bool known = id >= 0 && id < kRows;
      const std::size_t at = static_cast<std::size_t>(known ? id : 0) * kColumns + i % kColumns;
      ASSERT_EQ(actual[i], known ? coded.weights[at] : 0.0f) << i;
    }
  }
}

// Groups of every kind: normal and uniform ones, with outliers, constant, of zeros with either
// sign, tiny, beyond an f16 scale, and not finite.
std::vector<float> peculiar_groups(Random& random, std::int64_t groups) {
  constexpr auto kGroup = static_cast<std::size_t>(kWeightGroup);
  std::vector<float> values = random.normal(groups * kWeightGroup);
  for (std::size_t group = 0; group < static_cast<std::size_t>(groups); ++group) {
    float* const w = values.data() + group * kGroup;
    const auto set = [&](auto value) {
      for (std::size_t i = 0; i < kGroup; ++i) w[i] = value(i);
    };
    switch (group % 12) {
      case 1:
        set([&](std::size_t) { return static_cast<float>(random.integer(-99, 99)) / 64.0f; });
        break;
      case 2:
        w[group % kGroup] = -300.0f;
        break;
      case 3:
        set([&](std::size_t) { return 0.37f; });
        break;
      case 4:
        set([](std::size_t i) { return i % 2 == 0 ? -0.0f : 0.0f; });
        break;
      case 5:
        set([&](std::size_t i) { return w[i] * 1e-7f; });
        break;
      case 6:
        set([&](std::size_t i) { return w[i] * 1e37f; });
        break;
      case 7:
        w[3] = std::numeric_limits<float>::infinity();
        break;
      case 8:
        w[31] = std::numeric_limits<float>::quiet_NaN();
        break;
      case 9:
        set([&](std::size_t i) { return i % 2 == 0 ? 1.0f : -1.0f; });
        break;
      case 10:
        set([&](std::size_t i) { return w[i] * 0.02f; });
        break;
      default:
        break;
    }
  }
  return values;
}

// Rows of elements in any dtype, aligned and not, become the codes that encode_rows() gives them.
TEST_P(CodedWeights, ElementsAreCodedToTheSameBits) {
  if (!device_->info().codes_weights) GTEST_SKIP() << "this backend codes no weights";
  for (const WeightFormat& format : formats()) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      for (const std::int64_t inputs : {96, 544, 1024}) {
        for (const std::size_t offset : {std::size_t{0}, size_of(dtype)}) {
          SCOPED_TRACE(::testing::Message() << to_string(format) << " of " << to_string(dtype)
                                            << ", " << inputs << " inputs, offset " << offset);
          const std::int64_t outputs = random_.integer(17, 70);
          const std::vector<float> values =
              rounded(peculiar_groups(random_, outputs * inputs / kWeightGroup), dtype);
          const Coded wanted(values, inputs, format);
          const auto weight =
              written(encoded(values, dtype), dtype, {outputs, inputs, format}, offset);
          const std::vector<float> actual = rows_of(*weight);
          for (std::size_t i = 0; i < actual.size(); ++i) {
            if (std::isnan(wanted.weights[i])) {
              ASSERT_TRUE(std::isnan(actual[i])) << i;
            } else {
              ASSERT_EQ(actual[i], wanted.weights[i]) << i;
            }
          }
        }
      }
    }
  }
}

TEST_P(CodedWeights, PreparedWeightsAreCodedAndChargedAsPlanned) {
  Backend& backend = *device_->backend;
  const MemoryAccount& account = backend.account(backend.info().compute_tier);
  const std::vector<float> w = random_.normal(70 * 64);
  for (const WeightFormat& format : formats()) {
    if (format.code == WeightCode::uint4) continue;  // only files have it
    const WeightShape shape = {70, 64, format};
    const std::uint64_t before = account.used();
    const auto weight =
        backend.prepare_weight({const_cast<float*>(w.data()), DType::f32, 70, 64, 64}, format);
    EXPECT_LE(account.used() - before, backend.weight_bytes(shape) + backend.product_bytes(shape));
    EXPECT_GE(account.used() - before, backend.weight_bytes(shape));
    EXPECT_EQ(weight->dense_rows().data, nullptr);
  }
}

TEST_P(CodedWeights, GroupsThatDoNotDivideTheInputsAreRefused) {
  expect_refused(100, "groups of 32, which do not divide the 100 inputs");
}

INSTANTIATE_TEST_SUITE_P(Backends, CodedWeights, ::testing::ValuesIn(testing::backends()),
                         testing::name_of);

// Every instruction set that this processor has.
class CodedWeightsBy : public CodedWeights {
 protected:
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

TEST_P(CodedWeightsBy, EveryInstructionSet) {
  for (const std::int64_t target : {HWY_AVX3_DL, HWY_AVX3, HWY_AVX2, HWY_SCALAR}) {
    if (target != HWY_SCALAR && (hwy::SupportedTargets() & target) == 0) continue;
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    for (const WeightFormat& format : formats()) {
      expect_product({50, 64, format}, 5, true);
      expect_product({50, 64, format}, 12, false);
    }
    hwy::SetSupportedTargetsForTest(0);
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, CodedWeightsBy, ::testing::Values(testing::cpu_backend(DType::f32)),
                         testing::name_of);

}  // namespace
}  // namespace sluice
