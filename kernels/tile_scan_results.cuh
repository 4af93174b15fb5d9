// What a scan leaves of a page: its logits, or those of its candidates.
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

// Calls store(column, run, words) with runs of consecutive logits of this lane: run `run` begins
// kRun<kBits> tokens after the one before, `words` are of two logits. 4 bits: runs of 8, 2: of 4.
template <int kBits>
inline constexpr int kRun = kPageTokens* kBits / 8;

template <int kBits, int kColumns, typename Store>
__device__ __forceinline__ void for_runs(const PageSums<kColumns>& sums,
                                         const float (&factors)[kColumns][2], int query_count,
                                         const Store& store) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int column = c * 8 + side;
      if (lane_id() % 4 * 2 + column >= query_count) continue;
      const float factor = factors[c][side];
      const float zero = sums.zeros[c][side] * factor;
#pragma unroll
      for (int run = 0; run < 8 / kBits; ++run) {
        // Codes of run `run` sit kBits * run bits high.
        const float scale = factor * static_cast<float>(1 << (24 - kBits * run));
        std::uint32_t words[kBits];
#pragma unroll
        for (int i = 0; i < kBits; ++i) {
          const auto logit = [&](int k) {
            const int tile = kBits == 4 ? k : k * 2 + run / 2;
            return fmaf(sums.codes[tile][c][run % 2 * 2 + side], scale, zero);
          };
          words[i] = pack_logits(logit(2 * i), logit(2 * i + 1));
        }
        store(column, run, words);
      }
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

// All logits of a page, to their place.
template <int kBits, bool kAligned, int kColumns>
__device__ __forceinline__ void store_page(const PageSums<kColumns>& sums, const TileScanArgs& a,
                                           const HeadQueries<kColumns>& queries, int page) {
  __half* const logits = queries.logits + std::int64_t{page} * kPageTokens;
  for_runs<kBits>(sums, queries.factors, a.query_count,
                  [&](int column, int run, const std::uint32_t(&words)[kBits]) {
                    store_words<kAligned>(logits + column * a.stride + run * kRun<kBits>, words);
                  });
}

// The position of candidate `i` of a head; -1 beyond the last.
__device__ __forceinline__ std::int32_t position_of(const TileScanArgs& a, int head,
                                                    std::int32_t i) {
  return i < a.queries.counts[head] ? a.positions[head * a.position_capacity + i] : -1;
}

// The candidates of a page. Where the first of them are is asked before the page is scanned, for
// the answer takes long.
struct PageCandidates {
  static constexpr int kEarly = 2;
  std::int32_t first;
  std::int32_t early[kEarly];  // positions of first + lane, and of those kWarp after
};

__device__ __forceinline__ PageCandidates candidates_of(const TileScanArgs& a, const PageHead& at) {
  PageCandidates of;
  of.first = a.queries.first[at.head * a.pages + at.page];
#pragma unroll
  for (int i = 0; i < of.kEarly; ++i) {
    of.early[i] = position_of(a, at.head, of.first + i * kWarp + lane_id());
  }
  return of;
}

// The logits of a page's candidates, by way of `staged` [query_count, kPageTokens].
template <int kBits, int kColumns>
__device__ __forceinline__ void store_candidates(const PageSums<kColumns>& sums,
                                                 const TileScanArgs& a,
                                                 const HeadQueries<kColumns>& queries,
                                                 const PageHead& at,
                                                 const PageCandidates& candidates, __half* staged) {
  __half* const mine = staged + lane_id() % 4 * 2 * kPageTokens + lane_id() / 4 * (2 * kBits);
  for_runs<kBits>(sums, queries.factors, a.query_count,
                  [&](int column, int run, const std::uint32_t(&words)[kBits]) {
                    store_words<true>(mine + column * kPageTokens + run * kRun<kBits>, words);
                  });
  __syncwarp();
  const std::int64_t query = static_cast<std::int64_t>(at.head) * a.group + a.first_query;
#pragma unroll
  for (int round = 0; round < kPageTokens / kWarp; ++round) {
    const std::int32_t i = candidates.first + round * kWarp + lane_id();
    const std::int32_t position =
        round < candidates.kEarly ? candidates.early[round] : position_of(a, at.head, i);
    const std::int32_t token = position - at.page * kPageTokens;
    if (token < 0 || token >= kPageTokens) break;
    for (int n = 0; n < a.query_count; ++n) {
      a.logits[(query + n) * a.stride + i] = staged[n * kPageTokens + token];
    }
  }
  __syncwarp();
}

}  // namespace sluice::cuda
