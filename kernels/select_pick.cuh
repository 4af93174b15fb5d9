// The heaviest of a KV head's candidates, by one block.
#pragma once

#include <cstdint>

#include "kernels/select_large.cuh"

namespace sluice::cuda {

struct PickShared {
  std::uint32_t bins[kMostKeyBins];
  std::int32_t counts[kWarps];
  std::uint32_t part[kWarp];
  Crossing<std::uint32_t> found;
  KeyCut cut;
  std::int32_t last_tie;
  std::uint32_t pages;
  float alphas[kWarps][kMostGroup];
};

// Calls write(i, rank) for those i in [0, count) that `keeps` wants, in order; returns how many.
// keeps(i) is asked twice.
template <typename Keeps, typename Write>
__device__ std::int32_t compact(std::int32_t count, const Keeps& keeps, const Write& write,
                                PickShared* shared) {
  const auto warp = static_cast<std::int32_t>(threadIdx.x) / kWarp;
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarp;
  const std::int32_t each = (count + kThreads - 1) / kThreads * kWarp;
  const std::int32_t first = min(count, warp * each);
  const std::int32_t last = min(count, first + each);
  std::int32_t own = 0;
  for (std::int32_t i = first + lane; i < last; i += kWarp) own += keeps(i) ? 1 : 0;
  own = __reduce_add_sync(kAllLanes, own);
  __syncthreads();
  if (lane == 0) shared->counts[warp] = own;
  __syncthreads();
  std::int32_t all = 0;
  std::int32_t before = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    before += w < warp ? shared->counts[w] : 0;
    all += shared->counts[w];
  }
  for (std::int32_t at = first; at < last; at += kWarp) {
    const std::int32_t i = at + lane;
    const bool kept = i < last && keeps(i);
    const unsigned kepts = __ballot_sync(kAllLanes, kept);
    if (kept) write(i, before + __popc(kepts & ((1u << lane) - 1u)));
    before += __popc(kepts);
  }
  return all;
}

// The lightest key that is kept, and which of its equals are.
__device__ inline void find_cut(const SelectCall& c, const Candidate* candidates,
                                std::int32_t count, std::int32_t forced, PickShared* shared) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  if (thread == 0) {
    shared->cut = KeyCut();
    shared->cut.forced = static_cast<std::uint32_t>(forced);
    shared->cut.available = static_cast<std::uint32_t>(count);
    begin_cut(c, shared->cut);
    shared->last_tie = -1;
  }
  __syncthreads();
  for (int round = 0; round < key_rounds(c.group) && shared->cut.settled == 0; ++round) {
    const KeyRound view(c.group, round, shared->cut);
    const std::int32_t bins = key_bins(c.group, round);
    for (std::int32_t i = thread; i < bins; i += kThreads) shared->bins[i] = 0;
    __syncthreads();
#pragma unroll 4
    for (std::int32_t i = thread; i < count; i += kThreads) {
      const std::uint32_t key = candidates[i].key;
      if (view.concerns(key)) atomicAdd(shared->bins + view.bin(key), 1u);
    }
    __syncthreads();
    const auto bin_of = [&](std::int32_t i) { return shared->bins[bins - 1 - i]; };
    find_crossing(bin_of, bins, shared->cut.ties, &shared->found, shared->part);
    if (thread == 0) {
      advance_cut(shared->cut, c.group, round, shared->found, bin_of(shared->found.bin));
    }
    __syncthreads();
  }
  const KeyCut cut = shared->cut;
  if (cut.ties == 0) return;
  compact(
      count, [&](std::int32_t i) { return candidates[i].key == cut.key; },
      [&](std::int32_t i, std::int32_t rank) {
        if (rank + 1 == static_cast<std::int32_t>(cut.ties)) shared->last_tie = i;
      },
      shared);
  __syncthreads();
}

// Weights of the entries in the answer, in an order that depends on nothing else.
__device__ inline void write_alphas(const SelectCall& c, std::int32_t head, const RowInfo* rows,
                                    std::int32_t count, PickShared* shared) {
  const auto warp = static_cast<std::int32_t>(threadIdx.x) / kWarp;
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarp;
  const std::int32_t* const entries = c.positions + head * c.capacity;
  const int parts = max(1, kWarps / c.group);
  for (int q = warp; q < c.group * parts; q += kWarps) {
    const int g = q % c.group;
    const __half* const row = c.row(head, g);
    float sum = 0.0f;
#pragma unroll 4
    for (std::int32_t i = q / c.group * kWarp + lane; i < count; i += parts * kWarp) {
      sum += weight_of(row[entries[i]], rows[g]);
    }
    sum = warp_sum(sum);
    if (lane == 0) shared->alphas[q / c.group][g] = sum;
  }
  __syncthreads();
  const auto g = static_cast<std::int32_t>(threadIdx.x);
  if (g >= c.group) return;
  float sum = rows[g].tail;
  for (int part = 0; part < parts; ++part) sum += shared->alphas[part][g];
  c.alpha[static_cast<std::int64_t>(head) * c.group + g] = fminf(sum, 1.0f) * rows[g].share;
}

// Replaces the entries in the answer by their positions; returns their pages.
__device__ inline std::uint32_t finish_positions(const SelectCall& c, std::int32_t head,
                                                 std::int32_t count, PickShared* shared) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  std::int32_t* const positions = c.positions + head * c.capacity;
  const std::int32_t* const list = c.head_list(head);
  if (list != nullptr) {
    for (std::int32_t i = thread; i < count; i += kThreads) positions[i] = list[positions[i]];
  }
  if (thread == 0) shared->pages = 0;
  __syncthreads();
  std::uint32_t pages = 0;
  for (std::int32_t i = thread; i < count; i += kThreads) {
    if (i == 0 || positions[i] / kPageTokens != positions[i - 1] / kPageTokens) ++pages;
  }
  pages = __reduce_add_sync(kAllLanes, pages);
  if (thread % kWarp == 0 && pages != 0) atomicAdd(&shared->pages, pages);
  __syncthreads();
  return shared->pages;
}

// Writes what a KV head keeps: what is always kept, and the heaviest of the candidates, which are
// in order.
__device__ inline void pick(const SelectCall& c, std::int32_t head, const Extent& extent,
                            const RowInfo* rows, const Candidate* candidates, std::int32_t count,
                            PickShared* shared) {
  const std::int32_t* const list = c.head_list(head);
  std::int32_t* const to = c.positions + head * c.capacity;
  const auto allowed = [&](std::int32_t i) {
    return c.eligible == nullptr || c.eligible[list != nullptr ? list[i] : i] != 0;
  };
  const auto allowed_above = [&](std::int32_t i) { return allowed(extent.high + i); };
  const auto put = [&](std::int32_t at, std::int32_t entry) {
    if (at < c.capacity) to[at] = entry;
  };
  const auto nothing = [](std::int32_t, std::int32_t) {};
  const std::int32_t below = compact(
      extent.low, allowed, [&](std::int32_t i, std::int32_t rank) { put(rank, i); }, shared);
  const std::int32_t above = compact(extent.emit - extent.high, allowed_above, nothing, shared);
  find_cut(c, candidates, count, below + above, shared);
  const KeyCut cut = shared->cut;
  const std::int32_t last_tie = shared->last_tie;
  const std::int32_t kept = compact(
      count,
      [&](std::int32_t i) {
        const std::uint32_t key = candidates[i].key;
        return key > cut.key || (key == cut.key && i <= last_tie);
      },
      [&](std::int32_t i, std::int32_t rank) { put(below + rank, candidates[i].entry); }, shared);
  compact(
      extent.emit - extent.high, allowed_above,
      [&](std::int32_t i, std::int32_t rank) { put(below + kept + rank, extent.high + i); },
      shared);
  __syncthreads();
  const std::int32_t wanted = below + kept + above;
  const auto written = static_cast<std::int32_t>(min(std::int64_t{wanted}, c.capacity));
  write_alphas(c, head, rows, written, shared);
  __syncthreads();
  HeadSelection result;
  result.pages = static_cast<std::int32_t>(finish_positions(c, head, written, shared));
  result.count = written;
  result.cut = cut.cut != 0 || wanted > written ? 1 : 0;
  if (threadIdx.x == 0) c.heads[head] = result;
}

}  // namespace sluice::cuda
