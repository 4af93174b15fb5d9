// Ring of pages of value tiles that one warp copies to shared memory, in order: by bulk copies if
// the device has them, else by asynchronous copies of all lanes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/runtime/barriers.cuh"
#include "kernels/runtime/device_math.cuh"

namespace sluice::cuda {

class PageRing {
 public:
  static constexpr int kMostStages = 2;

  // All lanes construct it. `memory` holds `stages` of `page_bytes` each; barriers [kMostStages].
  __device__ PageRing(std::byte* memory, int stages, int page_bytes, std::uint64_t* barriers)
      : memory_(memory), stages_(stages), page_bytes_(page_bytes), barriers_(barriers) {
    if constexpr (kBulkCopies) {
      if (lane() == 0) {
        for (int i = 0; i < kMostStages; ++i) barrier_init(barrier(i), 1);
        barrier_init_fence();
      }
      __syncwarp();
    }
  }

  // Starts copying `page` (null: nothing) into the stage that was released first. To be called once
  // per stage before the first take(), then once after every release().
  __device__ __forceinline__ void fetch(const std::byte* page) {
    std::byte* const to = memory_ + into_ * page_bytes_;
    if constexpr (kBulkCopies) {
      if (page != nullptr && lane() == 0) {
        barrier_expect(barrier(into_), static_cast<std::uint32_t>(page_bytes_));
        copy_bulk(to, page, static_cast<std::uint32_t>(page_bytes_), barrier(into_));
      }
    } else {
      constexpr int kPiece = 16;
      for (int at = lane() * kPiece; page != nullptr && at < page_bytes_; at += kWarp * kPiece) {
        copy_async_or_zero(to + at, page + at, true);
      }
      copy_async_commit();
    }
    into_ = next_of(into_);
  }
  // Waits for the page that was fetched first.
  __device__ __forceinline__ const std::byte* take() {
    if constexpr (kBulkCopies) {
      barrier_wait(barrier(from_), phases_ >> from_ & 1u);
      phases_ ^= 1u << from_;
    } else {
      if (stages_ == 1) {
        copy_async_wait<0>();
      } else {
        copy_async_wait<kMostStages - 1>();
      }
      __syncwarp();
    }
    return memory_ + from_ * page_bytes_;
  }
  // Frees that page's stage.
  __device__ __forceinline__ void release() {
    __syncwarp();
    from_ = next_of(from_);
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ __forceinline__ int next_of(int stage) const {
    return stage + 1 == stages_ ? 0 : stage + 1;
  }
  __device__ __forceinline__ std::uint32_t barrier(int stage) const {
    return shared_address(barriers_ + stage);
  }

  std::byte* memory_;
  int stages_;
  int page_bytes_;
  std::uint64_t* barriers_;
  int into_ = 0;
  int from_ = 0;
  std::uint32_t phases_ = 0;  // phases of the barriers, one bit each
};

}  // namespace sluice::cuda
