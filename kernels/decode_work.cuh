// What attention of one token is told, and how its work is divided.
#pragma once

#include "kernels/device_math.cuh"
#include "kernels/heads.h"
#include "lib/selection.h"

namespace sluice::cuda {

// Queries that one block serves: with their rounding errors they fill the 16 rows of a matrix
// instruction.
inline constexpr int kBunch = 8;
// Rows that a warp takes at a time, and warps of a block.
inline constexpr int kWarpRows = 16;
inline constexpr int kDecodeWarps = 4;
inline constexpr int kTileRows = kWarpRows * kDecodeWarps;

struct DecodeKernelParams {
  const float* q = nullptr;  // [kv_heads * group, head_dim]
  int kv_heads = 0;
  int group = 0;
  HeadRows rows;                            // row 0 of each head
  HeadRows home;                            // of selected rows: those from `resident` on
  const std::int32_t* positions = nullptr;  // [kv_heads, capacity]; null: every row in turn
  std::int64_t capacity = 0;
  HeadCounts resident;
  HeadSelection* heads = nullptr;  // reported [kv_heads]: how many positions; null without them
  HeadCounts counts;               // rows without positions; else the newest, after the selected
  HeadRows newest;
  std::int64_t visible = 0;  // at most this many rows of each head
  float scale = 0.0f;        // of logits, times log2(e)
  float* out = nullptr;      // [kv_heads * group, head_dim]
  float* lse = nullptr;      // [kv_heads * group], natural logarithm
  bool merge = false;
  float* partials = nullptr;          // [bunches, workers + kv_heads, kBunch, head_dim]
  float* partial_lse = nullptr;       // [bunches, workers + kv_heads, kBunch], base 2
  std::uint32_t* finished = nullptr;  // [bunches, kv_heads], zero
  int workers = 0;                    // gridDim.x; gridDim.y is the number of bunches
  int stage_bytes = 0;                // of shared memory; tiles of the heads follow if they differ
};

template <int kHeadDim>
struct DecodeShape {
  static constexpr int kRowBytes = (4 * kHeadDim + 63) / 64 * 64;
  // An odd number of 16-byte units: the eight rows of a matrix then lie in different banks.
  static constexpr int kStride = kRowBytes + 16;
  static constexpr int kStageBytes = kWarpRows * kStride;
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr int kRowChunks = kRowBytes / 16;
};

// What a block works on: tiles [first, last) of one head, as part of what `worker` does.
struct DecodeSegment {
  int head = 0;
  std::int64_t first = 0;
  std::int64_t last = 0;
  std::int64_t rows = 0;   // of the head
  std::int64_t tiles = 0;  // of the head
};

__device__ __forceinline__ std::int64_t tiles_of(std::int64_t rows) {
  const std::int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  return tiles > 0 ? tiles : 1;  // a head without rows still has a result: an empty partial
}

// Whether every head has as many rows, and the host knows how many.
__device__ __forceinline__ bool is_uniform(const DecodeKernelParams& p) {
  return p.positions == nullptr && !p.counts.is_listed;
}

__device__ __forceinline__ std::int64_t rows_of(const DecodeKernelParams& p, int head) {
  const std::int64_t selected = p.positions == nullptr ? 0 : p.heads[head].count;
  return min(selected, p.visible) +
         (p.positions == nullptr ? min(p.counts[head], p.visible) : p.counts[head]);
}

// Tiles of all heads, numbered head by head, divided evenly among workers.
class DecodeWork {
 public:
  // `before`: shared memory [kv_heads + 1] if heads differ. The whole block comes here.
  __device__ DecodeWork(const DecodeKernelParams& p, std::int32_t* before)
      : p_(p), before_(before) {
    if (is_uniform(p)) {
      uniform_ = tiles_of(rows_of(p, 0));
      total_ = uniform_ * p.kv_heads;
    } else {
      add_up();
      total_ = before[p.kv_heads];
    }
    // Then every worker has a tile, and those between a head's first and last all have one of it.
    workers_ = static_cast<int>(min(static_cast<std::int64_t>(p.workers), total_));
  }

  __device__ std::int64_t begin(int worker) const {
    return worker < workers_ ? total_ * worker / workers_ : total_;
  }

  // The worker that has tile number `tile`.
  __device__ int worker_of(std::int64_t tile) const {
    return static_cast<int>(((tile + 1) * workers_ - 1) / total_);
  }

  __device__ std::int64_t before(int head) const {
    return uniform_ > 0 ? uniform_ * head : before_[head];
  }

  // The part of tiles [begin, end) that lies in the head of `begin`.
  __device__ DecodeSegment segment(std::int64_t begin, std::int64_t end) const {
    DecodeSegment s;
    s.head = head_of(begin);
    s.rows = rows_of(p_, s.head);
    s.tiles = tiles_of(s.rows);
    s.first = begin - before(s.head);
    s.last = min(s.tiles, end - before(s.head));
    return s;
  }

 private:
  // before[h] = tiles of heads 0 to h - 1: each thread adds up a run of heads, then the runs are
  // added up.
  __device__ void add_up() const {
    constexpr int kThreads = kDecodeWarps * kWarp;
    __shared__ std::int32_t runs[kThreads];
    const auto thread = static_cast<int>(threadIdx.x);
    const int length = (p_.kv_heads + kThreads - 1) / kThreads;
    const int first = min(thread * length, p_.kv_heads);
    const int last = min(first + length, p_.kv_heads);
    std::int32_t sum = 0;
    for (int head = first; head < last; ++head) {
      const auto tiles = static_cast<std::int32_t>(tiles_of(rows_of(p_, head)));
      before_[head + 1] = tiles;
      sum += tiles;
    }
    runs[thread] = sum;
    __syncthreads();
    std::int32_t carried = 0;
    for (int i = 0; i < thread; ++i) carried += runs[i];
    for (int head = first; head < last; ++head) before_[head + 1] = carried += before_[head + 1];
    if (thread == 0) before_[0] = 0;
    __syncthreads();
  }

  __device__ int head_of(std::int64_t tile) const {
    if (uniform_ > 0) return static_cast<int>(tile / uniform_);
    int low = 0;
    int high = p_.kv_heads - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (before_[middle] <= tile) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

  const DecodeKernelParams& p_;
  std::int32_t* before_;
  std::int64_t uniform_ = 0;
  std::int64_t total_ = 0;
  int workers_ = 0;
};

}  // namespace sluice::cuda
