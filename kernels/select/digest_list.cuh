// Which entries may be kept, by the digest that a cluster holds: bounds of their weights, the
// sectors that reach them, and what is found there.
#pragma once

#include <cstdint>

#include "kernels/select/digest.cuh"

namespace sluice::cuda {

// The logarithm to base 2 of the largest weight that there is, by every warp.
__device__ __forceinline__ float heaviest_of(const DigestWork& w) {
  const RowState& state = w.shared->states[min(lane_id(), w.group - 1)];
  return warp_max(fmaf(state.highest, kLog2E, -state.info.norm));
}

// Calls body(g, maxima) for a page's rows, in an order in which neighbouring pages are found in
// different banks of memory.
template <typename Body>
__device__ __forceinline__ void for_rows(const DigestWork& w, std::int32_t page, const Body& body) {
  int g = lane_id() * w.group / 8 % w.group;
#pragma unroll 4
  for (int i = 0; i < w.group; ++i) {
    body(g, w.maxima[page * w.group + g]);
    g = g + 1 == w.group ? 0 : g + 1;
  }
}

// Counts two distances, f16 below zero.
__device__ __forceinline__ void count_pair(std::uint32_t* counts, __half2 below) {
  const std::uint32_t distances = word_of_half2(__hsub2(as_half2(kFours), below));
  const std::uint32_t low = ((distances & 0xffffu) - (kFours & 0xffffu)) >> kEdgeShift;
  const std::uint32_t high = ((distances >> 16) - (kFours >> 16)) >> kEdgeShift;
  if (low < kSectorBins) atomicAdd(counts + low, 1u);
  if (high < kSectorBins) atomicAdd(counts + high, 1u);
}

// The largest weight that some query head gives an entry of a page, by how far it lies below the
// heaviest; of half of its sectors and of the others.
__device__ __forceinline__ __half2 heaviest_of_page(const DigestWork& w, std::int32_t page) {
  __half2 most = as_half2(kMinusInfinities);
  for_rows(w, page, [&](int g, const uint4& x) {
    const __half2 own =
        __hmax2(__hmax2(as_half2(x.x), as_half2(x.y)), __hmax2(as_half2(x.z), as_half2(x.w)));
    most = __hmax2(most, __hsub2(own, as_half2(w.digest->references[g])));
  });
  return most;
}

// The same of every sector, of what the query heads want.
__device__ __forceinline__ void count_page(const DigestWork& w, std::int32_t page,
                                           std::uint32_t* counts) {
  __half2 most[4];
#pragma unroll
  for (__half2& x : most) x = as_half2(kMinusInfinities);
  for_rows(w, page, [&](int g, const uint4& maxima) {
    const __half2 reference = as_half2(w.digest->references[g]);
    const __half2 threshold = twice(w.shared->rows[g].threshold);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __half2 x = as_half2(word_of(maxima, i));
      const std::uint32_t wanted = __hge2_mask(x, threshold);
      const std::uint32_t below = word_of_half2(__hsub2(x, reference));
      most[i] = __hmax2(most[i], as_half2((below & wanted) | (kMinusInfinities & ~wanted)));
    }
  });
#pragma unroll
  for (const __half2 x : most) count_pair(counts, x);
}

// Counts the block's sectors by the largest weight that some query head gives an entry there that
// it wants, and tells all blocks. In the first turn, when all are wanted, it takes only two of
// every page.
__device__ __forceinline__ void count_sectors(const DigestWork& w, float heaviest, int turn) {
  std::uint32_t* const counts = w.shared->digits + kDigits;
  // Distances are never less than they are.
  if (thread_id() < w.group) {
    const float norm = w.shared->rows[thread_id()].norm;
    w.digest->references[thread_id()] =
        std::uint32_t{__half_as_ushort(__float2half_ru((norm + heaviest) * kLn2))} * 0x10001u;
  }
  __syncthreads();
#pragma unroll 1
  for (std::int32_t page = thread_id(); page < w.pages; page += threads()) {
    if (turn == 0) {
      count_pair(counts, heaviest_of_page(w, page));
    } else {
      count_page(w, page, counts);
    }
  }
  __syncthreads();
  std::uint32_t* const to = w.bins + w.cluster.rank * kSectorBins;
  for (int other = warp_id(); other < w.cluster.size; other += warps()) {
#pragma unroll
    for (int i = lane_id() * 4; i < kSectorBins; i += kWarp * 4) {
      w.cluster.send(reinterpret_cast<uint4*>(to + i), other, w.barrier(kSectors + turn),
                     *reinterpret_cast<const uint4*>(counts + i));
    }
  }
  w.receive(kSectors + turn);
}

// By one warp: the logarithm of a weight that more sectors reach than entries are to be kept; -Inf
// if none is known.
__device__ __forceinline__ float find_weight(const DigestWork& w, float heaviest) {
  constexpr int kEach = kSectorBins / kWarp;
  std::uint32_t counts[kEach] = {};
#pragma unroll 4
  for (int i = 0; i < w.cluster.size; ++i) {
    const auto* const from =
        reinterpret_cast<const uint4*>(w.bins + i * kSectorBins + lane_id() * kEach);
#pragma unroll
    for (int j = 0; j < kEach; ++j) counts[j] += word_of(from[j / 4], j % 4);
  }
  std::uint32_t own = 0;
#pragma unroll
  for (const std::uint32_t x : counts) own += x;
  const std::uint32_t sum = warp_inclusive(own);
  const auto target = static_cast<std::uint32_t>(w.extent.keep) + 1;
  const unsigned reached = __ballot_sync(kAllLanes, sum >= target);
  if (reached == 0) return -INFINITY;
  std::uint32_t before = sum - own;
  int within = 0;
#pragma unroll
  for (const std::uint32_t x : counts) {
    before += x;
    if (before < target) ++within;
  }
  const int lane = __ffs(static_cast<int>(reached)) - 1;
  const int bin = lane * kEach + __shfl_sync(kAllLanes, within, lane);
  const auto edge = static_cast<std::uint16_t>((kFours & 0xffffu) + (bin + 1) * (1 << kEdgeShift));
  // Distances are rounded.
  return heaviest - (__half2float(__ushort_as_half(edge)) - 4.0f) * (kLog2E * (1.0f + 0x1p-10f));
}

// By the first warp: bounds of what is listed, as set_bounds() does, by the logarithm to base 2 of
// a weight that more entries reach than are to be kept; -Inf if none is known.
__device__ __forceinline__ void set_digest_bounds(const DigestWork& w, float found) {
  const int g = min(lane_id(), w.group - 1);
  const RowInfo& row = w.shared->rows[g];
  // Norms are rounded, and so are sums of weights.
  constexpr float kLess = 0x1p-10f;
  const bool is_bounded = found > -INFINITY && (w.group == 1 || found > kLightest);
  const float rounded = fabsf(__log2f(row.scale)) + fabsf(row.norm) * 0x1p-20f;
  const float log_weight = found - warp_max(rounded) - kLess;
  const float weight = exp2_fast(log_weight);
  const float each =
      w.group == 1 ? log_weight : log_weight - __log2f(static_cast<float>(w.group)) - kLess;
  std::uint16_t least = row.threshold;
  if (is_bounded) least = __half_as_ushort(__float2half_rd((each + row.norm) * kLn2));
  if (lane_id() < w.group) w.shared->leasts[g] = least;
  if (lane_id() != 0) return;
  w.digest->is_bounded = is_bounded ? 1 : 0;
  w.digest->weight = is_bounded ? weight : 0.0f;
  const std::uint32_t grade =
      w.group == 1 ? ordered2(least) << 16 : (__float_as_uint(weight) << 1) + 1u;
  w.shared->bound_grade = is_bounded ? grade : 1u;
}

// Finds bounds of what may be kept; false if there are none.
__device__ __forceinline__ bool bound_sectors(const DigestWork& w, int turn) {
  const float heaviest = heaviest_of(w);
  count_sectors(w, heaviest, turn);
  if (warp_id() == 0) set_digest_bounds(w, find_weight(w, heaviest));
  __syncthreads();
  return w.digest->is_bounded != 0;
}

// The same by a grade that as many candidates reach.
__device__ __forceinline__ void bound_by_grade(const DigestWork& w, std::uint32_t grade) {
  float found = 0.0f;
  if (w.group > 1) {
    found = __log2f(__uint_as_float(grade >> 1));
  } else {
    const float logit = __half2float(__ushort_as_half(half_of_ordered(grade >> 16)));
    found = fmaf(logit, kLog2E, -w.shared->rows[0].norm);
  }
  if (warp_id() == 0) set_digest_bounds(w, found);
  __syncthreads();
}

// So many candidates of each of half of the blocks are more than are to be kept.
__device__ __forceinline__ std::uint32_t part_of_kept(const DigestWork& w) {
  return static_cast<std::uint32_t>(2 * w.extent.keep / w.cluster.size) + 1;
}

// Grades that listed candidates of the block reach: x more than are to be kept, y part_of_kept(). 0
// where it has not so many, or so few that others' bounds will hardly be needed.
__device__ __forceinline__ uint2 grades_of_listed(const DigestWork& w, bool is_sample) {
  const std::uint32_t listed = min(w.shared->counts[0], static_cast<std::uint32_t>(kMostListedOwn));
  const auto all = static_cast<std::uint32_t>(w.extent.keep) + 1;
  const std::uint32_t part = part_of_kept(w);
  const std::uint32_t few = kMostListed / static_cast<unsigned>(w.cluster.size) / 4;
  if (listed < part || (listed < few && !is_sample)) return make_uint2(0, 0);
  const std::uint32_t base = w.shared->bound_grade;
  const int shift = max(grade_bits(w) - kDigitBits, 0);
#pragma unroll 1
  for (auto i = static_cast<std::uint32_t>(thread_id()); i < listed;
       i += static_cast<std::uint32_t>(threads())) {
    const std::uint32_t digit = (w.shared->own_grades[i] - base) >> shift;
    atomicAdd(w.shared->digits + (~digit & (kDigits - 1)), 1u);
  }
  __syncthreads();
  const auto reached_by = [&](std::uint32_t wanted) {
    if (warp_id() == 0) find_digit(w, wanted);
    __syncthreads();
    const std::uint32_t digit = ~static_cast<std::uint32_t>(w.shared->found.bin) & (kDigits - 1);
    __syncthreads();
    return base + (digit << shift);
  };
  const uint2 grades = make_uint2(listed < all ? 0 : reached_by(all), reached_by(part));
  for (int i = thread_id(); i < kDigits; i += threads()) w.shared->digits[i] = 0;
  __syncthreads();
  return grades;
}

// Where candidates are too many: the largest grade that is known to be reached by more than are to
// be kept, or 0 if it rules none out.
__device__ __forceinline__ std::uint32_t raised_grade(const DigestWork& w) {
  const bool is_one = lane_id() < w.cluster.size;
  const uint2 own = is_one ? w.digest->reached[lane_id()] : make_uint2(0, 0);
  const std::uint32_t part = part_of_kept(w);
  const std::uint32_t blocks = (static_cast<std::uint32_t>(w.extent.keep) + part) / part;
  std::uint32_t rank = 0;
#pragma unroll 4
  for (int i = 0; i < w.cluster.size; ++i) {
    const std::uint32_t other = __shfl_sync(kAllLanes, own.y, i);
    if (other > own.y || (other == own.y && i < lane_id())) ++rank;
  }
  const std::uint32_t parts = is_one && rank + 1 == blocks ? own.y : 0;
  const std::uint32_t grade = __reduce_max_sync(kAllLanes, max(own.x, parts));
  return grade > w.shared->bound_grade ? grade : 0;
}

// Whether a sector may hold candidates: its maxima weigh enough together, and some query head wants
// one of them.
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

// Queues the sectors of the block's pages [begin, end) that may hold candidates, and begins to read
// them. A warp first finds those of its pages that some query head's bound does not rule out,
// mostly few.
__device__ __forceinline__ void queue_sectors(const DigestWork& w, std::int32_t begin,
                                              std::int32_t end) {
  std::uint32_t* const near = w.bins + warp_id() * (kWarp * kBoundsPerPage);
#pragma unroll 1
  for (std::int32_t first = begin + warp_id() * kWarp; first < end; first += threads()) {
    const std::int32_t page = first + lane_id();
    std::uint32_t sectors = 0;
    if (page < end) {
      for_rows(w, page,
               [&](int g, const uint4& x) { sectors |= reaching(x, twice(w.shared->leasts[g])); });
    }
    const auto own = static_cast<std::uint32_t>(__popc(sectors));
    const std::uint32_t up_to = warp_inclusive(own);
    const auto count = static_cast<int>(__shfl_sync(kAllLanes, up_to, kWarp - 1));
#pragma unroll 1
    for (std::uint32_t* to = near + (up_to - own); sectors != 0; sectors &= sectors - 1) {
      *to++ =
          static_cast<std::uint32_t>(page * kBoundsPerPage + __ffs(static_cast<int>(sectors)) - 1);
    }
    __syncwarp();
#pragma unroll 1
    for (int i = lane_id(); i - lane_id() < count; i += kWarp) {
      const auto sector = static_cast<std::int32_t>(near[min(i, count - 1)]);
      const bool is_one = i < count && matters(w, sector);
      const unsigned all = __ballot_sync(kAllLanes, is_one);
      std::uint32_t slot = 0;
      if (lane_id() == 0 && all != 0) {
        slot = atomicAdd(&w.shared->counts[3], static_cast<std::uint32_t>(__popc(all)));
      }
      slot = __shfl_sync(kAllLanes, slot, 0) + __popc(all & ((1u << lane_id()) - 1u));
      if (!is_one || slot >= kMostNear) continue;
      w.scratch->entries.near[slot] = static_cast<std::uint32_t>(sector);
#pragma unroll 4
      for (int g = 0; g < w.group; ++g) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(w.rows + g * w.capacity + sector * 2));
      }
    }
    __syncwarp();
  }
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

// Reads `sectors` of those queued, every `step`-th, two entries a thread, and lists the candidates
// there.
__device__ __forceinline__ void list_sectors(const DigestWork& w, int sectors, int step) {
  constexpr int kPairs = kBoundTokens / 2;
  const std::uint32_t bound = w.shared->bound_grade;
  const auto* const pairs = reinterpret_cast<const std::uint32_t*>(w.rows);
#pragma unroll 1
  for (std::int32_t i = thread_id(); i < sectors * kPairs; i += threads()) {
    const auto pair =
        static_cast<std::int32_t>(w.scratch->entries.near[i / kPairs * step]) * kPairs + i % kPairs;
    const std::int32_t entry = w.first * 8 + pair * 2;
    if (entry >= w.extent.high) continue;
    float low = 0.0f;
    float high = 0.0f;
    std::uint32_t wanted = 0;
    std::uint32_t word = 0;
#pragma unroll 4
    for (int g = 0; g < w.group; ++g) {
      word = pairs[g * w.capacity * 4 + pair];
      const RowInfo& row = w.shared->rows[g];
      wanted |= __hge2_mask(as_half2(word), twice(row.threshold));
      // As grades are elsewhere.
      const float2 x = __half22float2(as_half2(word));
      low = fmaf(row.scale, exp2_fast(fmaf(x.x, kLog2E, -row.norm)), low);
      high = fmaf(row.scale, exp2_fast(fmaf(x.y, kLog2E, -row.norm)), high);
    }
    std::uint32_t grades[2] = {(__float_as_uint(low) << 1) + 1u, (__float_as_uint(high) << 1) + 1u};
    if (w.group == 1) {
      const std::uint32_t numbers = ordered2(word);
      grades[0] = numbers << 16;
      grades[1] = numbers & 0xffff0000u;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (entry + e < w.extent.low || entry + e >= w.extent.high) continue;
      if (grades[e] < bound || (wanted >> (16 * e) & 1u) == 0) continue;
      const std::uint32_t slot = atomicAdd(&w.shared->counts[0], 1u);
      if (slot >= kMostListedOwn) continue;
      w.shared->own_grades[slot] = grades[e];
      w.scratch->entries.own[slot] = static_cast<std::uint32_t>(pair * 2 + e);
    }
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

// Lists candidates; returns whether those of a sample of sectors alone, for a better bound: where
// sectors are so many that there must be one, but not in the last turn.
__device__ __forceinline__ bool list_near_sectors(const DigestWork& w, int turn) {
  queue_sectors(w, 0, w.pages);
  __syncthreads();
  const auto queued = static_cast<int>(w.shared->counts[3]);
  // Where many are kept, many sectors are no sign of a bad bound.
  const int usual = max(kMostSampled, 16 * static_cast<int>(part_of_kept(w)));
  const bool is_sample = queued > usual && turn + 1 < kMostTurns;
  if (is_sample) {
    list_sectors(w, min(usual, kMostNear), max(min(queued, kMostNear) / usual, 1));
  } else if (queued <= kMostNear) {
    list_sectors(w, queued, 1);
  } else {
    constexpr std::int32_t kPages = kMostNear / kBoundsPerPage;
#pragma unroll 1
    for (std::int32_t first = 0; first < w.pages; first += kPages) {
      __syncthreads();
      if (thread_id() == 0) w.shared->counts[3] = 0;
      __syncthreads();
      queue_sectors(w, first, min(first + kPages, w.pages));
      __syncthreads();
      list_sectors(w, static_cast<int>(w.shared->counts[3]), 1);
    }
  }
  __syncthreads();
  return is_sample;
}

// Lists candidates and tells all blocks how many there are; false if top_p may not want them all,
// where that is not known.
__device__ __forceinline__ bool list_by_digest(const DigestWork& w, int turn) {
  const Extent& extent = w.extent;
  const bool is_sure = !w.c.is_top_p || turn > 0;
  const bool is_sample = list_near_sectors(w, turn);
  if (!is_sure) weigh_below(w);
  __syncthreads();
  const uint2 reached = grades_of_listed(w, is_sample);
  if (thread_id() < w.cluster.size) {
    const bool is_long = is_sample || w.shared->counts[0] > kMostListedOwn;
    const std::uint32_t listed = is_long ? kTooMany : w.shared->counts[0];
    const auto forced = static_cast<std::uint32_t>(extent.low + extent.emit - extent.high);
    w.cluster.send(&w.shared->counted[w.cluster.rank], thread_id(), w.barrier(kListed + turn),
                   make_uint4(listed, listed, w.cluster.rank == 0 ? forced : 0, 0));
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
  // A little more, for what rounding may have added.
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
