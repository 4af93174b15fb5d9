// Pages of quantised keys on their way to the warps that scan them.
//
// Every warp copies its own pages asynchronously through a ring of slots in shared memory and waits
// for no other.
#pragma once

#include <limits>

#include "kernels/barriers.cuh"
#include "kernels/tile_scan_queries.cuh"
#include "lib/selection.h"

namespace sluice::cuda {

inline constexpr int kScanWarps = 4;          // of a block
inline constexpr int kScanBlocks = 5;         // of a multiprocessor
inline constexpr int kLeastDynamicPages = 8;  // of a warp: fewer are shared out evenly
inline constexpr int kRunPages = 2;           // that a warp takes at once of those not shared out

struct TileScanArgs {
  TileQueries queries;
  const std::byte* codes;         // [kv_heads, capacity, head_dim, code bytes]
  const std::uint16_t* scales;    // f16 [kv_heads, capacity, 2, head_dim]
  const std::int32_t* positions;  // [kv_heads, position_capacity], of candidates
  __half* logits;                 // [query_heads, stride]
  LogitDigest digest;             // of the logits, or null pointers
  std::int64_t capacity;
  std::int64_t position_capacity;
  std::int64_t stride;
  int pages;         // of every head
  int static_pages;  // of all heads' pages, shared out evenly from the start
  int heads;
  int head_dim;
  int steps;
  int pairs;  // of steps
  int group;
  int first_query;
  int query_count;
  bool aligned;         // logits of a page begin on 16 bytes
  bool has_candidates;  // only pages with a candidate are scanned
};

// A slot of a warp's ring: a chunk of a page, with its scales and zeros.
template <int kBits, bool kListed>
struct TileShape {
  static constexpr int kStages = kListed ? 3 : 2;            // slots
  static constexpr int kSteps = kListed ? kListedSteps : 4;  // of a chunk
  static constexpr int kChannels = kSteps * kStepChannels;
  static constexpr int kCodeBytes = kPageTokens * kBits / 8;  // of a channel
  static constexpr int kUnits = kCodeBytes / 16;
  static constexpr std::uint32_t kScaleOffset = kChannels * kCodeBytes;
  // In pairs if they are listed, of which one counts.
  static constexpr std::uint32_t kScaleBytes = kChannels * (kListed ? 4 : 2);
  static constexpr std::uint32_t kSlotBytes = kScaleOffset + 2 * kScaleBytes;
  static constexpr std::uint32_t kRingBytes = kStages * kSlotBytes;
  // Of all pages, how many eighths are shared out in advance: a jump to another head costs more
  // where its channels have to be looked up.
  static constexpr int kStaticEighths = kListed ? 6 : 4;
};

// What a warp has in shared memory. If channels are listed there are tables of the head that the
// warp is at, which keep loads and their latency out of the way from page to page.
struct WarpMemory {
  std::byte* ring;
  uint4* fragments;     // [pairs of steps, column tiles, lanes]
  uint4* places;        // [pairs of steps, lanes]
  uint4* selectors;     // [pairs of steps, 4]
  __half* staged;       // [query_count, kPageTokens], if there are candidates
  std::uint64_t* full;  // barriers of bulk copies
};

// Bytes of a warp's tables.
template <bool kListed, int kColumns>
__host__ __device__ constexpr std::uint32_t table_bytes(int pairs) {
  return kListed ? static_cast<std::uint32_t>(pairs) * 16 * (kColumns * kWarp + kWarp + 4) : 0;
}

// Pages of a warp, as numbers among those of all heads in order. Most are shared out evenly in
// advance; the rest is taken in short runs, so that all warps end together although some get on
// faster. The counter is asked for a run ahead, for its answer takes long.
class PageRuns {
 public:
  __device__ explicit PageRuns(const TileScanArgs& a) : a_(a) {
    const int warps = static_cast<int>(gridDim.x) * kScanWarps;
    const int warp = static_cast<int>(blockIdx.x * kScanWarps + threadIdx.x / kWarp);
    const int each = a.static_pages / warps;
    const int more = a.static_pages % warps;  // warps that have one more
    page = each * warp + min(warp, more);
    left_ = each + (warp < more ? 1 : 0);
  }

  // Once what is made ready for a scan is there: before the first page if there are candidates, and
  // before half of kLeastDynamicPages are left behind.
  __device__ __forceinline__ void begin() {
    ask();
    if (a_.has_candidates) skip();
  }
  __device__ __forceinline__ bool done() const { return left_ == 0; }
  __device__ __forceinline__ void next() {
    step();
    if (a_.has_candidates) skip();
  }

  int page = 0;

 private:
  __device__ __forceinline__ int total() const { return a_.pages * a_.heads; }
  __device__ __forceinline__ void ask() {
    if (a_.static_pages < total() && lane_id() == 0) {
      upcoming_ = atomicAdd(a_.queries.counters + blockIdx.x % kRunCounters, 1u);
    }
  }
  __device__ __forceinline__ void step() {
    ++page;
    if (--left_ == 0) begin_run();
  }
  __device__ __forceinline__ void begin_run() {
    if (a_.static_pages == total()) return;
    const unsigned run =
        __shfl_sync(kAllLanes, upcoming_, 0) * kRunCounters + blockIdx.x % kRunCounters;
    const std::int64_t first = a_.static_pages + std::int64_t{run} * kRunPages;
    if (first >= total()) return;
    ask();
    page = static_cast<int>(first);
    left_ = min(kRunPages, total() - page);
  }
  // To the next page with a candidate.
  __device__ __forceinline__ void skip() {
    while (!done() && a_.queries.first[page] < 0) step();
  }

  const TileScanArgs& a_;
  unsigned upcoming_ = 0;
  int left_ = 0;
};

// Splits the number of a page into head and page, which takes a division only where the head
// changes.
class PageHead {
 public:
  // Whether the head changed.
  __device__ __forceinline__ bool find(int number, int pages) {
    page = number - first_;
    if (static_cast<unsigned>(page) < static_cast<unsigned>(pages)) return false;
    head = number / pages;
    first_ = head * pages;
    page = number - first_;
    return true;
  }

  int head = -1;
  int page = 0;

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

// Goes through the chunks of a warp's pages, and knows which pages are in the ring.
template <int kBits, bool kListed>
class ChunkCursor {
  using Shape = TileShape<kBits, kListed>;

 public:
  __device__ explicit ChunkCursor(const TileScanArgs& a, std::byte* ring)
      : pages(a), slot(shared_address(ring)), ring_(slot) {}

  // The page of the oldest chunk in the ring; -1 at the end.
  __device__ __forceinline__ int oldest() const { return pages_[0]; }
  // The next slot will have the next chunk, if there is one.
  __device__ __forceinline__ bool begin_slot() {
#pragma unroll
    for (int i = 0; i + 1 < Shape::kStages - 1; ++i) pages_[i] = pages_[i + 1];
    pages_[Shape::kStages - 2] = pages.done() ? -1 : pages.page;
    return !pages.done();
  }
  __device__ __forceinline__ void end_slot() {
    slot =
        slot == ring_ + (Shape::kStages - 1) * Shape::kSlotBytes ? ring_ : slot + Shape::kSlotBytes;
  }
  __device__ __forceinline__ void next_chunk(int steps) {
    first_step += Shape::kSteps;
    if (first_step < steps) return;
    first_step = 0;
    pages.next();
  }

  PageRuns pages;
  int first_step = 0;  // of the next chunk
  std::uint32_t slot;  // where it goes

 private:
  std::uint32_t ring_;
  int pages_[Shape::kStages - 1]{};
};

// Copies chunks of listed channels into slots, in the order that they are used in.
template <int kBits>
class ListedCopier {
  using Shape = TileShape<kBits, true>;

 public:
  __device__ ListedCopier(const TileScanArgs& a, const WarpMemory& memory)
      : a_(a), at_(a, memory.ring), places_(memory.places + lane_id()) {
    // 16-byte unit u of a slot lies at u ^ (channel / 4 % 4 * 2): lanes that differ in the channel
    // they read, by multiples of four, find different banks.
    const int channel = lane_id() / Shape::kUnits;
    unit_ = static_cast<std::uint32_t>(lane_id() ^ (channel / 4 % 4 * 2)) * 16;
    word_ = Shape::kScaleOffset + static_cast<std::uint32_t>(lane_id()) * 4;
  }

  __device__ __forceinline__ void begin() { at_.pages.begin(); }
  __device__ __forceinline__ int oldest() const { return at_.oldest(); }

  // One more chunk, or nothing at the end; always commits a group.
  __device__ __forceinline__ void copy_next() {
    if (at_.begin_slot()) {
      if (head_.find(at_.pages.page, a_.pages)) enter();
      copy(places_[at_.first_step / Shape::kSteps * kWarp]);
      at_.next_chunk(a_.steps);
    }
    at_.end_slot();
    copy_async_commit();
  }
  // Until this lane's part of the oldest chunk is there.
  __device__ __forceinline__ void wait(std::uint32_t, unsigned) const {
    copy_async_wait<Shape::kStages - 2>();
  }

 private:
  __device__ __forceinline__ void enter() {
    const std::int64_t page = head_.head * a_.capacity;
    codes_ = a_.codes + page * (a_.head_dim * Shape::kCodeBytes);
    scales_ = reinterpret_cast<const std::byte*>(a_.scales) + page * (a_.head_dim * 4);
    const uint4* const places =
        a_.queries.places + static_cast<std::int64_t>(head_.head) * a_.pairs * kWarp + lane_id();
#pragma unroll 1
    for (int i = 0; i < a_.pairs; ++i) places_[i * kWarp] = __ldg(places + i * kWarp);
  }

  __device__ __forceinline__ void copy(uint4 places) const {
    const bool whole = at_.first_step + Shape::kSteps <= a_.steps;
    const auto page = static_cast<unsigned>(head_.page);
    const auto d = static_cast<unsigned>(a_.head_dim);
    const auto* const codes =
        reinterpret_cast<const uint4*>(codes_ + std::uint64_t{page} * (d * Shape::kCodeBytes));
    const std::uint32_t even = at_.slot + unit_;
    const std::uint32_t odd = at_.slot + (unit_ ^ (kBits == 4 ? 64 : 0));
    const unsigned units[4] = {places.x & 0xffff, places.y, places.z, places.w};
#pragma unroll
    for (int i = 0; i < kListedCopies<kBits>; ++i) {
      copy_unit_if((i % 2 == 0 ? even : odd) + static_cast<std::uint32_t>(i) * 512,
                   codes + units[i], whole || i < kListedCopies<kBits> / 2);
    }
    const auto* const scale =
        reinterpret_cast<const std::uint32_t*>(scales_ + std::uint64_t{page} * (d * 4)) +
        (places.x >> 16);
    const std::uint32_t word = at_.slot + word_;
    copy_word_if(word, scale, whole || lane_id() < kStepChannels);
    copy_word_if(word + Shape::kScaleBytes, scale + d / 2, whole || lane_id() < kStepChannels);
  }

  const TileScanArgs& a_;
  ChunkCursor<kBits, true> at_;
  PageHead head_;
  std::uint32_t unit_;
  std::uint32_t word_;
  const std::byte* codes_ = nullptr;   // of the head
  const std::byte* scales_ = nullptr;  // likewise
  uint4* places_;                      // likewise, of this lane
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
template <int kBits>
class OrderedCopier {
  using Shape = TileShape<kBits, false>;

 public:
  __device__ OrderedCopier(const TileScanArgs& a, const WarpMemory& memory)
      : a_(a), at_(a, memory.ring), full_(shared_address(memory.full)), first_slot_(at_.slot) {
    init_barriers(memory.full, Shape::kStages);
  }

  __device__ __forceinline__ void begin() { at_.pages.begin(); }
  __device__ __forceinline__ int oldest() const { return at_.oldest(); }

  // One more chunk, or nothing at the end.
  __device__ __forceinline__ void copy_next() {
    if (at_.begin_slot()) {
      if (head_.find(at_.pages.page, a_.pages)) first_page_ = head_.head * a_.capacity;
      const std::int64_t page = first_page_ + head_.page;
      const std::int64_t channel = page * a_.head_dim + at_.first_step * kStepChannels;
      const int steps = min(Shape::kSteps, a_.steps - at_.first_step);
      copy(static_cast<std::uint32_t>(steps * kStepChannels),
           a_.codes + channel * Shape::kCodeBytes,
           reinterpret_cast<const std::byte*>(a_.scales + channel + page * a_.head_dim));
      at_.next_chunk(a_.steps);
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
    return full_ + (slot == first_slot_ ? 0 : 8);
  }
  __device__ __forceinline__ void copy(std::uint32_t channels, const std::byte* codes,
                                       const std::byte* scales) const {
    if (lane_id() != 0) return;
    const std::uint32_t barrier = barrier_of(at_.slot);
    const std::uint32_t to = at_.slot + Shape::kScaleOffset;
    barrier_expect(barrier, channels * (Shape::kCodeBytes + 4));
    bulk(at_.slot, codes, channels * Shape::kCodeBytes, barrier);
    bulk(to, scales, channels * 2, barrier);
    bulk(to + Shape::kScaleBytes, scales + 2 * a_.head_dim, channels * 2, barrier);
  }
  __device__ __forceinline__ static void bulk(std::uint32_t to, const std::byte* from,
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
    copy_async_wait<Shape::kStages - 2>();
  }

 private:
  __device__ __forceinline__ void copy(std::uint32_t channels, const std::byte* codes,
                                       const std::byte* scales) const {
    const std::uint32_t to = at_.slot + Shape::kScaleOffset;
    units(at_.slot, codes, channels * Shape::kCodeBytes);
    units(to, scales, channels * 2);
    units(to + Shape::kScaleBytes, scales + 2 * a_.head_dim, channels * 2);
  }
  __device__ __forceinline__ static void units(std::uint32_t to, const std::byte* from,
                                               std::uint32_t bytes) {
    for (std::uint32_t at = static_cast<std::uint32_t>(lane_id()) * 16; at < bytes; at += 512) {
      copy_unit_if(to + at, from + at, true);
    }
  }
  __device__ __forceinline__ void finish() const { copy_async_commit(); }
#endif

  const TileScanArgs& a_;
  ChunkCursor<kBits, false> at_;
  PageHead head_;
  std::int64_t first_page_ = 0;  // of the head
  std::uint32_t full_;
  std::uint32_t first_slot_;
};

}  // namespace sluice::cuda
