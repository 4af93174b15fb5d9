// Rows on their way to the matrix instructions.
#pragma once

#include "kernels/barriers.cuh"
#include "kernels/decode_work.cuh"

namespace sluice::cuda {

// Brings rows of a segment to shared memory, kWarpRows at a time and kStages - 1 ahead of their
// use. One per warp. From Hopper on a row is one instruction of the bulk copy engine.
template <int kHeadDim, int kStages>
class DecodeRows {
  using Shape = DecodeShape<kHeadDim>;

 public:
  static constexpr int kBytes = kStages * Shape::kStageBytes;

  // `stages` [kBytes] and `barriers` [kStages] are shared memory of this warp.
  __device__ DecodeRows(const DecodeKernelParams& p, std::byte* stages, std::uint64_t* barriers)
      : p_(p), stages_(stages), barriers_(barriers) {
    if constexpr (kBulkCopies) {
      if (lane() == 0) {
        for (int i = 0; i < kStages; ++i) barrier_init(shared_address(&barriers[i]), 1);
        barrier_init_fence();
        shared_write_fence();
      }
      __syncwarp();
    }
  }

  // Goes to a segment; the warp has used all rows of the one before.
  __device__ void begin(const DecodeSegment& s) {
    rows_ = s.rows;
    next_ = s.first;
    last_ = s.last;
    base_ = p_.rows[s.head];
    if (p_.positions != nullptr) {
      positions_ = p_.positions + s.head * p_.capacity;
      home_ = p_.home[s.head];
      resident_ = p_.resident[s.head];
      newest_ = p_.newest[s.head];
      selected_ = rows_ - p_.counts[s.head];
    }
    look_up();
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) fetch((stage_ + i) % kStages);
  }

  // The next kWarpRows rows; those past the last one are zero.
  __device__ const std::byte* take() {
    if constexpr (kBulkCopies) {
      barrier_wait(shared_address(&barriers_[stage_]), phases_ >> stage_ & 1u);
      phases_ ^= 1u << stage_;
    } else {
      copy_async_wait<kStages - 2>();
    }
    __syncwarp();
    return stages_ + stage_ * Shape::kStageBytes;
  }

  // The rows that take() gave are done with.
  __device__ void release() {
    __syncwarp();
    fetch(stage_ == 0 ? kStages - 1 : stage_ - 1);
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
  }

  // Other uses of the stages' memory by this thread are over.
  __device__ static void reuse_memory() {
    if constexpr (kBulkCopies) shared_write_fence();
  }

  // How many of a tile's rows exist.
  __device__ int count(std::int64_t tile) const {
    const std::int64_t left = rows_ - first(tile);
    return static_cast<int>(left < 0 ? 0 : left < kWarpRows ? left : kWarpRows);
  }

 private:
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static constexpr bool kBulkCopies = true;
#else
  static constexpr bool kBulkCopies = false;
#endif

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ std::int64_t first(std::int64_t tile) const {
    return tile * kTileRows + static_cast<int>(threadIdx.x) / kWarp * kWarpRows;
  }

  // Positions are asked for one tile before their rows are, so that nothing waits for them.
  __device__ void look_up() {
    if (positions_ == nullptr || next_ >= last_) return;
    const std::int64_t number = first(next_) + lane();
    if (lane() < kWarpRows && number < selected_) position_ = positions_[number];
  }

  // Where row number lane() of the next tile is.
  __device__ const std::byte* row() const {
    const std::int64_t number = first(next_) + lane();
    if (positions_ == nullptr) return base_ + number * Shape::kRowBytes;
    if (number >= selected_) return newest_ + (number - selected_) * Shape::kRowBytes;
    const std::byte* const base = position_ < resident_ ? base_ : home_;
    return base + static_cast<std::int64_t>(position_) * Shape::kRowBytes;
  }

  __device__ void fetch(int stage) {
    std::byte* const to = stages_ + stage * Shape::kStageBytes;
    if (next_ < last_) {
      if constexpr (kBulkCopies) {
        fetch_bulk(to, shared_address(&barriers_[stage]));
      } else {
        fetch_chunks(to);
      }
      ++next_;
      look_up();
    }
    if constexpr (!kBulkCopies) copy_async_commit();
  }

  __device__ void fetch_bulk(std::byte* to, std::uint32_t barrier) const {
    const int existing = count(next_);
    if (lane() == 0) {
      barrier_expect(barrier, static_cast<std::uint32_t>(existing * Shape::kRowBytes));
    }
    __syncwarp();
    std::byte* const own = to + lane() * Shape::kStride;
    if (lane() < existing) {
      copy_bulk(own, row(), Shape::kRowBytes, barrier);
    } else if (lane() < kWarpRows) {
      for (int i = 0; i < Shape::kRowBytes; i += 16) {
        *reinterpret_cast<uint4*>(own + i) = make_uint4(0, 0, 0, 0);
      }
    }
  }

  __device__ void fetch_chunks(std::byte* to) const {
    const int existing = count(next_);
    // Something readable for lanes without a row: q is.
    const auto own = reinterpret_cast<unsigned long long>(
        lane() < existing ? row() : reinterpret_cast<const std::byte*>(p_.q));
#pragma unroll
    for (int i = 0; i < kWarpRows * Shape::kRowChunks / kWarp; ++i) {
      const int chunk = lane() + i * kWarp;
      const int number = chunk / Shape::kRowChunks;
      const int column = chunk % Shape::kRowChunks * 16;
      const auto* const from =
          reinterpret_cast<const std::byte*>(__shfl_sync(kAllLanes, own, number));
      const bool valid = number < existing;
      copy_async_or_zero(to + number * Shape::kStride + column, from + (valid ? column : 0), valid);
    }
  }

  const DecodeKernelParams& p_;
  std::byte* stages_;
  std::uint64_t* barriers_;
  const std::byte* base_ = nullptr;
  const std::byte* home_ = nullptr;
  const std::int32_t* positions_ = nullptr;
  const std::byte* newest_ = nullptr;
  std::int64_t resident_ = 0;
  std::int64_t selected_ = 0;
  std::int64_t rows_ = 0;
  std::int64_t next_ = 0;  // tile to fetch
  std::int64_t last_ = 0;
  std::int32_t position_ = 0;
  int stage_ = 0;             // to use next
  std::uint32_t phases_ = 0;  // of the barriers, a bit each
};

}  // namespace sluice::cuda
