// The sectors that reach the bounds, and the candidates in them.
#pragma once

#include <cstdint>

#include "kernels/select/digest_bounds.cuh"

namespace sluice::cuda {

// Returns true if a sector may hold candidates: its maxima weigh enough together, and some query
// head wants one of them.
__device__ __forceinline__ bool matters(const DigestWork& w, std::int32_t sector) {
  const __half* const maxima = reinterpret_cast<const __half*>(w.maxima) +
                               sector / kBoundsPerPage * w.group * kBoundsPerPage +
                               sector % kBoundsPerPage;
  float weight = 0.0f;
  bool is_wanted = false;
#pragma unroll 4
  for (int g = 0; g < w.group; ++g) {
    const __half x = maxima[g * kBoundsPerPage];
    const RowInfo& row = w.shared->rows[g];
    weight += weight_of(x, row);
    is_wanted = is_wanted || __hge(x, __ushort_as_half(row.threshold));
  }
  return weight >= w.digest->weight && is_wanted;
}

// Finds the sectors of this thread's pages, threads() apart, that reach some query head's bound: a
// byte for each page. Adds their number to counts[1].
__device__ __forceinline__ std::uint64_t find_near(const DigestWork& w) {
  std::uint64_t near = 0;
#pragma unroll 1
  for (int round = 0; round * threads() < w.pages; ++round) {
    const std::int32_t page = round * threads() + thread_id();
    if (page >= w.pages) break;
    std::uint32_t sectors = 0;
    for_rows(w, page,
             [&](int g, const uint4& x) { sectors |= reaching(x, twice(w.shared->leasts[g])); });
    near |= std::uint64_t{sectors} << (kBoundsPerPage * round);
  }
  const auto own = static_cast<std::uint32_t>(__popcll(near));
  const std::uint32_t all = __reduce_add_sync(kAllLanes, own);
  if (lane_id() == 0 && all > 0) atomicAdd(&w.shared->counts[1], all);
  return near;
}

// Queues every `step`-th of the sectors that a warp has found near in a round, unless it holds no
// candidates, and prefetches the first kSampled.
__device__ __forceinline__ void queue_sectors(const DigestWork& w, int round, std::uint64_t near,
                                              int step) {
  std::uint32_t* const list = w.bins + warp_id() * (kWarp * kBoundsPerPage);
  const auto sectors = static_cast<std::uint32_t>(near >> (kBoundsPerPage * round)) & 0xffu;
  const auto own = static_cast<std::uint32_t>(__popc(sectors));
  const std::uint32_t up_to = warp_inclusive(own);
  const auto count = static_cast<int>(__shfl_sync(kAllLanes, up_to, kWarp - 1));
  const auto page = static_cast<std::uint32_t>(round * threads() + thread_id());
  std::uint32_t* to = list + (up_to - own);
#pragma unroll 1
  for (std::uint32_t bits = sectors; bits != 0; bits &= bits - 1) {
    *to++ = page * kBoundsPerPage + static_cast<std::uint32_t>(__ffs(static_cast<int>(bits)) - 1);
  }
  __syncwarp();
#pragma unroll 1
  for (int first = step / 2; first < count; first += kWarp * step) {
    const int i = first + lane_id() * step;
    const auto sector = static_cast<std::int32_t>(list[min(i, count - 1)]);
    const bool is_one = i < count && matters(w, sector);
    const unsigned all = __ballot_sync(kAllLanes, is_one);
    std::uint32_t slot = 0;
    if (lane_id() == 0 && all != 0) {
      slot = atomicAdd(&w.shared->counts[2], static_cast<std::uint32_t>(__popc(all)));
    }
    slot = __shfl_sync(kAllLanes, slot, 0) + __popc(all & ((1u << lane_id()) - 1u));
    if (!is_one || slot >= kMostNear) continue;
    w.scratch->entries.near[slot] = static_cast<std::uint32_t>(sector);
    if (slot >= kSampled) continue;  // beyond that, enough reads are in flight together
#pragma unroll 4
    for (int g = 0; g < w.group; ++g) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(w.rows + g * w.capacity + sector * 2));
    }
  }
  __syncwarp();
}

// Adds up the shares of a row in pages where no entry reaches its bound.
__device__ __forceinline__ void weigh_below(const DigestWork& w) {
  const int g = lane_id() % w.group;
  const RowInfo row = w.shared->rows[g];
  const float least = __half2float(__ushort_as_half(w.shared->leasts[g]));
  float own = 0.0f;
  for_plain(w, [&](std::int32_t i) {
    const float most = largest8(w.maxima[i]);
    // The sums refer to the rounded product.
    if (most < least) own = fmaf(w.sums[i], exp2_fast(__fmul_rn(most, kLog2E) - row.norm), own);
  });
  const auto share = static_cast<std::uint32_t>(own * row.scale * kShares);
  const std::uint32_t sum =
      over_pages(w.group, share, [](std::uint32_t a, std::uint32_t b) { return a + b; });
  if (lane_id() < w.group) atomicAdd(&w.digest->own_below[g], sum);
}

// Lists a candidate, if there is room; counts it in any case.
__device__ __forceinline__ void list_one(const DigestWork& w, std::uint32_t entry,
                                         std::uint32_t grade) {
  const std::uint32_t slot = atomicAdd(&w.shared->counts[0], 1u);
  if (slot >= kMostListedOwn) return;
  w.shared->own_grades[slot] = grade;
  w.scratch->entries.own[slot] = entry;
}

// Lists the candidates in few sectors, at most two entries per thread. Separate from
// list_many(), because code that runs once is faster the shorter it is.
__device__ __forceinline__ void list_few(const DigestWork& w, std::uint32_t sectors) {
  constexpr int kPairs = kBoundTokens / 2;
  const auto* const pairs = reinterpret_cast<const std::uint32_t*>(w.rows);
  const auto i = static_cast<std::uint32_t>(thread_id());
  if (i >= sectors * kPairs) return;
  const auto pair =
      static_cast<std::int32_t>(w.scratch->entries.near[i / kPairs] * kPairs + i % kPairs);
  const std::int32_t entry = w.first * 8 + pair * 2;
  float low = 0.0f;
  float high = 0.0f;
  std::uint32_t wanted = 0;
  std::uint32_t word = 0;
#pragma unroll 4
  for (int g = 0; g < w.group; ++g) {
    word = pairs[g * w.capacity * 4 + pair];
    const RowInfo& row = w.shared->rows[g];
    wanted |= __hge2_mask(as_half2(word), twice(row.threshold));
    // Computed as all other grades, so that they compare.
    const float2 x = __half22float2(as_half2(word));
    low = fmaf(row.scale, exp2_fast(fmaf(x.x, kLog2E, -row.norm)), low);
    high = fmaf(row.scale, exp2_fast(fmaf(x.y, kLog2E, -row.norm)), high);
  }
  std::uint32_t grades[2] = {grade_of_weight(low), grade_of_weight(high)};
  if (w.group == 1) {
    const std::uint32_t numbers = ordered2(word);
    grades[0] = numbers << 16;
    grades[1] = numbers & 0xffff0000u;
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (entry + e < w.extent.low || entry + e >= w.extent.high) continue;
    if (grades[e] < w.shared->bound_grade || (wanted >> (16 * e) & 1u) == 0) continue;
    list_one(w, static_cast<std::uint32_t>(pair * 2 + e), grades[e]);
  }
}

// Lists the candidates in any number of sectors, or counts their grades if they are a sample's.
__device__ __forceinline__ void list_many(const DigestWork& w, std::uint32_t sectors,
                                          bool is_sample) {
  constexpr std::uint32_t kHalves = kBoundTokens / 8;
  std::uint32_t counted = 0;
#pragma unroll 1
  for (auto i = static_cast<std::uint32_t>(thread_id()); i < sectors * kHalves;
       i += static_cast<std::uint32_t>(threads())) {
    const std::uint32_t v = w.scratch->entries.near[i / kHalves] * kHalves + i % kHalves;
    std::uint32_t grades[8];
    grades_of(w, static_cast<std::int32_t>(v), grades);
#pragma unroll
    for (std::uint32_t e = 0; e < 8; ++e) {
      if (grades[e] < w.shared->bound_grade) continue;
      ++counted;
      if (is_sample) {
        count_grade(w, grades[e]);
      } else {
        list_one(w, v * 8 + e, grades[e]);
      }
    }
  }
  if (!is_sample) return;
  counted = __reduce_add_sync(kAllLanes, counted);
  if (lane_id() == 0) atomicAdd(&w.shared->counts[0], counted);
}

// Lists the candidates in the queued sectors, or counts their grades if they are a sample's.
__device__ __forceinline__ void list_queued(const DigestWork& w, bool is_sample) {
  const std::uint32_t sectors = min(w.shared->counts[2], static_cast<std::uint32_t>(kMostNear));
  if (!is_sample && sectors * (kBoundTokens / 2) <= static_cast<std::uint32_t>(threads())) {
    list_few(w, sectors);
  } else {
    list_many(w, sectors, is_sample);
  }
}

// Marks the block's part of entries [first, last) of the head as kept.
__device__ __forceinline__ void mark_range(const DigestWork& w, std::int32_t first,
                                           std::int32_t last) {
  auto* const words = reinterpret_cast<std::uint32_t*>(w.kept);
  const std::int32_t from = max(first - w.first * 8, 0);
  const std::int32_t to = min(last - w.first * 8, w.count * 8);
#pragma unroll 1
  for (std::int32_t i = from / 32 + thread_id(); i * 32 < to; i += threads()) {
    const std::uint32_t above = ~0u << max(from - i * 32, 0);
    const std::int32_t left = to - i * 32;
    words[i] |= left < 32 ? above & ((1u << left) - 1u) : above;
  }
}

// Clears the counts and the queue of a sample.
__device__ __forceinline__ void forget_sample(const DigestWork& w) {
  __syncthreads();
  if (thread_id() == 0) w.shared->counts[0] = w.shared->counts[2] = 0;
  for (int i = thread_id(); i < kDigits; i += threads()) w.shared->digits[i] = 0;
  __syncthreads();
}

// Lists candidates and returns false; or counts only those in a sample of sectors, for a better
// bound, and returns true. It takes the sample only if it may and there are many sectors, and goes
// back to listing if the sample shows few candidates.
__device__ __forceinline__ bool list_near_sectors(const DigestWork& w, bool may_sample) {
  static_assert(kMostWarps * kWarp * kBoundsPerPage <= kMostNear);  // a round's sectors fit
  const std::uint64_t near = find_near(w);
  __syncthreads();
  const auto all = static_cast<int>(w.shared->counts[1]);
  // If many entries are kept, many sectors do not mean that the bound is bad.
  const int sample = max(kSampled, 16 * static_cast<int>(part_of_kept(w)));
  // A sample that was not needed costs about as much as reading some more sectors.
  bool is_sample = may_sample && all > 8 * sample;
  const int rounds = (w.pages + threads() - 1) / threads();
#pragma unroll 1
  for (int round = 0; round < rounds;) {
    const int step = is_sample ? all / sample : 1;
    queue_sectors(w, round++, near, step);
    if ((is_sample || all <= kMostNear) && round < rounds) continue;
    __syncthreads();
    bool are_few = is_sample && static_cast<int>(w.shared->counts[2]) * step <= 2 * sample;
    if (!are_few) list_queued(w, is_sample);
    __syncthreads();
    if (is_sample) {
      const std::uint32_t found = w.shared->counts[0] * static_cast<std::uint32_t>(step);
      are_few = are_few || found <= kMostListed / static_cast<std::uint32_t>(w.cluster.size);
      if (!are_few) return true;
      forget_sample(w);
      is_sample = false;
      round = 0;
    } else if (round < rounds) {
      if (thread_id() == 0) w.shared->counts[2] = 0;
      __syncthreads();
    }
  }
  return false;
}

// Lists candidates and sends their number to all blocks; returns false if thresholds are not known
// and top_p may not want all candidates.
__device__ __forceinline__ bool list_by_digest(const DigestWork& w, int turn, bool may_sample) {
  const bool is_sure = !w.c.is_top_p || turn > 0;
  const bool is_sample = list_near_sectors(w, may_sample);
  if (!is_sure) weigh_below(w);
  __syncthreads();
  const uint2 reached = grades_reached(w, is_sample);
  if (thread_id() < w.cluster.size) {
    const bool is_long = is_sample || w.shared->counts[0] > kMostListedOwn;
    const std::uint32_t listed = is_long ? kTooMany : w.shared->counts[0];
    w.cluster.send(&w.shared->counted[w.cluster.rank], thread_id(), w.barrier(kListed + turn),
                   make_uint2(listed, listed));
    w.cluster.send(&w.digest->reached[w.cluster.rank], thread_id(), w.barrier(kListed + turn),
                   reached);
    auto* const own = reinterpret_cast<const uint4*>(w.digest->own_below);
    auto* const to = reinterpret_cast<uint4*>(w.digest->below[w.cluster.rank]);
    for (int i = 0; i < kMostRows / 4; ++i) {
      w.cluster.send(to + i, thread_id(), w.barrier(kListed + turn), own[i]);
    }
  }
  w.receive(kListed + turn);
  if (is_sure) return true;
  // A margin, because rounding may have added weight.
  const float rest = (1.0f - w.c.p) * (1.0f + 0x1p-12f) + 0x1p-16f;
  const auto enough = static_cast<std::uint32_t>(rest * kShares);
  bool all = true;
#pragma unroll 1
  for (int g = 0; g < w.group; ++g) {
    const std::uint32_t own = lane_id() < w.cluster.size ? w.digest->below[lane_id()][g] : 0u;
    all = __reduce_add_sync(kAllLanes, own) > enough && all;
  }
  return all;
}

}  // namespace sluice::cuda
