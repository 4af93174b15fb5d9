// Two backends of one GPU, each used by a thread of its own: what a kernel is allowed is the whole
// process's, so that no launch may depend on what another thread last launched.
#include <gtest/gtest.h>

#include <barrier>
#include <exception>
#include <functional>
#include <string>
#include <thread>

#include "kernels/cuda_backend.h"
#include "tests/kernels/has_device.h"
#include "tests/support/device.h"

namespace sluice::cuda {
namespace {

constexpr int kTimes = 20000;

// What it threw; empty: nothing.
std::string failure_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

// Products of one token with a matrix, whose inputs lie in shared memory.
void multiply(std::int64_t inputs, std::barrier<>& start) {
  constexpr std::int64_t kOutputs = 256;
  testing::Device device(make_cuda_backend({}));
  const DType dtype = device.info().compute_dtype;
  const auto weight = device.backend->make_weight({kOutputs, inputs, dtype});
  const Buffer x = device.allocate(Tier::device, static_cast<std::size_t>(inputs) * size_of(dtype));
  const Buffer y = device.allocate(Tier::device, kOutputs * sizeof(float));
  start.arrive_and_wait();
  for (int i = 0; i < kTimes; ++i) {
    device.queue->run(LinearParams{{x.data(), dtype, 1, inputs, inputs},
                                   weight.get(),
                                   nullptr,
                                   {y.data(), DType::f32, 1, kOutputs, kOutputs}});
    if (i % 256 == 0) device.synchronize();
  }
  device.synchronize();
}

TEST(TwoThreads, LaunchKernelsOfDifferentSizes) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::barrier<> start(2);
  std::string other;
  std::thread thread([&] { other = failure_of([&] { multiply(1024, start); }); });
  EXPECT_EQ(failure_of([&] { multiply(14336, start); }), "");
  thread.join();
  EXPECT_EQ(other, "");
}

}  // namespace
}  // namespace sluice::cuda
