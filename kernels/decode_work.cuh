// What attention of one token is told, and how its work is divided.
#pragma once

#include "kernels/device_math.cuh"
#include "kernels/heads.h"
#include "lib/selection.h"

namespace sluice::cuda {

// Queries that one block serves: with their rounding errors they fill the 16 rows of a matrix
// instruction.
inline constexpr int kBunch = 8;
// Rows that a warp takes at a time, and warps of a block that do.
inline constexpr int kWarpRows = 16;
inline constexpr int kDecodeWarps = 4;
inline constexpr int kTileRows = kWarpRows * kDecodeWarps;

struct DecodeKernelParams {
  const float* q = nullptr;  // [kv_heads * group, head_dim], 16-byte aligned
  int kv_heads = 0;
  int group = 0;
  const std::int32_t* positions = nullptr;  // [kv_heads, capacity]; null: every row in turn
  std::int64_t capacity = 0;
  HeadSelection* heads = nullptr;  // reported [kv_heads]: how many positions; null without them
  std::int64_t visible = 0;        // at most this many rows of each head
  float scale = 0.0f;              // of logits, times log2(e)
  float* out = nullptr;            // [kv_heads * group, head_dim]
  float* lse = nullptr;            // [kv_heads * group], natural logarithm
  bool merge = false;
  // Without `merge`:
  float* alpha = nullptr;                // [kv_heads * group] or null: the share of the selected
  const float* estimated_lse = nullptr;  // [kv_heads * group], of what alpha is a share of, to
                                         // which the newest rows' is added; or null
  const float* sums = nullptr;           // [kv_heads, head_dim], whose `share` stands for what
  float share = 0.0f;                    // alpha lacks; or null
  float* partials = nullptr;             // [bunches, workers + kv_heads, kBunch, head_dim]
  float2* partial_lse = nullptr;         // [bunches, workers + kv_heads, kBunch]: see DecodeResult
  std::uint32_t* finished = nullptr;     // [bunches, kv_heads], zero
  int workers = 0;                       // gridDim.x; gridDim.y is the number of bunches
  HeadCounts counts;                     // rows without positions; else the newest
  HeadRows rows;                         // row 0 of each head
  HeadRows newest;                       // of rows after the selected
  HeadCounts resident;                   // of selected rows: those from here on are at home
  HeadRows home;
};

// Memory of a tile. It is fetched as kLots lots of consecutive rows, for few large copies are
// faster than one of each row, and row i of a matrix instruction is of lot i. Rows of whole cache
// lines lie at multiples of such lines: copies that straddle them are 5 % slower. DecodeWarp then
// reads around their banks. Between other lots are bytes that keep rows in different banks.
template <int kHeadDim>
struct DecodeShape {
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr int kRowBytes = (4 * kHeadDim + 63) / 64 * 64;
  static constexpr int kRowChunks = kRowBytes / 16;
  static constexpr int kLots = 8;
  static constexpr int kLotRows = kTileRows / kLots;
  // The widest rows leave no registers for that.
  static constexpr bool kWholeLines = kHeadDim % 64 == 0 && kHeadDim <= 128;
  static constexpr int kLotStride = kLotRows * kRowBytes + (kWholeLines ? 0 : 16);
  static constexpr int kTileBytes = kLots * kLotStride;
  // Warps that fetch, each its rows of every tile: single rows take one warp long to ask for.
  // Others finish what was found of a segment, while the next is worked on. Wide rows are fewer,
  // and leave registers for fewer warps.
  static constexpr int kFetchWarps = kHeadDim <= 128 ? 4 : 2;
  static constexpr int kFetchRows = kTileRows / kFetchWarps;
  static constexpr int kFinishWarps = kHeadDim <= 128 ? 4 : 1;
  static constexpr int kFinishThreads = kFinishWarps * kWarp;
  static constexpr int kFirstFinishWarp = kDecodeWarps + kFetchWarps;
  static constexpr int kThreads = (kFirstFinishWarp + kFinishWarps) * kWarp;
  // The first tile of a head brings its queries.
  static constexpr int kQueryBytes = kBunch * kHeadDim * static_cast<int>(sizeof(float));
  static constexpr int kStageBytes = kTileBytes + kQueryBytes;

  // Where a row of a tile lies.
  __device__ static constexpr int place(int row) {
    return row / kLotRows * kLotStride + row % kLotRows * kRowBytes;
  }
};

// The warps that work on rows wait for each other.
__device__ __forceinline__ void sync_decode_warps() {
  asm volatile("bar.sync 1, %0;\n" ::"n"(kDecodeWarps * kWarp) : "memory");
}
// So do those that finish.
template <int kHeadDim>
__device__ __forceinline__ void sync_finish_warps() {
  asm volatile("bar.sync 2, %0;\n" ::"n"(DecodeShape<kHeadDim>::kFinishThreads) : "memory");
}

// What a block works on: tiles [first, last) of one head.
struct DecodeSegment {
  int head = 0;
  int first = 0;
  int last = 0;
  int rows = 0;      // of the head
  int selected = 0;  // the first of them, found by position
  int tiles = 0;     // of the head

  __device__ bool exists() const { return first < last; }
  // How many of a tile's rows exist.
  __device__ int count(int tile) const { return max(0, min(kTileRows, rows - tile * kTileRows)); }
  // The first row of a tile that is not found by position.
  __device__ int newest(int tile) const {
    return max(0, min(kTileRows, selected - tile * kTileRows));
  }
};

// Workers in a row.
struct DecodeSharers {
  int first = 0;
  int count = 0;
};

__device__ __forceinline__ int tiles_of(int rows) {
  const int tiles = (rows + kTileRows - 1) / kTileRows;
  return tiles > 0 ? tiles : 1;  // a head without rows still has a result: an empty partial
}

// Whether every head has as many rows, and the host knows how many.
__device__ __forceinline__ bool is_uniform(const DecodeKernelParams& p) {
  return p.positions == nullptr && !p.counts.is_listed;
}

// How many rows of a head are found by position.
__device__ __forceinline__ std::int32_t selected_of(const DecodeKernelParams& p, int head) {
  return p.positions == nullptr ? 0 : p.heads[head].count;
}

// How many rows a head has, of which so many are found by position.
__device__ __forceinline__ int rows_of(const DecodeKernelParams& p, int head, int selected) {
  const std::int64_t others = p.counts[head];
  return static_cast<int>(min(std::int64_t{selected}, p.visible) +
                          (p.positions == nullptr ? min(others, p.visible) : others));
}

// Tiles of all heads, numbered head by head, divided evenly among workers: the first of them have
// one more if need be. Numbers have 32 bits, for longer ones take long to divide.
class DecodeWork {
 public:
  // Shared memory that it takes if heads differ.
  static constexpr std::size_t shared_bytes(int kv_heads) {
    return (2 * static_cast<std::size_t>(kv_heads) + 1) * sizeof(std::int32_t);
  }

  // The whole block comes here; `shared` is [shared_bytes].
  __device__ DecodeWork(const DecodeKernelParams& p, std::int32_t* shared)
      : p_(p), before_(shared), rows_(shared + p.kv_heads + 1) {
    first_rows_ = rows_of(p, 0, selected_of(p, 0));
    if (is_uniform(p) || load_rows()) {
      uniform_ = tiles_of(first_rows_);
      total_ = uniform_ * p.kv_heads;
    } else {
      add_up();
      total_ = before_[p.kv_heads];
    }
    // Then every worker has a tile, and those between a head's first and last all have one of it.
    const int workers = min(p.workers, total_);
    each_ = total_ / workers;
    more_ = total_ % workers;
    const auto worker = static_cast<int>(blockIdx.x);
    if (worker >= workers) return;
    begin_ = each_ * worker + min(worker, more_);
    end_ = begin_ + each_ + (worker < more_ ? 1 : 0);
  }

  // What this block works on, one after the other until one does not exist.
  __device__ DecodeSegment first() const {
    return begin_ < end_ ? segment(head_of(begin_)) : DecodeSegment();
  }
  __device__ DecodeSegment after(const DecodeSegment& s) const {
    // Every head has a tile.
    return s.head + 1 < p_.kv_heads ? segment(s.head + 1) : DecodeSegment();
  }

  // Who has tiles of a segment's head.
  __device__ DecodeSharers sharers_of(const DecodeSegment& s) const {
    const int first = worker_of(before(s.head));
    return {first, worker_of(before(s.head) + s.tiles - 1) - first + 1};
  }

 private:
  // The worker that has tile number `tile`.
  __device__ int worker_of(int tile) const {
    const int of_first = more_ * (each_ + 1);  // tiles of the workers that have one more
    return tile < of_first ? tile / (each_ + 1) : more_ + (tile - of_first) / each_;
  }
  __device__ int before(int head) const { return uniform_ > 0 ? uniform_ * head : before_[head]; }

  __device__ DecodeSegment segment(int head) const {
    DecodeSegment s;
    s.head = head;
    s.rows = uniform_ > 0 ? first_rows_ : rows_[head];
    s.selected = p_.positions == nullptr ? 0 : s.rows - static_cast<int>(p_.counts[head]);
    s.tiles = tiles_of(s.rows);
    s.first = max(0, begin_ - before(head));
    s.last = min(s.tiles, end_ - before(head));
    return s;
  }

  // rows[h] = rows of head h. Returns whether all heads have as many, which most selections see to.
  __device__ bool load_rows() const {
    bool equal = true;
    for (auto head = static_cast<int>(threadIdx.x); head < p_.kv_heads;
         head += static_cast<int>(blockDim.x)) {
      rows_[head] = rows_of(p_, head, selected_of(p_, head));
      equal = equal && rows_[head] == first_rows_;
    }
    return __syncthreads_and(equal ? 1 : 0) != 0;
  }

  // before[h] = tiles of heads 0 to h - 1: each thread adds up a run of heads, then the runs are
  // added up.
  __device__ void add_up() const {
    __shared__ std::int32_t of_warps[kWarp];
    const auto thread = static_cast<int>(threadIdx.x);
    const auto threads = static_cast<int>(blockDim.x);
    const int length = (p_.kv_heads + threads - 1) / threads;
    const int first = min(thread * length, p_.kv_heads);
    const int last = min(first + length, p_.kv_heads);
    std::int32_t own = 0;
#pragma unroll 1
    for (int head = first; head < last; ++head) {
      own += tiles_of(rows_[head]);
    }
    std::int32_t sum = warp_inclusive(own);
    if (thread % kWarp == kWarp - 1) of_warps[thread / kWarp] = sum;
    __syncthreads();
    sum -= own;
#pragma unroll 1
    for (int warp = 0; warp < thread / kWarp; ++warp) sum += of_warps[warp];
#pragma unroll 1
    for (int head = first; head < last; ++head) {
      before_[head] = sum;
      sum += tiles_of(rows_[head]);
    }
    if (thread == threads - 1) before_[p_.kv_heads] = sum;
    __syncthreads();
  }

  __device__ int head_of(int tile) const {
    if (uniform_ > 0) return tile / uniform_;
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
  std::int32_t* rows_;
  int first_rows_ = 0;  // of head 0
  int uniform_ = 0;     // tiles of every head, if they are equal
  int total_ = 0;
  int each_ = 0;  // tiles of a worker
  int more_ = 0;  // workers that have one more
  int begin_ = 0;
  int end_ = 0;
};

}  // namespace sluice::cuda
