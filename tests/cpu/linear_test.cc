#include "cpu/dense/linear.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>

#include "cpu/cpu_backend.h"
#include "cpu/runtime/elementwise.h"
#include "cpu/runtime/threads.h"
#include "sluice/half.h"
#include "tests/support/random.h"

namespace sluice::cpu {
namespace {

using sluice::testing::Random;

struct Case {
  std::int64_t tokens, inputs, outputs;
  DType stored, compute;
  bool bias, accumulate;
};

CpuBackend backend_of(DType compute, int threads, DType weights = DType::f32) {
  CpuOptions options;
  options.threads = threads;
  options.compute = compute;
  options.weight_dtype = weights;
  return CpuBackend(options);
}

// Runs one product and returns its largest error against fp64, relative to the size that a sum of
// `inputs` products of normal numbers has.
double largest_error(const Case& c, Random& random) {
  const std::vector<float> x = random.normal(c.tokens * c.inputs);
  const std::vector<float> w = random.normal(c.outputs * c.inputs);
  const std::vector<float> bias = random.normal(c.outputs);
  const std::vector<float> y0 = random.normal(c.tokens * c.outputs);
  std::vector<std::byte> stored(w.size() * size_of(c.stored));
  convert(w.data(), DType::f32, stored.data(), c.stored, c.outputs * c.inputs);
  std::vector<std::byte> input(x.size() * size_of(c.compute));
  convert(x.data(), DType::f32, input.data(), c.compute, c.tokens * c.inputs);

  CpuBackend backend = backend_of(c.compute, 3, c.stored);
  const auto weight =
      backend.prepare_weight({stored.data(), c.stored, c.outputs, c.inputs, c.inputs});
  const WeightShape shape = {c.outputs, c.inputs, backend.weight_format()};
  EXPECT_EQ(backend.account(Tier::host).used(),
            backend.weight_bytes(shape) + backend.product_bytes(shape));
  std::vector<float> y = y0;
  backend.products().run({{input.data(), c.compute, c.tokens, c.inputs, c.inputs},
                          weight.get(),
                          c.bias ? bias.data() : nullptr,
                          {y.data(), DType::f32, c.tokens, c.outputs, c.outputs},
                          c.accumulate});

  // What the computation sees after its inputs were rounded.
  const auto rounded = [](const std::vector<float>& values, DType a, DType b) {
    std::vector<float> result = values;
    for (float& value : result) {
      for (const DType dtype : {a, b}) {
        if (dtype == DType::bf16) value = bf16_to_float(float_to_bf16(value));
        if (dtype == DType::f16) value = f16_to_float(float_to_f16(value));
      }
    }
    return result;
  };
  const std::vector<float> wr = rounded(w, c.stored, c.compute);
  const std::vector<float> xr = rounded(x, c.compute, c.compute);
  double error = 0.0;
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    for (std::int64_t o = 0; o < c.outputs; ++o) {
      const auto at = static_cast<std::size_t>(t * c.outputs + o);
      double sum =
          (c.bias ? bias[static_cast<std::size_t>(o)] : 0.0f) + (c.accumulate ? y0[at] : 0.0f);
      for (std::int64_t i = 0; i < c.inputs; ++i) {
        sum += double{xr[static_cast<std::size_t>(t * c.inputs + i)]} *
               wr[static_cast<std::size_t>(o * c.inputs + i)];
      }
      error = std::max(error, std::abs(sum - y[at]));
    }
  }
  return error / std::sqrt(static_cast<double>(c.inputs));
}

TEST(Linear, EqualsTheProductOfTheRoundedInputs) {
  const std::uint64_t seed = sluice::testing::seed(11);
  SCOPED_TRACE(sluice::testing::seed_message(seed));
  Random random(seed);
  std::vector<DType> computes = {DType::f32};
  if (Linear::bf16_is_fast()) computes.push_back(DType::bf16);
  for (const DType compute : computes) {
    for (const DType stored : {DType::bf16, DType::f16, DType::f32}) {
      for (const std::int64_t tokens : {1, 2, 3, 7, 16, 17, 64, 257, 600}) {
        const Case c{tokens,  random.integer(1, 300),    random.integer(1, 300),   stored,
                     compute, random.integer(0, 1) == 1, random.integer(0, 1) == 1};
        SCOPED_TRACE(::testing::Message() << tokens << " x " << c.inputs << " x " << c.outputs);
        // Products of bf16 numbers are exact in fp32; what is left is the order of fp32 sums.
        EXPECT_LT(largest_error(c, random), 2e-5);
      }
    }
  }
}

// So many inputs that fewer outputs than a block are widened at a time.
TEST(Linear, WidensFewerOutputsOfLongRows) {
  const std::uint64_t seed = sluice::testing::seed(14);
  SCOPED_TRACE(sluice::testing::seed_message(seed));
  Random random(seed);
  for (const DType stored : {DType::bf16, DType::f16}) {
    const Case c{40,  random.integer(9000, 20000), random.integer(17, 70), stored, DType::f32, true,
                 true};
    EXPECT_LT(largest_error(c, random), 2e-5) << c.inputs << " x " << c.outputs;
  }
}

// A layout that oneDNN has no fast kernel for makes it a hundred times slower, silently.
TEST(Linear, NeverFallsBackToTheReferenceKernel) {
  Threads threads(2);
  for (const DType compute : {DType::f32, DType::bf16}) {
    if (compute == DType::bf16 && !Linear::bf16_is_fast()) continue;
    const Linear linear(threads, compute, compute);
    for (const std::int64_t tokens : {1, 2, 16, 256}) {
      EXPECT_EQ(linear.kernel_name(tokens, 384, 768).find("ref"), std::string::npos) << tokens;
    }
  }
}

// Weights of 16 bits take 16 bits, whatever they are computed with.
TEST(Linear, StoresWeightsAsTheyAre) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    CpuBackend backend = backend_of(DType::f32, 2, dtype);
    EXPECT_EQ(backend.weight_bytes({100, 50, dtype}), 100u * 50u * 2u) << to_string(dtype);
    EXPECT_EQ(backend.weight_rows(backend.weight_format()), 1);
  }
  EXPECT_GE(backend_of(DType::f32, 2).weight_bytes({100, 50, DType::f32}), 100u * 50u * 4u);
}

// A token's answer is the same alone and among a few others, on any number of threads: where
// weights stay in 16 bits, and where they are packed in pairs and blocks are whole.
TEST(Linear, FewTokensDoNotChangeEachOther) {
  const std::uint64_t seed = sluice::testing::seed(13);
  SCOPED_TRACE(sluice::testing::seed_message(seed));
  Random random(seed);
  std::vector<std::pair<DType, DType>> dtypes = {{DType::f32, DType::bf16},
                                                 {DType::f32, DType::f16}};
  if (Linear::bf16_is_fast()) dtypes.emplace_back(DType::bf16, DType::bf16);
  for (const auto& [compute, stored] : dtypes) {
    const bool is_packed = compute == DType::bf16;
    for (const std::int64_t tokens : {2, 3, 4, 5, 15, 16}) {
      if (is_packed && tokens > 4) continue;
      const std::int64_t inputs = is_packed ? 32 * random.integer(1, 20) : random.integer(1, 700);
      const std::int64_t outputs = is_packed ? 64 * random.integer(1, 10) : random.integer(1, 700);
      SCOPED_TRACE(::testing::Message() << tokens << " x " << inputs << " x " << outputs);
      std::vector<float> w = random.normal(outputs * inputs);
      std::vector<std::byte> x(static_cast<std::size_t>(tokens * inputs) * size_of(compute));
      convert(random.normal(tokens * inputs).data(), DType::f32, x.data(), compute,
              tokens * inputs);
      std::vector<float> together(static_cast<std::size_t>(tokens * outputs));
      std::vector<float> alone(together.size());
      const auto multiply = [&](CpuBackend& backend, std::int64_t step, std::vector<float>& y) {
        const auto weight = backend.prepare_weight({w.data(), DType::f32, outputs, inputs, inputs});
        for (std::int64_t t = 0; t < tokens; t += step) {
          std::byte* const from =
              x.data() + static_cast<std::size_t>(t * inputs) * size_of(compute);
          backend.products().run({{from, compute, step, inputs, inputs},
                                  weight.get(),
                                  nullptr,
                                  {y.data() + t * outputs, DType::f32, step, outputs, outputs}});
        }
      };
      CpuBackend three = backend_of(compute, 3, stored);
      CpuBackend one = backend_of(compute, 1, stored);
      multiply(three, tokens, together);
      multiply(one, 1, alone);
      EXPECT_EQ(together, alone);
    }
  }
}

// Infinities and NaN of a checkpoint are still there when it is computed with.
TEST(Linear, KeepsWhatIsNotANumber) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const std::int64_t tokens : {1, 40}) {
      CpuBackend backend = backend_of(DType::f32, 1, dtype);
      const std::int64_t inputs = 33;
      std::vector<float> w(3 * 33, 1.0f);
      w[5] = std::numeric_limits<float>::infinity();
      w[33 + 32] = std::numeric_limits<float>::quiet_NaN();
      const auto weight = backend.prepare_weight({w.data(), DType::f32, 3, inputs, inputs});
      std::vector<float> x(static_cast<std::size_t>(tokens * inputs), 1.0f);
      std::vector<float> y(static_cast<std::size_t>(tokens * 3));
      backend.products().run({{x.data(), DType::f32, tokens, inputs, inputs},
                              weight.get(),
                              nullptr,
                              {y.data(), DType::f32, tokens, 3, 3}});
      EXPECT_TRUE(std::isinf(y[0]));
      EXPECT_TRUE(std::isnan(y[1]));
      EXPECT_EQ(y[2], 33.0f);
    }
  }
}

TEST(Linear, ReturnsItsMemory) {
  CpuBackend backend = backend_of(DType::f32, 2);
  const std::vector<float> w(100 * 50, 1.0f);
  {
    const auto weight =
        backend.prepare_weight({const_cast<float*>(w.data()), DType::f32, 100, 50, 50});
    EXPECT_GE(backend.account(Tier::host).used(), w.size() * sizeof(float));
  }
  EXPECT_EQ(backend.account(Tier::host).used(), 0u);
}

// As loading does: pieces of some blocks, in any order. Shapes that fill lines and blocks are
// packed another way than those that do not.
TEST(Linear, PacksRowsInAnyOrder) {
  const std::uint64_t seed = sluice::testing::seed(12);
  SCOPED_TRACE(sluice::testing::seed_message(seed));
  Random random(seed);
  for (const DType compute : {DType::f32, DType::bf16}) {
    if (compute == DType::bf16 && !Linear::bf16_is_fast()) continue;
    CpuBackend backend = backend_of(compute, 2);
    const std::unique_ptr<Queue> queue = backend.make_queue();
    for (int round = 0; round < 40; ++round) {
      const std::int64_t inputs =
          round % 2 == 0 ? 32 * random.integer(1, 12) : random.integer(1, 300);
      const std::int64_t outputs = random.integer(1, 500);
      SCOPED_TRACE(::testing::Message() << inputs << " x " << outputs);
      std::vector<float> w = random.normal(outputs * inputs);
      const auto whole = backend.prepare_weight({w.data(), DType::f32, outputs, inputs, inputs});
      const auto parts = backend.make_weight({outputs, inputs, compute});
      const std::int64_t step = backend.weight_rows(backend.weight_format()) * random.integer(1, 3);
      for (std::int64_t first = (outputs - 1) / step * step; first >= 0; first -= step) {
        queue->run(WriteWeightParams{
            parts.get(),
            first,
            {w.data() + first * inputs, DType::f32, std::min(step, outputs - first), inputs}});
      }
      std::vector<std::byte> x(static_cast<std::size_t>(inputs) * size_of(compute));
      convert(random.normal(inputs).data(), DType::f32, x.data(), compute, inputs);
      std::vector<float> expected(static_cast<std::size_t>(outputs));
      std::vector<float> actual(expected.size());
      const auto multiply = [&](const Weight& weight, std::vector<float>& y) {
        queue->run(LinearParams{{x.data(), compute, 1, inputs, inputs},
                                &weight,
                                nullptr,
                                {y.data(), DType::f32, 1, outputs, outputs}});
      };
      multiply(*whole, expected);
      multiply(*parts, actual);
      EXPECT_EQ(actual, expected);
    }
  }
}

// oneDNN would choose another layout for more threads.
TEST(Linear, PacksAlikeOnMachinesWithManyCores) {
  const int before = omp_get_max_threads();
  const std::vector<float> w(768 * 384, 1.0f);
  for (const DType compute : {DType::f32, DType::bf16}) {
    if (compute == DType::bf16 && !Linear::bf16_is_fast()) continue;
    for (const int team : {1, 2, 8, 16, 64}) {
      omp_set_num_threads(team);
      CpuBackend backend = backend_of(compute, 2);
      const MemoryAccount& account = backend.account(Tier::host);
      for (const std::int64_t outputs : {1, 30, 65, 100, 768}) {
        for (const std::int64_t inputs : {1, 30, 65, 384}) {
          auto weight = backend.prepare_weight(
              {const_cast<float*>(w.data()), DType::f32, outputs, inputs, inputs});
          EXPECT_EQ(account.used(), backend.weight_bytes({outputs, inputs, compute}));
          weight.reset();
          EXPECT_EQ(account.used(), 0u) << team << ' ' << outputs << ' ' << inputs;
        }
      }
    }
  }
  omp_set_num_threads(before);
}

}  // namespace
}  // namespace sluice::cpu
