// Output of a cluster: a KV head's kept positions in order, and its HeadSelection.
#pragma once

#include <cstdint>

#include "kernels/select/cluster.cuh"

namespace sluice::cuda {

// Lists the block's kept entries in order; returns their count.
template <typename Work>
__device__ __forceinline__ std::int32_t list_kept(const Work& w) {
  // Words of 32 entries.
  const auto* const words = reinterpret_cast<const std::uint32_t*>(w.kept);
  const std::int32_t first = warp_id() * w.each / 4 + lane_id();
  const std::int32_t last =
      min((warp_id() + 1) * w.each, (w.count + kWarp - 1) / kWarp * kWarp) / 4;
  std::uint32_t count = 0;
#pragma unroll 2
  for (std::int32_t i = first; i < last; i += kWarp) {
    count += static_cast<std::uint32_t>(__popc(words[i]));
  }
  count = __reduce_add_sync(kAllLanes, count);
  if (lane_id() == 0) w.shared->warp_counts[warp_id()] = count;
  __syncthreads();
  const std::uint32_t other = lane_id() < warps() ? w.shared->warp_counts[lane_id()] : 0u;
  const std::uint32_t all = __reduce_add_sync(kAllLanes, other);
  std::uint32_t slot = __reduce_add_sync(kAllLanes, lane_id() < warp_id() ? other : 0u);
#pragma unroll 1
  for (std::int32_t i = first; count > 0 && i - lane_id() < last; i += kWarp) {
    std::uint32_t kept = i < last ? words[i] : 0u;
    if (!__any_sync(kAllLanes, kept != 0)) continue;
    const auto own = static_cast<std::uint32_t>(__popc(kept));
    const std::uint32_t up_to = slot + warp_inclusive(own);
    auto* to = w.entries + (up_to - own);
    for (; kept != 0; kept &= kept - 1) {
      *to++ = static_cast<typename Work::Entry>(i * 32 + __ffs(static_cast<int>(kept)) - 1);
    }
    slot = __shfl_sync(kAllLanes, up_to, kWarp - 1);
  }
  __syncthreads();
  return static_cast<std::int32_t>(all);
}

// The position of the block's i-th kept entry.
__device__ __forceinline__ std::int32_t position_of(const auto& w, std::int32_t i) {
  const std::int32_t entry = w.first * 8 + w.entries[i];
  return w.list != nullptr ? w.list[entry] : entry;
}

// Sends all blocks the number of this block's positions and their first and last page, and the
// first block their weight and the number of pages that begin among them.
__device__ __forceinline__ void share_kept(const auto& w, std::int32_t count) {
  const auto page_of = [&](std::int32_t i) { return position_of(w, i) / kPageTokens; };
  if (warp_id() == warps() - 1 && lane_id() < w.cluster.size) {
    uint4 ends = make_uint4(static_cast<std::uint32_t>(count), 0, 0, 0);
    if (count > 0) {
      ends.y = static_cast<std::uint32_t>(page_of(0));
      ends.z = static_cast<std::uint32_t>(page_of(count - 1));
    }
    w.cluster.send(&w.shared->ends[w.cluster.rank], lane_id(), w.barrier(kEnds), ends);
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
      w.cluster.send(&w.shared->weighed[w.cluster.rank][warp_id()], 0, w.barrier(kEnds),
                     make_uint2(__float_as_uint(sum), pages));
    }
  }
  w.receive(kEnds);
}

// The numbers of positions before this block's, and in all blocks.
struct Slots {
  std::int64_t first = 0;
  std::int64_t all = 0;
};

__device__ __forceinline__ Slots slots_of(const auto& w) {
  const auto count =
      static_cast<std::uint32_t>(lane_id() < w.cluster.size ? w.shared->ends[lane_id()].x : 0);
  Slots slots;
  slots.first = __reduce_add_sync(kAllLanes, lane_id() < w.cluster.rank ? count : 0u);
  slots.all = __reduce_add_sync(kAllLanes, count);
  return slots;
}

// By the first block: reports the head's result.
__device__ __forceinline__ void report(const auto& w, std::int64_t count, bool is_cut) {
  if (w.part == 0) {
    float sum = 0.0f;
    for_parts(w, w.row,
              [&](int block, int i) { sum += __uint_as_float(w.shared->weighed[block][i].x); });
    sum = warp_sum(sum) + w.shared->rows[w.row].tail;
    if (lane_id() == 0) {
      w.c.alpha[static_cast<std::int64_t>(w.head) * w.group + w.row] =
          fminf(sum, 1.0f) * w.shared->shares[w.row];
    }
  }
  if (warp_id() != warps() - 1) return;
  std::uint32_t pages = 0;
  for_parts(w, 0, [&](int block, int i) { pages += w.shared->weighed[block][i].y; });
  pages = __reduce_add_sync(kAllLanes, pages);
  // A page may continue in the next block that has positions; it counts once.
  BlockEnds ends;
  if (lane_id() < w.cluster.size) {
    const uint4 x = w.shared->ends[lane_id()];
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

// Writes the kept positions and reports the result.
__device__ __forceinline__ void write_kept(const auto& w, bool is_cut) {
  __syncthreads();
  const std::int32_t count = list_kept(w);
  share_kept(w, count);
  const Slots slots = slots_of(w);
  std::int32_t* const to = w.c.positions + w.head * w.c.capacity + slots.first;
#pragma unroll 1
  for (std::int32_t i = thread_id(); i < count; i += threads()) to[i] = position_of(w, i);
  if (w.cluster.rank == 0) report(w, slots.all, is_cut);
}

__device__ __forceinline__ void report_bad(const auto& w) {
  if (w.cluster.rank == 0) report_none(w.c, w.head, true);
}

}  // namespace sluice::cuda
