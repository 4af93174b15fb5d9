// What a scan leaves of a tile of which only some tokens are wanted: the logits of those
// candidates.
#pragma once

#include "kernels/scan/tile_results.cuh"

namespace sluice::cuda {

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
