// Divides tiles among warps and copies them to shared memory.
//
// The tiles of all tokens and KV heads, in order, are divided among warps. Every warp copies its
// tiles asynchronously into a ring of slots in shared memory and waits for no other warp. Words are
// those of tile_queries.cuh.
#pragma once

#include "kernels/runtime/barriers.cuh"
#include "kernels/runtime/page_digest.h"
#include "kernels/scan/channels.h"
#include "kernels/scan/tile_queries.cuh"
#include "lib/backend/index_ops.h"

namespace sluice::cuda {

inline constexpr int kScanWarps = 4;          // per block
inline constexpr int kScanBlocks = 4;         // per multiprocessor
inline constexpr int kLeastDynamicTiles = 6;  // per warp: fewer are divided evenly

// "heads" are the KV heads of all tokens, [tokens, kv_heads].
struct TileScanArgs {
  const BatchToken* tokens;   // [token_count], up to kScanTokens
  const std::int32_t* table;  // [sequences, table_stride]: slots of tiles
  std::int64_t table_stride;
  int token_count;
  int kv_heads;
  TileQueries queries;
  const std::byte* codes;         // [kv_heads, slots, head_dim, kTilePages, code bytes]
  const std::uint16_t* scales;    // f16 [kv_heads, slots, kTilePages, 2, head_dim]
  const std::int32_t* positions;  // [heads, position_capacity]: candidates
  __half* logits;                 // [heads, group, stride]
  PageDigest digest;              // of the logits, or null pointers
  std::int64_t slots;             // per KV head
  std::int64_t position_capacity;
  std::int64_t stride;
  std::int64_t most_tiles;  // per head
  int head_dim;
  int steps;
  int pairs;  // pairs of steps
  int group;
  int first_query;
  int query_count;
  bool aligned;         // logits of a page start at multiples of 16 bytes
  bool has_candidates;  // only tiles with a candidate are scanned
};

// Kinds of scans. all: all channels of every tile. candidates: all channels of tiles with a
// candidate. listed: listed channels of either. few: listed channels of every tile, few enough for
// one chunk.
enum class TileScan { all, candidates, listed, few };

template <TileScan kScan>
inline constexpr bool kLists = kScan == TileScan::listed || kScan == TileScan::few;

template <TileScan kScan>
__device__ __forceinline__ bool has_candidates(const TileScanArgs& a) {
  return kScan == TileScan::listed ? a.has_candidates : kScan == TileScan::candidates;
}

// The launch's tokens, in shared memory of each block.
struct ScanTokens {
  std::int32_t first[kScanTokens];     // number of a token's first tile among all tiles
  std::int32_t pages[kScanTokens];     // its whole pages
  std::int32_t sequence[kScanTokens];  // its row of the table
  int total;                           // tiles
  int even;                            // the first tiles, divided evenly in advance

  // Tiles per KV head of a token.
  __device__ __forceinline__ int tiles(int token) const {
    return (pages[token] + kTilePages - 1) / kTilePages;
  }
};

// Fills `to`; all threads of a block call it, and it ends with a barrier. If there are many tiles,
// only `eighths` / 8 of them are divided evenly.
__device__ __forceinline__ void find_tokens(const TileScanArgs& a, int eighths, ScanTokens& to) {
  static_assert(kScanTokens % kWarp == 0);
  if (threadIdx.x < kWarp) {
    int total = 0;
#pragma unroll 1
    for (int t = lane_id(); t - lane_id() < a.token_count; t += kWarp) {
      const BatchToken token = t < a.token_count ? a.tokens[t] : BatchToken{};
      to.pages[t] = token.position / kPageTokens;
      to.sequence[t] = token.sequence;
      const int own = to.tiles(t) * a.kv_heads;
      const int up_to = total + warp_inclusive(own);
      to.first[t] = up_to - own;
      total = __shfl_sync(kAllLanes, up_to, kWarp - 1);
    }
    // Every counter needs warps that take tiles from it.
    const auto blocks = static_cast<int>(gridDim.x);
    const bool dynamic =
        total >= kLeastDynamicTiles * kScanWarps * blocks && blocks >= kRunCounters;
    to.total = total;
    to.even = dynamic ? total * eighths / 8 : total;
  }
  __syncthreads();
}

// One tile of a head.
struct TilePlace {
  int head = -1;
  int last_page = -1;  // the tile's last existing page, as a page of the head; -1: no tile

  __device__ __forceinline__ int tile() const { return last_page / kTilePages; }
};

// Tiles of a warp. Most are divided evenly in advance; warps take the rest one by one, so that all
// end together although some are faster. The counter and the table of slots are read one tile ahead
// because of their latency.
template <TileScan kScan>
class TileRuns {
 public:
  __device__ TileRuns(const TileScanArgs& a, const ScanTokens& tokens) : a_(a), tokens_(tokens) {
    const auto warps = static_cast<int>(gridDim.x * kScanWarps);
    auto warp = static_cast<int>(blockIdx.x * kScanWarps + threadIdx.x / kWarp);
    if (tokens.even < warps) {  // gives every block some tiles
      warp = static_cast<int>(threadIdx.x / kWarp * gridDim.x + blockIdx.x);
    }
    const int each = tokens.even / warps;
    const int more = tokens.even % warps;  // warps that have one more
    left_ = each + (warp < more ? 1 : 0);
    if (left_ == 0) return;
    go_to(each * warp + min(warp, more));
    look_up();
  }

  // Must be called after the kernel that prepares the scan is over: before the first tile if there
  // are candidates, otherwise before the tiles divided in advance run out.
  __device__ __forceinline__ void begin() {
    ask();
    look_for_candidates();
  }
  // Finds the next tile to scan; false if there is none.
  __device__ __forceinline__ bool find() {
    if (has_candidates<kScan>(a_)) skip();
    return left_ > 0;
  }
  __device__ __forceinline__ void step() {
    ++tile_;
    int number = -1;  // of the next tile, if it is not the same head's next one
    if (--left_ == 0) {
      number = take();
    } else if (tile_ == tokens_.tiles(token_)) {
      number = tokens_.first[token_] + (kv_head_ + 1) * tile_;
    }
    if (number >= 0) go_to(number);
    if (left_ == 0) return;
    look_up();
    look_for_candidates();
  }

  __device__ __forceinline__ TilePlace place() const {
    const int last = min(tile_ * kTilePages + kTilePages, tokens_.pages[token_]) - 1;
    return {token_ * a_.kv_heads + kv_head_, last};
  }
  // The number of the tile's slot among those of all KV heads.
  __device__ __forceinline__ std::int64_t in_index() const { return kv_head_ * a_.slots + slot_; }

 private:
  // Moves to tile `number` of all tiles.
  __device__ __forceinline__ void go_to(int number) {
    int low = 0;
    int high = a_.token_count - 1;
#pragma unroll 1
    while (low < high) {  // finds the last token that begins at or before it; others are empty
      const int middle = (low + high + 1) / 2;
      if (tokens_.first[middle] <= number) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    token_ = low;
    const int tiles = tokens_.tiles(low);
    tile_ = number - tokens_.first[low];
    kv_head_ = tile_ / tiles;
    tile_ -= kv_head_ * tiles;
  }
  // Loads the tile's slot long before it is needed.
  __device__ __forceinline__ void look_up() {
    slot_ = a_.table[tokens_.sequence[token_] * a_.table_stride + tile_];
  }
  // Loads the index of the tile's first candidate, also long before it is needed.
  __device__ __forceinline__ void look_for_candidates() {
    if (!has_candidates<kScan>(a_) || left_ == 0) return;
    first_ = a_.queries.first[place().head * a_.most_tiles + tile_];
  }
  // Moves to the next tile with a candidate.
  __device__ __forceinline__ void skip() {
    while (left_ > 0 && first_ < 0) step();
  }
  __device__ __forceinline__ void ask() {
    if (tokens_.even < tokens_.total && lane_id() == 0) {
      upcoming_ = atomicAdd(a_.queries.counters + blockIdx.x % kRunCounters, 1u);
    }
  }
  // Takes one more tile; returns its number, or -1 if none is left.
  __device__ __forceinline__ int take() {
    if (tokens_.even == tokens_.total) return -1;
    const unsigned run =
        __shfl_sync(kAllLanes, upcoming_, 0) * kRunCounters + blockIdx.x % kRunCounters;
    const std::int64_t taken = tokens_.even + std::int64_t{run};
    if (taken >= tokens_.total) return -1;
    ask();
    left_ = 1;
    return static_cast<int>(taken);
  }

  const TileScanArgs& a_;
  const ScanTokens& tokens_;
  int token_ = 0;
  int kv_head_ = 0;
  int tile_ = 0;  // within the head
  std::int32_t slot_ = 0;
  int left_ = 0;
  unsigned upcoming_ = 0;
  std::int32_t first_ = 0;
};

// Layout of a slot of a warp's ring. A slot holds a chunk of a tile: the channels of a pair of
// steps for both pages, with their scales and zeros.
template <int kBits, bool kListed>
struct TileShape {
  // Slots; all except the one being read are filled ahead. Chunks of one bit are so small that a
  // single one ahead does not hide the latency of memory.
  static constexpr int kStages = kBits == 1 ? 3 : 2;
  static constexpr int kAhead = kStages - 1;
  static constexpr int kChannels = kPairSteps * kStepChannels;  // per chunk
  static constexpr int kCodeBytes = kPageTokens * kBits / 8;    // per channel and page
  static constexpr int kChannelBytes = kTilePages * kCodeBytes;
  // Offset of the highest of three bits, after the lower two, per channel and page.
  static constexpr std::uint32_t kHighOffset = KeyTiles::low_bytes(kBits);
  static constexpr int kUnits = kChannelBytes / 16;
  // Listed channels of 3 bits lie in groups of four with gaps of 32 bytes, so that lanes whose
  // channels differ by multiples of four read different banks. For other bits see copy_listed().
  static constexpr int kGroup = 4;
  static constexpr std::uint32_t kGap = kListed && kBits == 3 ? 32 : 0;
  static constexpr std::uint32_t kScaleOffset =
      kChannels * kChannelBytes + kChannels / kGroup * kGap;
  // Bytes of one page's scales. Listed channels are copied as pairs of scales, one of them unused.
  static constexpr std::uint32_t kScaleBytes = kChannels * (kListed ? 4 : 2);
  static constexpr std::uint32_t kSlotBytes = kScaleOffset + 2 * kTilePages * kScaleBytes;
  static constexpr std::uint32_t kRingBytes = kStages * kSlotBytes;
  // Eighths of all tiles that are divided in advance: more for listed channels, because a jump to
  // another head costs more where channels have to be looked up.
  static constexpr int kStaticEighths = kListed ? 6 : 4;
};

// A warp's shared memory. For listed channels it has tables of the current head, so that the warp
// does not wait for loads from page to page.
struct WarpMemory {
  std::byte* ring;
  uint4* fragments;       // [pairs of steps, column tiles, lanes]
  uint4* places;          // [pairs of steps, lanes]
  uint4* selectors;       // [pairs of steps, 4]
  std::uint32_t* scales;  // [pairs of steps, lanes]
  __half* staged;         // [query_count, kTileTokens]; used only with candidates
  std::uint64_t* full;    // barriers of bulk copies
};

// Bytes of a warp's tables.
template <bool kListed, int kColumns>
__host__ __device__ constexpr std::uint32_t table_bytes(int pairs) {
  return kListed
             ? static_cast<std::uint32_t>(pairs) * 16 * (kColumns * kWarp + kWarp + 4 + kWarp / 4)
             : 0;
}

// Copies 4 or 16 bytes to shared memory, if `wanted`.
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

// Iterates over the chunks of a warp's tiles and keeps track of the tiles in the ring.
template <int kBits, TileScan kScan>
class ChunkCursor {
  using Shape = TileShape<kBits, kLists<kScan>>;

 public:
  __device__ ChunkCursor(const TileScanArgs& a, const ScanTokens& tokens, std::byte* ring)
      : tiles(a, tokens), slot(shared_address(ring)), ring_(slot) {}

  // Tile of the oldest chunk in the ring; none at the end.
  __device__ __forceinline__ TilePlace oldest() const { return tiles_[0]; }
  // Assigns the next chunk to the next slot; false if there is none.
  __device__ __forceinline__ bool begin_slot() {
#pragma unroll
    for (int i = 0; i + 1 < Shape::kAhead; ++i) tiles_[i] = tiles_[i + 1];
    const bool found = pair > 0 || tiles.find();
    tiles_[Shape::kAhead - 1] = found ? tiles.place() : TilePlace{};
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
  int pair = 0;        // pair of steps of the next chunk
  std::uint32_t slot;  // slot of the next chunk

 private:
  std::uint32_t ring_;
  TilePlace tiles_[Shape::kAhead]{};
};

// Copies a chunk of listed channels of a tile of the index to `slot`; one warp calls it. `places`
// and `pair` are the offsets of this lane's part, see TileQueries. Without `whole` the chunk has
// only one step.
template <int kBits>
__device__ __forceinline__ void copy_listed(const TileScanArgs& a, std::int64_t tile, uint4 places,
                                            std::uint32_t pair, bool whole, std::uint32_t slot) {
  using Shape = TileShape<kBits, true>;
  const auto lane = static_cast<std::uint32_t>(lane_id());
  const auto* const units =
      reinterpret_cast<const uint4*>(a.codes + tile * (a.head_dim * Shape::kChannelBytes));
  const std::uint32_t words[4] = {places.x, places.y, places.z, places.w};
#pragma unroll
  for (int i = 0; i < kListedCopies<kBits>; ++i) {
    const std::uint32_t from = i % 2 == 0 ? words[i / 2] & 0xffff : words[i / 2] >> 16;
    // 16-byte unit u of a slot lies at u ^ (channel / 4 % 4 * 2), so that lanes whose channels
    // differ by multiples of four read different banks. At 3 bits gaps do that.
    const std::uint32_t channel = (static_cast<std::uint32_t>(i * kWarp) + lane) / Shape::kUnits;
    const std::uint32_t unit = slot + lane * 16;
    const std::uint32_t to =
        kBits == 3 ? unit + channel / Shape::kGroup * Shape::kGap : unit ^ channel / 4 % 4 * 32;
    copy_unit_if(to + static_cast<std::uint32_t>(i) * 512, units + from,
                 i < kListedCopies<kBits> / 2 || whole);
  }
  const bool wanted = lane < kStepChannels || whole;
  const std::uint32_t to = slot + Shape::kScaleOffset + lane * 4;
  const auto pairs = static_cast<unsigned>(a.head_dim / 2);
  const auto* const from =
      reinterpret_cast<const std::uint32_t*>(a.scales) + tile * (2 * kTilePages * pairs) + pair;
#pragma unroll
  for (unsigned part = 0; part < 2 * kTilePages; ++part) {
    copy_word_if(to + part * Shape::kScaleBytes, from + part * pairs, wanted);
  }
}

// Copies chunks of listed channels into slots, in the order of their use.
template <int kBits, TileScan kScan>
class ListedCopier {
  using Shape = TileShape<kBits, true>;

 public:
  __device__ ListedCopier(const TileScanArgs& a, const ScanTokens& tokens, const WarpMemory& memory)
      : a_(a),
        at_(a, tokens, memory.ring),
        places_(memory.places + lane_id()),
        scale_places_(memory.scales + lane_id()) {}

  __device__ __forceinline__ void begin() { at_.tiles.begin(); }
  __device__ __forceinline__ TilePlace oldest() const { return at_.oldest(); }

  // Copies one more chunk, or nothing at the end; always commits a group.
  __device__ __forceinline__ void copy_next() {
    if (at_.begin_slot()) {
      if (const int head = at_.tiles.place().head; head != head_) enter(head);
      copy_listed<kBits>(a_, at_.tiles.in_index(), places_[at_.pair * kWarp],
                         scale_places_[at_.pair * kWarp], whole(), at_.slot);
      at_.next_chunk(a_.pairs);
    }
    at_.end_slot();
    copy_async_commit();
  }
  // Waits until this lane's part of the oldest chunk has arrived.
  __device__ __forceinline__ void wait(std::uint32_t, unsigned) const {
    copy_async_wait<Shape::kAhead - 1>();
  }

 private:
  __device__ __forceinline__ void enter(int head) {
    head_ = head;
    const std::int64_t first = std::int64_t{head} * a_.pairs * kWarp + lane_id();
#pragma unroll 1
    for (int i = 0; i < a_.pairs; ++i) {
      places_[i * kWarp] = __ldg(a_.queries.places + first + i * kWarp);
      scale_places_[i * kWarp] = __ldg(a_.queries.scales + first + i * kWarp);
    }
  }
  __device__ __forceinline__ bool whole() const { return (at_.pair + 1) * kPairSteps <= a_.steps; }

  const TileScanArgs& a_;
  ChunkCursor<kBits, kScan> at_;
  int head_ = -1;
  uint4* places_;                // this lane's places of the head
  std::uint32_t* scale_places_;  // this lane's pairs of scales of the head
};

// Initializes the barriers of this warp's slots, before any copy.
__device__ __forceinline__ void init_barriers(std::uint64_t* full, int count) {
#if __CUDA_ARCH__ >= 900
  if (lane_id() < count) {
    barrier_init(shared_address(full + lane_id()), 1);
    barrier_init_fence();
  }
  __syncwarp();
#endif
}

// Copies chunks of neighbouring channels. From Hopper on, single lanes start bulk copies that
// complete on the barriers `full`.
template <int kBits, TileScan kScan>
class OrderedCopier {
  using Shape = TileShape<kBits, false>;

 public:
  __device__ OrderedCopier(const TileScanArgs& a, const ScanTokens& tokens,
                           const WarpMemory& memory)
      : a_(a),
        at_(a, tokens, memory.ring),
        full_(shared_address(memory.full)),
        first_slot_(at_.slot) {
    init_barriers(memory.full, Shape::kStages);
  }

  __device__ __forceinline__ void begin() { at_.tiles.begin(); }
  __device__ __forceinline__ TilePlace oldest() const { return at_.oldest(); }

  // Copies one more chunk, or nothing at the end.
  __device__ __forceinline__ void copy_next() {
    if (at_.begin_slot()) {
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
  // One lane copies the codes, four others the scales and zeros of both pages.
  __device__ __forceinline__ void copy(int first, int channels) const {
    constexpr int kPieces = 1 + 2 * kTilePages;
    const std::uint32_t barrier = barrier_of(at_.slot);
    const auto count = static_cast<std::uint32_t>(channels);
    if (lane_id() == 0) {
      barrier_expect(barrier, count * (Shape::kChannelBytes + 4 * kTilePages));
      copy_bulk(at_.slot, codes(first), count * Shape::kChannelBytes, barrier);
    } else if (lane_id() < kPieces) {
      const int part = lane_id() - 1;
      copy_bulk(
          at_.slot + Shape::kScaleOffset + static_cast<std::uint32_t>(part) * Shape::kScaleBytes,
          scales(first, part), count * 2, barrier);
    }
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

  // Codes of the tile's channels from `first` on.
  __device__ __forceinline__ const std::byte* codes(int first) const {
    return a_.codes + (at_.tiles.in_index() * a_.head_dim + first) * Shape::kChannelBytes;
  }
  // Parts 0 to 3: scales of the first page, its zeros, scales of the second page, its zeros.
  __device__ __forceinline__ const std::uint16_t* scales(int first, int part) const {
    return a_.scales + (at_.tiles.in_index() * (2 * kTilePages) + part) * a_.head_dim + first;
  }

  const TileScanArgs& a_;
  ChunkCursor<kBits, kScan> at_;
  std::uint32_t full_;
  std::uint32_t first_slot_;
};

}  // namespace sluice::cuda
