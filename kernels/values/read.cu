// Attention to the pages that were chosen. Blocks share a head's pages, a warp has one at a time;
// the last block of a head adds up what all have, gives the mean value what is left, and merges.
#include <cmath>

#include "kernels/runtime/device_math.cuh"
#include "kernels/runtime/early_launch.cuh"
#include "kernels/runtime/ticket.cuh"
#include "kernels/values/read_page.cuh"
#include "lib/check.h"

namespace sluice::cuda {
namespace {

constexpr int kReadThreads = 256;
constexpr int kReadWarps = kReadThreads / kWarp;

// What a lane has of its warp's pages.
template <int kBlocks>
struct PageSums {
  float results[kBlocks][kBlockResults] = {};
  float mass = 0.0f;  // weights of the query head of the lane's column, lane / 4

  static constexpr int kNumbers = kBlocks * kBlockResults + 1;  // of a lane
  static constexpr int kSize = kNumbers * kWarp;

  // Calls body(number, place) for all of a lane's numbers.
  template <typename Body>
  __device__ __forceinline__ void for_each(const Body& body) {
    const auto lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int i = 0; i < kBlocks * kBlockResults; ++i) {
      body(results[i / kBlockResults][i % kBlockResults], i * kWarp + lane);
    }
    body(mass, (kNumbers - 1) * kWarp + lane);
  }
};

// The part of a head that a block has: some of its pages for some of its query heads.
struct BlockPart {
  int head;
  int split;
  int splits;  // that have pages
  int first_query;
  int queries;
  std::int64_t place;  // of the head's query part among all

  __device__ explicit BlockPart(const TilesCall& c, std::int32_t pages)
      : head(static_cast<int>(blockIdx.y)),
        split(static_cast<int>(blockIdx.x)),
        splits(min(max((pages + kReadWarps - 1) / kReadWarps, 1), c.splits)),
        first_query(static_cast<int>(blockIdx.z) * kTileQueries),
        queries(min(c.group - first_query, kTileQueries)),
        place(std::int64_t{head} * c.query_parts + blockIdx.z) {}
};

template <int kBits, int kBlocks>
__device__ __forceinline__ void add_page(const TilesCall& c, const BlockPart& part,
                                         const ReadPage& page, float norm,
                                         PageSums<kBlocks>& sums) {
  // Of a page at 2 bits and head_dim 128 all words are on their way at once.
  constexpr int kAtOnce = kBits == 2 && kBlocks == 4 ? 4 : 2;
  constexpr float kUnit = static_cast<float>(1 << (24 - kTopShift<kBits>));
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::byte* const bytes = c.values.at(part.head % c.kv_heads, page.place);
  LaneWords<kBits> words[kAtOnce];
#pragma unroll
  for (int b = 0; b < kAtOnce; ++b) {
    load_words<kBits>(bytes, c.head_dim, b * kBlockChannels, words[b]);
  }
  const int query = lane / 4;
  const __half* logits = nullptr;
  if (query < part.queries) {
    logits = c.row(part.head, part.first_query + query) + page.number * kPageTokens +
             lane % 4 * kThreadTokens;
  }
  const auto* const masks = reinterpret_cast<const std::uint32_t*>(
      c.masks + std::int64_t{part.head} * c.most_pages + page.number);
  const PageWeights w = weigh_page<kBits>(logits, masks[lane % 4], norm);
  if (query < part.queries) sums.mass = fmaf(w.factor, w.sum, sums.mass);
  const ColumnFactors factors(w, kUnit);
#pragma unroll
  for (int first = 0; first < kBlocks; first += kAtOnce) {
#pragma unroll
    for (int b = 0; b < kAtOnce && first + b < kBlocks; ++b) {
      const int channel = (first + b) * kBlockChannels;
      if (first > 0) load_words<kBits>(bytes, c.head_dim, channel, words[b]);
    }
#pragma unroll
    for (int b = 0; b < kAtOnce && first + b < kBlocks; ++b) {
      const int channel = (first + b) * kBlockChannels;
      add_block<kBits>(bytes, c.head_dim, channel, words[b], w, factors, sums.results[first + b]);
    }
  }
}

// Over all warps, for the first. `memory` is [kReadWarps / 2, PageSums::kSize].
template <int kBlocks>
__device__ void add_warps(PageSums<kBlocks>& sums, float* memory) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll 1
  for (int half = kReadWarps / 2; half > 0; half /= 2) {
    if (warp >= half && warp < 2 * half) {
      float* const to = memory + (warp - half) * PageSums<kBlocks>::kSize;
      sums.for_each([&](float x, int place) { to[place] = x; });
    }
    __syncthreads();
    if (warp < half) {
      const float* const from = memory + warp * PageSums<kBlocks>::kSize;
      sums.for_each([&](float& x, int place) { x += from[place]; });
    }
    __syncthreads();
  }
}

// One query head of a head whose pages are all read.
struct Finished {
  float read;    // what sums of values count
  float mean;    // and what value_sums do
  float before;  // and the partial that was there
};

__device__ Finished finish_query(const TilesCall& c, const BlockPart& part, int query, float read,
                                 bool is_all) {
  const std::int64_t row = std::int64_t{part.head} * c.group + part.first_query + query;
  const float unread = is_all ? 0.0f : fmaxf(c.masses[row] - read, 0.0f);
  const float mass = read + unread;
  float here = -INFINITY;
  Finished f = {0.0f, 0.0f, 0.0f};
  if (mass > 0.0f) {
    here = c.lse[row] + logf(mass);
    f.read = 1.0f / mass;
    f.mean = unread / mass / static_cast<float>(c.token_of(part.head).position + 1);
  }
  float lse = here;
  if (c.merge) {
    const float old = c.out_lse[row];
    f.before = 1.0f;
    if (here > -INFINITY) {
      const float highest = fmaxf(here, old);
      const float weight = expf(here - highest);
      const float kept = expf(old - highest);
      f.before = kept / (weight + kept);
      f.read *= weight / (weight + kept);
      f.mean *= weight / (weight + kept);
      lse = highest + logf(weight + kept);
    } else {
      lse = old;
    }
  }
  c.out_lse[row] = lse;
  return f;
}

// By the last block of a head: adds up all blocks' sums and writes the result.
template <int kBlocks>
__device__ void finish(const TilesCall& c, const BlockPart& part, bool is_all) {
  using Sums = PageSums<kBlocks>;
  __shared__ Finished finished[kTileQueries];
  const auto thread = static_cast<int>(threadIdx.x);
  const float* const partials = c.partials + part.place * c.splits * Sums::kSize;
  const auto sum_at = [&](int place) {
    float sum = 0.0f;
#pragma unroll 8
    for (int split = 0; split < part.splits; ++split) sum += partials[split * Sums::kSize + place];
    return sum;
  };
  if (thread < part.queries) {
    const float read = sum_at((Sums::kNumbers - 1) * kWarp + thread * 4);
    finished[thread] = finish_query(c, part, thread, read, is_all);
  }
  __syncthreads();
  for (int i = thread; i < Sums::kSize - kWarp; i += kReadThreads) {
    const int lane = i % kWarp;
    const int number = i / kWarp % kBlockResults;
    const int channel = i / kWarp / kBlockResults * kBlockChannels + lane / 4 * 4 + number / 2;
    const int query = lane % 4 * 2 + number % 2;
    if (channel >= c.head_dim || query >= part.queries) continue;
    const Finished f = finished[query];
    const std::int64_t row = std::int64_t{part.head} * c.group + part.first_query + query;
    float* const out = c.out + row * c.head_dim + channel;
    float x = f.read * sum_at(i);
    if (f.mean > 0.0f) {
      x = fmaf(f.mean, c.value_sums[std::int64_t{part.head} * c.head_dim + channel], x);
    }
    if (c.merge && f.before != 0.0f) x = fmaf(f.before, *out, x);
    *out = x;
  }
}

template <int kBits, int kBlocks>
__global__ void __launch_bounds__(kReadThreads, kBlocks <= 4 ? 2 : 1)
    read_pages(const __grid_constant__ TilesCall c) {
  using Sums = PageSums<kBlocks>;
  extern __shared__ float memory[];
  __shared__ bool is_last;
  wait_for_kernel_before();
  allow_next_kernel();
  const auto head = static_cast<int>(blockIdx.y);
  const std::int32_t pages = c.read_counts[head];
  const BlockPart part(c, pages);
  if (part.split >= part.splits) return;
  const auto thread = static_cast<int>(threadIdx.x);
  const int query = min(thread % kWarp / 4, part.queries - 1);
  const float norm = c.lse[std::int64_t{head} * c.group + part.first_query + query] * kLog2E;
  const ReadPage* const list = c.read + std::int64_t{head} * c.most_pages;
  Sums sums;
  const int step = part.splits * kReadWarps;
  int i = thread / kWarp * part.splits + part.split;
  ReadPage page{};
  if (i < pages) page = list[i];
#pragma unroll 1
  for (; i < pages; i += step) {
    const ReadPage own = page;
    if (i + step < pages) page = list[i + step];
    add_page<kBits, kBlocks>(c, part, own, norm, sums);
  }
  add_warps(sums, memory);
  if (thread < kWarp) {
    float* const to = c.partials + (part.place * c.splits + part.split) * Sums::kSize;
    sums.for_each([&](float x, int place) { to[place] = x; });
  }
  __syncthreads();
  if (thread == 0) is_last = takes_last_ticket(c.tickets + part.place, part.splits);
  __syncthreads();
  if (!is_last) return;
  if (thread == 0) c.tickets[part.place] = 0;
  const bool is_all = pages == page_of(c.token_of(head).position);
  finish<kBlocks>(c, part, is_all);
}

// Calls body(std::integral_constant<int, blocks of kBlockChannels>()), enough for a head.
template <typename Body>
void dispatch_blocks(int head_dim, const Body& body) {
  const int blocks = (head_dim + kBlockChannels - 1) / kBlockChannels;
  if (blocks <= 2) return body(std::integral_constant<int, 2>());
  if (blocks == 3) return body(std::integral_constant<int, 3>());
  if (blocks == 4) return body(std::integral_constant<int, 4>());
  return body(std::integral_constant<int, 8>());
}

template <int kBits>
void run_bits(const TilesCall& c, const Launch& launch) {
  dispatch_blocks(c.head_dim, [&](auto blocks) {
    constexpr int kBlocks = decltype(blocks)::value;
    constexpr std::size_t kShared = sizeof(float) * kReadWarps / 2 * PageSums<kBlocks>::kSize;
    const dim3 grid(static_cast<unsigned>(c.splits), static_cast<unsigned>(c.heads),
                    static_cast<unsigned>(c.query_parts));
    launch_early("attention to value tiles", read_pages<kBits, kBlocks>, grid, kReadThreads,
                 kShared, launch, c);
  });
}

// A row each warp.
__global__ void __launch_bounds__(kReadThreads)
    merge_rows(const __grid_constant__ MergePartialsParams p) {
  wait_for_kernel_before();
  allow_next_kernel();
  const auto lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t row =
      std::int64_t{blockIdx.x} * kReadWarps + static_cast<int>(threadIdx.x) / kWarp;
  if (row >= p.rows) return;
  const float here = p.from_lse[row];
  const float old = p.lse[row];
  if (here == -INFINITY) return;
  const float highest = fmaxf(here, old);
  const float sum = expf(here - highest) + expf(old - highest);
  const float weight = expf(here - highest) / sum;
  const float kept = expf(old - highest) / sum;
  const float* const from = p.from + row * p.head_dim;
  float* const out = p.out + row * p.head_dim;
  for (int c = lane; c < p.head_dim; c += kWarp) {
    out[c] = fmaf(weight, from[c], kept == 0.0f ? 0.0f : kept * out[c]);
  }
  __syncwarp();
  if (lane == 0) p.lse[row] = highest + logf(sum);
}

}  // namespace

std::int64_t partial_size(int head_dim) {
  std::int64_t size = 0;
  dispatch_blocks(head_dim, [&](auto blocks) { size = PageSums<decltype(blocks)::value>::kSize; });
  return size;
}

void run_read(const TilesCall& c, const Launch& launch) {
  switch (c.bits) {
    case 2:
      return run_bits<2>(c, launch);
    case 3:
      return run_bits<3>(c, launch);
    case 4:
      return run_bits<4>(c, launch);
    default:
      check(false, "attend_tiles: bits");
  }
}

void merge_partials(const MergePartialsParams& p, const Launch& launch) {
  if (p.rows == 0) return;
  const auto blocks = static_cast<unsigned>((p.rows + kReadWarps - 1) / kReadWarps);
  launch_early("merging partials", merge_rows, dim3(blocks), kReadThreads, 0, launch, p);
}

}  // namespace sluice::cuda
