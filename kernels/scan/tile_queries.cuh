// What a scan of tiles is told of the queries, written on the device before it.
#pragma once

#include "kernels/scan/channels.cuh"
#include "lib/backend/index_ops.h"

namespace sluice::cuda {

inline constexpr int kStepChannels = 16;  // of one tensor core step
inline constexpr int kPairSteps = 2;      // that are copied at once
// Copies of 16 bytes by every lane that a chunk of listed channels takes.
template <int kBits>
inline constexpr int kListedCopies = kBits* kPairSteps* kTilePages / 2;

// A pass over channels takes `steps` steps; the last is filled up with channels that the queries
// are zero in.
// Heads are the KV heads of all tokens, [tokens, kv_heads].
struct TileQueries {
  uint4* fragments;  // [heads, pairs of steps, column tiles, lanes], queries as B
  float* factors;    // [heads, kMaxQueries]
  // If channels are listed, [heads, pairs of steps, lanes]: where in a tile a lane finds what it
  // copies, as up to eight 16-bit numbers of 16 bytes of codes; and a pair of scales;
  // and [heads, pairs of steps, 4]: which halves of pairs of scales to take.
  uint4* places;
  std::uint32_t* scales;
  uint4* selectors;
  std::int32_t* counts;     // [heads]: candidates, if there are any
  std::int32_t* first;      // [heads, most_tiles]: the first candidate in a tile or -1, or null
  std::int32_t* read;       // reported [heads]: pages read for candidates, or null
  std::uint32_t* counters;  // [kRunCounters]: tiles given to warps
};

// Warps take tiles from one of so many counters: one alone would serve them too slowly.
inline constexpr int kRunCounters = 16;

// Which 16 bytes of a tile of 8, 6 or 4 for every channel are copied as number `i` of those that a
// list of channels takes, `inverse` of whose numbers make 1024. The first page's come first.
struct ListedUnits {
  int units;
  int inverse;

  static ListedUnits of_bits(int bits) { return {2 * bits, (1023 + 2 * bits) / (2 * bits)}; }
  // The place on the list; as exact as a division, for `i` is below 256.
  __device__ __forceinline__ int channel(int i) const { return i * inverse >> 10; }
  __device__ __forceinline__ std::uint32_t of(std::uint32_t channel, int place, int i) const {
    const auto number = static_cast<std::uint32_t>(i - place * units);
    const auto count = static_cast<std::uint32_t>(units);
    // At 3 bits the first page is first in the tile, too.
    return channel * count + (units == 6 ? number : number ^ channel % kTilePages * (count / 2));
  }
};

struct PrepareArgs {
  QueryArgs queries;
  TileQueries to;
  const BatchToken* tokens;
  const HeadSelection* candidates;  // reported [heads] or null
  std::int64_t most_tiles;          // that a head may have
  int steps;
  int column_tiles;
  int columns;  // of the first tile, until queries are repeated
  ListedUnits units;
  bool listed;  // channels are looked up rather than taken in order
};

// Which of a step's channels lane `lane` has as its number `j` of four. Channels that are listed
// can be laid out as is best; those in order are where they are, and lanes that differ in the
// lowest bit of the channel find different banks.
__device__ __forceinline__ int channel_of_lane(bool listed, int lane, int j) {
  return listed ? lane % 4 * 4 + j : lane % 4 / 2 * 8 + j * 2 + lane % 2;
}

// Half `channel` of a pair of scales, as two bytes of a permutation's selector.
__device__ __forceinline__ std::uint32_t half_selector(std::uint32_t channel, std::uint32_t pair) {
  const std::uint32_t low = channel % 2 * 2 + pair * 4;
  return low | (low + 1) << 4;
}

// Loops are short, and are not unrolled: of what runs once, fetching instructions takes longest.
__device__ inline void write_fragments(const Queries& queries, const PrepareArgs& a, int head) {
  const int pairs = (a.steps + 1) / 2;
  const int total = a.column_tiles * pairs * kWarp;
  uint4* const to = a.to.fragments + static_cast<std::int64_t>(head) * total;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < total; i += kQueryThreads) {
    const int lane = i % kWarp;
    const int tile = i / kWarp;  // a pair of steps has one or two
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
  // By the warp after the one that has most of the above.
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

// Tiles that the whole pages of a token lie in.
__device__ __forceinline__ int tiles_of(const BatchToken& token) {
  return (token.position / kPageTokens + kTilePages - 1) / kTilePages;
}

// Called by all threads of one block for every head, after load_queries().
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
  // kMaxQueries are fewer than threads.
  if (const auto n = static_cast<int>(threadIdx.x); n < a.queries.count) {
    a.to.factors[head * kMaxQueries + n] = queries.factor[n];
  }
  if (a.listed) write_lists(queries, a, head);
}

}  // namespace sluice::cuda
