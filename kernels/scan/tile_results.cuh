// What a scan leaves of a tile: the logits of its pages and what select() wants to know of them, or
// the logits of its candidates alone.
#pragma once

#include "kernels/scan/tile_copy.cuh"

namespace sluice::cuda {

// What follows is of 4 or 2 bits: how tokens are shared out among lanes depends on the bits that
// lie together, and of three bits two do.
template <int kBits>
inline constexpr int kLowBits = KeyTiles::low_bits(kBits);

// Sums of one page. At 4 bits tile m has tokens 8 r + m in row r = lane / 4 and those 64 after in
// row r + 8; at 2 bits tile 2 k + s has tokens 64 s + 4 r + k, and those 32 after.
template <int kColumns>
struct PageSums {
  float codes[8][kColumns][4];
  float zeros[kColumns][4];  // every row the same
};

// Scans are compiled for up to so many queries of a KV head: 4, 8 or kMaxQueries. Four leave half
// of B's columns free, so they stand there twice, with the scales of a tile's first page and of its
// second; every lane then has one page's logits to finish and store rather than half of the lanes
// two.
inline constexpr int kSharedQueries = 4;
template <int kQueries>
inline constexpr int kColumnTiles = kQueries > 8 ? 2 : 1;

// Sums of a tile. Those over zeros of both pages are of the first: its own are in the upper rows of
// A, the second's in the lower.
template <int kBits, int kQueries>
struct TileSums {
  PageSums<kColumnTiles<kQueries>> pages[kTilePages];
};
// Where pages share the columns, rows r = lane / 4 are tokens 2 kBits r + k of a run of the first
// page, which counts in columns 0 to 3, and rows r + 8 of the second, in columns 4 to 7; k of byte
// b of word w is 4 w + b.
template <int kBits>
using WordSums = float[4][8 / kBits][4];  // [bytes of the word, runs]
template <int kBits>
struct TileSums<kBits, kSharedQueries> {
  WordSums<kBits> codes[kBits / 2];
  float zeros[4];
};

// What a lane needs of the KV head whose pages it scans: for its columns, which are queries
// 8 c + first_column() and the next.
template <int kColumns>
struct HeadQueries {
  const uint4* fragments;      // [pairs of steps, column tiles], of this lane
  float factors[kColumns][2];  // turn sums into logits
  __half* logits;              // of its first column and its first token of page 0
};

template <int kQueries>
__device__ __forceinline__ int first_column() {
  return kQueries == kSharedQueries ? lane_id() % 2 * 2 : lane_id() % 4 * 2;
}
// Which of a tile's two, where a lane has one.
__device__ __forceinline__ int page_of_lane() { return lane_id() / 2 % 2; }

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

// Pairs [first, first + count) of the logits of every run, out of sums over codes, code(run, k),
// and one over zeros.
template <int kBits, typename Code>
__device__ __forceinline__ void find_pairs(const Code& code, float zeros, float factor, int first,
                                           int count, Runs<kBits>& runs) {
  const float zero = zeros * factor;
#pragma unroll
  for (int run = 0; run < 8 / kBits; ++run) {
    // Codes of run `run` sit kBits * run bits high.
    const float scale = factor * static_cast<float>(1 << (24 - kBits * run));
#pragma unroll
    for (int i = first; i < first + count; ++i) {
      runs[run][i] =
          pack_logits(fmaf(code(run, 2 * i), scale, zero), fmaf(code(run, 2 * i + 1), scale, zero));
    }
  }
}

// Those of column 8 c + first_column() + side.
template <int kBits, int kColumns>
__device__ __forceinline__ void find_runs(const PageSums<kColumns>& sums, int c, int side,
                                          const float (&factors)[kColumns][2], Runs<kBits>& runs) {
  const auto code = [&](int run, int k) {
    return sums.codes[kBits == 4 ? k : k * 2 + run / 2][c][run % 2 * 2 + side];
  };
  find_pairs<kBits>(code, sums.zeros[c][side], factors[c][side], 0, kBits, runs);
}

// Those of column first_column() + side and the page of this lane that come from word `word`.
template <int kBits>
__device__ __forceinline__ void find_of_word(const WordSums<kBits>& sums, int word,
                                             const float (&zeros)[4], int side, float factor,
                                             Runs<kBits>& runs) {
  const auto own = [&](const float(&sum)[4]) {
    return page_of_lane() == 0 ? sum[side] : sum[2 + side];
  };
  const auto code = [&](int run, int k) { return own(sums[k % 4][run]); };
  find_pairs<kBits>(code, own(zeros), factor, 2 * word, 2, runs);
}
template <int kBits>
__device__ __forceinline__ void find_runs(const TileSums<kBits, kSharedQueries>& sums, int side,
                                          const float (&factors)[1][2], Runs<kBits>& runs) {
#pragma unroll
  for (int word = 0; word < kBits / 2; ++word) {
    find_of_word<kBits>(sums.codes[word], word, sums.zeros, side, factors[0][side], runs);
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

// The logits of column `column` and the next, to their place. Lanes may have different pages;
// nothing is stored of one that is not there.
template <int kBits, bool kAligned>
__device__ __forceinline__ void store_runs(const Runs<kBits> (&runs)[2], const TileScanArgs& a,
                                           __half* logits, int column, TilePlace at, int page) {
  const bool present = page <= at.last_page;
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    if (column + side >= a.query_count || !present) continue;
#pragma unroll
    for (int run = 0; run < 8 / kBits; ++run) {
      store_words<kAligned>(logits + side * a.stride + run * kRun<kBits>, runs[side][run]);
    }
  }
  if (a.digest.maxima == nullptr) return;
  const int query = column + lane_id() / 4 % 2;
  const std::int64_t place = (at.head * a.digest.pages + page) * a.group + a.first_query + query;
  // The same for all lanes, since all take part.
  const bool has_second = column / 8 * 8 + 1 < a.query_count;
  digest_page<kBits>(runs, has_second, query < a.query_count && present,
                     reinterpret_cast<std::uint32_t*>(a.digest.maxima) + place * 4,
                     a.digest.sums + place);
}

// All logits of a tile, to their place.
template <int kBits, bool kAligned, int kQueries>
__device__ __forceinline__ void store_logits(const TileSums<kBits, kQueries>& sums,
                                             const TileScanArgs& a,
                                             const HeadQueries<kColumnTiles<kQueries>>& queries,
                                             TilePlace at) {
  const int first = first_column<kQueries>();
  if constexpr (kQueries == kSharedQueries) {
    const int page = at.tile() * kTilePages + page_of_lane();
    Runs<kBits> runs[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      find_runs<kBits>(sums, side, queries.factors, runs[side]);
    }
    store_runs<kBits, kAligned>(runs, a, queries.logits + std::int64_t{page} * kPageTokens, first,
                                at, page);
  } else {
#pragma unroll
    for (int p = 0; p < kTilePages; ++p) {
      const int page = at.tile() * kTilePages + p;
      if (page > at.last_page) break;
      __half* const logits = queries.logits + std::int64_t{page} * kPageTokens;
#pragma unroll
      for (int c = 0; c < kColumnTiles<kQueries>; ++c) {
        if (c * 8 >= a.query_count) break;
        Runs<kBits> runs[2];
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          find_runs<kBits>(sums.pages[p], c, side, queries.factors, runs[side]);
        }
        store_runs<kBits, kAligned>(runs, a, logits + c * 8 * a.stride, c * 8 + first, at, page);
      }
    }
  }
}

inline constexpr int kTileTokens = kTilePages * kPageTokens;

// The candidates of a tile. Where the first of them are is asked before the tile is scanned, for
// the answer takes long.
struct TileCandidates {
  static constexpr int kEarly = 3;
  std::int32_t first;
  std::int32_t early[kEarly];  // positions of first + lane, and kWarp and so on after
};

// The position of candidate `i` of a head; -1 beyond the last.
__device__ __forceinline__ std::int32_t position_of(const TileScanArgs& a, int head,
                                                    std::int32_t i) {
  return i < a.queries.counts[head] ? a.positions[head * a.position_capacity + i] : -1;
}

__device__ __forceinline__ TileCandidates candidates_of(const TileScanArgs& a, TilePlace at) {
  TileCandidates of;
  of.first = a.queries.first[at.head * a.most_tiles + at.tile()];
#pragma unroll
  for (int i = 0; i < of.kEarly; ++i) {
    of.early[i] = position_of(a, at.head, of.first + i * kWarp + lane_id());
  }
  return of;
}

// The logits of a tile's candidates, by way of `staged` [query_count, kTileTokens].
template <int kBits, int kQueries>
__device__ __forceinline__ void store_candidates(const TileSums<kBits, kQueries>& sums,
                                                 const TileScanArgs& a,
                                                 const HeadQueries<kColumnTiles<kQueries>>& queries,
                                                 TilePlace at, const TileCandidates& candidates,
                                                 __half* staged) {
  constexpr bool kShared = kQueries == kSharedQueries;
  const int first = first_column<kQueries>();
#pragma unroll
  for (int p = 0; p < (kShared ? 1 : kTilePages); ++p) {
    __half* const mine = staged + first * kTileTokens +
                         (kShared ? page_of_lane() : p) * kPageTokens + lane_id() / 4 * (2 * kBits);
#pragma unroll
    for (int c = 0; c < kColumnTiles<kQueries>; ++c) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int column = c * 8 + side;
        if (first + column >= a.query_count) continue;
        Runs<kBits> runs;
        if constexpr (kShared) {
          find_runs<kBits>(sums, side, queries.factors, runs);
        } else {
          find_runs<kBits>(sums.pages[p], c, side, queries.factors, runs);
        }
#pragma unroll
        for (int run = 0; run < 8 / kBits; ++run) {
          store_words<true>(mine + column * kTileTokens + run * kRun<kBits>, runs[run]);
        }
      }
    }
  }
  __syncwarp();
  const std::int64_t query = static_cast<std::int64_t>(at.head) * a.group + a.first_query;
#pragma unroll
  for (int round = 0; round < kTileTokens / kWarp; ++round) {
    const std::int32_t i = candidates.first + round * kWarp + lane_id();
    const std::int32_t position =
        round < candidates.kEarly ? candidates.early[round] : position_of(a, at.head, i);
    const std::int32_t token = position - at.tile() * kTileTokens;
    if (token < 0 || token >= kTileTokens) break;
    for (int n = 0; n < a.query_count; ++n) {
      a.logits[(query + n) * a.stride + i] = staged[n * kTileTokens + token];
    }
  }
  __syncwarp();
}

}  // namespace sluice::cuda
