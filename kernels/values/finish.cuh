// The pages and query heads of a block of the reading kernel, and the work of a head's last block:
// it adds up all blocks' sums, gives the remaining weight to the mean value, and merges.
#pragma once

#include <cmath>

#include "kernels/runtime/device_math.cuh"
#include "kernels/values/choose.cuh"

namespace sluice::cuda {

// A block's part of a head: some of its pages for some of its query heads.
struct BlockPart {
  int head;
  int pages;       // of the head
  int chosen = 0;  // pages that are read
  int split;
  int splits = 1;  // blocks that have pages
  int first_query;
  int queries;
  std::int64_t place;  // index in [heads, query_parts]
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

// A block's partial, for the last block of its head: sums [kTileQueries, channels] of the query
// heads that exist, then their masses.
struct Partial {
  float* sums;
  float* masses;

  __device__ Partial(const TilesCall& c, const BlockPart& part, int split)
      : sums(c.partials + (part.place * c.splits + split) * partial_floats(c.channels)),
        masses(sums + kTileQueries * c.channels) {}
};

__device__ __forceinline__ float4 add_scaled(const float4& x, float factor, const float4& y) {
  return make_float4(fmaf(factor, y.x, x.x), fmaf(factor, y.y, x.y), fmaf(factor, y.z, x.z),
                     fmaf(factor, y.w, x.w));
}

// Factors of one query head's inputs, once all blocks of the head have read their pages.
struct Finished {
  float read;    // of the sums of values
  float mean;    // of value_sums, for the pages that were not read
  float all;     // of value_sums, if they stand for part of every value
  float mass;    // weights of the pages that were read, over the number of tokens
  float before;  // of the partial already in `out`
};

// One warp calls it. Sums are taken in the same order every time.
__device__ Finished finish_query(const TilesCall& c, const BlockPart& part, int query,
                                 bool is_all) {
  const auto lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t row = std::int64_t{part.head} * c.group + part.first_query + query;
  const float old = c.merge ? c.out_lse[row] : 0.0f;
  const float lse = c.lse[row] * kLog2E;
  const int slices = is_all ? 0 : PageWeights::slices_of(part.pages);
  const float* const masses = c.weights.from(part.head).masses + part.first_query + query;
  const float* const sums = Partial(c, part, 0).masses + query;
  const auto stride = static_cast<int>(partial_floats(c.channels));
  float read = 0.0f;
  float all = 0.0f;
  // The loads of one iteration overlap.
#pragma unroll 1
  for (int i = lane; i < max(part.splits, slices); i += 2 * kWarp) {
    const int next = i + kWarp;
    const float first = i < part.splits ? sums[i * stride] : 0.0f;
    const float second = next < part.splits ? sums[next * stride] : 0.0f;
    const float first_all = i < slices ? masses[i * c.group] : 0.0f;
    const float second_all = next < slices ? masses[next * c.group] : 0.0f;
    read += first + second;
    all += first_all + second_all;
  }
  read = warp_sum(read);
  all = warp_sum(all);
  const float unread = fmaxf(all - read, 0.0f);
  const float mass = read + unread;
  // Logarithms of base 2. -Inf leaves a part out: the pages if they weigh nothing, the partial
  // before if there is none.
  const float here = mass > 0.0f ? lse + __log2f(mass) : -INFINITY;
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
  return {each, __fdividef(each * unread, tokens), __fdividef(each * mass, tokens),
          __fdividef(read, tokens), __fdividef(kept, sum)};
}

// Inputs of four channels of a query head, besides the sums of values. `column` counts fours of
// channels over the block's query heads.
struct ColumnParts {
  float4 mean;
  float4 before;

  __device__ __forceinline__ ColumnParts(const TilesCall& c, const BlockPart& part, int column)
      : mean(reinterpret_cast<const float4*>(
            c.value_sums)[part.head * (c.head_dim / 4) + column % (c.head_dim / 4)]),
        before(c.merge ? *output(c, part, column) : make_float4(0.0f, 0.0f, 0.0f, 0.0f)) {}

  __device__ __forceinline__ static float4* output(const TilesCall& c, const BlockPart& part,
                                                   int column) {
    const std::int64_t row = std::int64_t{part.head} * c.group + part.first_query;
    return reinterpret_cast<float4*>(c.out + row * c.head_dim) + column;
  }

  __device__ __forceinline__ float4 with(const float4& sum, const Finished& f) const {
    float4 x = make_float4(f.read * sum.x, f.read * sum.y, f.read * sum.z, f.read * sum.w);
    if (f.mean > 0.0f) x = add_scaled(x, f.mean, mean);
    if (!(f.before <= 0.0f)) x = add_scaled(x, f.before, before);
    return x;
  }
};

// Adds up all blocks' sums and writes the result; the last block of a head calls it. Each thread
// has four channels; if there are enough threads, several divide the blocks among them. `memory` is
// [kReadThreads] float4.
__device__ void finish(const TilesCall& c, const BlockPart& part, float4* memory) {
  __shared__ Finished finished[kTileQueries];
  const auto thread = static_cast<int>(threadIdx.x);
  const bool is_all = part.chosen == part.pages;
  const int columns = part.queries * c.head_dim / 4;
  const int shares = max(kReadThreads / columns, 1);
  const int share = thread / columns;
  const auto* const sums = reinterpret_cast<const float4*>(Partial(c, part, 0).sums);
  const auto stride = static_cast<int>(partial_floats(c.channels) / 4);
#pragma unroll 1
  for (int first = 0; first < columns; first += kReadThreads) {
    const int column = min(first + thread - share * columns, columns - 1);
    const ColumnParts parts(c, part, column);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (int split = share; split < part.splits; split += shares) {
      sum = add_scaled(sum, 1.0f, sums[split * stride + column]);
    }
    memory[thread] = sum;
    if (first == 0 && thread / kWarp < part.queries) {
      const Finished f = finish_query(c, part, thread / kWarp, is_all);
      if (thread % kWarp == 0) finished[thread / kWarp] = f;
    }
    __syncthreads();
    if (share == 0 && first + thread < columns) {
#pragma unroll 1
      for (int other = 1; other < shares; ++other) {
        sum = add_scaled(sum, 1.0f, memory[thread + other * columns]);
      }
      *ColumnParts::output(c, part, column) = parts.with(sum, finished[column * 4 / c.head_dim]);
    }
    __syncthreads();
  }
}

// The products of a KV head's value_sums with the vectors of its basis, a vector per warp at a
// time.
__device__ __forceinline__ void project_sums(const TilesCall& c, const float* basis,
                                             const float* value_sums, float* products) {
  const auto lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x) / kWarp; i < c.channels; i += kReadWarps) {
    float product = 0.0f;
    for (int j = lane; j < c.head_dim; j += kWarp) {
      product = fmaf(basis[i * c.head_dim + j], value_sums[j], product);
    }
    product = warp_sum(product);
    if (lane == 0) products[i] = product;
  }
}

// Writes the output of query heads from their components, [queries, channels]: a thread has one
// channel of several query heads, which share the loads of the basis.
__device__ __forceinline__ void write_whole(const TilesCall& c, const BlockPart& part,
                                            const float* basis, const float* value_sums,
                                            const float* components, const Finished* finished) {
  const auto thread = static_cast<int>(threadIdx.x);
  const int step = kReadThreads / c.head_dim;
  const int first = thread / c.head_dim;
  const int channel = thread % c.head_dim;
  if (first >= step) return;
  float sums[kTileQueries] = {};
#pragma unroll 16
  for (int i = 0; i < c.channels; ++i) {
    const float x = basis[i * c.head_dim + channel];
#pragma unroll
    for (int k = 0; k < kTileQueries; ++k) {
      const int query = first + k * step;
      if (query < part.queries) sums[k] = fmaf(x, components[query * c.channels + i], sums[k]);
    }
  }
  const std::int64_t row = std::int64_t{part.head} * c.group + part.first_query;
  const float mean = value_sums[channel];
#pragma unroll
  for (int k = 0; k < kTileQueries; ++k) {
    const int query = first + k * step;
    if (query >= part.queries) continue;
    const Finished f = finished[query];
    float* const out = c.out + (row + query) * c.head_dim + channel;
    float x = sums[k];
    if (f.all > 0.0f) x = fmaf(f.all, mean, x);
    if (!(f.before <= 0.0f)) x = fmaf(f.before, *out, x);
    *out = x;
  }
}

// finish() for pages of components: B^T (sums - mass * B mean) + mean, see ValueTiles. `memory`:
// [kTileQueries, channels].
__device__ void finish_components(const TilesCall& c, const BlockPart& part, float* memory) {
  constexpr int kMostChannels = 128;
  __shared__ Finished finished[kTileQueries];
  __shared__ float of_sums[kMostChannels];
  const auto thread = static_cast<int>(threadIdx.x);
  const bool is_all = part.chosen == part.pages;
  const std::int64_t head = part.head % c.kv_heads;
  const float* const basis = c.basis + head * c.channels * c.head_dim;
  const float* const value_sums = c.value_sums + std::int64_t{part.head} * c.head_dim;
  const float* const sums = Partial(c, part, 0).sums;
  const auto stride = static_cast<int>(partial_floats(c.channels));
  const int numbers = part.queries * c.channels;
#pragma unroll 1
  for (int i = thread; i < numbers; i += kReadThreads) {
    float sum = 0.0f;
#pragma unroll 16
    for (int split = 0; split < part.splits; ++split) sum += sums[split * stride + i];
    memory[i] = sum;
  }
  if (thread / kWarp < part.queries) {
    const Finished f = finish_query(c, part, thread / kWarp, is_all);
    if (thread % kWarp == 0) finished[thread / kWarp] = f;
  }
  project_sums(c, basis, value_sums, of_sums);
  __syncthreads();
#pragma unroll 1
  for (int i = thread; i < numbers; i += kReadThreads) {
    const Finished& f = finished[i / c.channels];
    const float beside = memory[i] - f.mass * of_sums[i % c.channels];
    memory[i] = f.read > 0.0f ? f.read * beside : 0.0f;
  }
  __syncthreads();
  write_whole(c, part, basis, value_sums, memory, finished);
}

}  // namespace sluice::cuda
