// Attention to the pages that are read. Blocks share a head's pages, a warp has one at a time; the
// last block of a head adds up what all have, gives the mean value what is left, and merges.
#include <cmath>

#include "kernels/runtime/device_math.cuh"
#include "kernels/runtime/early_launch.cuh"
#include "kernels/runtime/ticket.cuh"
#include "kernels/values/choose.cuh"
#include "kernels/values/read_page.cuh"
#include "lib/check.h"

namespace sluice::cuda {
namespace {

constexpr int kSumWarps = kReadWarps / 2;  // whose sums meet in shared memory

// What a lane has of its warp's pages.
template <int kBlocks>
struct PageSums {
  float results[kBlocks][kBlockResults] = {};
  float mass = 0.0f;  // weights of the query head of the lane's column, lane / 4

  static constexpr int kNumbers = kBlocks * kBlockResults + 1;  // of a lane
  static constexpr int kSize = kNumbers * kWarp;

  // Where for_each() puts what a query head has of a channel, and its mass.
  __device__ static int place_of(int query, int channel) {
    const int number = channel / kBlockChannels * kBlockResults + channel % 4 * 2 + query % 2;
    return number * kWarp + channel % kBlockChannels / 4 * 4 + query / 2;
  }
  __device__ static int mass_place(int query) { return (kNumbers - 1) * kWarp + query * 4; }

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

// A page that is read.
struct ReadPage {
  int number;
  std::int64_t place;  // see TilePool
};

// The part of a head that a block has: some of its pages for some of its query heads.
struct BlockPart {
  int head;
  int pages;       // of the head
  int chosen = 0;  // that are read
  int split;
  int splits = 1;  // that have pages
  int first_query;
  int queries;
  std::int64_t place;  // of the head's query part among all
  const uint4* masks;  // of the head's pages

  __device__ explicit BlockPart(const TilesCall& c)
      : head(static_cast<int>(blockIdx.y)),
        pages(page_of(c.token_of(head).position)),
        split(static_cast<int>(blockIdx.x)),
        first_query(static_cast<int>(blockIdx.z) * kTileQueries),
        queries(min(c.group - first_query, kTileQueries)),
        place(std::int64_t{head} * c.query_parts + blockIdx.z),
        masks(c.weights.from(head).masks) {}

  __device__ void share_out(const TilesCall& c, int pages_chosen) {
    chosen = pages_chosen;
    splits = min(max((chosen + kReadWarps - 1) / kReadWarps, 1), c.splits);
  }
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
  const auto* const masks = reinterpret_cast<const std::uint32_t*>(part.masks + page.number);
  const ColumnWeights w = weigh_page<kBits>(logits, masks[lane % 4], norm);
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

// Of shared memory: the sums of half the warps, or of columns that threads share.
template <int kBlocks>
__host__ __device__ constexpr std::size_t sum_floats() {
  constexpr std::size_t kSums = std::size_t{kSumWarps} * PageSums<kBlocks>::kSize;
  return kSums > 4 * kReadThreads ? kSums : 4 * kReadThreads;
}

// Adds up the warps' sums in shared memory, [kSumWarps, PageSums::kSize], for sum_of().
template <int kBlocks>
__device__ void join_warps(PageSums<kBlocks>& sums, float* memory) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  float* const own = memory + warp % kSumWarps * PageSums<kBlocks>::kSize;
  if (warp >= kSumWarps) sums.for_each([&](float x, int place) { own[place] = x; });
  __syncthreads();
  if (warp < kSumWarps) sums.for_each([&](float x, int place) { own[place] += x; });
  __syncthreads();
}

// What all of the block's warps have at a place.
template <int kBlocks>
__device__ __forceinline__ float sum_of(const float* memory, int place) {
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kSumWarps; ++warp) {
    sum += memory[warp * PageSums<kBlocks>::kSize + place];
  }
  return sum;
}

// What a block leaves for the last one of its head: sums [kTileQueries, head_dim] of those query
// heads that there are, then their masses.
struct Partial {
  float* sums;
  float* masses;

  __device__ Partial(const TilesCall& c, const BlockPart& part, int split)
      : sums(c.partials + (part.place * c.splits + split) * partial_floats(c.head_dim)),
        masses(sums + kTileQueries * c.head_dim) {}
};

template <int kBlocks>
__device__ void write_partial(const TilesCall& c, const BlockPart& part, const float* memory) {
  using Sums = PageSums<kBlocks>;
  const Partial to(c, part, part.split);
  const auto thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < part.queries * c.head_dim; i += kReadThreads) {
    to.sums[i] = sum_of<kBlocks>(memory, Sums::place_of(i / c.head_dim, i % c.head_dim));
  }
  if (thread < part.queries) to.masses[thread] = sum_of<kBlocks>(memory, Sums::mass_place(thread));
}

__device__ __forceinline__ float4 add_scaled(const float4& x, float factor, const float4& y) {
  return make_float4(fmaf(factor, y.x, x.x), fmaf(factor, y.y, x.y), fmaf(factor, y.z, x.z),
                     fmaf(factor, y.w, x.w));
}

// One query head of a head whose pages are all read.
struct Finished {
  float read;    // what sums of values count
  float mean;    // and what value_sums do
  float before;  // and the partial that was there
};

// By one warp. Sums are taken in the same order every time.
__device__ Finished finish_query(const TilesCall& c, const BlockPart& part, int query,
                                 bool is_all) {
  const auto lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t row = std::int64_t{part.head} * c.group + part.first_query + query;
  const float old = c.merge ? c.out_lse[row] : 0.0f;
  float read = 0.0f;
#pragma unroll 1
  for (int split = lane; split < part.splits; split += kWarp) {
    read += Partial(c, part, split).masses[query];
  }
  float all = 0.0f;
  const int slices = is_all ? 0 : PageWeights::slices_of(part.pages);
  const float* const masses = c.weights.from(part.head).masses + part.first_query + query;
#pragma unroll 1
  for (int slice = lane; slice < slices; slice += kWarp) all += masses[slice * c.group];
  read = warp_sum(read);
  all = warp_sum(all);
  const float unread = fmaxf(all - read, 0.0f);
  const float mass = read + unread;
  // In bits. What weighs nothing is left out, the partial before if there is none.
  const float here = mass > 0.0f ? fmaf(c.lse[row], kLog2E, __log2f(mass)) : -INFINITY;
  const float before = c.merge ? old * kLog2E : -INFINITY;
  const float highest = fmaxf(here, before);
  const float reference = highest > -INFINITY ? highest : 0.0f;
  const float weight = exp2_fast(here - reference);
  const float kept = exp2_fast(before - reference);
  const float both = weight + kept;
  const float sum = both == 0.0f ? 1.0f : both;  // NaN stays
  if (lane == 0) c.out_lse[row] = (highest + __log2f(sum)) * kLn2;
  const float each = mass > 0.0f ? __fdividef(weight, sum * mass) : 0.0f;
  const auto tokens = static_cast<float>(c.token_of(part.head).position + 1);
  return {each, __fdividef(each * unread, tokens), __fdividef(kept, sum)};
}

// Four channels of a query head, whose sums of values these are.
__device__ __forceinline__ void write_columns(const TilesCall& c, const BlockPart& part, int column,
                                              const float4& sum, const Finished& f) {
  const std::int64_t row = std::int64_t{part.head} * c.group + part.first_query;
  const int channel = column * 4 % c.head_dim;
  const auto& mean = reinterpret_cast<const float4*>(c.value_sums + std::int64_t{part.head} *
                                                                        c.head_dim)[channel / 4];
  auto& to = reinterpret_cast<float4*>(c.out + row * c.head_dim)[column];
  float4 x = make_float4(f.read * sum.x, f.read * sum.y, f.read * sum.z, f.read * sum.w);
  if (f.mean > 0.0f) x = add_scaled(x, f.mean, mean);
  if (!(f.before <= 0.0f)) x = add_scaled(x, f.before, to);
  to = x;
}

// By the last block of a head: adds up all blocks' sums and writes the result. Threads have four
// channels each; where they suffice, several share what there is to add up. `memory` is
// [kReadThreads] float4.
__device__ void finish(const TilesCall& c, const BlockPart& part, float4* memory) {
  __shared__ Finished finished[kTileQueries];
  const auto thread = static_cast<int>(threadIdx.x);
  const bool is_all = part.chosen == part.pages;
  const int columns = part.queries * c.head_dim / 4;
  const int shares = max(kReadThreads / columns, 1);
  const int query = thread / kWarp;
  if (query < part.queries) {
    const Finished f = finish_query(c, part, query, is_all);
    if (thread % kWarp == 0) finished[query] = f;
  }
  const int share = thread / columns;
  const auto* const sums = reinterpret_cast<const float4*>(Partial(c, part, 0).sums);
  const auto stride = static_cast<int>(partial_floats(c.head_dim) / 4);
#pragma unroll 1
  for (int first = 0; first < columns; first += kReadThreads) {
    const int column = first + thread - share * columns;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (column < columns && share < shares) {
#pragma unroll 8
      for (int split = share; split < part.splits; split += shares) {
        sum = add_scaled(sum, 1.0f, sums[split * stride + column]);
      }
    }
    memory[thread] = sum;
    __syncthreads();
    if (share == 0 && column < columns) {
#pragma unroll 1
      for (int other = 1; other < shares; ++other) {
        sum = add_scaled(sum, 1.0f, memory[thread + other * columns]);
      }
      write_columns(c, part, column, sum, finished[column * 4 / c.head_dim]);
    }
    __syncthreads();
  }
}

template <int kBits, int kBlocks>
__global__ void __launch_bounds__(kReadThreads, kBlocks <= 4 ? 2 : 1)
    read_pages(const __grid_constant__ TilesCall c) {
  extern __shared__ float4 memory[];
  __shared__ PageChoice::Shared choice;
  __shared__ bool is_last;
  auto* const floats = reinterpret_cast<float*>(memory);
  auto* const list = reinterpret_cast<PageChoice::Page*>(floats + sum_floats<kBlocks>());
  wait_for_kernel_before();
  allow_next_kernel();
  BlockPart part(c);
  if (part.pages > 0 && c.selections[part.head].bad != 0) part.pages = 0;
  PageChoice pages(c.weights.from(part.head).weights, part.pages, choice);
  part.share_out(c, part.pages > 0 ? pages.list(c.share, list) : 0);
  const auto thread = static_cast<int>(threadIdx.x);
  if (part.split == 0 && blockIdx.z == 0 && thread == 0 && c.pages_read != nullptr) {
    c.pages_read[part.head] = part.chosen * c.query_parts;
  }
  if (part.split >= part.splits) return;
  __syncthreads();
  const int query = min(thread % kWarp / 4, part.queries - 1);
  const float norm = c.lse[std::int64_t{part.head} * c.group + part.first_query + query] * kLog2E;
  const std::int32_t sequence = c.token_of(part.head).sequence;
  const auto page_at = [&](int i) {
    const int number = list[i];
    return ReadPage{number, c.values.place_of(sequence, number)};
  };
  PageSums<kBlocks> sums;
  const int step = part.splits * kReadWarps;
  int i = thread / kWarp * part.splits + part.split;
  ReadPage page{};
  if (i < part.chosen) page = page_at(i);
#pragma unroll 1
  for (; i < part.chosen; i += step) {
    const ReadPage own = page;
    if (i + step < part.chosen) page = page_at(i + step);
    add_page<kBits, kBlocks>(c, part, own, norm, sums);
  }
  join_warps(sums, floats);
  write_partial<kBlocks>(c, part, floats);
  __syncthreads();
  if (thread == 0) is_last = takes_last_ticket(c.tickets + part.place, part.splits);
  __syncthreads();
  if (!is_last) return;
  if (thread == 0) c.tickets[part.place] = 0;
  finish(c, part, memory);
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
    const std::size_t shared = sizeof(float) * sum_floats<kBlocks>() +
                               sizeof(PageChoice::Page) * static_cast<std::size_t>(c.most_pages);
    check(c.most_pages <= PageChoice::kMostPages, "attend_tiles: pages");
    const auto kernel = read_pages<kBits, kBlocks>;
    require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared)),
            "attention to value tiles");
    const dim3 grid(static_cast<unsigned>(c.splits), static_cast<unsigned>(c.heads),
                    static_cast<unsigned>(c.query_parts));
    launch_early("attention to value tiles", kernel, grid, kReadThreads, shared, launch, c);
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

namespace {

unsigned merge_blocks(const MergePartialsParams& p) {
  return static_cast<unsigned>((p.rows + kReadWarps - 1) / kReadWarps);
}

}  // namespace

void merge_partials(const MergePartialsParams& p, const Launch& launch) {
  if (p.rows == 0) return;
  launch_early("merging partials", merge_rows, dim3(merge_blocks(p)), kReadThreads, 0, launch, p);
}

void merge_joined_partials(const MergePartialsParams& p, const Launch& launch) {
  if (p.rows == 0) return;
  merge_rows<<<merge_blocks(p), kReadThreads, 0, launch.stream>>>(p);
  require_launch("merging partials");
}

}  // namespace sluice::cuda
