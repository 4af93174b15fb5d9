// Selection where all logits of a KV head fit the shared memories of one cluster of blocks: one
// kernel, one read. A decode step selects once per layer, and a chain of kernels takes longer to
// start and to wait for memory than these logits take to look at.
//
// The blocks have neighbouring parts of the entries, in order. What one finds it sends to all, and
// each draws the same conclusions from it, in the order of the blocks: results do not depend on
// which is faster. They send each other
//   maxima and sums of their parts of every row,
//   of a histogram of every row's weights the sums of kCoarse neighbouring bins, then those bins
//     among which top_p's threshold lies; and how large vectors' maxima are, from which follows a
//     bound of what is among the heaviest,
//   for a cut by keys: how many entries reach that bound, then their keys,
//   how much each has kept.
#pragma once

#include <cstdint>

#include "kernels/barriers.cuh"
#include "kernels/cluster.cuh"
#include "kernels/select_keys.cuh"
#include "kernels/select_strip.cuh"

namespace sluice::cuda {

inline constexpr int kMostBlocks = 16;  // of a cluster
inline constexpr int kMostRows = 8;     // query heads of a KV head
inline constexpr int kMostWarps = 16;
inline constexpr int kCoarse = 128;      // bins of weights that are first looked at together
inline constexpr int kSketchBins = 64;   // of the maxima of vectors
inline constexpr int kSketchWidth = 32;  // bins of weights in one of them
inline constexpr int kDigitBits = 9;     // of keys, looked at together
inline constexpr int kDigits = 1 << kDigitBits;
inline constexpr int kMostListedOwn = 2048;     // candidates of a block
inline constexpr int kMostNear = 4096;          // entries of a block that may be candidates
inline constexpr int kMostListed = 8192;        // and of all
inline constexpr int kMostPicked = kWarp;       // of them, compared one by one
inline constexpr int kMostQueued = 17 * kWarp;  // logits of a warp, to be counted

// What a warp found of its part of a row: sums of 2^(x log2(e) - norm), the norm that of `highest`.
struct alignas(16) RowPart {
  float highest = 0.0f;  // +Inf if a logit is no number
  float all = 0.0f;
  float kept = 0.0f;  // of what is always kept, or in the tail
  float tail = 0.0f;
};

// What is known of a row, and how the weights that top_p chooses among are counted: by bins from
// that of `highest` down.
struct RowState {
  RowInfo info;
  float highest = 0.0f;
  float missing = 0.0f;  // the share that top_p lacks beside what is always kept
  std::int32_t top = 0;
  std::int32_t bins = 0;    // 0: the threshold is known
  std::uint16_t least = 0;  // f16 of the lowest bin
  std::uint16_t bound = 0;  // f16: as many entries as are to be kept are not below
};

// For the first half of the work; the list of what is kept takes its place. Bins that other blocks
// send lie where the queues were: they do so once they know that all has been counted.
struct alignas(16) ClusterScratch {
  RowPart parts[kMostBlocks][kMostWarps];  // of all blocks
  union {
    __half queues[kMostWarps][kMostQueued];  // logits to be counted
    uint4 fine[1];                           // [blocks, group, kWarp]: four bins each
    struct {
      std::uint16_t own[kMostListedOwn];  // of candidates
      std::uint16_t near[kMostNear];      // of what may be one
    } entries;
  };

  // With so many slots for a warp's lanes.
  __host__ __device__ static constexpr std::uint32_t bytes(int slots) {
    const auto fine = static_cast<std::uint32_t>(slots * kWarp) * std::uint32_t{sizeof(uint4)};
    const auto others = static_cast<std::uint32_t>(sizeof(queues));
    return static_cast<std::uint32_t>(sizeof(parts)) + (fine > others ? fine : others);
  }
};

// What blocks send each other, by its barrier.
enum Exchange {
  kSums,
  kCoarseBins,
  kFineBins,
  kCounts,
  kKeys,
  kTies,
  kEnds,
  kLaterEnds,
  kExchanges,
};

// Where and how a block ends: the pages of its first and last position.
struct BlockEnds {
  std::int32_t count = 0;
  std::int32_t first = 0;
  std::int32_t last = 0;
};

struct alignas(16) ClusterShared {
  std::uint64_t barriers[kExchanges];
  // Other blocks write here, each to its own place.
  uint4 counted[kMostBlocks];  // candidates, all that may be selected, what is always kept
  uint4 ends[2][kMostBlocks];  // BlockEnds
  std::uint32_t equals[kMostBlocks];
  uint2 weighed[2][kMostBlocks][kMostWarps];  // the first block's: weights and pages of warps
  // Other blocks read this.
  alignas(16) std::uint32_t digits[2 * kDigits];
  // Only this block's.
  alignas(16) std::uint32_t sketch[kMostRows][kSketchBins / 2];  // two bins in a word
  std::uint32_t own_keys[kMostListedOwn];
  Extent extent;
  RowState states[kMostRows];
  RowInfo rows[kMostRows];          // those of the states
  std::uint16_t leasts[kMostRows];  // candidates reach one of them
  std::uint32_t bound_key;          // and this
  std::uint32_t counts[4];          // candidates, wanted, always kept, near the bound
  std::uint32_t part[kWarp];
  std::uint32_t totals[256];
  Crossing<std::uint32_t> found;
  std::uint32_t in_bin;
  std::uint32_t picked_count;
  alignas(16) std::uint32_t picked[kMostPicked];
  std::uint32_t warp_counts[kMostWarps];
  float shares[kMostRows];
};

// The call, and where things lie: in bytes from the start of shared memory, after ClusterShared.
struct ClusterCall {
  SelectCall call;
  bool has_keys = false;      // a cut by keys is made, or may be
  std::int32_t capacity = 0;  // vectors of a block
  std::int32_t bins = 0;      // per row, a multiple of kCoarse, or 0
  std::uint32_t bins_at = 0;
  std::uint32_t kept_at = 0;
  std::uint32_t scratch_at = 0;
  std::uint32_t bytes = 0;  // of all
};

__device__ __forceinline__ int thread_id() { return static_cast<int>(threadIdx.x); }
__device__ __forceinline__ int threads() { return static_cast<int>(blockDim.x); }
__device__ __forceinline__ int lane_id() { return thread_id() % kWarp; }
__device__ __forceinline__ int warp_id() { return thread_id() / kWarp; }
__device__ __forceinline__ int warps() { return threads() / kWarp; }

// What a block works on. Vectors are 8 entries; its own are [first, first + count) of the head's.
struct ClusterWork {
  const SelectCall& c;
  Cluster cluster;
  bool has_keys;
  int group;
  int parts;     // warps of a row, as long as they look at rows one by one
  int row = -1;  // this warp's; -1: none
  int part;
  std::int32_t head;
  std::int32_t first = 0;
  std::int32_t count = 0;
  std::int32_t each = 0;  // vectors of a warp, where it looks at all rows: a multiple of kWarp
  std::int32_t capacity;
  std::int32_t row_bins;
  ClusterShared* shared;
  uint4* rows;              // [group, capacity]
  std::uint32_t* bins;      // [group, row_bins] of weights; later the keys of all candidates
  std::uint8_t* kept;       // [capacity]: bit e of vector v is entry 8 v + e
  std::uint8_t* equal;      // [capacity]: entries whose key is that of the cut
  ClusterScratch* scratch;  // or
  std::uint16_t* entries;   // [8 * capacity], kept
  std::uint32_t* coarse;    // [blocks, group, kWarp], of all blocks, after `scratch`
  std::uint32_t* sketches;  // [blocks, group, kWarp], of all blocks
  const std::int32_t* list;
  Extent extent;

  __device__ ClusterWork(const ClusterCall& call, std::byte* memory)
      : c(call.call),
        has_keys(call.has_keys),
        group(c.group),
        parts(warps() / group),
        part(warp_id() / group),
        head(static_cast<std::int32_t>(blockIdx.x) / cluster.size),
        capacity(call.capacity),
        row_bins(call.bins),
        shared(reinterpret_cast<ClusterShared*>(memory)),
        rows(reinterpret_cast<uint4*>(shared + 1)),
        bins(reinterpret_cast<std::uint32_t*>(memory + call.bins_at)),
        kept(reinterpret_cast<std::uint8_t*>(memory + call.kept_at)),
        equal(kept + (capacity + kWarp - 1) / kWarp * kWarp),
        scratch(reinterpret_cast<ClusterScratch*>(memory + call.scratch_at)),
        entries(reinterpret_cast<std::uint16_t*>(memory + call.scratch_at)),
        coarse(reinterpret_cast<std::uint32_t*>(memory + call.scratch_at +
                                                ClusterScratch::bytes(cluster.size * group))),
        sketches(coarse + (row_bins > 0 ? cluster.size * group * kWarp : 0)),
        list(c.head_list(head)) {
    if (part < parts) row = warp_id() % group;
  }

  // Shares the entries out, once it is known how many there are.
  __device__ void share_out(const Extent& known) {
    extent = known;
    const std::int32_t all = (extent.total + 7) / 8;
    // Cache lines are of one block.
    const std::int32_t own = (all + 8 * cluster.size - 1) / (8 * cluster.size) * 8;
    first = cluster.rank * own;
    count = max(0, min(own, all - first));
    each = (count + threads() - 1) / threads() * kWarp;
  }

  __device__ __forceinline__ std::int32_t entry(std::int32_t v) const { return (first + v) * 8; }

  __device__ __forceinline__ std::uint32_t barrier(int exchange) const {
    return shared_address(shared->barriers + exchange);
  }
  // By one thread: what this block will have received in an exchange.
  __device__ __forceinline__ void expect(int exchange, std::uint32_t bytes) const {
    barrier_expect(barrier(exchange), bytes);
  }
  // Until it has.
  __device__ __forceinline__ void receive(int exchange) const {
    barrier_wait_for_cluster(barrier(exchange), 0);
  }
};

// Calls body(v) for this thread's vectors, by all lanes of a warp at the same time: a warp has
// neighbouring ones. v may lie beyond the last.
template <typename Body>
__device__ __forceinline__ void for_own(const ClusterWork& w, const Body& body) {
  const std::int32_t last = min((warp_id() + 1) * w.each, w.count);
#pragma unroll 1
  for (std::int32_t v = warp_id() * w.each; v < last; v += kWarp) body(v + lane_id());
}

// The same in two steps, the first of which, look(v), is on its way for two vectors at a time; it
// is called with vectors that there are.
template <typename Look, typename Body>
__device__ __forceinline__ void for_own_pairs(const ClusterWork& w, const Look& look,
                                              const Body& body) {
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

// By one warp: calls body(part) for the parts of a row of all blocks.
template <typename Body>
__device__ __forceinline__ void for_parts(const ClusterWork& w, int g, const Body& body) {
  const int block = lane_id() % kMostBlocks;
  const int last = block < w.cluster.size ? w.parts : 0;
#pragma unroll 4
  for (int i = lane_id() / kMostBlocks; i < last; i += kWarp / kMostBlocks) {
    body(block, i * w.group + g);
  }
}

}  // namespace sluice::cuda
