// Selection by one cluster of blocks per KV head, for logits that fit its shared memories: one
// kernel and one read. A decode step selects once per layer, and a chain of kernels takes longer to
// launch and to wait for memory than these logits take to scan.
//
// The blocks hold consecutive parts of the entries. Each sends its results to all others, and all
// combine them in the order of the blocks, so that results do not depend on timing. They exchange
//   maxima and sums of their parts of every row,
//   for top_p: sums of kCoarse neighbouring bins of every row's histogram of weights, then the bins
//     that contain the threshold; and a histogram of vectors' maxima, which bounds the heaviest,
//   for a cut by grades: the number of entries that reach that bound, then their grades,
//   the weight that each block has kept.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/runtime/barriers.cuh"
#include "kernels/runtime/cluster.cuh"
#include "kernels/runtime/launch.h"
#include "kernels/select/grades.cuh"
#include "kernels/select/paths.cuh"
#include "kernels/select/strip.cuh"

namespace sluice::cuda {

inline constexpr int kMostBlocks = 16;  // of a cluster
inline constexpr int kMostRows = 8;     // query heads of a KV head
inline constexpr int kMostWarps = 16;
inline constexpr int kCoarse = 128;      // bins of weights that are exchanged as one sum at first
inline constexpr int kSketchBins = 64;   // of the histogram of vectors' maxima
inline constexpr int kSketchWidth = 32;  // bins of weights per bin of that histogram
inline constexpr int kDigitBits = 9;     // bits of a grade per radix step
inline constexpr int kDigits = 1 << kDigitBits;
inline constexpr int kMostListedOwn = 2048;     // candidates of a block
inline constexpr int kMostNear = 4096;          // entries of a block that may be candidates
inline constexpr int kMostListed = 8192;        // candidates of all blocks
inline constexpr int kMostPicked = kWarp;       // candidates compared one by one
inline constexpr int kMostTurns = 3;            // attempts to list candidates by a digest
inline constexpr int kMostQueued = 17 * kWarp;  // logits that a warp queues for counting

// A warp's result for its part of a row: sums of 2^(x log2(e) - norm), with the norm of `highest`.
struct alignas(16) RowPart {
  float highest = 0.0f;  // +Inf if a logit is NaN
  float all = 0.0f;
  float kept = 0.0f;  // of entries that are always kept, or in the tail
  float tail = 0.0f;
};

// The bounds of a row, and its histogram of the weights that top_p chooses among: bins from that of
// `highest` downwards.
struct RowState {
  RowInfo info;
  float highest = 0.0f;
  float missing = 0.0f;  // the share that top_p needs beyond the tokens that are always kept
  std::int32_t top = 0;
  std::int32_t bins = 0;    // 0: the threshold is known
  std::uint16_t least = 0;  // f16 of the lowest bin
  std::uint16_t bound = 0;  // f16, not above the `keep`-th largest logit
};

// Scratch for the first half of the work; the list of kept entries overwrites it. Bins from other
// blocks may overwrite the queues, because a block sends them only once all blocks have counted.
template <typename Entry>
struct alignas(16) ClusterScratch {
  RowPart parts[kMostBlocks][kMostWarps];  // of all blocks
  union {
    __half queues[kMostWarps][kMostQueued];  // logits to be counted
    uint4 fine[1];                           // [blocks, group, kWarp]: four bins each
    struct {
      Entry own[kMostListedOwn];  // of candidates
      Entry near[kMostNear];      // that may be candidates
    } entries;
  };

  // `slots` is blocks * group: the rows of `fine`.
  __host__ __device__ static constexpr std::uint32_t bytes(int slots) {
    const auto fine = static_cast<std::uint32_t>(slots * kWarp) * std::uint32_t{sizeof(uint4)};
    constexpr auto kQueues = static_cast<std::uint32_t>(sizeof(queues));
    constexpr auto kEntries = static_cast<std::uint32_t>(sizeof(entries));
    constexpr std::uint32_t others = kQueues > kEntries ? kQueues : kEntries;
    return static_cast<std::uint32_t>(sizeof(parts)) + (fine > others ? fine : others);
  }
};

// The messages that blocks exchange, one barrier for each.
enum Exchange {
  kSums,
  kCoarseBins,
  kFineBins,
  kCounts,
  kGrades,
  kTies,
  kEnds,
  kSectors,  // of a digest, one per turn
  kListed = kSectors + kMostTurns,
  kExchanges = kListed + kMostTurns,
};

// The pages of a block's first and last position.
struct BlockEnds {
  std::int32_t count = 0;
  std::int32_t first = 0;
  std::int32_t last = 0;
};

struct alignas(16) ClusterShared {
  std::uint64_t barriers[kExchanges];
  // Other blocks write here, each to its own element.
  uint2 counted[kMostBlocks];  // candidates, wanted entries
  uint4 ends[kMostBlocks];     // BlockEnds
  std::uint32_t equals[kMostBlocks];
  uint2 weighed[kMostBlocks][kMostWarps];  // the first block's: weights and pages of warps
  // Other blocks read this.
  alignas(16) std::uint32_t digits[2 * kDigits];
  // Only this block's.
  alignas(16) std::uint32_t sketch[kMostRows][kSketchBins / 2];  // two bins in a word
  std::uint32_t own_grades[kMostListedOwn];
  Extent extent;
  RowState states[kMostRows];
  RowInfo rows[kMostRows];          // those of the states
  std::uint16_t leasts[kMostRows];  // a candidate's logits reach one of them
  std::uint32_t bound_grade;        // a candidate's grade reaches it
  std::uint32_t counts[3];          // candidates, wanted, near the bound
  std::uint32_t part[kWarp];
  std::uint32_t totals[256];
  Crossing<std::uint32_t> found;
  std::uint32_t in_bin;
  std::uint32_t picked_count;
  alignas(16) std::uint32_t picked[kMostPicked];
  std::uint32_t warp_counts[kMostWarps];
  float shares[kMostRows];
};

// The call, and its layout of shared memory: offsets in bytes from the start, where ClusterShared
// lies.
struct ClusterCall {
  SelectCall call;
  std::int32_t capacity = 0;  // vectors per block
  std::int32_t bins = 0;      // per row, a multiple of kCoarse, or 0
  std::uint32_t bins_at = 0;
  std::uint32_t kept_at = 0;
  std::uint32_t scratch_at = 0;
  std::uint32_t bytes = 0;  // in total

  explicit ClusterCall(const SelectCall& c) : call(c) {
    if (!c.is_top_p || c.p >= 1.0f) return;
    const auto needed = static_cast<std::int32_t>(std::ceil(c.bin_range * kBinsPerNat)) + 4;
    bins = (needed + kCoarse - 1) / kCoarse * kCoarse;
  }

  // Lays out shared memory: `held` bytes first, and last the scratch or the list of kept entries.
  void lay_out(int blocks, std::int64_t held, std::int64_t scratch, std::int64_t list) {
    const auto aligned = [](std::int64_t n) {
      return static_cast<std::uint32_t>((n + 15) / 16 * 16);
    };
    const std::int64_t grades = call.has_grades ? kMostListed : 0;
    const int marks = (capacity + kWarp - 1) / kWarp * kWarp;
    const std::int64_t slots = blocks * call.group;  // one for each block's message about a row
    const int kinds = (bins > 0 ? 1 : 0) + (call.has_grades ? 1 : 0);
    bins_at = aligned(std::int64_t{sizeof(ClusterShared)} + held);
    kept_at = bins_at + aligned(4 * std::max(std::int64_t{bins} * call.group, grades));
    scratch_at = kept_at + aligned((call.has_grades ? 2 : 1) * marks);
    bytes = scratch_at + aligned(std::max(scratch + kinds * slots * kWarp * 4, list));
  }
};

// A cluster must fit one part of the device. Hopper's parts have up to 18 multiprocessors on
// devices with more than a hundred (NVIDIA 2022, "H100 Tensor Core GPU Architecture"); on smaller
// devices and newer architectures only the portable size is certain.
inline int most_blocks_of(const DeviceLimits& device) {
  constexpr int kPortableBlocks = 8;  // on any device that has clusters
  constexpr int kFullHopper = 114;
  const bool is_large = device.capability == 90 && device.multiprocessors >= kFullHopper;
  return is_large ? kMostBlocks : kPortableBlocks;
}

__device__ __forceinline__ int thread_id() { return static_cast<int>(threadIdx.x); }
__device__ __forceinline__ int threads() { return static_cast<int>(blockDim.x); }
__device__ __forceinline__ int lane_id() { return thread_id() % kWarp; }
__device__ __forceinline__ int warp_id() { return thread_id() / kWarp; }
__device__ __forceinline__ int warps() { return threads() / kWarp; }

// The work of one block: vectors [first, first + count) of the head, 8 entries each. `EntryNumber`
// counts entries.
template <typename EntryNumber>
struct WorkOf {
  using Entry = EntryNumber;
  using Scratch = ClusterScratch<Entry>;
  // Low bits dropped from a weight's mass, so that more entries add up in 32 bits.
  static constexpr int kMassShift = sizeof(Entry) == 2 ? 0 : 1;

  const SelectCall& c;
  Cluster cluster;
  bool has_sketches;
  int group;
  int parts;     // warps per row where each warp reads one row
  int row = -1;  // this warp's; -1: none
  int part;
  std::int32_t head;
  std::int32_t first = 0;
  std::int32_t count = 0;
  std::int32_t each = 0;  // vectors per warp where it reads all rows; a multiple of kWarp
  std::int32_t capacity;
  std::int32_t row_bins;
  ClusterShared* shared;
  const uint4* rows;        // [group, capacity]
  std::uint32_t* bins;      // [group, row_bins] of weights; later the grades of all candidates
  std::uint8_t* kept;       // [capacity]: bit e of vector v is entry 8 v + e
  std::uint8_t* equal;      // [capacity]: entries whose grade equals the cut
  Scratch* scratch;         // shares its memory with `entries`
  Entry* entries;           // [8 * capacity], kept
  std::uint32_t* coarse;    // [blocks, group, kWarp], of all blocks, after `scratch`
  std::uint32_t* sketches;  // [blocks, group, kWarp], of all blocks
  const std::int32_t* list;
  Extent extent;

  __device__ WorkOf(const ClusterCall& call, std::byte* memory)
      : c(call.call),
        has_sketches(c.has_grades),
        group(c.group),
        parts(warps() / group),
        part(warp_id() / group),
        head(static_cast<std::int32_t>(blockIdx.x) / cluster.size),
        capacity(call.capacity),
        row_bins(call.bins),
        shared(reinterpret_cast<ClusterShared*>(memory)),
        rows(reinterpret_cast<const uint4*>(shared + 1)),
        bins(reinterpret_cast<std::uint32_t*>(memory + call.bins_at)),
        kept(reinterpret_cast<std::uint8_t*>(memory + call.kept_at)),
        equal(kept + (capacity + kWarp - 1) / kWarp * kWarp),
        scratch(reinterpret_cast<Scratch*>(memory + call.scratch_at)),
        entries(reinterpret_cast<Entry*>(memory + call.scratch_at)),
        coarse(reinterpret_cast<std::uint32_t*>(memory + call.scratch_at +
                                                Scratch::bytes(cluster.size * group))),
        sketches(coarse + (row_bins > 0 ? cluster.size * group * kWarp : 0)),
        list(c.head_list(head)) {
    if (part < parts) row = warp_id() % group;
  }

  // Divides the entries among the blocks once their number is known.
  __device__ void share_out(const Extent& known) {
    extent = known;
    const std::int32_t all = (extent.total + 7) / 8;
    // No two blocks share a cache line.
    const std::int32_t own = (all + 8 * cluster.size - 1) / (8 * cluster.size) * 8;
    first = cluster.rank * own;
    count = max(0, min(own, all - first));
    each = (count + threads() - 1) / threads() * kWarp;
  }

  __device__ __forceinline__ std::int32_t entry(std::int32_t v) const { return (first + v) * 8; }

  __device__ __forceinline__ std::uint32_t barrier(int exchange) const {
    return shared_address(shared->barriers + exchange);
  }
  // Called by one thread: the bytes that this block receives in an exchange.
  __device__ __forceinline__ void expect(int exchange, std::uint32_t bytes) const {
    barrier_expect(barrier(exchange), bytes);
  }
  // Waits until this block has received them; `turn` counts the uses of the barrier.
  __device__ __forceinline__ void receive(int exchange, int turn = 0) const {
    barrier_wait_for_cluster(barrier(exchange), static_cast<std::uint32_t>(turn));
  }
};

// Calls body(v) for this thread's vectors. All lanes of a warp call it together, with neighbouring
// vectors; v may lie beyond the last.
template <typename Body>
__device__ __forceinline__ void for_own(const auto& w, const Body& body) {
  const std::int32_t last = min((warp_id() + 1) * w.each, w.count);
#pragma unroll 1
  for (std::int32_t v = warp_id() * w.each; v < last; v += kWarp) body(v + lane_id());
}

// Calls body(v, look(v)) for the same vectors, with look() in flight for two of them at a time;
// look() is only called with vectors that exist.
template <typename Look, typename Body>
__device__ __forceinline__ void for_own_pairs(const auto& w, const Look& look, const Body& body) {
  const std::int32_t last = min((warp_id() + 1) * w.each, w.count);
#pragma unroll 1
  for (std::int32_t first = warp_id() * w.each; first < last; first += 2 * kWarp) {
    const std::int32_t v = first + lane_id();
    const auto low = look(min(v, w.count - 1));
    const auto high = look(min(v + kWarp, w.count - 1));
    body(v, low);
    if (first + kWarp < last) body(v + kWarp, high);
  }
}

// Called by one warp: calls body(block, i) for every block's parts i of row g.
template <typename Body>
__device__ __forceinline__ void for_parts(const auto& w, int g, const Body& body) {
  const int block = lane_id() % kMostBlocks;
  const int last = block < w.cluster.size ? w.parts : 0;
#pragma unroll 4
  for (int i = lane_id() / kMostBlocks; i < last; i += kWarp / kMostBlocks) {
    body(block, i * w.group + g);
  }
}

__device__ __forceinline__ void set_zero(const auto& w) {
  const uint4 zero = make_uint4(0, 0, 0, 0);
  auto* const bins = reinterpret_cast<uint4*>(w.bins);
#pragma unroll 1
  for (int i = thread_id(); i < w.group * w.row_bins / 4; i += threads()) bins[i] = zero;
  if (thread_id() < 3) w.shared->counts[thread_id()] = 0;
  if (!w.c.has_grades) return;
  if (thread_id() == 0) w.shared->picked_count = 0;
  if (thread_id() < kMostPicked) w.shared->picked[thread_id()] = 0;
  auto* const digits = reinterpret_cast<uint4*>(w.shared->digits);
#pragma unroll 1
  for (int i = thread_id(); i < 2 * kDigits / 4; i += threads()) digits[i] = zero;
  auto* const sketch = reinterpret_cast<uint4*>(w.shared->sketch);
#pragma unroll 1
  for (int i = thread_id(); i < kMostRows * kSketchBins / 8; i += threads()) sketch[i] = zero;
}

// By one thread: initializes the barriers of all exchanges, and expects the messages whose sizes
// are known. Not all exchanges need to happen.
__device__ __forceinline__ void set_up_exchanges(const auto& w) {
  for (int i = 0; i < kExchanges; ++i) barrier_init(w.barrier(i), 1);
  barrier_init_fence();
  const auto blocks = static_cast<std::uint32_t>(w.cluster.size);
  const auto units = static_cast<std::uint32_t>(w.parts * w.group) * blocks;  // warps with rows
  w.expect(kSums, units * sizeof(RowPart));
  w.expect(kCounts, blocks * sizeof(uint2));
  w.expect(kTies, blocks * sizeof(std::uint32_t));
  const std::uint32_t ends =
      blocks * sizeof(uint4) + (w.cluster.rank == 0 ? units * sizeof(uint2) : 0);
  w.expect(kEnds, ends);
}

// Waits for the previous kernel and reads the head's extent and shares. Other blocks have begun
// once w.cluster.wait() returns.
__device__ __forceinline__ void begin(const auto& w) {
  const TokenBounds token = bounds_of(w.c, w.head);
  __syncthreads();
  w.cluster.arrive();
  wait_for_kernel_before();
  allow_next_kernel();
  if (warp_id() == 0) {
    const Extent extent = extent_of(w.c, w.head, token);
    if (lane_id() == 0) w.shared->extent = extent;
  }
  if (thread_id() < w.group) {
    const std::int64_t row = static_cast<std::int64_t>(w.head) * w.group + thread_id();
    w.shared->shares[thread_id()] = share_of(w.c, row);
  }
  __syncthreads();
}

// Returns true if there are logits; otherwise reports an empty head, after w.cluster.wait(). Called
// by all blocks.
__device__ __forceinline__ bool has_logits(const auto& w) {
  if (w.shared->extent.total > 0) return true;
  w.cluster.wait();
  if (w.cluster.rank == 0) report_none(w.c, w.head, false);
  return false;
}

}  // namespace sluice::cuda
