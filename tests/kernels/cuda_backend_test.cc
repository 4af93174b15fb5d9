// What the CUDA backend says when there is no device, no memory or nothing to pin, and that it goes
// on afterwards.
#include "kernels/cuda_backend.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/runtime/error.h"
#include "kernels/runtime/owners.h"
#include "sluice/errors.h"
#include "tests/kernels/has_device.h"
#include "tests/support/device.h"

namespace sluice::cuda {
namespace {

// The error that body() throws; fails the test if it throws none.
template <typename Body>
Error error_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return {ErrorCode::internal, ""};
}

TEST(CudaErrors, AreTyped) {
  EXPECT_NO_THROW(require(cudaSuccess, "nothing"));
  const auto code = [](cudaError_t status) {
    return error_of([&] { require(status, "a test"); }).code();
  };
  EXPECT_EQ(code(cudaErrorMemoryAllocation), ErrorCode::memory);
  for (const cudaError_t status :
       {cudaErrorNoDevice, cudaErrorInsufficientDriver, cudaErrorNoKernelImageForDevice,
        cudaErrorInvalidDevice, cudaErrorSystemDriverMismatch}) {
    EXPECT_EQ(code(status), ErrorCode::unsupported) << cudaGetErrorString(status);
  }
  EXPECT_EQ(code(cudaErrorIllegalAddress), ErrorCode::internal);
}

TEST(CudaErrors, SayThatTheProcessIsLost) {
  for (const cudaError_t status : {cudaErrorIllegalAddress, cudaErrorLaunchFailure}) {
    EXPECT_TRUE(is_sticky(status));
    const Error error = error_of([&] { require(status, "a test"); });
    EXPECT_NE(std::string(error.what()).find("start it again"), std::string::npos);
  }
  EXPECT_FALSE(is_sticky(cudaErrorMemoryAllocation));
}

TEST(CudaBackendTest, SaysThatThereIsNoDevice) {
  if (has_device()) GTEST_SKIP() << "there is one";
  const Error error = error_of([] { make_cuda_backend({}); });
  EXPECT_EQ(error.code(), ErrorCode::unsupported);
  EXPECT_NE(std::string(error.what()).find("`device` cuda"), std::string::npos) << error.what();
}

class OnDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_device()) GTEST_SKIP() << "no CUDA device";
  }

  static std::unique_ptr<testing::Device> make(const CudaOptions& options) {
    return std::make_unique<testing::Device>(make_cuda_backend(options));
  }

  // A little work of which the answer is known.
  static void expect_working(testing::Device& backend) {
    const std::vector<float> x = {1.0f, 2.0f, 3.0f, 4.0f};
    const Buffer from = testing::upload(backend, x);
    const Buffer to = backend.allocate(Tier::device, x.size() * sizeof(float));
    backend.queue->run(
        CastParams{{from.data(), DType::f32, 1, 4, 4}, {to.data(), DType::f32, 1, 4, 4}});
    EXPECT_EQ(testing::download<float>(backend, to), x);
  }
};

// By which a row cache pays or not: rows cross no faster than the device's own memory is read.
TEST_F(OnDevice, KnowsItsBus) {
  const std::unique_ptr<Backend> backend = make_cuda_backend({});
  const BackendInfo& info = backend->info();
  EXPECT_GT(info.memory_bytes, 0u);
  for (const double rate : {info.link.copied, info.link.read}) {
    EXPECT_GT(rate, 1e8);
    EXPECT_LT(rate, info.memory_rate);
  }
  EXPECT_EQ(info.cached_bytes & (info.cached_bytes - 1), 0u) << "measured as a power of two";
}

TEST_F(OnDevice, RefusesADeviceThatIsNotThere) {
  CudaOptions options;
  options.ordinal = 4711;
  EXPECT_EQ(error_of([&] { make_cuda_backend(options); }).code(), ErrorCode::unsupported);
}

TEST_F(OnDevice, HoldsItsCap) {
  CudaOptions options;
  options.device_cap = queue_bytes() + (1 << 20);
  const auto backend = make(options);
  const Error error =
      error_of([&] { static_cast<void>(backend->allocate(Tier::device, (1 << 20) + 1)); });
  EXPECT_EQ(error.code(), ErrorCode::memory);
  expect_working(*backend);
  EXPECT_LE(backend->backend->account(Tier::device).peak(), *options.device_cap);
}

TEST_F(OnDevice, SaysThatTheDeviceIsFull) {
  CudaOptions options;
  options.device_cap = MemoryAccount::kNoCap;
  const auto backend = make(options);
  std::size_t free = 0;
  std::size_t total = 0;
  require(cudaMemGetInfo(&free, &total), "free memory");
  const std::size_t left = std::size_t{512} << 20;
  if (free < 2 * left) GTEST_SKIP() << "too little free memory for a ballast";
  {
    const DeviceBlock ballast = make_device_block(free - left);
    const std::uint64_t before = backend->backend->account(Tier::device).used();
    const Error error =
        error_of([&] { static_cast<void>(backend->allocate(Tier::device, 2 * left)); });
    EXPECT_EQ(error.code(), ErrorCode::memory);
    EXPECT_NE(std::string(error.what()).find("`device_memory`"), std::string::npos);
    EXPECT_EQ(backend->backend->account(Tier::device).used(), before);
    expect_working(*backend);
  }
  // With the ballast gone the same succeeds.
  EXPECT_NO_THROW(static_cast<void>(backend->allocate(Tier::device, 2 * left)));
}

TEST_F(OnDevice, SaysThatMemoryCannotBePinned) {
  const auto backend = make({});
  constexpr std::size_t kBytes = 1 << 20;
  void* const memory =
      ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  ::munmap(memory, kBytes);
  auto* const gone = static_cast<std::byte*>(memory);
  EXPECT_EQ(error_of([&] { backend->backend->register_host(gone, kBytes); }).code(),
            ErrorCode::memory);
  expect_working(*backend);
}

// Casts what is in pinned memory, [4], to f32 on the device, by two queues.
class Step {
 public:
  explicit Step(testing::Device& backend)
      : backend_(backend),
        transfer_(backend.backend->make_queue({.computes = false})),
        x_(backend.allocate(Tier::host, 16)),
        brought_(backend.allocate(Tier::device, 16)),
        y_(backend.allocate(Tier::device, 16)) {}

  // The input changes, the work does not.
  std::vector<float> run(std::unique_ptr<Recording>& recording, const std::vector<float>& x) {
    std::copy(x.begin(), x.end(), x_.floats());
    backend_.queue->replay(recording, [&] {
      ++issued;
      transfer_->wait_for(*backend_.queue);
      const CopyOp op = {brought_.data(), x_.data(), 16};
      transfer_->copy({&op, 1});
      backend_.queue->wait_for(*transfer_);
      // Two, so that one starts while the other still runs.
      for (int i = 0; i < 2; ++i) {
        backend_.queue->run(
            CastParams{{brought_.data(), DType::f32, 2, 2, 2}, {y_.data(), DType::f32, 2, 2, 2}});
      }
      if (fails) throw Error(ErrorCode::usage, "a test");
    });
    return testing::download<float>(backend_, y_);
  }

  int issued = 0;
  bool fails = false;

 private:
  testing::Device& backend_;
  std::unique_ptr<Queue> transfer_;
  Buffer x_, brought_, y_;
};

TEST_F(OnDevice, AStepIsRecordedOnceAndReplayed) {
  const auto backend = make({});
  Step step(*backend);
  std::unique_ptr<Recording> recordings[2];
  for (int round = 0; round < 1000; ++round) {
    const auto r = static_cast<float>(round);
    const std::vector<float> x = {r, r + 0.25f, -r, 1.0f};
    ASSERT_EQ(step.run(recordings[round % 2], x), x);
  }
  EXPECT_EQ(step.issued, 2);
  EXPECT_EQ(backend->queue->replay_counts().recordings, 2);
  EXPECT_EQ(backend->queue->replay_counts().launches, 1000);
  recordings[0].reset();
  EXPECT_EQ(step.run(recordings[0], {4.0f, 3.0f, 2.0f, 1.0f})[0], 4.0f);
  EXPECT_EQ(backend->queue->replay_counts().recordings, 3);
}

TEST_F(OnDevice, AStepThatCannotBeIssuedIsNotRecorded) {
  const auto backend = make({});
  Step step(*backend);
  std::unique_ptr<Recording> recording;
  const std::vector<float> x = {1.0f, 2.0f, 3.0f, 4.0f};
  step.fails = true;
  EXPECT_EQ(error_of([&] { step.run(recording, x); }).code(), ErrorCode::usage);
  EXPECT_EQ(recording, nullptr);
  EXPECT_EQ(backend->queue->replay_counts().launches, 0);
  expect_working(*backend);
  step.fails = false;
  EXPECT_EQ(step.run(recording, x), x);
  EXPECT_EQ(step.run(recording, {0.0f, 0.0f, 0.0f, 0.0f}), std::vector<float>(4));
}

TEST_F(OnDevice, ARecordedStepNeitherAllocatesNorWaitsNorCopiesPageableMemory) {
  const auto backend = make({});
  const Buffer y = backend->allocate(Tier::device, 16);
  const auto dies = [&](const std::function<void()>& issue, const char* why) {
    std::unique_ptr<Recording> recording;
    EXPECT_DEATH(backend->queue->replay(recording, issue), why);
  };
  // A forked process has no device: each begins anew.
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  dies([&] { static_cast<void>(backend->allocate(Tier::device, 16)); }, "memory taken");
  dies([&] { backend->synchronize(); }, "waits for itself");
  dies(
      [&] {
        std::vector<std::byte> pageable(16);
        const CopyOp op = {y.data(), pageable.data(), 16};
        backend->queue->copy({&op, 1});
      },
      "not pinned");
}

}  // namespace
}  // namespace sluice::cuda
