// Pages of quantised keys on their way to the warps that scan them.
//
// Every warp copies its own tiles asynchronously through a ring of slots in shared memory and waits
// for no other.
#pragma once

#include "kernels/runtime/barriers.cuh"
#include "kernels/scan/tile_runs.cuh"

namespace sluice::cuda {

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
  // Of the highest of three bits, behind the lower two of a channel of a page.
  static constexpr std::uint32_t kHighOffset = KeyTiles::low_bytes(kBits);
  static constexpr int kUnits = kChannelBytes / 16;
  // Listed channels of 3 bits lie in groups of four, 32 bytes apart: lanes that differ in the
  // channel they read, by multiples of four, find different banks. See copy_listed() for others.
  static constexpr int kGroup = 4;
  static constexpr std::uint32_t kGap = kListed && kBits == 3 ? 32 : 0;
  static constexpr std::uint32_t kScaleOffset =
      kChannels * kChannelBytes + kChannels / kGroup * kGap;
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
  __device__ ChunkCursor(const TileScanArgs& a, const ScanTokens& tokens, std::byte* ring)
      : tiles(a, tokens), slot(shared_address(ring)), ring_(slot) {}

  // The tile of the oldest chunk in the ring; none at the end.
  __device__ __forceinline__ TilePlace oldest() const { return tiles_[0]; }
  // The next slot will have the next chunk, if there is one.
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
  int pair = 0;        // of steps, the next chunk
  std::uint32_t slot;  // where it goes

 private:
  std::uint32_t ring_;
  TilePlace tiles_[Shape::kAhead]{};
};

// Copies a chunk of listed channels of a tile of the index to `slot`, by a warp. `places` and
// `pair` are where this lane finds its part; see TileQueries. Without `whole` there is but one
// step.
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
    // 16-byte unit u of a slot lies at u ^ (channel / 4 % 4 * 2): lanes that differ in the
    // channel they read, by multiples of four, find different banks. At 3 bits gaps see to that.
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

// Copies chunks of listed channels into slots, in the order that they are used in.
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

  // One more chunk, or nothing at the end; always commits a group.
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
  // Until this lane's part of the oldest chunk is there.
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
  uint4* places_;                // of the head, of this lane
  std::uint32_t* scale_places_;  // likewise
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

  // One more chunk, or nothing at the end.
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
  // One lane copies the codes, four others scales and zeros of either page.
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

  // Of the tile and channels from `first` on.
  __device__ __forceinline__ const std::byte* codes(int first) const {
    return a_.codes + (at_.tiles.in_index() * a_.head_dim + first) * Shape::kChannelBytes;
  }
  // Scales of the first page, its zeros, scales of the second, its zeros.
  __device__ __forceinline__ const std::uint16_t* scales(int first, int part) const {
    return a_.scales + (at_.tiles.in_index() * (2 * kTilePages) + part) * a_.head_dim + first;
  }

  const TileScanArgs& a_;
  ChunkCursor<kBits, kScan> at_;
  std::uint32_t full_;
  std::uint32_t first_slot_;
};

}  // namespace sluice::cuda
