// Bounds of the weights that may be kept: first from the cluster's digest, then tighter ones from
// the candidates.
#pragma once

#include <cstdint>

#include "kernels/select/digest.cuh"

namespace sluice::cuda {

// The logarithm to base 2 of the largest weight. Called by every warp.
__device__ __forceinline__ float heaviest_of(const DigestWork& w) {
  const RowState& state = w.shared->states[min(lane_id(), w.group - 1)];
  return warp_max(fmaf(state.highest, kLog2E, -state.info.norm));
}

// Calls body(g, maxima) for a page's rows, in an order in which lanes with neighbouring pages read
// different banks of shared memory.
template <typename Body>
__device__ __forceinline__ void for_rows(const DigestWork& w, std::int32_t page, const Body& body) {
  int g = lane_id() * w.group / 8 % w.group;
#pragma unroll 4
  for (int i = 0; i < w.group; ++i) {
    body(g, w.maxima[page * w.group + g]);
    g = g + 1 == w.group ? 0 : g + 1;
  }
}

// Counts two sectors; `below` has their negated distances below the heaviest.
__device__ __forceinline__ void count_pair(std::uint32_t* counts, __half2 below) {
  const std::uint32_t distances = word_of_half2(__hsub2(as_half2(kFours), below));
  const std::uint32_t low = ((distances & 0xffffu) - (kFours & 0xffffu)) >> kEdgeShift;
  const std::uint32_t high = ((distances >> 16) - (kFours >> 16)) >> kEdgeShift;
  if (low < kSectorBins) atomicAdd(counts + low, 1u);
  if (high < kSectorBins) atomicAdd(counts + high, 1u);
}

// The largest weight that some query head gives an entry of a page, as its negated distance below
// the heaviest: one for the even sectors, one for the odd ones.
__device__ __forceinline__ __half2 heaviest_of_page(const DigestWork& w, std::int32_t page) {
  __half2 most = as_half2(kMinusInfinities);
  for_rows(w, page, [&](int g, const uint4& x) {
    const __half2 own =
        __hmax2(__hmax2(as_half2(x.x), as_half2(x.y)), __hmax2(as_half2(x.z), as_half2(x.w)));
    most = __hmax2(most, __hsub2(own, as_half2(w.digest->references[g])));
  });
  return most;
}

// Counts every sector of a page by the largest weight that some query head gives an entry there
// that it wants.
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
// it wants, and sends the counts to all blocks. The first turn, where all entries are wanted,
// counts only two sectors of every page.
__device__ __forceinline__ void count_sectors(const DigestWork& w, float heaviest, int turn) {
  std::uint32_t* const counts = w.shared->digits + kDigits;
  // Rounded up, so that distances are never too short.
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

// Logarithms to base 2 of weights that query heads give entries.
struct KnownWeights {
  float highest;  // about the largest
  float reached;  // by more than `keep` sectors; -Inf if no such weight is known
};

// The distance below the heaviest, in log2, where a bin of sectors begins.
__device__ __forceinline__ float bin_distance(int bin) {
  const auto edge = static_cast<std::uint16_t>((kFours & 0xffffu) + bin * (1 << kEdgeShift));
  return (__half2float(__ushort_as_half(edge)) - 4.0f) * kLog2E;
}

// By one warp: finds the weights from all blocks' counts of sectors.
__device__ __forceinline__ KnownWeights find_weights(const DigestWork& w, float heaviest) {
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
  if (reached == 0) return {heaviest, -INFINITY};
  std::uint32_t before = sum - own;
  int empty = 0;
  int within = 0;
#pragma unroll
  for (const std::uint32_t x : counts) {
    before += x;
    if (before == 0) ++empty;
    if (before < target) ++within;
  }
  const auto bin_of = [&](unsigned lanes, int i) {
    const int lane = __ffs(static_cast<int>(lanes)) - 1;
    return lane * kEach + __shfl_sync(kAllLanes, i, lane);
  };
  const int first = bin_of(__ballot_sync(kAllLanes, sum > 0), empty);
  const int last = bin_of(reached, within);
  // Distances are rounded.
  return {heaviest - bin_distance(first), heaviest - bin_distance(last + 1) * (1.0f + 0x1p-10f)};
}

// By the first warp: sets the bounds that candidates reach, as set_bounds() does.
__device__ __forceinline__ void set_digest_bounds(const DigestWork& w, const KnownWeights& known) {
  const int g = min(lane_id(), w.group - 1);
  const RowInfo& row = w.shared->rows[g];
  // Norms are rounded, and so are sums of weights.
  constexpr float kLess = 0x1p-10f;
  const bool is_bounded = known.reached > -INFINITY && (w.group == 1 || known.reached > kLightest);
  const float rounded = fabsf(__log2f(row.scale)) + fabsf(row.norm) * 0x1p-20f;
  const float log_weight = known.reached - warp_max(rounded) - kLess;
  const float weight = exp2_fast(log_weight);
  const float each =
      w.group == 1 ? log_weight : log_weight - __log2f(static_cast<float>(w.group)) - kLess;
  std::uint16_t least = row.threshold;
  if (is_bounded) least = __half_as_ushort(__float2half_rd((each + row.norm) * kLn2));
  if (lane_id() < w.group) w.shared->leasts[g] = least;
  if (lane_id() != 0) return;
  w.digest->is_bounded = is_bounded ? 1 : 0;
  w.digest->weight = is_bounded ? weight : 0.0f;
  std::uint32_t grade = 1;
  if (is_bounded) grade = w.group == 1 ? grade_of_logit(least) : grade_of_weight(weight);
  w.shared->bound_grade = grade;
  const float most = static_cast<float>(w.group) * exp2_fast(known.highest);
  const __half logit = __float2half_ru((known.highest + row.norm) * kLn2);
  const std::uint32_t highest =
      w.group == 1 ? grade_of_logit(__half_as_ushort(logit)) : grade_of_weight(most);
  w.digest->highest = known.highest;
  w.digest->digit_shift =
      max(32 - __clz(static_cast<int>(max(highest, grade) - grade)) - kDigitBits, 0);
}

// Finds bounds of the entries that may be kept; returns false if there are none.
__device__ __forceinline__ bool bound_sectors(const DigestWork& w, int turn) {
  const float heaviest = heaviest_of(w);
  count_sectors(w, heaviest, turn);
  if (warp_id() == 0) set_digest_bounds(w, find_weights(w, heaviest));
  __syncthreads();
  return w.digest->is_bounded != 0;
}

// Sets the bounds by a grade that more than `keep` candidates reach.
__device__ __forceinline__ void bound_by_grade(const DigestWork& w, std::uint32_t grade) {
  KnownWeights known{w.digest->highest, 0.0f};
  __syncthreads();
  if (w.group > 1) {
    known.reached = __log2f(__uint_as_float(grade >> 1));
  } else {
    const float logit = __half2float(__ushort_as_half(half_of_ordered(grade >> 16)));
    known.reached = fmaf(logit, kLog2E, -w.shared->rows[0].norm);
  }
  if (warp_id() == 0) set_digest_bounds(w, known);
  __syncthreads();
}

// Candidates per block, such that half of the blocks have more than `keep` together.
__device__ __forceinline__ std::uint32_t part_of_kept(const DigestWork& w) {
  return static_cast<std::uint32_t>(2 * w.extent.keep / w.cluster.size) + 1;
}

// Counts a grade by its distance above the bound.
__device__ __forceinline__ void count_grade(const DigestWork& w, std::uint32_t grade) {
  const std::uint32_t above = (grade - w.shared->bound_grade) >> w.digest->digit_shift;
  atomicAdd(w.shared->digits + (kDigits - 1 - min(above, std::uint32_t{kDigits - 1})), 1u);
}

// Grades that candidates of the block reach: x is reached by more than `keep` of them, y by
// part_of_kept(). 0 if the block has fewer candidates, or so few that a higher bound will hardly be
// needed. A sample's grades are counted already; without a sample, those of the list are counted
// here.
__device__ __forceinline__ uint2 grades_reached(const DigestWork& w, bool is_sample) {
  const std::uint32_t most = is_sample ? ~0u : static_cast<std::uint32_t>(kMostListedOwn);
  const std::uint32_t found = min(w.shared->counts[0], most);
  const auto all = static_cast<std::uint32_t>(w.extent.keep) + 1;
  const std::uint32_t part = part_of_kept(w);
  const std::uint32_t few = kMostListed / static_cast<unsigned>(w.cluster.size) / 4;
  if (found < part || (found < few && !is_sample)) return make_uint2(0, 0);
#pragma unroll 1
  for (auto i = static_cast<std::uint32_t>(thread_id()); i < found && !is_sample;
       i += static_cast<std::uint32_t>(threads())) {
    count_grade(w, w.shared->own_grades[i]);
  }
  __syncthreads();
  const auto reached_by = [&](std::uint32_t wanted) {
    if (warp_id() == 0) find_digit(w, wanted);
    __syncthreads();
    const auto digit = static_cast<std::uint32_t>(kDigits - 1 - w.shared->found.bin);
    __syncthreads();
    return w.shared->bound_grade + (digit << w.digest->digit_shift);
  };
  const uint2 grades = make_uint2(found < all ? 0 : reached_by(all), reached_by(part));
  for (int i = thread_id(); i < kDigits; i += threads()) w.shared->digits[i] = 0;
  __syncthreads();
  return grades;
}

// The bound for a retry after too many candidates: the largest grade that more than `keep` of them
// are known to reach, or 0 if it rules none out.
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

}  // namespace sluice::cuda
