// Mean keys of pages, and the lists of pages that a block of queries attends to: one thread block
// for each block of queries and KV head.
#include <algorithm>

#include "kernels/attention/attention.h"
#include "kernels/runtime/dispatch.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/whole_pages.cuh"
#include "lib/check.h"

namespace sluice::cuda {
namespace {

constexpr int kMeanThreads = 256;

template <typename Pages>
struct MeansArgs {
  Pages pages;
  std::uint16_t* means = nullptr;  // [sequences, kv_heads, page_stride, head_dim]
  std::int64_t page_stride = 0;
  std::int64_t row_bytes = 0;
  int kv_heads = 0;
  int head_dim = 0;
};

__device__ __forceinline__ std::uint32_t as_bf16_pair(float2 x) {
  return pack(__nv_bfloat16(), x.x, x.y);
}

// Threads hold pairs of channels, of rows a fixed distance apart.
template <typename T, typename Pages>
__global__ void __launch_bounds__(kMeanThreads)
    page_means_kernel(const __grid_constant__ MeansArgs<Pages> args) {
  __shared__ float2 parts[kMeanThreads];
  const int head = static_cast<int>(blockIdx.y);
  WholePage page;
  if (!args.pages.find(head, args.row_bytes, page)) return;
  const int thread = static_cast<int>(threadIdx.x);
  const int pairs = args.head_dim / 2;
  const int rows = kMeanThreads / pairs;
  const int pair = thread % pairs;
  float2 sum = {0, 0};
  for (int row = thread / pairs; row < kPageTokens && thread < rows * pairs; row += rows) {
    const float2 x = floats_of(load_pair(T(), page.rows + row * args.row_bytes, pair));
    sum.x += x.x;
    sum.y += x.y;
  }
  parts[thread] = sum;
  __syncthreads();
  if (thread >= pairs) return;
  for (int part = 1; part < rows; ++part) {
    sum.x += parts[part * pairs + thread].x;
    sum.y += parts[part * pairs + thread].y;
  }
  const std::int64_t to =
      ((page.sequence * args.kv_heads + head) * args.page_stride + page.number) * args.head_dim;
  constexpr float kShare = 1.0f / kPageTokens;
  reinterpret_cast<std::uint32_t*>(args.means + to)[thread] =
      as_bf16_pair({sum.x * kShare, sum.y * kShare});
}

template <typename Pages>
void launch_means(const PageMeansParams& p, const Pages& pages, const Launch& launch) {
  MeansArgs<Pages> args;
  args.pages = pages;
  args.means = p.to.means;
  args.page_stride = p.to.pages;
  args.row_bytes = static_cast<std::int64_t>(p.shape.row_bytes());
  args.kv_heads = p.shape.kv_heads;
  args.head_dim = p.shape.head_dim;
  const dim3 grid(static_cast<unsigned>(p.pages.count), static_cast<unsigned>(p.shape.kv_heads));
  dispatch_key(p.shape.rows.key(), [&](auto element) {
    page_means_kernel<decltype(element)><<<grid, kMeanThreads, 0, launch.stream>>>(args);
  });
  require_launch("page_means");
}

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMaxHeadDim = 256;
// Query heads at a time: each load of a mean key serves all of them.
constexpr int kHeads = 4;
// Lanes that share the product of a query and a mean key, and channels that each takes at a time.
constexpr int kDotLanes = 4;
constexpr int kDotChannels = 8;
// Pages whose weights fit shared memory; those of longer prompts stay where the list will be.
constexpr int kSharedPages = 8192;

struct ChooseArgs {
  const float* q = nullptr;              // [tokens, query_heads, head_dim]
  const std::uint16_t* means = nullptr;  // of the sequence: [kv_heads, page_stride, head_dim]
  PageLists lists;
  std::uint32_t* listed = nullptr;  // [kv_heads, page_stride], zeros
  std::int64_t q_stride = 0;
  std::int64_t page_stride = 0;
  std::int64_t first = 0;  // position of the first query
  int tokens = 0;
  int group = 0;
  int head_dim = 0;
  float scale = 0;
  float share = 0;
};

struct Shared {
  float queries[kHeads][kMaxHeadDim];  // means, scaled
  float parts[kThreads];
  float highest[kHeads];
  float factor[kHeads];  // of weights before they add up to 1
};

// The work of a thread block.
struct QueryBlock {
  int head;
  int first;  // token
  int tokens;
  int before;  // pages that end before its first token
  int end;     // of the pages of its own tokens
  std::int32_t* list;
  std::int32_t* count;
  float* weights;  // [before]

  __device__ QueryBlock(const ChooseArgs& args, float* shared_weights)
      : head(static_cast<int>(blockIdx.y)),
        first(static_cast<int>(blockIdx.x * PageLists::kBlock)),
        tokens(min(static_cast<int>(PageLists::kBlock), args.tokens - first)),
        before(static_cast<int>((args.first + first) / kPageTokens)),
        end(static_cast<int>((args.first + first + tokens - 1) / kPageTokens) + 1) {
    const std::int64_t entry = head * args.lists.blocks + blockIdx.x;
    list = args.lists.pages + entry * args.lists.capacity;
    count = args.lists.counts + entry;
    weights = before <= kSharedPages ? shared_weights : reinterpret_cast<float*>(list);
  }
};

__device__ float block_sum(float x, float* part) {
  float total;
  block_exclusive(x, part, total);
  __syncthreads();
  return total;
}

// Maximum over the block; NaN if any value is NaN.
__device__ float block_max(float x, float* part) {
  const bool bad = __syncthreads_or(isnan(x)) != 0;
  x = warp_max(x);
  if (threadIdx.x % kWarp == 0) part[threadIdx.x / kWarp] = x;
  __syncthreads();
  x = warp_max(part[threadIdx.x % kWarp % kWarps]);
  __syncthreads();
  return bad ? __int_as_float(0x7fffffff) : x;
}

// Means of the block's queries in heads [first_head, first_head + kHeads) of the group. Those past
// its last repeat that.
__device__ void average_queries(const ChooseArgs& args, const QueryBlock& block, int first_head,
                                Shared& shared) {
  const int d = args.head_dim;
  const auto thread = static_cast<int>(threadIdx.x);
  const int rows = max(1, kThreads / d);
  const int channel = thread % d;
  const int row = thread / d;
  for (int h = 0; h < kHeads; ++h) {
    const std::int64_t head = block.head * args.group + min(first_head + h, args.group - 1);
    const float* const q = args.q + block.first * args.q_stride + head * d + channel;
    float sum = 0;
    if (row < rows) {
#pragma unroll 8
      for (int t = row; t < block.tokens; t += rows) sum += q[t * args.q_stride];
    }
    shared.parts[thread] = sum;
    __syncthreads();
    if (thread < d) {
      for (int r = 1; r < rows; ++r) sum += shared.parts[r * d + thread];
      shared.queries[h][thread] = sum * (args.scale / static_cast<float>(block.tokens));
    }
    __syncthreads();
  }
}

// Logits of one page, computed by kDotLanes lanes that all get the result.
__device__ __forceinline__ void logits_of(const ChooseArgs& args, const std::uint16_t* key,
                                          const Shared& shared, float (&logits)[kHeads]) {
  const int lane = static_cast<int>(threadIdx.x) % kDotLanes;
#pragma unroll
  for (float& logit : logits) logit = 0;
#pragma unroll 4
  for (int c = lane * kDotChannels; c < args.head_dim; c += kDotLanes * kDotChannels) {
    const uint4 words = *reinterpret_cast<const uint4*>(key + c);
    const std::uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = floats_of(as_pair(__nv_bfloat16(), word[i]));
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float2 q = *reinterpret_cast<const float2*>(&shared.queries[h][c + 2 * i]);
        logits[h] = fmaf(q.y, x.y, fmaf(q.x, x.x, logits[h]));
      }
    }
  }
#pragma unroll
  for (float& logit : logits) {
    logit += __shfl_xor_sync(kAllLanes, logit, 1);
    logit += __shfl_xor_sync(kAllLanes, logit, 2);
  }
}

// Calls visit(page, logits) for every page before the block, in one lane each; warps stay together.
template <typename Visit>
__device__ __forceinline__ void for_each_page(const ChooseArgs& args, const QueryBlock& block,
                                              const Shared& shared, const Visit& visit) {
  constexpr int kAtOnce = kThreads / kDotLanes;
  const int own = static_cast<int>(threadIdx.x) / kDotLanes;
  const std::uint16_t* const keys = args.means + block.head * args.page_stride * args.head_dim;
  for (int first = 0; first < block.before; first += kAtOnce) {
    const int page = first + own;
    const std::int64_t from = min(page, block.before - 1);
    float logits[kHeads];
    logits_of(args, keys + from * args.head_dim, shared, logits);
    if (page < block.before && threadIdx.x % kDotLanes == 0) visit(page, logits);
  }
}

// Adds the weights of heads from `first_head` on. The products are computed twice, because that
// costs less than storing the logits of all heads.
__device__ void add_weights(const ChooseArgs& args, const QueryBlock& block, int first_head,
                            Shared& shared) {
  average_queries(args, block, first_head, shared);
  float highest[kHeads];
  float sum[kHeads];
  for (int h = 0; h < kHeads; ++h) {
    highest[h] = -__builtin_huge_valf();
    sum[h] = 0;
  }
  for_each_page(args, block, shared, [&](int, const float(&logits)[kHeads]) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      // A NaN stays in the sum; the first correction, of a sum of nothing, is one of 0.
      const float now = fmaxf(highest[h], logits[h]);
      sum[h] =
          sum[h] * exp2_fast((highest[h] - now) * kLog2E) + exp2_fast((logits[h] - now) * kLog2E);
      highest[h] = now;
    }
  });
  for (int h = 0; h < kHeads; ++h) {
    const float all = block_max(highest[h], shared.parts);
    const float own = highest[h] == -__builtin_huge_valf() && sum[h] == 0
                          ? 0
                          : sum[h] * exp2_fast((highest[h] - all) * kLog2E);
    const float total = block_sum(own, shared.parts);
    if (threadIdx.x == 0) {
      shared.highest[h] = all;
      shared.factor[h] = first_head + h < args.group ? 1.0f / total : 0.0f;
    }
  }
  __syncthreads();
  for_each_page(args, block, shared, [&](int page, const float(&logits)[kHeads]) {
    float weight = first_head == 0 ? 0.0f : block.weights[page];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      weight = fmaf(exp2_fast((logits[h] - shared.highest[h]) * kLog2E), shared.factor[h], weight);
    }
    block.weights[page] = weight;
  });
  __syncthreads();
}

__device__ float sum_from(const QueryBlock& block, float cut, float* part) {
  float sum = 0;
  for (int page = static_cast<int>(threadIdx.x); page < block.before; page += kThreads) {
    const float weight = block.weights[page];
    if (!(weight < cut)) sum += weight;
  }
  return block_sum(sum, part);
}

// The highest threshold such that weights from it on carry the share; 0 if a weight is NaN. Bits of
// floats that are not negative are in order as the floats are.
__device__ float find_cut(const QueryBlock& block, float share, float* part) {
  const float total = sum_from(block, 0, part);
  if (!(total < __builtin_huge_valf())) return 0;
  constexpr int kHighestBit = 30;
  int cut = 0;
  for (int bit = kHighestBit; bit >= 0; --bit) {
    const int next = cut | 1 << bit;
    if (sum_from(block, __int_as_float(next), part) >= share * total) cut = next;
  }
  return __int_as_float(cut);
}

// Writes the list in order, because it overwrites the weights and must not overtake those still to
// be read.
__device__ void write_list(const ChooseArgs& args, const QueryBlock& block, float cut,
                           std::int32_t* part) {
  std::int32_t count = 0;
  for (int first = 0; first < block.end; first += kThreads) {
    const int page = first + static_cast<int>(threadIdx.x);
    bool is_listed = page < block.end && (page == 0 || page + 1 >= block.before);
    if (page < block.before) is_listed |= cut == 0 || !(block.weights[page] < cut);
    std::int32_t some = 0;
    const std::int32_t at = count + block_exclusive(is_listed ? 1 : 0, part, some);
    __syncthreads();
    if (is_listed) {
      block.list[at] = page;
      atomicAdd(args.listed + block.head * args.page_stride + page, 1u);
    }
    count += some;
  }
  if (threadIdx.x == 0) *block.count = count;
}

__global__ void __launch_bounds__(kThreads)
    choose_pages_kernel(const __grid_constant__ ChooseArgs args) {
  extern __shared__ float choose_pages_weights[];
  __shared__ Shared shared;
  const QueryBlock block(args, choose_pages_weights);
  float cut = 0;
  if (args.share < 1.0f && block.before > 0) {
    for (int head = 0; head < args.group; head += kHeads) add_weights(args, block, head, shared);
    cut = find_cut(block, args.share, shared.parts);
  }
  write_list(args, block, cut, reinterpret_cast<std::int32_t*>(shared.parts));
}

}  // namespace

void page_means(const PageMeansParams& params, const Launch& launch) {
  if (params.pages.count == 0) return;
  const WholePages& pages = params.pages;
  if (pages.batch.tokens != nullptr) {
    return launch_means(params, PagesOfBatch{pages.batch.tokens, pages.paged}, launch);
  }
  const HeadRows rows = {pages.run_rows, pages.head_stride};
  launch_means(params, PageRun{rows, pages.run_sequence, pages.first}, launch);
}

void choose_pages(const ChoosePagesParams& p, const Launch& launch) {
  check(p.lists.blocks == PageLists::blocks_of(p.tokens), "choose_pages: lists of other blocks");
  check((p.first + p.tokens - 1) / kPageTokens < p.lists.capacity, "choose_pages: lists too short");
  check(p.shape.head_dim <= kMaxHeadDim && p.shape.head_dim % kDotChannels == 0,
        "choose_pages: head_dim");
  ChooseArgs args;
  args.q = p.q;
  args.means = p.means.of(p.shape, p.sequence, 0, 0);
  args.lists = p.lists;
  args.listed = p.listed;
  args.q_stride = p.q_stride;
  args.page_stride = p.means.pages;
  args.first = p.first;
  args.tokens = static_cast<int>(p.tokens);
  args.group = p.shape.group();
  args.head_dim = p.shape.head_dim;
  args.scale = p.scale;
  args.share = static_cast<float>(p.share);
  const auto bytes = static_cast<std::size_t>(p.shape.kv_heads * p.means.pages) * sizeof(*p.listed);
  require(cudaMemsetAsync(p.listed, 0, bytes, launch.stream), "memset");
  const dim3 grid(static_cast<unsigned>(p.lists.blocks), static_cast<unsigned>(p.shape.kv_heads));
  const std::int64_t most = (p.first + p.tokens) / kPageTokens + 1;  // pages before a block
  const std::size_t shared =
      static_cast<std::size_t>(std::min<std::int64_t>(most, kSharedPages)) * sizeof(float);
  choose_pages_kernel<<<grid, kThreads, shared, launch.stream>>>(args);
  require_launch("choose_pages");
}

}  // namespace sluice::cuda
