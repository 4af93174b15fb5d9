// Selection with a small k or cap by a digest: one cluster of blocks per KV head holds the digest
// in its shared memories and reads only the few logits that may be kept.
//
// The blocks hold consecutive pages. They exchange
//   maxima and sums of their parts of every row,
//   a histogram of their sectors' maxima, whose k-th heaviest bounds the lightest weight kept,
//   the number of candidates in the sectors that reach the bound, then their grades, which the
//     cluster cuts as it does with all logits in shared memory,
//   the weight that each block has kept.
// top_p needs no threshold if the pages below the bound hold more weight than it may drop, because
// then it wants all candidates. Otherwise thresholds are found first, from the sectors that may
// matter. If many sectors reach the bound because weights are nearly equal, a sample raises it. If
// candidates are still too many to list, all logits are read, as by a cluster.
#pragma once

#include <cstdint>

#include "kernels/select/cluster_cut.cuh"

namespace sluice::cuda {

constexpr int kPageVectors = kPageTokens / 8;
constexpr int kPageStep = 4;  // pages: bulk copies begin and end at multiples of it
constexpr int kSectorBins = 256;
constexpr int kSampled = 256;  // sectors in a block's sample, at least
// Sectors are counted by their distance below the heaviest, in nats. The bin comes from the upper
// bits of the f16 4 + distance, so that bins grow wider with distance.
constexpr std::uint32_t kFours = 0x44004400u;
constexpr int kEdgeShift = 4;
constexpr float kLightest = -120.0f;  // log2; lighter weights bound no sum over query heads

struct DigestCall : ClusterCall {
  std::int32_t pages = 0;  // of a block at most
  std::uint32_t maxima_at = 0;
  std::uint32_t sums_at = 0;

  using ClusterCall::ClusterCall;
};

struct alignas(16) DigestShared {
  // Other blocks write here.
  alignas(16) std::uint32_t below[kMostBlocks][kMostRows];  // shares of pages below the bounds
  uint2 reached[kMostBlocks];                               // see grades_reached()
  // Only this block's.
  RowPart parts[kMostWarps][kMostRows];
  alignas(16) std::uint32_t own_below[kMostRows];
  std::uint64_t loaded;                 // barrier of the digest
  std::uint32_t references[kMostRows];  // logits of the heaviest weight, f16 twice
  float weight;                         // lower bound of the lightest kept
  float highest;                        // about log2 of the heaviest candidate's weight
  int digit_shift;                      // from a grade less the bound to its digit
  std::uint32_t is_bounded;
};

struct DigestWork : WorkOf<std::uint32_t> {
  DigestShared* digest;
  uint4* maxima;  // [pages, group]: of a page's sectors, without always kept entries
  float* sums;    // [pages, group], of plain pages
  std::int32_t first_page = 0;
  std::int32_t pages = 0;
  // Plain pages: digested, without always kept entries.
  std::int32_t first_plain = 0;
  std::int32_t last_plain = 0;

  __device__ DigestWork(const DigestCall& call, std::byte* memory)
      : WorkOf(call, memory),
        digest(reinterpret_cast<DigestShared*>(shared + 1)),
        maxima(reinterpret_cast<uint4*>(memory + call.maxima_at)),
        sums(reinterpret_cast<float*>(memory + call.sums_at)) {
    has_sketches = false;
  }

  __device__ void share_out(const Extent& known) {
    extent = known;
    const std::int32_t all = (extent.total + kPageTokens - 1) / kPageTokens;
    const int step = kPageStep * cluster.size;
    const std::int32_t own = (all + step - 1) / step * kPageStep;
    first_page = cluster.rank * own;
    pages = min(max(all - first_page, 0), own);
    first = first_page * kPageVectors;
    count = max(0, min(pages * kPageVectors, (extent.total + 7) / 8 - first));
    each = (count + threads() - 1) / threads() * kWarp;
    rows = reinterpret_cast<const uint4*>(c.row(head, 0)) + first;
    capacity = static_cast<std::int32_t>(c.stride / 8);
    constexpr std::int32_t kStep = kPageStep * kPageTokens;
    const std::int32_t low = (extent.low + kStep - 1) / kStep * kPageStep;
    const std::int32_t high = extent.high / kStep * kPageStep;
    first_plain = min(max(low - first_page, 0), pages);
    last_plain = min(max(high - first_page, first_plain), pages);
  }
};

// By one thread: begins to read the digest of plain pages.
__device__ __forceinline__ void load_digest(const DigestWork& w) {
  const std::int32_t count = (w.last_plain - w.first_plain) * w.group;
  const std::uint32_t barrier = shared_address(&w.digest->loaded);
  const std::int32_t to = w.first_plain * w.group;
  const std::int64_t from =
      (static_cast<std::int64_t>(w.head) * w.c.digest.pages + w.first_page + w.first_plain) *
      w.group;
  const auto bytes = static_cast<std::uint32_t>(count);
  barrier_expect(barrier, bytes * static_cast<std::uint32_t>(sizeof(uint4) + sizeof(float)));
  if (count == 0) return;
  copy_bulk(w.maxima + to, w.c.digest.maxima + from * kBoundsPerPage, bytes * 16u, barrier);
  copy_bulk(w.sums + to, w.c.digest.sums + from, bytes * 4u, barrier);
}

// By one warp: reads its part of its row's pages that are not plain, and puts their maxima into the
// digest.
__device__ __forceinline__ Seen read_special(const DigestWork& w) {
  const __half* const row = w.c.row(w.head, w.row);
  auto* const maxima = reinterpret_cast<__half*>(w.maxima);
  const std::int32_t gap = (w.last_plain - w.first_plain) * kPageVectors;
  Seen seen;
  Sums& sums = seen.sums;
#pragma unroll 1
  for (std::int32_t at = w.part * kWarp; at < w.pages * kPageVectors - gap; at += w.parts * kWarp) {
    std::int32_t v = at + lane_id();
    if (v >= w.first_plain * kPageVectors) v += gap;
    uint4 x = all_minus_infinity();
    if (v < w.count) x = load8_below(row, w.extent.total, w.entry(v));
    const __half2 both = __hmax2_nan(__hmax2_nan(as_half2(x.x), as_half2(x.y)),
                                     __hmax2_nan(as_half2(x.z), as_half2(x.w)));
    seen.most = __hmax2_nan(seen.most, both);
    sums.refer_to(fmaxf(sums.norm, larger_of(both) * kLog2E));
    sums.all += weight8(x, sums.norm);
    add_kept8(w.extent, w.entry(v), x, sums);
    float most = largest8(masked(x, ~forced8(w.extent, w.entry(v))));
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
    if (v % 2 != 0 || v >= w.pages * kPageVectors) continue;
    const std::int32_t place = v / kPageVectors * w.group + w.row;
    maxima[place * kBoundsPerPage + v % kPageVectors / 2] = __float2half_rn(most);
  }
  return seen;
}

// Reduces by add() over the lanes of each row; the row's first lane gets the result. Lane l has
// page l / group and row l % group; lanes beyond the last whole page do not count.
template <typename T, typename Add>
__device__ __forceinline__ T over_pages(int group, T x, const Add& add) {
  const int pages = kWarp / group;
  const int page = lane_id() / group;
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const T other = __shfl_down_sync(kAllLanes, x, step * group);
    if (page < step && page + step < pages) x = add(x, other);
  }
  return x;
}

// Calls body(i) for this lane's items of the digest's plain pages, i = page * group + row.
template <typename Body>
__device__ __forceinline__ void for_plain(const DigestWork& w, const Body& body) {
  const int pages = kWarp / w.group;
  const int page = lane_id() / w.group;
  if (page >= pages) return;
#pragma unroll 2
  for (std::int32_t at = w.first_plain + warp_id() * pages + page; at < w.last_plain;
       at += warps() * pages) {
    body(at * w.group + lane_id() % w.group);
  }
}

// Finds every row's maximum and sum over the block's plain pages.
__device__ __forceinline__ void read_plain(const DigestWork& w) {
  barrier_wait(shared_address(&w.digest->loaded), 0);
  Seen seen;
  for_plain(w, [&](std::int32_t i) { seen.add(w.maxima[i], w.sums[i]); });
  RowPart part;
  const float own = larger_of(seen.most);
  part.highest = over_pages(w.group, own < INFINITY ? own : INFINITY,
                            [](float a, float b) { return fmaxf(a, b); });
  const float highest = __shfl_sync(kAllLanes, part.highest, lane_id() % w.group);
  seen.sums.refer_to(fmaxf(kNoNorm, highest * kLog2E));
  part.all = over_pages(w.group, seen.sums.all, [](float a, float b) { return a + b; });
  if (lane_id() < w.group) w.digest->parts[warp_id()][lane_id()] = part;
}

// By one warp: the result for its part of its row, from `seen` and from the plain pages that the
// warps w.part, w.part + w.parts, ... have read.
__device__ __forceinline__ RowPart join_parts(const DigestWork& w, Seen seen) {
  RowPart plain;
  plain.highest = -INFINITY;
  if (lane_id() < warps() && lane_id() % w.parts == w.part) {
    plain = w.digest->parts[lane_id()][w.row];
  }
  const float own = larger_of(seen.most);
  RowPart part;
  part.highest = warp_max(fmaxf(own < INFINITY ? own : INFINITY, plain.highest));
  const float norm = fmaxf(kNoNorm, part.highest * kLog2E);
  seen.sums.refer_to(norm);
  const float factor = exp2_fast(fmaxf(kNoNorm, plain.highest * kLog2E) - norm);
  part.all = warp_sum(fmaf(factor, plain.all, seen.sums.all));
  part.kept = warp_sum(seen.sums.kept);
  part.tail = warp_sum(seen.sums.tail);
  return part;
}

// Reads the digest and sends this block's sums to all blocks.
__device__ __forceinline__ void share_digest(const DigestWork& w) {
  if (thread_id() == 0) load_digest(w);
  Seen seen;
  if (w.row >= 0) seen = read_special(w);
  read_plain(w);
  __syncthreads();
  RowPart part;
  if (w.row >= 0) part = join_parts(w, seen);
  exchange_parts(w, part);
}

}  // namespace sluice::cuda
