// The cut by grades in a cluster. Every block lists its entries that may be among the heaviest; all
// blocks receive the grades of all lists and search them by radix. If the lists are too long, they
// search all entries instead, digit by digit.
#pragma once

#include <cstdint>

#include "kernels/select/cluster_rows.cuh"

namespace sluice::cuda {

constexpr std::uint32_t kTooMany = 1u << 20;  // sent instead of a count of candidates

// Bits of a vector's entries that are always kept.
__device__ __forceinline__ std::uint32_t forced_of(const auto& w, std::int32_t v) {
  return allowed8(w.extent, w.entry(v)) & forced8(w.extent, w.entry(v));
}

__device__ __forceinline__ std::uint32_t reached_of(const auto& w, std::int32_t v) {
  return reached8(w.group, w.shared->rows, [&](int g) { return w.rows[g * w.capacity + v]; });
}

// Sets the bounds that candidates reach: one for the grade, and from it one for each row's logit.
// At least one of a candidate's logits reaches its row's bound.
__device__ __forceinline__ void set_bounds(const auto& w) {
  if (warp_id() == 0) {
    const int g = min(lane_id(), w.group - 1);
    const RowInfo& row = w.shared->rows[g];
    const __half bound = __ushort_as_half(w.shared->states[g].bound);
    // Not valid below the threshold, because top_p may not want the entries that were counted.
    const bool is_valid = !w.c.is_top_p || __hge(bound, __ushort_as_half(row.threshold));
    std::uint16_t least = static_cast<std::uint16_t>(kMinusInfinities);
    std::uint32_t grade = 1;
    if (w.group == 1) {
      if (is_valid) least = __half_as_ushort(bound);
      grade = grade_of_logit(least);
    } else {
      // Sums of weights are rounded.
      constexpr float kLess = 1.0f - 0x1p-16f;
      const float weight = warp_max(is_valid ? weight_of(bound, row) : 0.0f) * kLess;
      if (weight > 0.0f) {
        grade = grade_of_weight(weight);
        const float each = __log2f(weight * 0.98f / static_cast<float>(w.group));
        least = __half_as_ushort(__float2half_rd((each + row.norm) / kLog2E));
      }
    }
    if (lane_id() < w.group) w.shared->leasts[g] = least;
    if (lane_id() == 0) w.shared->bound_grade = grade;
  }
  __syncthreads();
}

// Bits of a vector's entries.
struct Near {
  std::uint32_t forced;  // always kept
  std::uint32_t wanted;  // may be selected
  std::uint32_t near;    // may be selected and be candidates
};

__device__ __forceinline__ Near look_near(const auto& w, std::int32_t v) {
  Near x{forced_of(w, v), 0, 0};
  const std::uint32_t others = selectable8(w.extent, w.entry(v));
  for_group(
      w.group, [&](int g) { return w.rows[g * w.capacity + v]; },
      [&](int g, const uint4& row) {
        x.near |= reaching(row, twice(w.shared->leasts[g]));
        if (w.c.is_top_p) x.wanted |= reaching(row, twice(w.shared->rows[g].threshold));
      });
  x.wanted = w.c.is_top_p ? x.wanted & others : others;
  x.near &= x.wanted;
  return x;
}

// Computes the grades of entries that may be candidates, and lists those that are.
__device__ __forceinline__ void list_near(const auto& w) {
  const std::uint32_t bound = w.shared->bound_grade;
  const auto* const halves = reinterpret_cast<const __half*>(w.rows);
  const std::uint32_t count = min(w.shared->counts[2], static_cast<std::uint32_t>(kMostNear));
#pragma unroll 1
  for (auto i = static_cast<std::uint32_t>(thread_id()); i < count;
       i += static_cast<std::uint32_t>(threads())) {
    const auto entry = w.scratch->entries.near[i];
    const std::uint32_t grade = grade_of(halves + entry, w.capacity * 8, w.group, w.shared->rows);
    if (grade < bound) continue;
    const std::uint32_t slot = atomicAdd(&w.shared->counts[0], 1u);
    if (slot >= kMostListedOwn) continue;
    w.shared->own_grades[slot] = grade;
    w.scratch->entries.own[slot] = entry;
  }
}

// Lists the block's candidates, marks the always kept entries, and sends their counts to all
// blocks.
template <typename Work>
__device__ __forceinline__ void list_candidates(const Work& w) {
  std::uint32_t wanted = 0;
  for_own_pairs(
      w, [&](std::int32_t v) { return look_near(w, v); },
      [&](std::int32_t v, const Near& x) {
        const bool is_one = v < w.count;
        w.kept[v] = static_cast<std::uint8_t>(is_one ? x.forced : 0u);
        w.equal[v] = 0;
        if (!is_one) return;
        wanted += static_cast<std::uint32_t>(__popc(x.wanted));
        if (x.near == 0) return;
        std::uint32_t slot =
            atomicAdd(&w.shared->counts[2], static_cast<std::uint32_t>(__popc(x.near)));
        for (std::uint32_t bits = x.near; bits != 0; bits &= bits - 1, ++slot) {
          if (slot >= kMostNear) break;
          w.scratch->entries.near[slot] =
              static_cast<typename Work::Entry>(v * 8 + __ffs(static_cast<int>(bits)) - 1);
        }
      });
  wanted = __reduce_add_sync(kAllLanes, wanted);
  if (lane_id() == 0 && wanted != 0) atomicAdd(&w.shared->counts[1], wanted);
  __syncthreads();
  list_near(w);
  __syncthreads();
  if (thread_id() < w.cluster.size) {
    const std::uint32_t* const own = w.shared->counts;
    w.cluster.send(&w.shared->counted[w.cluster.rank], thread_id(), w.barrier(kCounts),
                   make_uint2(own[2] > kMostNear ? kTooMany : own[0], own[1]));
  }
  w.receive(kCounts);
}

// Sends the candidates' grades to all blocks; the lane's block has `count` candidates, all blocks
// have `all`.
__device__ __forceinline__ void exchange_grades(const auto& w, std::uint32_t count,
                                                std::uint32_t all) {
  if (thread_id() == 0) w.expect(kGrades, all * 4);
  const std::uint32_t start = warp_inclusive(count) - count;
  std::uint32_t* const to = w.bins + __shfl_sync(kAllLanes, start, w.cluster.rank);
  const std::uint32_t own = __shfl_sync(kAllLanes, count, w.cluster.rank);
#pragma unroll 1
  for (auto i = static_cast<std::uint32_t>(thread_id()); i < own;
       i += static_cast<std::uint32_t>(threads())) {
    const std::uint32_t grade = w.shared->own_grades[i];
#pragma unroll 4
    for (int other = 0; other < w.cluster.size; ++other) {
      w.cluster.send(to + i, other, w.barrier(kGrades), grade);
    }
  }
  w.receive(kGrades);
}

// Called by one warp: finds the digit of the `wanted`-th heaviest of the counted grades.
__device__ __forceinline__ void find_digit(const auto& w, std::uint32_t wanted) {
  constexpr int kEach = kDigits / kWarp;
  static_assert(kEach == 16);
  const std::uint32_t* const own = w.shared->digits + lane_id() * kEach;
  uint4 x[kEach / 4];
  std::uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kEach / 4; ++i) {
    x[i] = reinterpret_cast<const uint4*>(own)[i];
    sum += x[i].x + x[i].y + x[i].z + x[i].w;
  }
  const std::uint32_t up_to = warp_inclusive(sum);
  if (up_to < wanted || up_to - sum >= wanted) return;
  std::uint32_t before = up_to - sum;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const std::uint32_t here = word_of(x[i / 4], i % 4);
    if (before < wanted && before + here >= wanted) {
      w.shared->found = {lane_id() * kEach + i, before, true};
      w.shared->in_bin = here;
    }
    before += here;
  }
}

// Called by every warp: finds the cut among the few picked grades; unused ones are zero.
__device__ __forceinline__ void cut_picked(const auto& w, GradeCut& cut) {
  const std::uint32_t grade = w.shared->picked[lane_id()];
  std::uint32_t larger = 0;
  std::uint32_t equal = 0;
#pragma unroll
  for (int i = 0; i < kMostPicked / 4; ++i) {
    const uint4 others = reinterpret_cast<const uint4*>(w.shared->picked)[i];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      larger += word_of(others, j) > grade ? 1u : 0u;
      equal += word_of(others, j) == grade ? 1u : 0u;
    }
  }
  const bool is_cut = grade != 0 && larger < cut.ties && larger + equal >= cut.ties;
  const int lane = __ffs(static_cast<int>(__ballot_sync(kAllLanes, is_cut))) - 1;
  cut.grade = __shfl_sync(kAllLanes, grade, lane);
  cut.ties -= __shfl_sync(kAllLanes, larger, lane);
  if (cut.ties != __shfl_sync(kAllLanes, equal, lane)) return;
  --cut.grade;
  cut.ties = 0;
}

// The number of low bits in which candidates' grades may differ.
__device__ __forceinline__ int grade_bits(const auto& w) {
  // Sums of weights are rounded.
  const std::uint32_t highest =
      w.group == 1 ? 0xffffffffu : (__float_as_uint(static_cast<float>(w.group)) << 1) + 1024;
  return 32 - __clz(static_cast<int>(highest - w.shared->bound_grade));
}

// Finds the cut among the exchanged candidates: by the upper bits in which they differ, then by
// lower ones, until few are left. Digits are zero on entry.
__device__ __forceinline__ void cut_lists(const auto& w, std::uint32_t count, GradeCut& cut) {
  const std::uint32_t* const grades = w.bins;
  const std::uint32_t base = w.shared->bound_grade;
  int known = grade_bits(w);  // bits from this one up are known
  std::uint32_t found = 0;
  while (true) {
    const int shift = max(known - kDigitBits, 0);
    const auto is_left = [&](std::uint32_t grade) {
      return known == 32 || (grade ^ found) >> known == 0;
    };
#pragma unroll 1
    for (auto i = static_cast<std::uint32_t>(thread_id()); i < count;
         i += static_cast<std::uint32_t>(threads())) {
      const std::uint32_t grade = grades[i] - base;
      if (is_left(grade)) atomicAdd(w.shared->digits + (~(grade >> shift) & (kDigits - 1)), 1u);
    }
    __syncthreads();
    if (warp_id() == 0) find_digit(w, cut.ties);
    __syncthreads();
    const Crossing<std::uint32_t> crossing = w.shared->found;
    const std::uint32_t in_bin = w.shared->in_bin;
    const std::uint32_t upper = known == 32 ? 0u : found >> known << known;
    found = upper | ((~static_cast<std::uint32_t>(crossing.bin) & (kDigits - 1)) << shift &
                     (known == 32 ? ~0u : (1u << known) - 1u));
    cut.ties -= crossing.before;
    cut.grade = base + found;
    if (cut.ties == in_bin) {
      --cut.grade;
      cut.ties = 0;
    }
    if (cut.ties == 0 || shift == 0) return;
    known = shift;
    if (in_bin <= kMostPicked) {
#pragma unroll 1
      for (auto i = static_cast<std::uint32_t>(thread_id()); i < count;
           i += static_cast<std::uint32_t>(threads())) {
        if (is_left(grades[i] - base)) {
          w.shared->picked[atomicAdd(&w.shared->picked_count, 1u)] = grades[i];
        }
      }
      __syncthreads();
      return cut_picked(w, cut);
    }
#pragma unroll 1
    for (int i = thread_id(); i < kDigits; i += threads()) w.shared->digits[i] = 0;
    __syncthreads();
  }
}

// Marks this block's candidates above the cut in `kept`, and those equal to it in `equal`.
__device__ __forceinline__ void mark_listed(const auto& w, const GradeCut& cut) {
#pragma unroll 1
  for (auto i = static_cast<std::uint32_t>(thread_id()); i < w.shared->counts[0];
       i += static_cast<std::uint32_t>(threads())) {
    const std::uint32_t grade = w.shared->own_grades[i];
    const std::uint32_t entry = w.scratch->entries.own[i];
    if (grade < cut.grade || (grade == cut.grade && cut.ties == 0)) continue;
    auto* const words = reinterpret_cast<std::uint32_t*>(grade > cut.grade ? w.kept : w.equal);
    atomicOr(words + entry / 32, 1u << entry % 32);
  }
  __syncthreads();
}

__device__ __forceinline__ void grades_of(const auto& w, std::int32_t v,
                                          std::uint32_t (&grades)[8]) {
  grades8(
      w.c, w.group, w.shared->rows, selectable8(w.extent, w.entry(v)),
      [&](int g) { return w.rows[g * w.capacity + v]; }, grades);
}

// Finds the cut among all entries, eight bits at a time, and marks the entries above it and equal
// to it.
__device__ __noinline__ static GradeCut cut_entries(auto w, GradeCut cut) {
  for (int round = 0; round < 4; ++round) {
    const int shift = 24 - 8 * round;
    std::uint32_t* const digits = w.shared->digits + round * 256;
    for_own(w, [&](std::int32_t v) {
      if (v >= w.count) return;
      std::uint32_t grades[8];
      grades_of(w, v, grades);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (grades[e] == 0 || (round > 0 && (grades[e] ^ cut.grade) >> (shift + 8) != 0)) continue;
        atomicAdd(digits + (grades[e] >> shift & 255u), 1u);
      }
    });
    w.cluster.sync();
    if (thread_id() < 256) {
      std::uint32_t sum = 0;
#pragma unroll 4
      for (int other = 0; other < w.cluster.size; ++other) {
        sum += w.cluster.of(digits, other)[255 - thread_id()];
      }
      w.shared->totals[thread_id()] = sum;
    }
    __syncthreads();
    find_crossing([&](std::int32_t i) { return w.shared->totals[i]; }, 256, cut.ties,
                  &w.shared->found, w.shared->part);
    const Crossing<std::uint32_t> found = w.shared->found;
    cut.grade |= static_cast<std::uint32_t>(255 - found.bin) << shift;
    cut.ties -= found.before;
    if (cut.ties == w.shared->totals[found.bin]) {
      --cut.grade;
      cut.ties = 0;
      break;
    }
  }
  w.cluster.sync();  // others may still read this block's digits
  for_own(w, [&](std::int32_t v) {
    if (v >= w.count) return;
    std::uint32_t grades[8];
    grades_of(w, v, grades);
    std::uint32_t above;
    std::uint32_t equal;
    compare8(cut, grades, above, equal);
    w.kept[v] = static_cast<std::uint8_t>(w.kept[v] | above);
    w.equal[v] = static_cast<std::uint8_t>(equal);
  });
  return cut;
}

// Keeps the first `ties` entries equal to the cut, counted over all blocks.
__device__ __forceinline__ void keep_ties(const auto& w, std::uint32_t ties) {
  __syncwarp();  // other lanes have marked neighbouring entries
  // Words of 32 entries.
  const auto* const equals = reinterpret_cast<const std::uint32_t*>(w.equal);
  auto* const kept = reinterpret_cast<std::uint32_t*>(w.kept);
  const std::int32_t first = warp_id() * w.each / 4;
  const std::int32_t last =
      min((warp_id() + 1) * w.each, (w.count + kWarp - 1) / kWarp * kWarp) / 4;
  std::uint32_t own = 0;
#pragma unroll 1
  for (std::int32_t i = first + lane_id(); i < last; i += kWarp) {
    own += static_cast<std::uint32_t>(__popc(equals[i]));
  }
  own = __reduce_add_sync(kAllLanes, own);
  std::uint32_t all = 0;
  std::uint32_t before = block_exclusive(lane_id() == 0 ? own : 0u, w.shared->part, all);
  before = __shfl_sync(kAllLanes, before, 0);
  if (thread_id() < w.cluster.size) {
    w.cluster.send(w.shared->equals + w.cluster.rank, thread_id(), w.barrier(kTies), all);
  }
  w.receive(kTies);
  before +=
      __reduce_add_sync(kAllLanes, lane_id() < w.cluster.rank ? w.shared->equals[lane_id()] : 0u);
#pragma unroll 1
  for (std::int32_t at = first; own > 0 && at < last; at += kWarp) {
    const std::int32_t i = at + lane_id();
    const std::uint32_t equal = i < last ? equals[i] : 0u;
    const auto count = static_cast<std::uint32_t>(__popc(equal));
    const std::uint32_t up_to = before + warp_inclusive(count);
    const std::uint32_t used = min(up_to - count, ties);
    if (equal != 0) kept[i] |= first_bits(equal, static_cast<std::int32_t>(ties - used));
    before = __shfl_sync(kAllLanes, up_to, kWarp - 1);
  }
}

// Marks the always kept entries and all others, or with top_p those that it wants.
__device__ __forceinline__ void mark_reached(const auto& w) {
  for_own_pairs(
      w,
      [&](std::int32_t v) {
        const std::uint32_t others = selectable8(w.extent, w.entry(v));
        return forced_of(w, v) | (w.c.is_top_p ? others & reached_of(w, v) : others);
      },
      [&](std::int32_t v, std::uint32_t kept) {
        w.kept[v] = static_cast<std::uint8_t>(v < w.count ? kept : 0u);
      });
}

// Cuts at the lightest kept grade, from the lists whose counts the blocks have exchanged; returns
// false if the lists are too long or too short.
__device__ __forceinline__ bool cut_at_grade(const auto& w, GradeCut& cut) {
  uint2 own = make_uint2(0, 0);
  if (lane_id() < w.cluster.size) own = w.shared->counted[lane_id()];
  const std::uint32_t listed = __reduce_add_sync(kAllLanes, own.x);
  const bool is_long = __any_sync(kAllLanes, own.x > kMostListedOwn) || listed > kMostListed;
  cut.available = __reduce_add_sync(kAllLanes, own.y);
  begin_cut(w.c, w.extent, cut);
  if (cut.settled != 0) return true;
  if (is_long || listed < cut.ties) return false;
  exchange_grades(w, own.x, listed);
  cut_lists(w, listed, cut);
  mark_listed(w, cut);
  if (cut.ties > 0) keep_ties(w, cut.ties);
  return true;
}

// Marks the kept entries; returns true if top_p wants more.
__device__ __forceinline__ bool mark_heaviest(const auto& w) {
  list_candidates(w);
  GradeCut cut;
  if (!cut_at_grade(w, cut)) {
    cut = cut_entries(w, cut);
    if (cut.ties > 0) keep_ties(w, cut.ties);
  } else if (cut.settled != 0 && cut.available > 0 && cut.grade == 0) {
    mark_reached(w);
  }
  return cut.cut != 0;
}

}  // namespace sluice::cuda
