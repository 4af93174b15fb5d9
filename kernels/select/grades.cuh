// The grades of eight consecutive entries, with logits in any memory.
#pragma once

#include <cstdint>

#include "kernels/select/common.cuh"

namespace sluice::cuda {

// Calls body(g, eight logits) for every query head; load(g) gives the logits, and is called for
// four at a time.
template <typename Load, typename Body>
__device__ __forceinline__ void for_group(int group, const Load& load, const Body& body) {
  for (int first = 0; first < group; first += 4) {
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = load(min(first + i, group - 1));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + i < group) body(first + i, v[i]);
    }
  }
}

// Bit e: some query head's threshold is reached.
template <typename Load>
__device__ __forceinline__ std::uint32_t reached8(int group, const RowInfo* rows,
                                                  const Load& load) {
  std::uint32_t bits = 0;
  for_group(group, load,
            [&](int g, const uint4& v) { bits |= reaching(v, twice(rows[g].threshold)); });
  return bits;
}

// Grades of weights summed over query heads, and of a single query head's logit.
__device__ __forceinline__ std::uint32_t grade_of_weight(float weight) {
  return (__float_as_uint(weight) << 1) + 1u;
}
__device__ __forceinline__ std::uint32_t grade_of_logit(std::uint16_t logit) {
  return ordered2(logit) << 16;
}

// Grades of the entries in `allowed`: larger is heavier. 0 for the others and, with top_p, for
// entries that no query head wants. Grades are summed weights, or the logits of a single query
// head.
template <typename Load>
__device__ __forceinline__ void grades8(const SelectCall& c, int group, const RowInfo* rows,
                                        std::uint32_t allowed, const Load& load,
                                        std::uint32_t (&grades)[8]) {
  if (group == 1) {
    const uint4 v = load(0);
    if (c.is_top_p) allowed &= reaching(v, twice(rows[0].threshold));
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const std::uint32_t pair = ordered2(word_of(v, w));
      grades[2 * w] = pair << 16;
      grades[2 * w + 1] = pair & 0xffff0000u;
    }
  } else {
    float sums[8] = {};
    std::uint32_t wanted = 0;
    for_group(group, load, [&](int g, const uint4& v) {
      if (c.is_top_p) wanted |= reaching(v, twice(rows[g].threshold));
      const float norm = rows[g].norm;
      const float scale = rows[g].scale;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 x = __half22float2(as_half2(word_of(v, w)));
        sums[2 * w] = fmaf(scale, exp2_fast(fmaf(x.x, kLog2E, -norm)), sums[2 * w]);
        sums[2 * w + 1] = fmaf(scale, exp2_fast(fmaf(x.y, kLog2E, -norm)), sums[2 * w + 1]);
      }
    });
    if (c.is_top_p) allowed &= wanted;
#pragma unroll
    for (int e = 0; e < 8; ++e) grades[e] = grade_of_weight(sums[e]);
  }
  if (allowed == 0xffu) return;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if ((allowed >> e & 1u) == 0) grades[e] = 0;
  }
}

// The grade of one entry that grades8() does not give 0; `logits` has one logit per query head,
// `stride` apart.
__device__ __forceinline__ std::uint32_t grade_of(const __half* logits, std::int64_t stride,
                                                  int group, const RowInfo* rows) {
  if (group == 1) return grade_of_logit(__half_as_ushort(*logits));
  float sum = 0.0f;
#pragma unroll 4
  for (int g = 0; g < group; ++g) {
    const float x = __half2float(logits[g * stride]);
    sum = fmaf(rows[g].scale, exp2_fast(fmaf(x, kLog2E, -rows[g].norm)), sum);
  }
  return grade_of_weight(sum);
}

// Radix rounds look at 11, 11 and 10 bits of summed weights, at 11 and 5 bits of logits, which lie
// in a grade's upper half.
inline constexpr int kMostGradeBins = 2048;
__host__ __device__ constexpr int grade_shift(int group, int round) {
  if (group == 1) return round == 0 ? 21 : 16;
  return round == 0 ? 21 : round == 1 ? 10 : 0;
}
__host__ __device__ constexpr int grade_bins(int group, int round) {
  if (group == 1) return round == 0 ? 2048 : 32;
  return round == 2 ? 1024 : 2048;
}
__host__ __device__ constexpr int grade_rounds(int group) { return group == 1 ? 2 : 3; }

// The search for the lightest grade that is kept.
struct GradeCut {
  std::uint32_t available = 0;  // entries with a grade
  std::uint32_t grade = 0;      // larger ones are kept
  std::uint32_t ties = 0;       // the first `ties` entries equal to the cut are kept
  std::uint32_t settled = 0;
  std::uint32_t cut = 0;  // HeadSelection::cut: 1 if not all that top_p wants can be kept
};

// The grades that a radix round counts, and their bins.
struct GradeRound {
  std::uint32_t known;  // the digits found so far
  int known_shift;      // bits below them; 32: none are known
  int shift;
  std::uint32_t mask;

  __device__ GradeRound(int group, int round, const GradeCut& cut)
      : known(round == 0 ? 0 : cut.grade >> grade_shift(group, round - 1)),
        known_shift(round == 0 ? 32 : grade_shift(group, round - 1)),
        shift(grade_shift(group, round)),
        mask(static_cast<std::uint32_t>(grade_bins(group, round) - 1)) {}

  __device__ __forceinline__ bool concerns(std::uint32_t grade) const {
    return grade != 0 && (known_shift == 32 || grade >> known_shift == known);
  }
  __device__ __forceinline__ std::uint32_t bin(std::uint32_t grade) const {
    return grade >> shift & mask;
  }
};

// Before the first round: sets the number of wanted grades, and settles the cut if all or none are.
__device__ inline void begin_cut(const SelectCall& c, const Extent& extent, GradeCut& cut) {
  const auto keep = static_cast<std::uint32_t>(extent.keep);
  const auto forced = static_cast<std::uint32_t>(extent.forced());
  const std::uint32_t wanted = keep > forced ? keep - forced : 0;
  cut.cut = c.is_top_p && forced + cut.available > keep ? 1 : 0;
  cut.grade = 0;
  cut.ties = wanted;
  cut.settled = 1;
  if (cut.available <= wanted) {
    cut.ties = 0;
  } else if (wanted == 0) {
    cut.grade = 0xffffffffu;
    cut.ties = 0;
  } else {
    cut.settled = 0;
  }
}

// After a round: narrows the cut to the bin where the wanted grades end, counted from the heaviest.
__device__ inline void advance_cut(GradeCut& cut, int group, int round,
                                   const Crossing<std::uint32_t>& found, std::uint32_t in_bin) {
  const auto digit = static_cast<std::uint32_t>(grade_bins(group, round) - 1 - found.bin);
  cut.grade |= digit << grade_shift(group, round);
  cut.ties -= found.before;
  if (cut.ties != in_bin) return;
  // The whole bin is kept: the cut is the grade just below it.
  cut.grade = cut.grade == 0 ? 0 : cut.grade - 1;
  cut.ties = 0;
  cut.settled = 1;
}

// Bits of the grades above the cut and of those equal to it.
__device__ __forceinline__ void compare8(const GradeCut& cut, const std::uint32_t (&grades)[8],
                                         std::uint32_t& above, std::uint32_t& equal) {
  above = 0;
  equal = 0;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    above |= grades[e] > cut.grade ? 1u << e : 0u;
    equal |= grades[e] == cut.grade ? 1u << e : 0u;
  }
  if (cut.ties == 0) equal = 0;
}

// The first `count` set bits.
__device__ __forceinline__ std::uint32_t first_bits(std::uint32_t bits, std::int32_t count) {
  if (count >= __popc(bits)) return bits;
  std::uint32_t kept = 0;
  for (; count > 0; --count) {
    kept |= bits & (0u - bits);
    bits &= bits - 1;
  }
  return kept;
}

// Compares f16 logits with the cut of a single query head's grades.
struct LogitCut {
  __half2 limit;   // logits above it are kept; twice
  bool keeps_all;  // even -Inf
  bool keeps_none;
  bool has_ties;

  __device__ explicit LogitCut(const GradeCut& cut) {
    constexpr std::uint32_t kMinusInfinity = 0x03ffu;  // as an ordered number
    constexpr std::uint32_t kInfinity = 0xfc00u;
    constexpr std::uint32_t kMinusZero = 0x7fffu;  // never a logit's, because -0 counts as 0
    std::uint32_t number = cut.grade >> 16;
    keeps_all = number < kMinusInfinity;
    keeps_none = number >= kInfinity;
    has_ties = cut.ties != 0;
    if (number == kMinusZero) --number;
    limit = twice(half_of_ordered(number));
  }

  __device__ __forceinline__ void compare8(const uint4& v, std::uint32_t allowed,
                                           std::uint32_t& above, std::uint32_t& equal) const {
    above = keeps_all ? allowed : 0;
    equal = 0;
    if (keeps_all || keeps_none) return;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const std::uint32_t own = (1u << (2 * w)) | (0x10000u << (2 * w + 1));
      above |= __hgt2_mask(as_half2(word_of(v, w)), limit) & own;
      equal |= __heq2_mask(as_half2(word_of(v, w)), limit) & own;
    }
    above = (above | above >> 16) & allowed;
    equal = has_ties ? (equal | equal >> 16) & allowed : 0;
  }
};

}  // namespace sluice::cuda
