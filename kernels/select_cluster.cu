#include <algorithm>
#include <cmath>

#include "kernels/error.h"
#include "kernels/select_cluster_cut.cuh"

namespace sluice::cuda {
namespace {

constexpr int kPortableBlocks = 8;  // of a cluster, on any device that has clusters

// Lists what is kept of the block, in order; returns how much that is.
__device__ __forceinline__ std::int32_t list_kept(const ClusterWork& w) {
  // Of 32 entries each.
  const auto* const words = reinterpret_cast<const std::uint32_t*>(w.kept);
  const std::int32_t first = warp_id() * w.each / 4 + lane_id();
  const std::int32_t last =
      min((warp_id() + 1) * w.each, (w.count + kWarp - 1) / kWarp * kWarp) / 4;
  std::uint32_t count = 0;
  for (std::int32_t i = first; i < last; i += kWarp) {
    count += static_cast<std::uint32_t>(__popc(words[i]));
  }
  count = __reduce_add_sync(kAllLanes, count);
  if (lane_id() == 0) w.shared->warp_counts[warp_id()] = count;
  __syncthreads();
  const std::uint32_t other = lane_id() < warps() ? w.shared->warp_counts[lane_id()] : 0u;
  const std::uint32_t all = __reduce_add_sync(kAllLanes, other);
  std::uint32_t slot = __reduce_add_sync(kAllLanes, lane_id() < warp_id() ? other : 0u);
  for (std::int32_t i = first; count > 0 && i - lane_id() < last; i += kWarp) {
    std::uint32_t kept = i < last ? words[i] : 0u;
    const auto own = static_cast<std::uint32_t>(__popc(kept));
    const std::uint32_t up_to = slot + warp_inclusive(own);
    std::uint16_t* to = w.entries + (up_to - own);
    for (; kept != 0; kept &= kept - 1) {
      *to++ = static_cast<std::uint16_t>(i * 32 + __ffs(static_cast<int>(kept)) - 1);
    }
    slot = __shfl_sync(kAllLanes, up_to, kWarp - 1);
  }
  __syncthreads();
  return static_cast<std::int32_t>(all);
}

// The position of the block's i-th kept entry.
__device__ __forceinline__ std::int32_t position_of(const ClusterWork& w, std::int32_t i) {
  const std::int32_t entry = w.first * 8 + w.entries[i];
  return w.list != nullptr ? w.list[entry] : entry;
}

// Tells all blocks how many positions this one has, and the first block what they weigh and how
// many pages begin among them.
__device__ __forceinline__ void share_kept(const ClusterWork& w, std::int32_t count, int turn) {
  const int exchange = turn == 0 ? kEnds : kLaterEnds;
  const auto page_of = [&](std::int32_t i) { return position_of(w, i) / kPageTokens; };
  if (warp_id() == warps() - 1 && lane_id() < w.cluster.size) {
    uint4 ends = make_uint4(static_cast<std::uint32_t>(count), 0, 0, 0);
    if (count > 0) {
      ends.y = static_cast<std::uint32_t>(page_of(0));
      ends.z = static_cast<std::uint32_t>(page_of(count - 1));
    }
    w.cluster.send(&w.shared->ends[turn][w.cluster.rank], lane_id(), w.barrier(exchange), ends);
  }
  if (w.row >= 0) {
    const RowInfo info = w.shared->rows[w.row];
    const auto* const row = reinterpret_cast<const __half*>(w.rows + w.row * w.capacity);
    float sum = 0.0f;
    std::uint32_t pages = 0;
    for (std::int32_t i = w.part * kWarp + lane_id(); i < count; i += w.parts * kWarp) {
      sum += weight_of(row[w.entries[i]], info);
      if (w.row == 0 && (i == 0 || page_of(i) != page_of(i - 1))) ++pages;
    }
    sum = warp_sum(sum);
    pages = __reduce_add_sync(kAllLanes, pages);
    if (lane_id() == 0) {
      w.cluster.send(&w.shared->weighed[turn][w.cluster.rank][warp_id()], 0, w.barrier(exchange),
                     make_uint2(__float_as_uint(sum), pages));
    }
  }
  w.receive(exchange);
}

// How many positions there are before this block's, and in all.
struct Slots {
  std::int64_t first = 0;
  std::int64_t all = 0;
};

__device__ __forceinline__ Slots slots_of(const ClusterWork& w) {
  const auto count =
      static_cast<std::uint32_t>(lane_id() < w.cluster.size ? w.shared->ends[0][lane_id()].x : 0);
  Slots slots;
  slots.first = __reduce_add_sync(kAllLanes, lane_id() < w.cluster.rank ? count : 0u);
  slots.all = __reduce_add_sync(kAllLanes, count);
  return slots;
}

// What became of the head, by the first block.
__device__ __forceinline__ void report(const ClusterWork& w, std::int64_t count, int turn,
                                       bool is_cut) {
  if (w.part == 0) {
    float sum = 0.0f;
    for_parts(w, w.row, [&](int block, int i) {
      sum += __uint_as_float(w.shared->weighed[turn][block][i].x);
    });
    sum = warp_sum(sum) + w.shared->rows[w.row].tail;
    if (lane_id() == 0) {
      w.c.alpha[static_cast<std::int64_t>(w.head) * w.group + w.row] =
          fminf(sum, 1.0f) * w.shared->shares[w.row];
    }
  }
  if (warp_id() != warps() - 1) return;
  std::uint32_t pages = 0;
  for_parts(w, 0, [&](int block, int i) { pages += w.shared->weighed[turn][block][i].y; });
  pages = __reduce_add_sync(kAllLanes, pages);
  // A page may go on in the next block that has any.
  BlockEnds ends;
  if (lane_id() < w.cluster.size) {
    const uint4 x = w.shared->ends[turn][lane_id()];
    ends = {static_cast<std::int32_t>(x.x), static_cast<std::int32_t>(x.y),
            static_cast<std::int32_t>(x.z)};
  }
  const unsigned some = __ballot_sync(kAllLanes, ends.count > 0);
  const unsigned before = some & ((1u << lane_id()) - 1u);
  const std::int32_t last =
      __shfl_sync(kAllLanes, ends.last, before != 0 ? 31 - __clz(static_cast<int>(before)) : 0);
  const bool goes_on = before != 0 && ends.count > 0 && last == ends.first;
  const int shared_pages = __popc(__ballot_sync(kAllLanes, goes_on));
  if (lane_id() != 0) return;
  HeadSelection result;
  result.count = static_cast<std::int32_t>(count);
  result.cut = is_cut ? 1 : 0;
  result.pages = static_cast<std::int32_t>(pages) - shared_pages;
  w.c.heads[w.head] = result;
}

// Writes what is kept.
__device__ __forceinline__ void write_kept(const ClusterWork& w, bool is_cut) {
  std::int32_t count = list_kept(w);
  int turn = 0;
  share_kept(w, count, turn);
  Slots slots = slots_of(w);
  if (slots.all > w.c.capacity) {
    is_cut = true;
    slots.all = w.c.capacity;
    count = static_cast<std::int32_t>(
        max(std::int64_t{0}, min(std::int64_t{count}, w.c.capacity - slots.first)));
    turn = 1;
    share_kept(w, count, turn);
  }
  std::int32_t* const to = w.c.positions + w.head * w.c.capacity + slots.first;
  for (std::int32_t i = thread_id(); i < count; i += threads()) to[i] = position_of(w, i);
  if (w.cluster.rank == 0) report(w, slots.all, turn, is_cut);
}

__device__ __forceinline__ void report_bad(const ClusterWork& w) {
  if (w.cluster.rank != 0) return;
  if (thread_id() < w.group) {
    w.c.alpha[static_cast<std::int64_t>(w.head) * w.group + thread_id()] = 0.0f;
  }
  if (thread_id() != 0) return;
  HeadSelection result;
  result.bad = 1;
  w.c.heads[w.head] = result;
}

__device__ __forceinline__ void select_head(const ClusterWork& w) {
  share_sums(w);
  if (!join_sums(w)) return report_bad(w);
  if (w.row_bins > 0 || w.has_keys) {
    if (thread_id() == 0) expect_bins(w);
    count_rows(w);
    weigh_bins(w);
    __syncthreads();
    find_thresholds(w);
  }
  bool is_cut = false;
  if (w.has_keys) {
    is_cut = mark_heaviest(w);
  } else {
    mark_reached(w);
  }
  __syncthreads();
  write_kept(w, is_cut);
}

__device__ __forceinline__ void set_zero(const ClusterWork& w) {
  const uint4 zero = make_uint4(0, 0, 0, 0);
  auto* const bins = reinterpret_cast<uint4*>(w.bins);
  for (int i = thread_id(); i < w.group * w.row_bins / 4; i += threads()) bins[i] = zero;
  if (thread_id() < 4) w.shared->counts[thread_id()] = 0;
  if (!w.has_keys) return;
  if (thread_id() == 0) w.shared->picked_count = 0;
  if (thread_id() < kMostPicked) w.shared->picked[thread_id()] = 0;
  auto* const digits = reinterpret_cast<uint4*>(w.shared->digits);
  for (int i = thread_id(); i < 2 * kDigits / 4; i += threads()) digits[i] = zero;
  auto* const sketch = reinterpret_cast<uint4*>(w.shared->sketch);
  for (int i = thread_id(); i < kMostRows * kSketchBins / 8; i += threads()) sketch[i] = zero;
}

// By one thread: prepares all exchanges, and expects what is known of them; not all of them need
// take place.
__device__ __forceinline__ void set_up_exchanges(const ClusterWork& w) {
  for (int i = 0; i < kExchanges; ++i) barrier_init(w.barrier(i), 1);
  barrier_init_fence();
  const auto blocks = static_cast<std::uint32_t>(w.cluster.size);
  const auto units = static_cast<std::uint32_t>(w.parts * w.group) * blocks;  // warps with rows
  w.expect(kSums, units * sizeof(RowPart));
  w.expect(kCounts, blocks * sizeof(uint4));
  w.expect(kTies, blocks * sizeof(std::uint32_t));
  const std::uint32_t ends =
      blocks * sizeof(uint4) + (w.cluster.rank == 0 ? units * sizeof(uint2) : 0);
  w.expect(kEnds, ends);
  w.expect(kLaterEnds, ends);
}

__device__ __forceinline__ void select_in_cluster(const ClusterCall& call, std::byte* memory) {
  ClusterWork work(call, memory);
  ClusterShared* const shared = work.shared;
  if (thread_id() == 0) set_up_exchanges(work);
  set_zero(work);
  __syncthreads();
  work.cluster.arrive();
  wait_for_kernel_before();
  allow_next_kernel();
  if (warp_id() == 0) {
    const Extent extent = extent_of(work.c, work.head);
    if (lane_id() == 0) shared->extent = extent;
  }
  if (thread_id() < work.group) {
    const float* const shares = work.c.share;
    const std::int64_t row = static_cast<std::int64_t>(work.head) * work.group + thread_id();
    shared->shares[thread_id()] =
        shares == nullptr ? 1.0f : *static_cast<const volatile float*>(shares + row);
  }
  __syncthreads();
  work.share_out(shared->extent);
  select_head(work);
}

__global__ void __launch_bounds__(kMostWarps* kWarp, 1)
    select_cluster(const __grid_constant__ ClusterCall call) {
  extern __shared__ uint4 memory[];
  // Clusters and bulk copies came together.
  if constexpr (kBulkCopies) select_in_cluster(call, reinterpret_cast<std::byte*>(memory));
}

std::uint32_t aligned(std::int64_t bytes) {
  return static_cast<std::uint32_t>((bytes + 15) / 16 * 16);
}

ClusterCall cluster_call(const SelectCall& c, int blocks) {
  ClusterCall l;
  l.call = c;
  l.has_keys = !c.is_top_p || c.keep < c.entries;
  const std::int32_t vectors = (c.entries + 7) / 8;
  l.capacity = (vectors + 8 * blocks - 1) / (8 * blocks) * 8;
  if (c.is_top_p && c.p < 1.0f) {
    const auto bins = static_cast<std::int32_t>(std::ceil(c.bin_range * kBinsPerNat)) + 4;
    l.bins = (bins + kCoarse - 1) / kCoarse * kCoarse;
  }
  const std::int64_t keys = l.has_keys ? kMostListed : 0;
  const int marks = (l.capacity + kWarp - 1) / kWarp * kWarp;
  const int slots = blocks * c.group;  // of what all blocks send of every row
  const int kinds = (l.bins > 0 ? 1 : 0) + (l.has_keys ? 1 : 0);
  l.bins_at = aligned(std::int64_t{sizeof(ClusterShared)} +
                      std::int64_t{l.capacity} * c.group * std::int64_t{sizeof(uint4)});
  l.kept_at = l.bins_at + aligned(4 * std::max(std::int64_t{l.bins} * c.group, keys));
  l.scratch_at = l.kept_at + aligned((l.has_keys ? 2 : 1) * marks);
  l.bytes = l.scratch_at +
            aligned(std::max(ClusterScratch::bytes(slots) + std::int64_t{kinds} * slots * kWarp * 4,
                             std::int64_t{l.capacity} * 16));
  return l;
}

bool fits(const SelectCall& c, int blocks, const DeviceLimits& device) {
  const ClusterCall l = cluster_call(c, blocks);
  return l.capacity * 8 <= kMassedEntries && l.bins <= kWarp * kCoarse &&
         l.bytes <= static_cast<std::uint32_t>(device.shared_bytes);
}

// A cluster lies within a part of the device. Hopper's parts have up to 18 multiprocessors where
// the device has more than a hundred (NVIDIA 2022, "H100 Tensor Core GPU Architecture"); of smaller
// devices and newer kinds only the portable size is certain.
int most_blocks_of(const DeviceLimits& device) {
  constexpr int kFullHopper = 114;
  const bool is_large = device.capability == 90 && device.multiprocessors >= kFullHopper;
  return is_large ? kMostBlocks : kPortableBlocks;
}

// Blocks of each KV head, or 0: it does not fit. As many as are worth it; fewer take longer to look
// at their entries, more to hear of each other.
int blocks_of(const SelectCall& c, const DeviceLimits& device) {
  constexpr std::int64_t kWorth = 16384;  // logits of a block
  // Parts of the device have a few multiprocessors to spare.
  const std::int64_t most = std::min<std::int64_t>(
      device.multiprocessors * 7 / 8 / std::max(c.kv_heads, 1), most_blocks_of(device));
  const std::int64_t work = std::int64_t{c.entries} * c.group;
  int found = 0;
  for (int blocks = 4; blocks <= most; blocks *= 2) {
    if (!fits(c, blocks, device)) continue;
    found = blocks;
    if (work <= blocks * kWorth) break;
  }
  return found;
}

}  // namespace

bool fits_cluster(const SelectCall& c, const DeviceLimits& device) {
  if (device.capability < 90 || c.group > kMostRows) return false;
  // With more to keep, candidates would mostly be too many to list.
  const bool is_cut = !c.is_top_p || c.keep < c.entries;
  if (is_cut && std::int64_t{c.keep} * c.group * 2 > kMostListed) return false;
  return blocks_of(c, device) > 0;
}

void run_cluster(const SelectCall& c, const Launch& launch) {
  const int blocks = blocks_of(c, *launch.device);
  const ClusterCall call = cluster_call(c, blocks);
  const auto set = [](cudaFuncAttribute attribute, int value) {
    require(cudaFuncSetAttribute(select_cluster, attribute, value), "select_cluster");
  };
  set(cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(call.bytes));
  // Always the same, for calls that were recorded before start later.
  set(cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  const int threads = call.capacity * c.group <= 1024 ? 256 : kMostWarps * kWarp;
  launch_early_clusters("select_cluster", select_cluster,
                        dim3(static_cast<unsigned>(c.kv_heads * blocks)), threads, call.bytes,
                        blocks, launch, call);
}

}  // namespace sluice::cuda
