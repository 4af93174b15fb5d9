// Pages of quantised keys on their way to the warps that scan them.
//
// Every warp copies its own pages asynchronously through a ring of slots in shared memory and waits
// for no other.
#pragma once

#include "kernels/barriers.cuh"
#include "kernels/tile_scan_queries.cuh"
#include "lib/selection.h"

namespace sluice::cuda {

inline constexpr int kScanWarps = 4;          // of a block
inline constexpr int kScanBlocks = 5;         // of a multiprocessor
inline constexpr int kLeastDynamicPages = 8;  // of a warp: fewer are shared out evenly

struct TileScanArgs {
  TileQueries queries;
  const std::byte* codes;         // [kv_heads, capacity, head_dim, code bytes]
  const std::uint16_t* scales;    // f16 [kv_heads, capacity, 2, head_dim]
  const std::int32_t* positions;  // [kv_heads, position_capacity], of candidates
  __half* logits;                 // [query_heads, stride]
  std::int64_t capacity;
  std::int64_t position_capacity;
  std::int64_t stride;
  int pages;         // of every head
  int static_pages;  // of all heads' pages, shared out evenly from the start
  int run_pages;     // that a warp takes at once of the others
  int heads;
  int head_dim;
  int steps;
  int group;
  int first_query;
  int query_count;
  bool aligned;  // logits of a page begin on 16 bytes
};

// A slot of a warp's ring: a chunk of a page, with its scales and zeros.
template <int kBits, bool kListed>
struct TileShape {
  static constexpr int kStages = kListed ? 3 : 2;  // slots
  static constexpr int kSteps = kListed ? 2 : 4;   // of a chunk
  static constexpr int kChannels = kSteps * kStepChannels;
  static constexpr int kCodeBytes = kPageTokens * kBits / 8;  // of a channel
  static constexpr int kUnits = kCodeBytes / 16;
  static constexpr std::uint32_t kScaleOffset = kChannels * kCodeBytes;
  // In pairs if they are listed, of which one counts.
  static constexpr std::uint32_t kScaleBytes = kChannels * (kListed ? 4 : 2);
  static constexpr std::uint32_t kSlotBytes = kScaleOffset + 2 * kScaleBytes;
  static constexpr std::uint32_t kRingBytes = kStages * kSlotBytes;
  // Of all pages, how many eighths are shared out in advance, and how many of the others a warp
  // takes at once: a jump costs more where channels have to be looked up.
  static constexpr int kStaticEighths = kListed ? 6 : 4;
  static constexpr int kRunPages = kListed ? 4 : 2;
};

// Where a page is; head is -1 at the end.
struct PagePlace {
  int head;
  int page;
};

// What goes with a slot.
struct SlotNotes {
  PagePlace page;
  std::uint64_t full;  // barrier of bulk copies
};

// Pages of a warp, among those of all heads in order. Most are shared out evenly in advance; the
// rest is taken in short runs, so that all warps end together although some get on faster. The
// counter is asked for a run ahead, for its answer takes long.
class PageRuns {
 public:
  __device__ explicit PageRuns(const TileScanArgs& a) : a_(a) {
    const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * kScanWarps;
    const std::int64_t number =
        static_cast<std::int64_t>(blockIdx.x) * kScanWarps + threadIdx.x / kWarp;
    const auto first = static_cast<int>(a.static_pages * number / warps);
    ask();
    begin(first, static_cast<int>(a.static_pages * (number + 1) / warps) - first);
    if (left_ == 0) begin_run();
    skip();
  }

  __device__ __forceinline__ bool done() const { return left_ == 0; }
  __device__ __forceinline__ void next() {
    step();
    skip();
  }
  // Whether this page does not follow the one before.
  __device__ __forceinline__ bool jumped() const { return jumped_; }

  int head = 0;
  int page = 0;

 private:
  __device__ int total() const { return a_.pages * a_.heads; }
  __device__ __forceinline__ void ask() {
    if (a_.static_pages < total() && threadIdx.x % kWarp == 0) {
      upcoming_ = atomicAdd(a_.queries.counters + blockIdx.x % kRunCounters, 1u);
    }
  }
  __device__ __forceinline__ void begin(int first, int count) {
    head = first / a_.pages;
    page = first % a_.pages;
    left_ = count;
    jumped_ = true;
  }
  __device__ __forceinline__ void step() {
    jumped_ = false;
    if (--left_ == 0) return begin_run();
    if (++page == a_.pages) {
      page = 0;
      ++head;
      jumped_ = true;
    }
  }
  __device__ __forceinline__ void begin_run() {
    if (a_.static_pages == total()) return;
    const unsigned run =
        __shfl_sync(kAllLanes, upcoming_, 0) * kRunCounters + blockIdx.x % kRunCounters;
    const std::int64_t first = a_.static_pages + static_cast<std::int64_t>(run) * a_.run_pages;
    if (first >= total()) return;
    ask();
    begin(static_cast<int>(first), min(a_.run_pages, total() - static_cast<int>(first)));
  }
  // To the next page with a candidate, if there are candidates.
  __device__ __forceinline__ void skip() {
    if (a_.queries.first == nullptr) return;
    while (!done() && a_.queries.first[static_cast<std::int64_t>(head) * a_.pages + page] < 0) {
      step();
    }
    jumped_ = true;
  }

  const TileScanArgs& a_;
  unsigned upcoming_ = 0;
  int left_ = 0;
  bool jumped_ = true;
};

__device__ __forceinline__ int scan_lane() { return static_cast<int>(threadIdx.x) % kWarp; }

// 4 bytes to shared memory.
__device__ __forceinline__ void copy_word(std::uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_unit(std::uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(from) : "memory");
}

// Copies chunks of listed channels into slots, in the order that they are used in, and notes beside
// each slot which page it is of.
template <int kBits>
class ListedCopier {
  using Shape = TileShape<kBits, true>;
  static constexpr int kChannelsAtOnce = kWarp / Shape::kUnits;
  static constexpr int kCopies = Shape::kChannels / kChannelsAtOnce;

 public:
  __device__ ListedCopier(const TileScanArgs& a, std::byte* ring, SlotNotes* notes)
      : a_(a), at_(a), to_(shared_address(ring)), notes_(notes) {
    // 16-byte unit u of a slot lies at u ^ (channel / 4 % 4 * 2): lanes that differ in the channel
    // they read, by multiples of four, find different banks.
    const int channel = scan_lane() / Shape::kUnits;
    unit_ = static_cast<std::uint32_t>(scan_lane() ^ (channel / 4 % 4 * 2)) * 16;
    locate();
  }

  // One more chunk, or nothing at the end; always commits a group.
  __device__ __forceinline__ void copy_next() {
    const bool done = at_.done();
    if (scan_lane() == 0) notes_[slot_].page = {done ? -1 : at_.head, at_.page};
    if (!done) {
      copy(to_ + slot_ * Shape::kSlotBytes);
      advance();
    }
    slot_ = slot_ + 1 == Shape::kStages ? 0 : slot_ + 1;
    copy_async_commit();
  }
  // Until this lane's part of the oldest chunk is there.
  __device__ __forceinline__ void wait(unsigned, unsigned) const {
    copy_async_wait<Shape::kStages - 2>();
  }

 private:
  // Finds the page that comes next.
  __device__ __forceinline__ void locate() {
    if (at_.done()) return;
    if (!at_.jumped()) {
      codes_ += a_.head_dim * Shape::kCodeBytes;
      scales_ += a_.head_dim * 4;
    } else {
      const std::int64_t page = at_.head * a_.capacity + at_.page;
      codes_ = a_.codes + page * (a_.head_dim * Shape::kCodeBytes);
      scales_ = reinterpret_cast<const std::byte*>(a_.scales) + page * (a_.head_dim * 4);
    }
    if (at_.jumped() || a_.steps > Shape::kSteps) look_up();
  }

  __device__ __forceinline__ void copy(std::uint32_t slot) {
    const bool whole = chunk_ * Shape::kSteps + Shape::kSteps <= a_.steps;
    copy_codes<0, kCopies / 2>(slot);
    if (whole) copy_codes<kCopies / 2, kCopies>(slot);
    if (whole || scan_lane() < kStepChannels) {
      const std::uint32_t to =
          slot + Shape::kScaleOffset + static_cast<std::uint32_t>(scan_lane()) * 4;
      const std::byte* const from = scales_ + scale_offset_;
      copy_word(to, from);
      copy_word(to + Shape::kScaleBytes, from + 2 * a_.head_dim);
    }
  }

  template <int kFirst, int kEnd>
  __device__ __forceinline__ void copy_codes(std::uint32_t slot) {
#pragma unroll
    for (int i = kFirst; i < kEnd; ++i) {
      const std::uint32_t flip = kBits == 4 && i % 2 == 1 ? 64 : 0;
      copy_unit(slot + (unit_ ^ flip) + static_cast<std::uint32_t>(i) * 512, codes_ + offsets_[i]);
    }
  }

  // The channels of this chunk.
  __device__ __forceinline__ void look_up() {
    const std::uint16_t* const list =
        a_.queries.channels + at_.head * kMaxListed + chunk_ * Shape::kChannels;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      offsets_[i] = list[i * kChannelsAtOnce + scan_lane() / Shape::kUnits] * Shape::kCodeBytes +
                    scan_lane() % Shape::kUnits * 16;
    }
    scale_offset_ = list[scan_lane()] / 2 * 4;
  }

  __device__ __forceinline__ void advance() {
    if (++chunk_ * Shape::kSteps < a_.steps) return look_up();
    chunk_ = 0;
    at_.next();
    locate();
  }

  const TileScanArgs& a_;
  PageRuns at_;
  std::uint32_t to_;
  SlotNotes* notes_;
  std::uint32_t unit_;
  std::uint32_t slot_ = 0;
  int chunk_ = 0;
  const std::byte* codes_ = nullptr;   // of the page
  const std::byte* scales_ = nullptr;  // likewise
  std::uint32_t offsets_[kCopies]{};
  std::uint32_t scale_offset_ = 0;
};

// Before any copy; for this warp's slots.
__device__ __forceinline__ void init_notes(SlotNotes* notes, int count) {
#if __CUDA_ARCH__ >= 900
  if (scan_lane() < count) {
    barrier_init(shared_address(&notes[scan_lane()].full), 1);
    barrier_init_fence();
  }
  __syncwarp();
#endif
}

// Copies chunks of neighbouring channels. From Hopper on one lane has the copy engine do it.
template <int kBits>
class BlockCopier {
  using Shape = TileShape<kBits, false>;

 public:
  __device__ BlockCopier(const TileScanArgs& a, std::byte* ring, SlotNotes* notes)
      : a_(a), at_(a), to_(shared_address(ring)), notes_(notes) {
    locate();
  }

  // One more chunk, or nothing at the end.
  __device__ __forceinline__ void copy_next() {
    const bool done = at_.done();
    if (scan_lane() == 0) notes_[slot_].page = {done ? -1 : at_.head, at_.page};
    if (!done) {
      const int channels =
          min(Shape::kChannels, (a_.steps - chunk_ * Shape::kSteps) * kStepChannels);
      copy(to_ + slot_ * Shape::kSlotBytes, static_cast<std::uint32_t>(channels));
      advance();
    }
    finish(done);
    slot_ = slot_ + 1 == Shape::kStages ? 0 : slot_ + 1;
  }

#if __CUDA_ARCH__ >= 900
  __device__ __forceinline__ void wait(unsigned slot, unsigned round) const {
    barrier_wait(shared_address(&notes_[slot].full), round);
  }

 private:
  __device__ __forceinline__ void copy(std::uint32_t slot, std::uint32_t channels) {
    if (scan_lane() != 0) return;
    const std::uint32_t barrier = shared_address(&notes_[slot_].full);
    const std::uint32_t codes = channels * Shape::kCodeBytes;
    const std::uint32_t scales = channels * 2;
    barrier_expect(barrier, codes + 2 * scales);
    bulk(slot, codes_, codes, barrier);
    bulk(slot + Shape::kScaleOffset, scales_, scales, barrier);
    bulk(slot + Shape::kScaleOffset + Shape::kScaleBytes, scales_ + 2 * a_.head_dim, scales,
         barrier);
  }
  __device__ __forceinline__ static void bulk(std::uint32_t to, const std::byte* from,
                                              std::uint32_t bytes, std::uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];\n" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
  }
  // A slot without a page is full at once.
  __device__ __forceinline__ void finish(bool done) {
    if (done && scan_lane() == 0) barrier_arrive(shared_address(&notes_[slot_].full));
  }
#else
  __device__ __forceinline__ void wait(unsigned, unsigned) const {
    copy_async_wait<Shape::kStages - 2>();
  }

 private:
  __device__ __forceinline__ void copy(std::uint32_t slot, std::uint32_t channels) {
    units(slot, codes_, channels * Shape::kCodeBytes);
    units(slot + Shape::kScaleOffset, scales_, channels * 2);
    units(slot + Shape::kScaleOffset + Shape::kScaleBytes, scales_ + 2 * a_.head_dim, channels * 2);
  }
  __device__ __forceinline__ static void units(std::uint32_t to, const std::byte* from,
                                               std::uint32_t bytes) {
    for (std::uint32_t at = static_cast<std::uint32_t>(scan_lane()) * 16; at < bytes; at += 512) {
      copy_unit(to + at, from + at);
    }
  }
  __device__ __forceinline__ void finish(bool) { copy_async_commit(); }
#endif

  __device__ __forceinline__ void locate() {
    if (at_.done()) return;
    const std::int64_t page = at_.head * a_.capacity + at_.page;
    codes_ = a_.codes + page * (a_.head_dim * Shape::kCodeBytes);
    scales_ = reinterpret_cast<const std::byte*>(a_.scales) + page * (a_.head_dim * 4);
  }

  __device__ __forceinline__ void advance() {
    if (++chunk_ * Shape::kSteps < a_.steps) {
      codes_ += Shape::kChannels * Shape::kCodeBytes;
      scales_ += Shape::kChannels * 2;
      return;
    }
    chunk_ = 0;
    at_.next();
    locate();
  }

  const TileScanArgs& a_;
  PageRuns at_;
  std::uint32_t to_;
  SlotNotes* notes_;
  std::uint32_t slot_ = 0;
  int chunk_ = 0;
  const std::byte* codes_ = nullptr;   // of the chunk
  const std::byte* scales_ = nullptr;  // likewise; zeros lie after all scales of the page
};

}  // namespace sluice::cuda
