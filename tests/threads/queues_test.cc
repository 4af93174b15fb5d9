// Queues of one CPU backend that work at the same time, each for a thread of its own.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/cpu_backend.h"
#include "tests/support/random.h"
#include "tests/threads/together.h"

namespace sluice {
namespace {

constexpr int kThreads = 4;
constexpr std::int64_t kWidth = 128;

Matrix matrix(std::vector<float>& values, std::int64_t rows) {
  return {values.data(), DType::f32, rows, kWidth, kWidth};
}

// A chain of products and norms, of as many rows as the thread has for itself.
std::vector<float> work(Queue& queue, const Weight& weight, int number) {
  const std::int64_t rows = 1 + 3 * number;
  testing::Random random(static_cast<std::uint64_t>(number));
  std::vector<float> x = random.normal(rows * kWidth);
  std::vector<float> y(x.size());
  const std::vector<float> ones(kWidth, 1.0f);
  for (int round = 0; round < 20; ++round) {
    queue.run(RmsNormParams{matrix(x, rows), ones.data(), 1e-5f, matrix(y, rows)});
    queue.run(LinearParams{matrix(y, rows), &weight, nullptr, matrix(x, rows)});
    queue.synchronize();
  }
  return x;
}

TEST(SharedBackend, GivesEveryQueueItsResults) {
  cpu::CpuOptions options;
  options.threads = 2;
  options.compute = DType::f32;
  cpu::CpuBackend backend(options);
  std::vector<float> weights = testing::Random(1).normal(kWidth * kWidth, 0.1f);
  const std::unique_ptr<Weight> weight = backend.prepare_weight(matrix(weights, kWidth));
  std::vector<std::vector<float>> expected;
  for (int i = 0; i < kThreads; ++i) expected.push_back(work(*backend.make_queue(), *weight, i));
  // A backend that has no kernels yet.
  cpu::CpuBackend shared(options);
  const std::unique_ptr<Weight> own = shared.prepare_weight(matrix(weights, kWidth));
  std::vector<std::vector<float>> actual(kThreads);
  testing::together(kThreads, [&](int i) {
    const std::unique_ptr<Queue> queue = shared.make_queue();
    const Buffer held = shared.allocate(Tier::device, 1000);
    actual[static_cast<std::size_t>(i)] = work(*queue, *own, i);
  });
  EXPECT_EQ(actual, expected);
  EXPECT_EQ(shared.account(Tier::device).used(), 0u);
  EXPECT_GE(shared.account(Tier::device).peak(), 1000u);
}

}  // namespace
}  // namespace sluice
