// Ring through which a warp streams tiles of coded weights.
#pragma once

#include "kernels/runtime/barriers.cuh"
#include "kernels/runtime/device_math.cuh"

namespace sluice::cuda {

// A warp's ring of stages in shared memory. A stage has kPieces contiguous pieces of up to
// kPieceBytes; `Walk` says which come next: int next(const std::byte* (&pieces)[kPieces]) returns
// the bytes of each, 0 if there are no more.
template <typename Walk, int kPieces, int kPieceBytes, int kStages>
class TileRing {
 public:
  static constexpr int kStageBytes = kPieces * kPieceBytes;

  // `is_used`: false for a warp that never takes a stage.
  __device__ TileRing(const Walk& walk, std::byte* stages, std::uint64_t* barriers,
                      bool is_used = true)
      : walk_(walk), stages_(stages), barriers_(barriers) {
    if (!is_used) return;
    if constexpr (kBulkCopies) {
      if (lane() == 0) {
        for (int i = 0; i < kStages; ++i) barrier_init(shared_address(&barriers[i]), 1);
        barrier_init_fence();
      }
      __syncwarp();
    }
    for (int i = 0; i < kStages; ++i) fetch(i);
  }

  // Waits for the next stage.
  __device__ const std::byte* take() {
    if constexpr (kBulkCopies) {
      barrier_wait(shared_address(&barriers_[stage_]), phases_ >> stage_ & 1u);
      phases_ ^= 1u << stage_;
    } else {
      copy_async_wait<kStages - 1>();
      __syncwarp();
    }
    return stages_ + stage_ * kStageBytes;
  }
  // Frees the stage that take() gave.
  __device__ void release() {
    __syncwarp();
    fetch(stage_);
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }

  __device__ void fetch(int stage) {
    const std::byte* from[kPieces];
    if (const int bytes = walk_.next(from)) copy(stage, from, bytes);
    if constexpr (!kBulkCopies) copy_async_commit();
  }
  __device__ void copy(int stage, const std::byte* const (&from)[kPieces], int bytes) const {
    std::byte* const to = stages_ + stage * kStageBytes;
    if constexpr (kBulkCopies) {
      if (lane() != 0) return;
      const std::uint32_t barrier = shared_address(&barriers_[stage]);
      barrier_expect(barrier, static_cast<std::uint32_t>(kPieces * bytes));
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        copy_bulk(to + i * kPieceBytes, from[i], static_cast<std::uint32_t>(bytes), barrier);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        for (int at = lane() * 16; at < bytes; at += kWarp * 16) {
          copy_async_or_zero(to + i * kPieceBytes + at, from[i] + at, true);
        }
      }
    }
  }

  Walk walk_;
  std::byte* stages_;
  std::uint64_t* barriers_;
  int stage_ = 0;
  std::uint32_t phases_ = 0;  // phases of the barriers, one bit each
};

}  // namespace sluice::cuda
