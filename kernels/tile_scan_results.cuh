// What a scan leaves of a page: its logits.
#pragma once

#include "kernels/tile_scan_copy.cuh"
#include "lib/selection.h"

namespace sluice::cuda {

// Sums of one page. At 4 bits tile m has tokens 8 r + m in row r = lane / 4 and those 64 after in
// row r + 8; at 2 bits tile 2 k + s has tokens 64 s + 4 r + k, and those 32 after.
template <int kColumns>
struct PageSums {
  float codes[8][kColumns][4];
  float zeros[kColumns][4];  // every row the same
};

// What a lane needs of the KV head whose pages it scans: for its columns, which are queries
// 8 c + lane % 4 * 2 and the next.
template <int kColumns>
struct HeadQueries {
  const uint4* fragments;      // [pairs of steps, column tiles], of this lane
  float factors[kColumns][2];  // turn sums into logits
  __half* logits;              // of its first column and its first token of page 0
};

// Two logits as f16, finite ones clamped to its range.
__device__ __forceinline__ std::uint32_t pack_logits(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Logits of one query and page that a lane has: runs of consecutive ones, a word for two. A run
// begins kRun<kBits> tokens after the one before. 4 bits: 2 runs of 8, 2: 4 runs of 4.
template <int kBits>
inline constexpr int kRun = kPageTokens* kBits / 8;
template <int kBits>
using Runs = std::uint32_t[8 / kBits][kBits];

// The logits of column 8 c + lane % 4 * 2 + side.
template <int kBits, int kColumns>
__device__ __forceinline__ void find_runs(const PageSums<kColumns>& sums, int c, int side,
                                          const float (&factors)[kColumns][2], Runs<kBits>& runs) {
  const float factor = factors[c][side];
  const float zero = sums.zeros[c][side] * factor;
#pragma unroll
  for (int run = 0; run < 8 / kBits; ++run) {
    // Codes of run `run` sit kBits * run bits high.
    const float scale = factor * static_cast<float>(1 << (24 - kBits * run));
#pragma unroll
    for (int i = 0; i < kBits; ++i) {
      const auto logit = [&](int k) {
        const int tile = kBits == 4 ? k : k * 2 + run / 2;
        return fmaf(sums.codes[tile][c][run % 2 * 2 + side], scale, zero);
      };
      runs[run][i] = pack_logits(logit(2 * i), logit(2 * i + 1));
    }
  }
}

template <bool kAligned, int kWords>
__device__ __forceinline__ void store_words(__half* to, const std::uint32_t (&words)[kWords]) {
  if constexpr (!kAligned) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const __half2 pair = *reinterpret_cast<const __half2*>(&words[i]);
      to[2 * i] = __low2half(pair);
      to[2 * i + 1] = __high2half(pair);
    }
  } else if constexpr (kWords == 4) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  }
}

// The larger of what lanes `step` apart have: of their `first`, or their `second` for the lanes
// with that bit.
__device__ __forceinline__ __half2 larger_of_lanes(__half2 first, __half2 second, int step) {
  const bool is_second = (lane_id() & step) != 0;
  const __half2 given = is_second ? first : second;
  return __hmax2_nan(is_second ? second : first, __shfl_xor_sync(kAllLanes, given, step));
}

// Runs' maxima, in pairs of two runs.
template <int kBits>
__device__ __forceinline__ __half2 largest_of_runs(const Runs<kBits>& runs, int pair) {
  __half2 most[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    most[r] = as_half2(runs[2 * pair + r][0]);
#pragma unroll
    for (int i = 1; i < kBits; ++i) {
      most[r] = __hmax2_nan(most[r], as_half2(runs[2 * pair + r][i]));
    }
  }
  return __hmax2_nan(__lows2half2(most[0], most[1]), __highs2half2(most[0], most[1]));
}

// Sum of 2^(x log2(e) - norm) over a lane's logits.
template <int kBits>
__device__ __forceinline__ float sum_runs(const Runs<kBits>& runs, float norm) {
  float even = 0.0f;
  float odd = 0.0f;
#pragma unroll
  for (int run = 0; run < 8 / kBits; ++run) {
#pragma unroll
    for (int i = 0; i < kBits; ++i) {
      const float2 x = __half22float2(as_half2(runs[run][i]));
      even += exp2_fast(fmaf(x.x, kLog2E, -norm));
      odd += exp2_fast(fmaf(x.y, kLog2E, -norm));
    }
  }
  return even + odd;
}

// What select() wants to know of a page beforehand, for the two queries of a lane; lanes with an
// odd row write of the second. `maxima` and `sum` are of the query that this lane writes.
template <int kBits>
__device__ __forceinline__ void digest_page(const Runs<kBits> (&runs)[2], bool has_second,
                                            bool writes, std::uint32_t* maxima, float* sum) {
  constexpr int kOdd = 4;                     // lanes of the next row are so far away
  constexpr int kNext = kBits == 4 ? 8 : 16;  // and of the next kBoundTokens
  constexpr int kOther = kBits == 4 ? 16 : 8;
  __half2 most =
      larger_of_lanes(largest_of_runs<kBits>(runs[0], 0), largest_of_runs<kBits>(runs[1], 0), kOdd);
  if constexpr (kBits == 2) {
    const __half2 later = larger_of_lanes(largest_of_runs<kBits>(runs[0], 1),
                                          largest_of_runs<kBits>(runs[1], 1), kOdd);
    most = larger_of_lanes(most, later, kOther);
  }
  const __half2 next = __shfl_xor_sync(kAllLanes, most, kNext);
  __half2 all = __hmax2_nan(most, next);
  all = __hmax2_nan(all, __shfl_xor_sync(kAllLanes, all, kOther));
  const float own_norm = larger_of(all) * kLog2E;
  const float other_norm = __shfl_xor_sync(kAllLanes, own_norm, kOdd);
  const bool is_odd = (lane_id() & kOdd) != 0;
  const float first = sum_runs<kBits>(runs[0], is_odd ? other_norm : own_norm);
  float second = 0.0f;
  if (has_second) second = sum_runs<kBits>(runs[1], is_odd ? own_norm : other_norm);
  float total = is_odd ? second : first;
  total += __shfl_xor_sync(kAllLanes, is_odd ? first : second, kOdd);
  total += __shfl_xor_sync(kAllLanes, total, kNext);
  total += __shfl_xor_sync(kAllLanes, total, kOther);
  if (!writes) return;
  // Two neighbours' maxima, of the first of two runs or of the second.
  const __half2 pair =
      (lane_id() & kNext) != 0 ? __highs2half2(next, most) : __lows2half2(most, next);
  const int row = lane_id() / 4;
  maxima[row / 2 % 2 * 2 + row / 4] = *reinterpret_cast<const std::uint32_t*>(&pair);
  if (row < 2) *sum = total;
}

// All logits of a page, to their place.
template <int kBits, bool kAligned, int kColumns>
__device__ __forceinline__ void store_page(const PageSums<kColumns>& sums, const TileScanArgs& a,
                                           const HeadQueries<kColumns>& queries, int head,
                                           int page) {
  __half* const logits = queries.logits + std::int64_t{page} * kPageTokens;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    if (c * 8 >= a.query_count) break;
    const int column = c * 8 + lane_id() % 4 * 2;
    Runs<kBits> runs[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      find_runs<kBits>(sums, c, side, queries.factors, runs[side]);
      if (column + side >= a.query_count) continue;
#pragma unroll
      for (int run = 0; run < 8 / kBits; ++run) {
        store_words<kAligned>(logits + (c * 8 + side) * a.stride + run * kRun<kBits>,
                              runs[side][run]);
      }
    }
    if (a.digest.maxima == nullptr) continue;
    const int query = column + lane_id() / 4 % 2;
    const std::int64_t place = (head * a.digest.pages + page) * a.group + a.first_query + query;
    digest_page<kBits>(runs, c * 8 + 1 < a.query_count, query < a.query_count,
                       reinterpret_cast<std::uint32_t*>(a.digest.maxima) + place * 4,
                       a.digest.sums + place);
  }
}

}  // namespace sluice::cuda
