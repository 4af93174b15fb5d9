// Pages of quantised keys on their way to the warps that scan them.
//
// Every warp copies its own tiles asynchronously through a ring of slots in shared memory and waits
// for no other.
#pragma once

#include <limits>

#include "kernels/barriers.cuh"
#include "kernels/tile_scan_queries.cuh"
#include "lib/selection.h"

namespace sluice::cuda {

inline constexpr int kScanWarps = 4;          // of a block
inline constexpr int kScanBlocks = 4;         // of a multiprocessor
inline constexpr int kLeastDynamicTiles = 6;  // of a warp: fewer are shared out evenly

struct TileScanArgs {
  TileQueries queries;
  const std::byte* codes;         // [kv_heads, tile_capacity, head_dim, kTilePages, code bytes]
  const std::uint16_t* scales;    // f16 [kv_heads, capacity, 2, head_dim]
  const std::int32_t* positions;  // [kv_heads, position_capacity], of candidates
  __half* logits;                 // [query_heads, stride]
  LogitDigest digest;             // of the logits, or null pointers
  std::int64_t capacity;
  std::int64_t tile_capacity;
  std::int64_t position_capacity;
  std::int64_t stride;
  int pages;         // of every head
  int tiles;         // likewise
  int static_tiles;  // of all heads' tiles, shared out evenly from the start
  int heads;
  int head_dim;
  int steps;
  int pairs;  // of steps
  int group;
  int first_query;
  int query_count;
  bool aligned;         // logits of a page begin on 16 bytes
  bool has_candidates;  // only tiles with a candidate are scanned
};

// What is scanned: all channels of every tile or only of those with a candidate, or channels that
// are listed, which may be either; or so few listed ones of every tile that they are one chunk.
enum class TileScan { all, candidates, listed, few };

template <TileScan kScan>
inline constexpr bool kLists = kScan == TileScan::listed || kScan == TileScan::few;

template <TileScan kScan>
__device__ __forceinline__ bool has_candidates(const TileScanArgs& a) {
  return kScan == TileScan::listed ? a.has_candidates : kScan == TileScan::candidates;
}

// A slot of a warp's ring: a chunk of a tile, which is a pair of steps of its channels for both
// pages, with their scales and zeros.
template <int kBits, bool kListed>
struct TileShape {
  // Slots, all but one of which are filled ahead of the one that is read.
  static constexpr int kStages = 2;
  static constexpr int kAhead = kStages - 1;
  static constexpr int kChannels = kPairSteps * kStepChannels;  // of a chunk
  static constexpr int kCodeBytes = kPageTokens * kBits / 8;    // of a channel of a page
  static constexpr int kChannelBytes = kTilePages * kCodeBytes;
  static constexpr int kUnits = kChannelBytes / 16;
  static constexpr std::uint32_t kScaleOffset = kChannels * kChannelBytes;
  // Of one page; in pairs if they are listed, of which one counts.
  static constexpr std::uint32_t kScaleBytes = kChannels * (kListed ? 4 : 2);
  static constexpr std::uint32_t kSlotBytes = kScaleOffset + 2 * kTilePages * kScaleBytes;
  static constexpr std::uint32_t kRingBytes = kStages * kSlotBytes;
  // Of all tiles, how many eighths are shared out in advance: a jump to another head costs more
  // where its channels have to be looked up.
  static constexpr int kStaticEighths = kListed ? 6 : 4;
};

// What a warp has in shared memory. If channels are listed there are tables of the head that the
// warp is at, which keep loads and their latency out of the way from page to page.
struct WarpMemory {
  std::byte* ring;
  uint4* fragments;       // [pairs of steps, column tiles, lanes]
  uint4* places;          // [pairs of steps, lanes]
  uint4* selectors;       // [pairs of steps, 4]
  std::uint32_t* scales;  // [pairs of steps, lanes]
  __half* staged;         // [query_count, kTileTokens], if there are candidates
  std::uint64_t* full;    // barriers of bulk copies
};

// Bytes of a warp's tables.
template <bool kListed, int kColumns>
__host__ __device__ constexpr std::uint32_t table_bytes(int pairs) {
  return kListed
             ? static_cast<std::uint32_t>(pairs) * 16 * (kColumns * kWarp + kWarp + 4 + kWarp / 4)
             : 0;
}

// Tiles of a warp, as numbers among those of all heads in order. Most are shared out evenly in
// advance; the rest is taken one by one, so that all warps end together although some get on
// faster. The counter is asked for a tile ahead, for its answer takes long.
template <TileScan kScan>
class TileRuns {
 public:
  __device__ explicit TileRuns(const TileScanArgs& a) : a_(a) {
    const int warps = static_cast<int>(gridDim.x) * kScanWarps;
    const int warp = static_cast<int>(blockIdx.x * kScanWarps + threadIdx.x / kWarp);
    const int each = a.static_tiles / warps;
    const int more = a.static_tiles % warps;  // warps that have one more
    tile = each * warp + min(warp, more);
    left_ = each + (warp < more ? 1 : 0);
  }

  // Once what is made ready for a scan is there: before the first tile if there are candidates, and
  // before those that are shared out in advance are left behind.
  __device__ __forceinline__ void begin() {
    ask();
    look();
  }
  // Whether there is a tile; then `tile` is the next one to scan.
  __device__ __forceinline__ bool find() {
    if (has_candidates<kScan>(a_)) skip();
    return left_ > 0;
  }
  __device__ __forceinline__ void step() {
    ++tile;
    if (--left_ == 0) take();
    look();
  }

  int tile = 0;

 private:
  __device__ __forceinline__ int total() const { return a_.tiles * a_.heads; }
  __device__ __forceinline__ void ask() {
    if (a_.static_tiles < total() && lane_id() == 0) {
      upcoming_ = atomicAdd(a_.queries.counters + blockIdx.x % kRunCounters, 1u);
    }
  }
  __device__ __forceinline__ void take() {
    if (a_.static_tiles == total()) return;
    const unsigned run =
        __shfl_sync(kAllLanes, upcoming_, 0) * kRunCounters + blockIdx.x % kRunCounters;
    const std::int64_t taken = a_.static_tiles + std::int64_t{run};
    if (taken >= total()) return;
    ask();
    tile = static_cast<int>(taken);
    left_ = 1;
  }
  // Asks for the tile's first candidate, long before the answer is needed.
  __device__ __forceinline__ void look() {
    if (!has_candidates<kScan>(a_) || left_ == 0) return;
    first_ = a_.queries.first[tile];
  }
  // To the next tile with a candidate.
  __device__ __forceinline__ void skip() {
    while (left_ > 0 && first_ < 0) step();
  }

  const TileScanArgs& a_;
  unsigned upcoming_ = 0;
  int left_ = 0;
  std::int32_t first_ = 0;
};

// Splits the number of a tile into head and tile, which takes a division only where the head
// changes.
class TileHead {
 public:
  // Whether the head changed.
  __device__ __forceinline__ bool find(int number, int tiles) {
    tile = number - first_;
    if (static_cast<unsigned>(tile) < static_cast<unsigned>(tiles)) return false;
    head = number / tiles;
    first_ = head * tiles;
    tile = number - first_;
    return true;
  }

  int head = -1;
  int tile = 0;

 private:
  int first_ = std::numeric_limits<int>::max();
};

// 4 or 16 bytes to shared memory, if `wanted`.
__device__ __forceinline__ void copy_word_if(std::uint32_t to, const void* from, bool wanted) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "@p cp.async.ca.shared.global [%0], [%1], 4;\n}\n" ::"r"(to),
      "l"(from), "r"(static_cast<int>(wanted))
      : "memory");
}
__device__ __forceinline__ void copy_unit_if(std::uint32_t to, const void* from, bool wanted) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "@p cp.async.cg.shared.global [%0], [%1], 16;\n}\n" ::"r"(to),
      "l"(from), "r"(static_cast<int>(wanted))
      : "memory");
}

// Goes through the chunks of a warp's tiles, and knows which tiles are in the ring.
template <int kBits, TileScan kScan>
class ChunkCursor {
  using Shape = TileShape<kBits, kLists<kScan>>;

 public:
  __device__ explicit ChunkCursor(const TileScanArgs& a, std::byte* ring)
      : tiles(a), slot(shared_address(ring)), ring_(slot) {}

  // The tile of the oldest chunk in the ring; -1 at the end.
  __device__ __forceinline__ int oldest() const { return tiles_[0]; }
  // The next slot will have the next chunk, if there is one.
  __device__ __forceinline__ bool begin_slot() {
#pragma unroll
    for (int i = 0; i + 1 < Shape::kAhead; ++i) tiles_[i] = tiles_[i + 1];
    const bool found = pair > 0 || tiles.find();
    tiles_[Shape::kAhead - 1] = found ? tiles.tile : -1;
    return found;
  }
  __device__ __forceinline__ void end_slot() {
    slot =
        slot == ring_ + (Shape::kStages - 1) * Shape::kSlotBytes ? ring_ : slot + Shape::kSlotBytes;
  }
  __device__ __forceinline__ void next_chunk(int pairs) {
    if (++pair < pairs) return;
    pair = 0;
    tiles.step();
  }

  TileRuns<kScan> tiles;
  int pair = 0;        // of steps, the next chunk
  std::uint32_t slot;  // where it goes

 private:
  std::uint32_t ring_;
  int tiles_[Shape::kAhead]{};
};

// Copies a chunk of listed channels of a tile to `slot`, by a warp. `codes` and `scales` are the
// head's, `places` and `pair` where this lane finds its part; see TileQueries. Without `whole`
// there is but one step.
template <int kBits>
__device__ __forceinline__ void copy_listed(const TileScanArgs& a, const std::byte* codes,
                                            const std::byte* scales, int tile, uint4 places,
                                            std::uint32_t pair, bool whole, std::uint32_t slot) {
  using Shape = TileShape<kBits, true>;
  const auto lane = static_cast<std::uint32_t>(lane_id());
  const auto d = static_cast<unsigned>(a.head_dim);
  const auto* const units = reinterpret_cast<const uint4*>(
      codes + std::uint64_t{static_cast<unsigned>(tile)} * (d * Shape::kChannelBytes));
  const std::uint32_t words[4] = {places.x, places.y, places.z, places.w};
#pragma unroll
  for (int i = 0; i < kListedCopies<kBits>; ++i) {
    const std::uint32_t from = i % 2 == 0 ? words[i / 2] & 0xffff : words[i / 2] >> 16;
    // 16-byte unit u of a slot lies at u ^ (channel / 4 % 4 * 2): lanes that differ in the
    // channel they read, by multiples of four, find different banks.
    const std::uint32_t channel = (static_cast<std::uint32_t>(i * kWarp) + lane) / Shape::kUnits;
    const std::uint32_t to = (slot + lane * 16) ^ channel / 4 % 4 * 32;
    copy_unit_if(to + static_cast<std::uint32_t>(i) * 512, units + from,
                 i < kListedCopies<kBits> / 2 || whole);
  }
  const bool wanted = lane < kStepChannels || whole;
  const std::uint32_t to = slot + Shape::kScaleOffset + lane * 4;
#pragma unroll
  for (int p = 0; p < kTilePages; ++p) {
    // The last page may be alone in its tile; then it is copied twice.
    const auto page = static_cast<unsigned>(min(tile * kTilePages + p, a.pages - 1));
    const auto* const from =
        reinterpret_cast<const std::uint32_t*>(scales + std::uint64_t{page} * (d * 4)) + pair;
    copy_word_if(to + p * 2 * Shape::kScaleBytes, from, wanted);
    copy_word_if(to + (p * 2 + 1) * Shape::kScaleBytes, from + d / 2, wanted);
  }
}

// Where a head's codes and scales are.
template <int kBits>
__device__ __forceinline__ const std::byte* codes_of_head(const TileScanArgs& a, int head) {
  return a.codes + head * a.tile_capacity * (a.head_dim * TileShape<kBits, true>::kChannelBytes);
}
__device__ __forceinline__ const std::byte* scales_of_head(const TileScanArgs& a, int head) {
  return reinterpret_cast<const std::byte*>(a.scales) + head * a.capacity * (a.head_dim * 4);
}

// Copies chunks of listed channels into slots, in the order that they are used in.
template <int kBits>
class ListedCopier {
  using Shape = TileShape<kBits, true>;

 public:
  __device__ ListedCopier(const TileScanArgs& a, const WarpMemory& memory)
      : a_(a),
        at_(a, memory.ring),
        places_(memory.places + lane_id()),
        scale_places_(memory.scales + lane_id()) {}

  __device__ __forceinline__ void begin() { at_.tiles.begin(); }
  __device__ __forceinline__ int oldest() const { return at_.oldest(); }

  // One more chunk, or nothing at the end; always commits a group.
  __device__ __forceinline__ void copy_next() {
    if (at_.begin_slot()) {
      if (head_.find(at_.tiles.tile, a_.tiles)) enter();
      copy_listed<kBits>(a_, codes_, scales_, head_.tile, places_[at_.pair * kWarp],
                         scale_places_[at_.pair * kWarp], whole(), at_.slot);
      at_.next_chunk(a_.pairs);
    }
    at_.end_slot();
    copy_async_commit();
  }
  // Until this lane's part of the oldest chunk is there.
  __device__ __forceinline__ void wait(std::uint32_t, unsigned) const {
    copy_async_wait<Shape::kAhead - 1>();
  }

 private:
  __device__ __forceinline__ void enter() {
    codes_ = codes_of_head<kBits>(a_, head_.head);
    scales_ = scales_of_head(a_, head_.head);
    const std::int64_t first = std::int64_t{head_.head} * a_.pairs * kWarp + lane_id();
#pragma unroll 1
    for (int i = 0; i < a_.pairs; ++i) {
      places_[i * kWarp] = __ldg(a_.queries.places + first + i * kWarp);
      scale_places_[i * kWarp] = __ldg(a_.queries.scales + first + i * kWarp);
    }
  }
  __device__ __forceinline__ bool whole() const { return (at_.pair + 1) * kPairSteps <= a_.steps; }

  const TileScanArgs& a_;
  ChunkCursor<kBits, TileScan::listed> at_;
  TileHead head_;
  const std::byte* codes_ = nullptr;   // of the head
  const std::byte* scales_ = nullptr;  // likewise
  uint4* places_;                      // likewise, of this lane
  std::uint32_t* scale_places_;        // likewise
};

// Before any copy; for this warp's slots.
__device__ __forceinline__ void init_barriers(std::uint64_t* full, int count) {
#if __CUDA_ARCH__ >= 900
  if (lane_id() < count) {
    barrier_init(shared_address(full + lane_id()), 1);
    barrier_init_fence();
  }
  __syncwarp();
#endif
}

// Copies chunks of neighbouring channels. From Hopper on one lane has the copy engine do it, and
// barriers `full` tell of it.
template <int kBits, TileScan kScan>
class OrderedCopier {
  using Shape = TileShape<kBits, false>;

 public:
  __device__ OrderedCopier(const TileScanArgs& a, const WarpMemory& memory)
      : a_(a), at_(a, memory.ring), full_(shared_address(memory.full)), first_slot_(at_.slot) {
    init_barriers(memory.full, Shape::kStages);
  }

  __device__ __forceinline__ void begin() { at_.tiles.begin(); }
  __device__ __forceinline__ int oldest() const { return at_.oldest(); }

  // One more chunk, or nothing at the end.
  __device__ __forceinline__ void copy_next() {
    if (at_.begin_slot()) {
      head_.find(at_.tiles.tile, a_.tiles);
      const int first = at_.pair * Shape::kChannels;
      copy(first, min(Shape::kChannels, a_.head_dim - first));
      at_.next_chunk(a_.pairs);
    }
    at_.end_slot();
    finish();
  }

#if __CUDA_ARCH__ >= 900
  __device__ __forceinline__ void wait(std::uint32_t slot, unsigned round) const {
    barrier_wait(barrier_of(slot), round);
  }

 private:
  __device__ __forceinline__ std::uint32_t barrier_of(std::uint32_t slot) const {
    return full_ + (slot - first_slot_) / Shape::kSlotBytes * 8;
  }
  // One lane copies the codes, four others scales and zeros of either page.
  __device__ __forceinline__ void copy(int first, int channels) const {
    constexpr int kPieces = 1 + 2 * kTilePages;
    const std::uint32_t barrier = barrier_of(at_.slot);
    const auto count = static_cast<std::uint32_t>(channels);
    if (lane_id() == 0) {
      barrier_expect(barrier, count * (Shape::kChannelBytes + 4 * kTilePages));
      bulk(at_.slot, codes(first), count * Shape::kChannelBytes, barrier);
    } else if (lane_id() < kPieces) {
      const int part = lane_id() - 1;
      bulk(at_.slot + Shape::kScaleOffset + static_cast<std::uint32_t>(part) * Shape::kScaleBytes,
           scales(first, part), count * 2, barrier);
    }
  }
  __device__ __forceinline__ static void bulk(std::uint32_t to, const void* from,
                                              std::uint32_t bytes, std::uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];\n" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
  }
  __device__ __forceinline__ void finish() const {}
#else
  __device__ __forceinline__ void wait(std::uint32_t, unsigned) const {
    copy_async_wait<Shape::kAhead - 1>();
  }

 private:
  __device__ __forceinline__ void copy(int first, int channels) const {
    const auto count = static_cast<std::uint32_t>(channels);
    units(at_.slot, codes(first), count * Shape::kChannelBytes);
#pragma unroll
    for (int part = 0; part < 2 * kTilePages; ++part) {
      units(at_.slot + Shape::kScaleOffset + static_cast<std::uint32_t>(part) * Shape::kScaleBytes,
            reinterpret_cast<const std::byte*>(scales(first, part)), count * 2);
    }
  }
  __device__ __forceinline__ static void units(std::uint32_t to, const std::byte* from,
                                               std::uint32_t bytes) {
    for (std::uint32_t at = static_cast<std::uint32_t>(lane_id()) * 16; at < bytes; at += 512) {
      copy_unit_if(to + at, from + at, true);
    }
  }
  __device__ __forceinline__ void finish() const { copy_async_commit(); }
#endif

  // Of the tile and channels from `first` on.
  __device__ __forceinline__ const std::byte* codes(int first) const {
    const std::int64_t tile = head_.head * a_.tile_capacity + head_.tile;
    return a_.codes + (tile * a_.head_dim + first) * Shape::kChannelBytes;
  }
  // Scales of the first page, its zeros, scales of the second, its zeros. The last page may be
  // alone in its tile; then it stands for both.
  __device__ __forceinline__ const std::uint16_t* scales(int first, int part) const {
    const int page = min(head_.tile * kTilePages + part / 2, a_.pages - 1);
    return a_.scales + ((head_.head * a_.capacity + page) * 2 + part % 2) * a_.head_dim + first;
  }

  const TileScanArgs& a_;
  ChunkCursor<kBits, kScan> at_;
  TileHead head_;
  std::uint32_t full_;
  std::uint32_t first_slot_;
};

}  // namespace sluice::cuda
