// Query data for a scan of tiles, written on the device before the scan.
//
// Words of the files tile_*: a tile is two pages of the key index (KeyTiles), unless it is called a
// column tile, the 8 columns of one mma. A step is the 16 channels of one mma. A chunk is a pair of
// steps of a tile; it fills a slot of a warp's ring in shared memory, which is not a slot of the
// index, the place of a tile. A column is a query head. A run is consecutive tokens of a page that
// one lane has.
#pragma once

#include "kernels/scan/channels.cuh"
#include "lib/backend/index_ops.h"

namespace sluice::cuda {

inline constexpr int kStepChannels = 16;  // of one tensor core step
inline constexpr int kPairSteps = 2;      // steps copied at once
// 16-byte copies that each lane issues for a chunk of listed channels.
template <int kBits>
inline constexpr int kListedCopies = kBits* kPairSteps* kTilePages / 2;

// A pass over channels takes `steps` steps; the last is padded with channels in which the queries
// are zero.
// "heads" are the KV heads of all tokens, [tokens, kv_heads].
struct TileQueries {
  uint4* fragments;  // [heads, pairs of steps, column tiles, lanes], queries as B
  float* factors;    // [heads, kMaxQueries]: turn sums into logits
  // For listed channels:
  // [heads, pairs of steps, lanes]: what a lane copies of a tile's codes, as up to eight 16-bit
  // indices of 16-byte units.
  uint4* places;
  // [heads, pairs of steps, lanes]: what it copies of the scales, as the index of a pair.
  std::uint32_t* scales;
  // [heads, pairs of steps, 4]: which half of each pair belongs to the channel.
  uint4* selectors;
  std::int32_t* counts;     // [heads]: candidates; unused without candidates
  std::int32_t* first;      // [heads, most_tiles]: the first candidate in a tile or -1, or null
  std::int32_t* read;       // reported [heads]: pages read for candidates, or null
  std::uint32_t* counters;  // [kRunCounters]: tiles handed out to warps
};

// Several counters hand out tiles to warps, because a single one would serve them too slowly.
inline constexpr int kRunCounters = 16;

// Places of listed channels in a tile, in units of 16 bytes: a channel has 8, 6 or 4 units (both
// pages at 4, 3 or 2 bits), copied first page first. `inverse` = ceil(1024 / units) replaces a
// division.
struct ListedUnits {
  int units;
  int inverse;

  static ListedUnits of_bits(int bits) { return {2 * bits, (1023 + 2 * bits) / (2 * bits)}; }
  // The place in the list of copy `i`'s channel; as exact as a division because `i` is below 256.
  __device__ __forceinline__ int channel(int i) const { return i * inverse >> 10; }
  // The unit that copy `i` reads; `channel` is number `place` of the list.
  __device__ __forceinline__ std::uint32_t of(std::uint32_t channel, int place, int i) const {
    const auto number = static_cast<std::uint32_t>(i - place * units);
    const auto count = static_cast<std::uint32_t>(units);
    // At 3 bits the first page also comes first in the tile.
    return channel * count + (units == 6 ? number : number ^ channel % kTilePages * (count / 2));
  }
};

struct PrepareArgs {
  QueryArgs queries;
  TileQueries to;
  const BatchToken* tokens;
  const HeadSelection* candidates;  // reported [heads] or null
  std::int64_t most_tiles;          // per head
  int steps;
  int column_tiles;
  int columns;  // distinct queries of a column tile: 8, or 4 that repeat, one set for each page
  ListedUnits units;
  bool listed;  // channels are looked up rather than taken in order
};

// Channel of a step that lane `lane` has as its number `j` of four. Listed channels are gathered,
// so any order will do; channels in order stay where they are, and here lanes that differ in the
// lowest bit of the channel read different banks.
__device__ __forceinline__ int channel_of_lane(bool listed, int lane, int j) {
  return listed ? lane % 4 * 4 + j : lane % 4 / 2 * 8 + j * 2 + lane % 2;
}

// Half `channel` of a pair of scales, as two bytes of a permutation's selector.
__device__ __forceinline__ std::uint32_t half_selector(std::uint32_t channel, std::uint32_t pair) {
  const std::uint32_t low = channel % 2 * 2 + pair * 4;
  return low | (low + 1) << 4;
}

// Loops are short and not unrolled, because in code that runs once fetching instructions takes
// longest.
__device__ inline void write_fragments(const Queries& queries, const PrepareArgs& a, int head) {
  const int pairs = (a.steps + 1) / 2;
  const int total = a.column_tiles * pairs * kWarp;
  uint4* const to = a.to.fragments + static_cast<std::int64_t>(head) * total;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < total; i += kQueryThreads) {
    const int lane = i % kWarp;
    const int tile = i / kWarp;  // one or two per pair of steps
    const int step = (a.column_tiles == 1 ? tile : tile / 2) * 2;
    const int n = (a.column_tiles == 1 ? 0 : tile % 2 * 8) + lane / 4 % a.columns;
    const auto q = [&](int at, int j) {
      const int place = at * kStepChannels + channel_of_lane(a.listed, lane, j);
      if (n >= a.queries.count || place >= a.queries.channels) return 0.0f;
      return queries.q[n][queries.channel[place]];
    };
    const auto two = [&](int at, int j) { return pack(__half(), q(at, j), q(at, j + 1)); };
    to[i] = make_uint4(two(step, 0), two(step, 2), two(step + 1, 0), two(step + 1, 2));
  }
}

__device__ inline void write_lists(const Queries& queries, const PrepareArgs& a, int head) {
  constexpr int kChannels = kPairSteps * kStepChannels;
  const int pairs = (a.steps + 1) / 2;
  const auto channel = [&](int place) {
    return static_cast<std::uint32_t>(queries.channel[min(place, a.queries.channels - 1)]);
  };
  const ListedUnits& units = a.units;
  const std::int64_t to = static_cast<std::int64_t>(head) * pairs * kWarp;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < pairs * kWarp; i += kQueryThreads) {
    const int lane = i % kWarp;
    const int first = i / kWarp * kChannels;
    // One copy of all lanes takes kWarp units of neighbouring places.
    const auto unit = [&](int copy) {
      const int number = copy * kWarp + lane;
      const int place = units.channel(number);
      return units.of(channel(first + place), place, number);
    };
    const auto two = [&](int copy) { return unit(copy) | unit(copy + 1) << 16; };
    a.to.places[to + i] = make_uint4(two(0), two(2), two(4), two(6));
    a.to.scales[to + i] = channel(first + lane) / 2;
  }
  uint4* const selectors = a.to.selectors + static_cast<std::int64_t>(head) * pairs * 4;
  // Starts at the second warp because the first has most of the work above.
  const int thread = static_cast<int>(threadIdx.x + kQueryThreads - kWarp) % kQueryThreads;
#pragma unroll 1
  for (int i = thread; i < pairs * 4; i += kQueryThreads) {
    const int place = i / 4 * kChannels + i % 4 * 4;
    const auto two = [&](int at) {
      return half_selector(channel(at), 0) | half_selector(channel(at + 1), 1) << 8;
    };
    selectors[i] = make_uint4(two(place), two(place + 2), two(place + kStepChannels),
                              two(place + kStepChannels + 2));
  }
}

// Tiles that hold the whole pages of a token.
__device__ __forceinline__ int tiles_of(const BatchToken& token) {
  return (token.position / kPageTokens + kTilePages - 1) / kTilePages;
}

// All threads of one block per head call it, after load_queries().
__device__ inline void prepare_tiles(const Queries& queries, const PrepareArgs& a, int head,
                                     int token) {
  if (head == 0 && threadIdx.x < kRunCounters) a.to.counters[threadIdx.x] = 0;
  if (a.candidates != nullptr) {
    if (threadIdx.x == 0) a.to.counts[head] = a.candidates[head].count;
    if (threadIdx.x == 0 && a.to.read != nullptr && a.queries.first == 0) a.to.read[head] = 0;
    std::int32_t* const first = a.to.first + head * a.most_tiles;
    const int tiles = tiles_of(a.tokens[token]);
    for (int tile = static_cast<int>(threadIdx.x); tile < tiles; tile += kQueryThreads) {
      first[tile] = -1;
    }
  }
  write_fragments(queries, a, head);
  // One thread per query: kMaxQueries is below kQueryThreads.
  if (const auto n = static_cast<int>(threadIdx.x); n < a.queries.count) {
    a.to.factors[head * kMaxQueries + n] = queries.factor[n];
  }
  if (a.listed) write_lists(queries, a, head);
}

}  // namespace sluice::cuda
