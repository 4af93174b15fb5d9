// What a scan of tiles is told of the queries, written on the device before it.
#pragma once

#include "kernels/channels.cuh"
#include "lib/selection.h"

namespace sluice::cuda {

inline constexpr int kStepChannels = 16;  // of one tensor core step
inline constexpr int kMaxListed = kMaxHeadDim;

// A pass over channels takes `steps` steps; the last is filled up with channels that the queries
// are zero in.
struct TileQueries {
  uint2* fragments;         // [kv_heads, column tiles, steps, lanes], queries as B
  float* factors;           // [kv_heads, kMaxQueries]
  std::uint16_t* channels;  // [kv_heads, kMaxListed], if they are listed
  uint2* selectors;         // [kv_heads, steps, 4]: which halves of pairs of scales to take
  std::int32_t* counts;     // [kv_heads]: candidates, if there are any
  std::int32_t* first;      // [kv_heads, pages]: the first candidate in a page or -1, or null
  std::uint32_t* counters;  // [kRunCounters]: runs of pages given to warps
};

// Warps take runs of pages from one of so many counters: one alone would serve them too slowly.
inline constexpr int kRunCounters = 16;

struct PrepareArgs {
  QueryArgs queries;
  TileQueries to;
  const HeadSelection* candidates;  // host-visible [kv_heads] or null
  std::int64_t pages;
  int steps;
  int column_tiles;
  bool listed;  // channels are looked up rather than taken in order
};

// Which of a step's channels lane `lane` has as its number `j` of four. Channels that are listed
// can be laid out as is best; those in order are where they are, and lanes that differ in the
// lowest bit of the channel find different banks.
__device__ __forceinline__ int channel_of_lane(bool listed, int lane, int j) {
  return listed ? lane % 4 * 4 + j : lane % 4 / 2 * 8 + j * 2 + lane % 2;
}

// Half `channel` of a pair of scales, as two bytes of a permutation's selector.
__device__ __forceinline__ std::uint32_t half_selector(int channel, int pair) {
  const std::uint32_t low = static_cast<std::uint32_t>(channel % 2 * 2 + pair * 4);
  return low | (low + 1) << 4;
}

__device__ inline void write_fragments(const Queries& queries, const PrepareArgs& a, int head) {
  const int total = a.column_tiles * a.steps * kWarp;
  uint2* const to = a.to.fragments + static_cast<std::int64_t>(head) * total;
  for (int i = static_cast<int>(threadIdx.x); i < total; i += kQueryThreads) {
    const int lane = i % kWarp;
    const int step = i / kWarp % a.steps;
    const int n = i / kWarp / a.steps * 8 + lane / 4;
    const auto q = [&](int j) {
      const int place = step * kStepChannels + channel_of_lane(a.listed, lane, j);
      if (n >= a.queries.count || place >= a.queries.channels) return 0.0f;
      return queries.q[n][queries.channel[place]];
    };
    to[i] = make_uint2(pack(__half(), q(0), q(1)), pack(__half(), q(2), q(3)));
  }
}

__device__ inline void write_lists(const Queries& queries, const PrepareArgs& a, int head) {
  const int thread = static_cast<int>(threadIdx.x);
  const auto channel = [&](int place) {
    return static_cast<int>(queries.channel[min(place, a.queries.channels - 1)]);
  };
  for (int place = thread; place < kMaxListed; place += kQueryThreads) {
    a.to.channels[head * kMaxListed + place] = static_cast<std::uint16_t>(channel(place));
  }
  if (thread < a.steps * 4) {
    const int place = thread * 4;
    a.to.selectors[head * a.steps * 4 + thread] = make_uint2(
        half_selector(channel(place), 0) | half_selector(channel(place + 1), 1) << 8,
        half_selector(channel(place + 2), 0) | half_selector(channel(place + 3), 1) << 8);
  }
}

// Called by all threads of one block for every KV head, after load_queries().
__device__ inline void prepare_tiles(const Queries& queries, const PrepareArgs& a, int head) {
  if (head == 0 && threadIdx.x < kRunCounters) a.to.counters[threadIdx.x] = 0;
  if (a.candidates != nullptr) {
    if (threadIdx.x == 0) a.to.counts[head] = a.candidates[head].count;
    for (std::int64_t page = threadIdx.x; page < a.pages; page += kQueryThreads) {
      a.to.first[head * a.pages + page] = -1;
    }
  }
  write_fragments(queries, a, head);
  for (int n = static_cast<int>(threadIdx.x); n < a.queries.count; n += kQueryThreads) {
    a.to.factors[head * kMaxQueries + n] = queries.factor[n];
  }
  if (a.listed) write_lists(queries, a, head);
}

}  // namespace sluice::cuda
