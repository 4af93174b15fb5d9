// Parameters of decode attention, and the division of its work. Words of the files decode*:
//   head       a KV head of one token. Its rows are the selected ones, found by position, and then
//              the newest, those of the token's own page, in turn. Without a selection all rows
//              come in turn
//   tile       64 rows of a head, or 32 where shared memory is too small for two tiles of wide
//   rows.
//              A lot is an eighth of them, consecutive, fetched by one copy if they come in turn
//   bunch      up to 8 query heads of a KV head; blockIdx.y
//   worker     blockIdx.x. The tiles of all heads are divided evenly among workers (stream-K)
//   segment    a worker's tiles of one head
//   sharers    the workers with tiles of one head; the last to finish merges their partials
//   placed     (rows) looked up by find_rows(), so that no page has to be looked up
//   resident   (rows) on the device, by their page or in the row cache
#pragma once

#include "kernels/attention/attention.h"
#include "kernels/attention/slow_bus.cuh"
#include "kernels/runtime/device_math.cuh"
#include "kernels/runtime/paged.cuh"
#include "kernels/runtime/rows.cuh"
#include "lib/backend/index_ops.h"

namespace sluice::cuda {

// Rows of a tile that a warp works on.
inline constexpr int kWarpRows = 16;

// Heads are numbered token * kv_heads + KV head.
struct DecodeKernelParams {
  const float* q = nullptr;  // [count, kv_heads * group, head_dim], 16-byte aligned
  std::int64_t q_stride = 0;
  const BatchToken* tokens = nullptr;  // [count]
  int count = 0;
  int kv_heads = 0;
  int heads = 0;  // count * kv_heads
  int group = 0;
  PagedRows rows;
  const PositionGap* gaps = nullptr;        // [count] or null; not if rows are found by position
  const std::int32_t* positions = nullptr;  // [heads, capacity]; null: every row in turn
  std::int64_t capacity = 0;
  const PlacedRow* places = nullptr;  // [heads, capacity], of these positions; null: see the pages
  std::byte* cache = nullptr;         // [kv_heads, ways, row_bytes]
  std::int64_t cache_stride = 0;      // bytes per KV head
  const HeadSelection* selections = nullptr;  // reported [heads]: how many positions; or null
  std::int32_t* resident =
      nullptr;             // reported [heads] or null: how many of these rows are on the device
  float scale = 0.0f;      // of logits, times log2(e)
  float* out = nullptr;    // [heads * group, head_dim]
  float* lse = nullptr;    // [heads * group], natural logarithm
  float* alpha = nullptr;  // [heads * group] or null: the share of the selected
  // [heads * group] or null: log-sum-exp of the tokens whose share alpha is, the newest rows not
  // among them; see DecodeGiven::alpha_with().
  const float* estimated_lse = nullptr;
  // [heads, head_dim] or null: of all values that a token sees. Their mean stands for the rest,
  // 1 - alpha.
  const float* sums = nullptr;
  float* partials = nullptr;                 // [bunches, workers + heads, kBunch, head_dim]
  float2* partial_lse = nullptr;             // [bunches, workers + heads, kBunch]: see DecodeResult
  std::int32_t* partial_resident = nullptr;  // [workers + heads], of the first bunch
  std::uint32_t* finished = nullptr;         // [bunches, heads], zero
  int workers = 0;                           // gridDim.x; gridDim.y is the number of bunches
  int stages = 0;                            // stages of a block's ring
  SlowBus slow_bus;

  // True if heads have rows that are found by position, before those of the token's page.
  __host__ __device__ bool selects() const { return positions != nullptr; }
};

// The warps of a block, and the memory of a tile.
//
// kWarps warps work on rows. Fetching warps have their rows of every tile each, because a single
// one would take long to request single rows. Finishing warps complete the results of a segment
// during work on the next. Wide rows are fewer and leave registers for fewer warps.
//
// A tile is kLots lots of kLotRows consecutive rows, because few large copies are faster than one
// per row. Warp w works on rows 2 w and 2 w + 1 of every lot; lot i has column i of its products
// with the queries. Rows of whole cache lines are aligned to cache lines, because copies that
// straddle them are 5 % slower, and DecodeWarp reads them in an order that avoids bank conflicts.
// Other lots are padded to put rows in different banks.
template <typename Rows, int kDim, int kWarps>
struct DecodeShape {
  using Key = typename Rows::Key;
  using Value = typename Rows::Value;
  static constexpr int kHeadDim = kDim;
  static constexpr int kDecodeWarps = kWarps;
  static constexpr int kTileRows = kWarpRows * kDecodeWarps;
  static constexpr int kFetchWarps = kDim <= 128 ? 4 : 2;
  static constexpr int kFetchRows = kTileRows / kFetchWarps;
  static constexpr int kFinishWarps = kDim <= 128 ? 4 : 1;
  static constexpr int kFirstFinishWarp = kDecodeWarps + kFetchWarps;
  static constexpr int kThreads = (kFirstFinishWarp + kFinishWarps) * kWarp;
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr int kKeyBytes = part_bytes<Key>(kHeadDim);  // V begins behind them
  static constexpr int kRowBytes = (kKeyBytes + part_bytes<Value>(kHeadDim) + 63) / 64 * 64;
  static constexpr int kRowChunks = kRowBytes / 16;
  static constexpr int kLots = 8;
  static constexpr int kLotRows = kTileRows / kLots;
  // Not for the widest rows, which leave no registers for it.
  static constexpr bool kWholeLines = !kIsCoded<Key> && kHeadDim % 64 == 0 && kHeadDim <= 128;
  static constexpr int kLotStride = kLotRows * kRowBytes + (kWholeLines ? 0 : 16);
  static constexpr int kTileBytes = kLots * kLotStride;
  // A head's queries come with its first tile. The warps' results are written over its last.
  static constexpr int kQueryBytes = kBunch * kHeadDim * static_cast<int>(sizeof(float));
  static constexpr int kResultBytes = kDecodeWarps * kBunch * (kHeadDim + 11) * 4;
  static constexpr int kStageBytes = kTileBytes + kQueryBytes > kResultBytes
                                         ? kTileBytes + kQueryBytes
                                         : (kResultBytes + 127) / 128 * 128;

  // The offset of a row in a tile.
  __device__ static constexpr int place(int row) {
    if (kLotStride == kLotRows * kRowBytes) return row * kRowBytes;
    return row / kLotRows * kLotStride + row % kLotRows * kRowBytes;
  }
};

// Barrier of the warps that work on rows.
template <typename Shape>
__device__ __forceinline__ void sync_decode_warps() {
  asm volatile("bar.sync 1, %0;\n" ::"n"(Shape::kDecodeWarps * kWarp) : "memory");
}
// Barrier of the finishing warps.
template <typename Shape>
__device__ __forceinline__ void sync_finish_warps() {
  asm volatile("bar.sync 2, %0;\n" ::"n"(Shape::kFinishWarps * kWarp) : "memory");
}

// A block's work: tiles [first, last) of one head.
template <typename Shape>
struct DecodeSegment {
  static constexpr int kTileRows = Shape::kTileRows;

  int head = 0;
  int first = 0;
  int last = 0;
  int rows = 0;      // of the head
  int selected = 0;  // the first `selected` rows are found by position
  int tiles = 0;     // of the head
  int number = 0;    // of the token
  int kv_head = 0;
  BatchToken token;
  PositionGap gap;  // of the token

  __device__ bool exists() const { return first < last; }
  // The number of rows of a tile that exist.
  __device__ int count(int tile) const { return max(0, min(kTileRows, rows - tile * kTileRows)); }
  // The first row of a tile that is not found by position.
  __device__ int newest(int tile) const {
    return max(0, min(kTileRows, selected - tile * kTileRows));
  }
};

// The workers that have tiles of one head, which are consecutive.
struct DecodeSharers {
  int first = 0;
  int count = 0;
};

// True if this block reports how many of the selected rows were on the device.
__device__ __forceinline__ bool counts_resident(const DecodeKernelParams& p) {
  return p.selects() && p.resident != nullptr && blockIdx.y == 0;
}

// The number of rows of a head that are not found by position.
__device__ __forceinline__ int in_turn_of(const DecodeKernelParams& p, const BatchToken& token,
                                          const PositionGap& gap) {
  if (p.selects()) return place_in_page(token.position) + 1;
  return token.position + 1 - (gap.end - gap.first);
}

// The position of such a row if no row is found by position. Gaps are whole pages, so that a tile
// lies on one side of the gap.
__device__ __forceinline__ std::int32_t position_beside(const PositionGap& gap, int row) {
  return row < gap.first ? row : row + (gap.end - gap.first);
}

// The number of rows of a head that are found by position.
__device__ __forceinline__ int selected_of(const DecodeKernelParams& p, int head) {
  return p.selects() ? p.selections[head].count : 0;
}

// Bytes of shared memory if heads differ: per token of a batch, and in addition.
constexpr std::int64_t decode_token_bytes(int kv_heads) {
  constexpr auto kToken = static_cast<std::int64_t>(sizeof(BatchToken) + sizeof(PositionGap));
  constexpr auto kHead = static_cast<std::int64_t>(sizeof(std::int32_t)) + 1;
  return kToken + kv_heads * kHead;
}
inline constexpr std::int64_t kDecodeBytesBeside = sizeof(std::int32_t);

// Tiles of all heads, numbered head by head and divided evenly among workers; the first workers
// have one more if the tiles do not divide. Numbers have 32 bits because dividing longer ones is
// slow.
template <typename Shape>
class DecodeWork {
  static constexpr int kTileRows = Shape::kTileRows;
  using Segment = DecodeSegment<Shape>;

 public:
  // The whole block constructs it; `shared` has decode_token_bytes() per token and
  // kDecodeBytesBeside. Reads nothing that the preceding kernel may write, and does not wait for
  // its loads.
  __device__ DecodeWork(const DecodeKernelParams& p, std::int32_t* shared)
      : p_(p),
        before_(shared),
        tokens_(reinterpret_cast<BatchToken*>(shared + p.heads + 1)),
        gaps_(reinterpret_cast<PositionGap*>(tokens_ + p.count)),
        last_(reinterpret_cast<std::uint8_t*>(gaps_ + p.count)),
        first_token_(p.tokens[0]) {
    if (p.gaps != nullptr) first_gap_ = p.gaps[0];
    if (p.count == 1) return;
    for_mine(p.count, [&](int number) {
      copy_async_word(&tokens_[number].sequence, &p.tokens[number].sequence);
      copy_async_word(&tokens_[number].position, &p.tokens[number].position);
      if (p.gaps == nullptr) return;
      copy_async_word(&gaps_[number].first, &p.gaps[number].first);
      copy_async_word(&gaps_[number].end, &p.gaps[number].end);
    });
    copy_async_commit();
  }

  // Called by the whole block once the selection is known; it is a barrier for the block's earlier
  // writes.
  __device__ void divide() {
    const int first_selected = selected_of(p_, 0);
    if (all_equal(first_selected)) {
      first_rows_ = in_turn_of(p_, first_token_, first_gap_) + first_selected;
      uniform_ = tiles_of(first_rows_);
      total_ = uniform_ * p_.heads;
    } else {
      add_up();
      total_ = before_[p_.heads];
    }
    // Gives every worker a tile, so that all workers between a head's first and last have one of
    // its tiles.
    const int workers = min(p_.workers, total_);
    each_ = total_ / workers;
    more_ = total_ % workers;
    const auto worker = static_cast<int>(blockIdx.x);
    if (worker >= workers) return;
    begin_ = each_ * worker + min(worker, more_);
    end_ = begin_ + each_ + (worker < more_ ? 1 : 0);
  }

  // This block's segments: first(), then after() each, until one does not exist.
  __device__ Segment first() const {
    if (begin_ >= end_) return Segment();
    Segment s;
    s.head = head_of(begin_);
    s.number = p_.count == 1 ? 0 : s.head / p_.kv_heads;
    s.kv_head = s.head - s.number * p_.kv_heads;
    s.token = token(s.number);
    s.gap = gap(s.number);
    set_tiles(s);
    return s;
  }
  // Runs once every few tiles, so it must not divide.
  __device__ Segment after(const Segment& s) const {
    // Every head has a tile.
    if (s.head + 1 >= p_.heads) return Segment();
    Segment next = s;
    ++next.head;
    if (++next.kv_head == p_.kv_heads) {
      next.kv_head = 0;
      next.token = tokens_[++next.number];
      next.gap = gap(next.number);
    }
    set_tiles(next);
    return next;
  }

  // The workers that have tiles of a segment's head.
  __device__ DecodeSharers sharers_of(const Segment& s) const {
    const int first = worker_of(before(s.head));
    return {first, worker_of(before(s.head) + s.tiles - 1) - first + 1};
  }

 private:
  // Tiles of `rows` rows; at least one, because a token's own row exists.
  __device__ static int tiles_of(int rows) { return (rows - 1) / kTileRows + 1; }

  // Calls body(i) for this thread's share of [0, count).
  template <typename Body>
  __device__ static void for_mine(int count, const Body& body) {
    for (auto i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
      body(i);
    }
  }
  __device__ BatchToken token(int number) const {
    return p_.count == 1 ? first_token_ : tokens_[number];
  }
  __device__ PositionGap gap(int number) const {
    return p_.count == 1 || p_.gaps == nullptr ? first_gap_ : gaps_[number];
  }

  // The worker that has tile number `tile`.
  __device__ int worker_of(int tile) const {
    const int of_first = more_ * (each_ + 1);  // tiles of the workers with one more
    return tile < of_first ? tile / (each_ + 1) : more_ + (tile - of_first) / each_;
  }
  __device__ int before(int head) const { return uniform_ > 0 ? uniform_ * head : before_[head]; }

  // Derives a segment's members from its head and token.
  __device__ void set_tiles(Segment& s) const {
    const int first_tile = before(s.head);
    s.tiles = uniform_ > 0 ? uniform_ : before_[s.head + 1] - first_tile;
    s.rows = uniform_ > 0 ? first_rows_ : (s.tiles - 1) * kTileRows + last_[s.head] + 1;
    s.selected = s.rows - in_turn_of(p_, s.token, s.gap);
    s.first = max(0, begin_ - first_tile);
    s.last = min(s.tiles, end_ - first_tile);
  }

  // Returns true if all of this thread's heads have selected `selected` rows. Several heads are
  // loaded at once; past the end, the last head again.
  __device__ bool all_select(int selected) const {
    constexpr int kAtOnce = 4;
    const auto threads = static_cast<int>(blockDim.x);
    bool equal = true;
#pragma unroll 1
    for (auto head = static_cast<int>(threadIdx.x); head < p_.heads; head += kAtOnce * threads) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        equal &= selected_of(p_, min(head + i * threads, p_.heads - 1)) == selected;
      }
    }
    return equal;
  }

  // Returns true if all heads have the same number of rows, selected and not, as most selections
  // ensure: then nothing is stored per head. A barrier.
  __device__ bool all_equal(int first_selected) const {
    bool equal = true;
    if (p_.selects()) equal = all_select(first_selected);
    if (p_.count > 1) {
      copy_async_wait<0>();
      const int first_in_turn = in_turn_of(p_, first_token_, first_gap_);
      for_mine(p_.count, [&](int number) {
        equal &= in_turn_of(p_, tokens_[number], gap(number)) == first_in_turn;
      });
    }
    return __syncthreads_and(equal ? 1 : 0) != 0;
  }

  // Tiles before[h] of heads 0 to h - 1: each thread adds up a run of heads, then the runs are
  // added up.
  __device__ void add_up() const {
    __shared__ std::int32_t of_warps[kWarp];
    const auto thread = static_cast<int>(threadIdx.x);
    const auto threads = static_cast<int>(blockDim.x);
    const int length = (p_.heads + threads - 1) / threads;
    const int first = min(thread * length, p_.heads);
    const int last = min(first + length, p_.heads);
    std::int32_t own = 0;
    int number = first / p_.kv_heads;
    int left = (number + 1) * p_.kv_heads - first;  // heads of that token
#pragma unroll 1
    for (int head = first; head < last; ++head) {
      const int rows = in_turn_of(p_, token(number), gap(number)) + selected_of(p_, head);
      before_[head] = rows;
      own += tiles_of(rows);
      if (--left > 0) continue;
      ++number;
      left = p_.kv_heads;
    }
    std::int32_t sum = warp_inclusive(own);
    if (thread % kWarp == kWarp - 1) of_warps[thread / kWarp] = sum;
    __syncthreads();
    sum -= own;
#pragma unroll 1
    for (int warp = 0; warp < thread / kWarp; ++warp) sum += of_warps[warp];
#pragma unroll 1
    for (int head = first; head < last; ++head) {
      const int rows = before_[head];
      before_[head] = sum;
      last_[head] = static_cast<std::uint8_t>((rows - 1) % kTileRows);
      sum += tiles_of(rows);
    }
    if (thread == threads - 1) before_[p_.heads] = sum;
    __syncthreads();
  }

  __device__ int head_of(int tile) const {
    if (uniform_ > 0) return tile / uniform_;
    int low = 0;
    int high = p_.heads - 1;
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
  std::int32_t* before_;  // [heads + 1]
  BatchToken* tokens_;    // [count]
  PositionGap* gaps_;     // [count], if there are any
  std::uint8_t* last_;    // [heads]: rows of the last tile minus one
  BatchToken first_token_;
  PositionGap first_gap_;
  int uniform_ = 0;     // tiles per head if all heads have the same number of rows, else 0
  int first_rows_ = 0;  // rows per head in that case
  int total_ = 0;
  int each_ = 0;  // tiles per worker
  int more_ = 0;  // workers with one more
  int begin_ = 0;
  int end_ = 0;
};

}  // namespace sluice::cuda
