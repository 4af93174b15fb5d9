// Recordings that are more than there is memory for: those that were not used for long are made
// anew, what all take stays within what is charged for them, and each does what it did.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels/cuda_backend.h"
#include "kernels/runtime/recorder.h"
#include "tests/kernels/has_device.h"
#include "tests/support/device.h"

namespace sluice::cuda {
namespace {

constexpr int kOps = 500;  // of a step
constexpr int kMany = 4 * static_cast<int>(Recorder::kMostNodes) / kOps;
constexpr std::size_t kPiece = 256;

std::size_t free_bytes() {
  std::size_t free = 0;
  std::size_t total = 0;
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  return free;
}

class Recorded : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_device()) GTEST_SKIP() << "no CUDA device";
    device_ = std::make_unique<testing::Device>(make_cuda_backend({}));
    from_ = device_->allocate(Tier::host, kMany * kPiece);
    to_ = device_->allocate(Tier::host, kPiece);
    for (std::size_t i = 0; i < from_.bytes(); ++i) {
      from_.data()[i] = static_cast<std::byte>(7 * (i / kPiece) + i);
    }
    recordings_.resize(kMany);
  }
  // Step number `i`, whose copies all bring the same piece.
  void replay(int i) {
    const std::byte* const piece = from_.data() + static_cast<std::size_t>(i) * kPiece;
    const CopyOp op = {to_.data(), piece, kPiece};
    device_->queue->replay(recordings_[static_cast<std::size_t>(i)], [&] {
      for (int n = 0; n < kOps; ++n) device_->queue->copy({&op, 1});
    });
    device_->synchronize();
    EXPECT_TRUE(std::equal(piece, piece + kPiece, to_.data())) << i;
  }
  std::int64_t made() const { return device_->queue->replay_counts().recordings; }

  std::unique_ptr<testing::Device> device_;
  Buffer from_, to_;
  std::vector<std::unique_ptr<Recording>> recordings_;
};

TEST_F(Recorded, StepsTakeTheMemoryThatIsCharged) {
  replay(0);
  const std::size_t before = free_bytes();
  for (int i = 1; i < kMany; ++i) replay(i);
  EXPECT_LE(before - free_bytes(), Recorder::kDeviceBytes);
  EXPECT_EQ(made(), kMany);
  replay(0);
  EXPECT_EQ(made(), kMany + 1) << "it was dropped";
  replay(kMany - 1);
  EXPECT_EQ(made(), kMany + 1) << "it was used not long ago";
}

TEST_F(Recorded, StepsMayEndInAnyOrder) {
  for (int i = 0; i < kMany; ++i) replay(i);
  for (int i = kMany - 1; i >= 0; i -= 2) recordings_[static_cast<std::size_t>(i)].reset();
  for (int i = 0; i < kMany; ++i) replay(i);
  // Owners may have them for longer than the backend.
  from_ = Buffer();
  to_ = Buffer();
  device_.reset();
  recordings_.clear();
}

}  // namespace
}  // namespace sluice::cuda
