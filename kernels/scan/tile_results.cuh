// Results of scanning a tile: the logits of its pages and their digest for select(), or the logits
// of its candidates alone.
#pragma once

#include "kernels/scan/tile_copy.cuh"

namespace sluice::cuda {

// Bits that a code takes in a lane's words: 4 or 2. Of 3 bits the lower 2 lie together; single bits
// are loaded into every other bit of a word. This, not the number of bits, determines how tokens
// are divided among lanes, so kBits below is 4 or 2.
template <int kBits>
inline constexpr int kLowBits = kBits == 4 ? 4 : 2;

// Sums of one page: results of mma, with tokens as rows and queries as columns. At 4 bits, codes[m]
// has token 8 r + m in row r = lane / 4 and the token 64 later in row r + 8; at 2 bits,
// codes[2 k + s] has token 64 s + 4 r + k in row r and the token 32 later in row r + 8.
template <int kColumns>
struct PageSums {
  float codes[8][kColumns][4];
  float zeros[kColumns][4];  // the same in every row
};

// Scans are compiled for up to 4, 8 or kMaxQueries queries per KV head. Up to 4 queries leave half
// of B's columns free, so B holds them twice, scaled for the tile's first and second page. Then
// every lane finishes and stores the logits of one page; otherwise half of the lanes would do both.
inline constexpr int kSharedQueries = 4;
template <int kQueries>
inline constexpr int kColumnTiles = kQueries > 8 ? 2 : 1;

// Sums of a tile. pages[0].zeros has the sums over zeros of both pages, because A has the zeros of
// the first page in its upper rows and those of the second in its lower.
template <int kBits, int kQueries>
struct TileSums {
  PageSums<kColumnTiles<kQueries>> pages[kTilePages];
};
// Sums of a tile whose pages share the columns. Row r = lane / 4 is token 2 kBits r + k of a run of
// the first page, valid in columns 0 to 3; row r + 8 is the same of the second page, valid in
// columns 4 to 7. For byte b of word w, k is 4 w + b.
template <int kBits>
using WordSums = float[4][8 / kBits][4];  // [bytes of the word, runs]
template <int kBits>
struct TileSums<kBits, kSharedQueries> {
  WordSums<kBits> codes[kBits / 2];
  float zeros[4];
};

// A lane's data of the KV head whose pages it scans. Its columns are queries 8 c + first_column()
// and the next.
template <int kColumns>
struct HeadQueries {
  const uint4* fragments;      // [pairs of steps, column tiles] for this lane
  float factors[kColumns][2];  // turn sums into logits
  __half* logits;              // at its first column and its first token of page 0
};

template <int kQueries>
__device__ __forceinline__ int first_column() {
  return kQueries == kSharedQueries ? lane_id() % 2 * 2 : lane_id() % 4 * 2;
}
// Page of the tile, 0 or 1, that this lane has where pages share the columns.
__device__ __forceinline__ int page_of_lane() { return lane_id() / 2 % 2; }

// Packs two logits as f16; finite ones are clamped to its range.
__device__ __forceinline__ std::uint32_t pack_logits(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// A lane's logits of one query and page: runs of consecutive tokens, two per word. Runs start
// kRun<kBits> tokens apart. 4 bits: 2 runs of 8 tokens; 2 bits: 4 runs of 4.
template <int kBits>
inline constexpr int kRun = kPageTokens* kBits / 8;
template <int kBits>
using Runs = std::uint32_t[8 / kBits][kBits];

// Computes pairs [first, first + count) of the logits of every run from the sums over codes,
// code(run, k), and the sum over zeros.
template <int kBits, typename Code>
__device__ __forceinline__ void find_pairs(const Code& code, float zeros, float factor, int first,
                                           int count, Runs<kBits>& runs) {
  const float zero = zeros * factor;
#pragma unroll
  for (int run = 0; run < 8 / kBits; ++run) {
    // Codes of run `run` sit kBits * run bits high, in subnormal f16 numbers: see tiles.cu.
    const float scale = factor * static_cast<float>(1 << (24 - kBits * run));
#pragma unroll
    for (int i = first; i < first + count; ++i) {
      runs[run][i] =
          pack_logits(fmaf(code(run, 2 * i), scale, zero), fmaf(code(run, 2 * i + 1), scale, zero));
    }
  }
}

// Computes the runs of column 8 c + first_column() + side.
template <int kBits, int kColumns>
__device__ __forceinline__ void find_runs(const PageSums<kColumns>& sums, int c, int side,
                                          const float (&factors)[kColumns][2], Runs<kBits>& runs) {
  const auto code = [&](int run, int k) {
    return sums.codes[kBits == 4 ? k : k * 2 + run / 2][c][run % 2 * 2 + side];
  };
  find_pairs<kBits>(code, sums.zeros[c][side], factors[c][side], 0, kBits, runs);
}

// Computes the logits that come from word `word`, of column first_column() + side and this lane's
// page.
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

// Maximum over two lanes `step` apart: of their `first`, or of their `second` in the lane with bit
// `step` set.
__device__ __forceinline__ __half2 larger_of_lanes(__half2 first, __half2 second, int step) {
  const bool is_second = (lane_id() & step) != 0;
  const __half2 given = is_second ? first : second;
  return __hmax2_nan(is_second ? second : first, __shfl_xor_sync(kAllLanes, given, step));
}

// Maxima of the two runs of pair `pair`.
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

// Digest of a page for select(), for the two queries of a lane. Lanes in odd rows write the second
// query; `maxima` and `sum` belong to the query that this lane writes.
template <int kBits>
__device__ __forceinline__ void digest_page(const Runs<kBits> (&runs)[2], bool has_second,
                                            bool writes, std::uint32_t* maxima, float* sum) {
  constexpr int kOdd = 4;                     // lanes to the next row
  constexpr int kNext = kBits == 4 ? 8 : 16;  // lanes to the next kBoundTokens
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
  // Maxima of two neighbouring sub-pages, from the first or the second of two runs.
  const __half2 pair =
      (lane_id() & kNext) != 0 ? __highs2half2(next, most) : __lows2half2(most, next);
  const int row = lane_id() / 4;
  maxima[row / 2 % 2 * 2 + row / 4] = *reinterpret_cast<const std::uint32_t*>(&pair);
  if (row < 2) *sum = total;
}

// Stores the logits of column `column` and the next. Lanes may have different pages; a page that
// does not exist is not stored.
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
  // The same for all lanes, because the digest needs every lane.
  const bool has_second = column / 8 * 8 + 1 < a.query_count;
  digest_page<kBits>(runs, has_second, query < a.query_count && present,
                     reinterpret_cast<std::uint32_t*>(a.digest.maxima) + place * 4,
                     a.digest.sums + place);
}

// Stores all logits of a tile.
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

// The candidates of a tile. The positions of the first ones are loaded before the tile is scanned,
// to hide the latency.
struct TileCandidates {
  static constexpr int kEarly = 3;
  std::int32_t first;
  std::int32_t early[kEarly];  // positions of candidates first + lane + i * kWarp
};

// Position of candidate `i` of a head; -1 beyond the last.
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

// Stores the logits of a tile's candidates, through `staged` [query_count, kTileTokens].
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
