// Summed weights of the unselected tokens of every page. A block weighs neighbouring pages of one
// head, by the digest if there is one and no token of the page is selected, else from the logits.
#include "kernels/runtime/device_math.cuh"
#include "kernels/runtime/early_launch.cuh"
#include "kernels/runtime/page_digest.h"
#include "kernels/runtime/paged.cuh"
#include "kernels/values/values.h"
#include "kernels/values/weigh.h"
#include "lib/check.h"

namespace sluice::cuda {
namespace {

constexpr int kWeighThreads = 256;
constexpr int kWeighWarps = kWeighThreads / kWarp;
// So few that they do not limit the blocks of a multiprocessor: their threads wait for memory most
// of the time.
constexpr int kMostRegisters = 32;
constexpr int kRowLanes = kPageTokens / 8;  // lanes that read one query head's logits of a page
constexpr int kRowsAtOnce = kWarp / kRowLanes;

// A head is a KV head of a token: number token * kv_heads + KV head.
struct WeighCall {
  const BatchToken* tokens = nullptr;
  int kv_heads = 0;
  int heads = 0;
  int group = 0;
  const HeadSelection* selections = nullptr;  // reported [heads]
  const std::int32_t* positions = nullptr;    // [heads, position_capacity]
  std::int64_t position_capacity = 0;
  const __half* logits = nullptr;  // [heads, group, stride]
  std::int64_t stride = 0;
  PageDigest digest;           // or null pointers
  const float* lse = nullptr;  // [heads, group]
  PageWeights to;
  bool is_beside = false;

  __device__ __forceinline__ BatchToken token_of(int head) const { return tokens[head / kv_heads]; }
  __device__ __forceinline__ const __half* row(int head, int query) const {
    return logits + (std::int64_t{head} * group + query) * stride;
  }
};

// The pages that a block weighs, and its shared memory.
struct Slice {
  int head;
  int first;
  int count;
  uint4* masks;    // [count]
  float* weights;  // [count, group]
};

// Pages of a slice whose logits are read, in any order.
struct ReadPages {
  int count;
  int pages[PageWeights::kSlicePages];
};

// Marks the slice's selected tokens.
__device__ void mark_selected(const WeighCall& c, const Slice& slice, std::int32_t selected) {
  __shared__ std::int32_t range[2];
  const auto thread = static_cast<int>(threadIdx.x);
  const std::int32_t* const list = c.positions + slice.head * c.position_capacity;
  for (int page = thread; page < slice.count; page += kWeighThreads) {
    slice.masks[page] = make_uint4(0, 0, 0, 0);
  }
  if (thread < 2 * kWarp) {
    const int end = thread / kWarp;
    const std::int64_t page = slice.first + end * slice.count;
    const std::int32_t found = count_below(list, selected, page * kPageTokens);
    if (thread % kWarp == 0) range[end] = found;
  }
  __syncthreads();
  auto* const words = reinterpret_cast<std::uint32_t*>(slice.masks);
  for (std::int32_t i = range[0] + thread; i < range[1]; i += kWeighThreads) {
    const std::int32_t at = list[i] - slice.first * kPageTokens;
    atomicOr(words + at / kWarp, 1u << at % kWarp);
  }
  __syncthreads();
}

__device__ __forceinline__ bool is_marked(const uint4& mask) {
  return (mask.x | mask.y | mask.z | mask.w) != 0;
}

// A query head's weight on a page by the digest.
__device__ __forceinline__ float digested(const WeighCall& c, const Slice& slice, int page,
                                          int query) {
  const std::int64_t pages = std::int64_t{slice.head} * c.digest.pages + slice.first + page;
  const std::int64_t place = pages * c.group + query;
  const uint4 maxima = reinterpret_cast<const uint4*>(c.digest.maxima)[place];
  const __half2 most = __hmax2(__hmax2(as_half2(maxima.x), as_half2(maxima.y)),
                               __hmax2(as_half2(maxima.z), as_half2(maxima.w)));
  const float highest = larger_of(most) * kLog2E;
  const float norm = c.lse[slice.head * c.group + query] * kLog2E;
  return c.digest.sums[place] * exp2_fast(highest - norm);
}

// Sum of the weights of eight logits, except those whose bit in `taken` is set.
__device__ __forceinline__ float weight8(const uint4& logits, std::uint32_t taken, float norm) {
  const std::uint32_t words[4] = {logits.x, logits.y, logits.z, logits.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = __half22float2(as_half2(words[i]));
    const float low = exp2_fast(fmaf(x.x, kLog2E, -norm));
    const float high = exp2_fast(fmaf(x.y, kLog2E, -norm));
    if ((taken >> (2 * i) & 1u) == 0) sum += low;
    if ((taken >> (2 * i + 1) & 1u) == 0) sum += high;
  }
  return sum;
}

// Weighs the pages that the digest can weigh, and lists the others.
__device__ __forceinline__ void weigh_digested(const WeighCall& c, const Slice& slice,
                                               ReadPages& read) {
  const bool has_digest = c.digest.maxima != nullptr;
  for (auto item = static_cast<int>(threadIdx.x); item < slice.count * c.group;
       item += kWeighThreads) {
    const int page = item / c.group;
    const int query = item - page * c.group;
    if (has_digest && !is_marked(slice.masks[page])) {
      slice.weights[item] = digested(c, slice, page, query);
    } else if (query == 0) {
      read.pages[atomicAdd(&read.count, 1)] = page;
    }
  }
}

// Computes the weights of the listed pages; half a warp per query head and page.
__device__ void weigh_logits(const WeighCall& c, const Slice& slice, const ReadPages& read) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int items = read.count * c.group;
#pragma unroll 2
  for (int base = warp * kRowsAtOnce; base < items; base += kWeighWarps * kRowsAtOnce) {
    const int item = base + lane / kRowLanes;
    const int part = lane % kRowLanes;
    const bool counts = item < items;
    const int entry = counts ? item / c.group : 0;
    const int page = read.pages[entry];
    const int query = item - entry * c.group;
    float sum = 0.0f;
    if (counts) {
      const auto* const mask = reinterpret_cast<const std::uint32_t*>(slice.masks + page);
      const __half* const row = c.row(slice.head, query) + (slice.first + page) * kPageTokens;
      const float norm = c.lse[slice.head * c.group + query] * kLog2E;
      sum =
          weight8(reinterpret_cast<const uint4*>(row)[part], mask[part / 4] >> part % 4 * 8, norm);
    }
#pragma unroll
    for (int step = kRowLanes / 2; step > 0; step /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, step);
    }
    if (counts && part == 0) slice.weights[page * c.group + query] = sum;
  }
}

__device__ void report(const WeighCall& c, const Slice& slice) {
  const auto thread = static_cast<int>(threadIdx.x);
  const PageWeights to = c.to.from(slice.head);
  for (int page = thread; page < slice.count; page += kWeighThreads) {
    float sum = 0.0f;
    for (int g = 0; g < c.group; ++g) sum += slice.weights[page * c.group + g];
    to.weights[slice.first + page] = sum;
    to.masks[slice.first + page] = slice.masks[page];
  }
  float* const masses = to.masses + blockIdx.x * c.group;
  for (int g = thread / kWarp; g < c.group; g += kWeighWarps) {
    float sum = 0.0f;
    for (int page = thread % kWarp; page < slice.count; page += kWarp) {
      sum += slice.weights[page * c.group + g];
    }
    sum = warp_sum(sum);
    if (thread % kWarp == 0) masses[g] = sum;
  }
}

__device__ __forceinline__ void weigh_slice(const WeighCall& c, uint4* memory) {
  __shared__ ReadPages read;
  Slice slice;
  slice.head = static_cast<int>(blockIdx.y);
  slice.first = static_cast<int>(blockIdx.x) * PageWeights::kSlicePages;
  const int pages = page_of(c.token_of(slice.head).position);
  slice.count = min(pages - slice.first, PageWeights::kSlicePages);
  if (slice.count <= 0) return;
  const HeadSelection selection = c.selections[slice.head];
  if (selection.bad != 0) return;
  slice.masks = memory;
  slice.weights = reinterpret_cast<float*>(memory + PageWeights::kSlicePages);
  if (threadIdx.x == 0) read.count = 0;  // the barriers of mark_selected() come after it
  mark_selected(c, slice, selection.count);
  weigh_digested(c, slice, read);
  __syncthreads();
  weigh_logits(c, slice, read);
  __syncthreads();
  report(c, slice);
}

// Beside the kernel before, it waits last: rule 2 of early_launch.cuh.
__global__ void __maxnreg__(kMostRegisters) weigh_slices(const __grid_constant__ WeighCall c) {
  extern __shared__ uint4 memory[];
  if (c.is_beside) {
    __threadfence();  // so that no stale line of this L1 cache is read
  } else {
    wait_for_kernel_before();
    allow_next_kernel();
  }
  weigh_slice(c, memory);
  if (c.is_beside) {
    wait_for_kernel_before();
    allow_next_kernel();
  }
}

}  // namespace

void weigh_pages(const WeighedPages& p, const Launch& launch) {
  check(p.logits.stride % 8 == 0 && reinterpret_cast<std::uintptr_t>(p.logits.data) % 16 == 0,
        "page weights of rows of logits that are not aligned");
  WeighCall c;
  c.tokens = p.batch.tokens;
  c.kv_heads = p.shape.kv_heads;
  c.heads = static_cast<int>(p.batch.count * p.shape.kv_heads);
  c.group = p.shape.group();
  c.selections = p.selected.heads;
  c.positions = p.selected.positions;
  c.position_capacity = p.selected.capacity;
  c.logits = reinterpret_cast<const __half*>(p.logits.data);
  c.stride = p.logits.stride;
  c.digest = PageDigest::of(p.logits.digest);
  c.lse = p.lse;
  c.to = p.to;
  c.is_beside = p.is_beside;
  if (c.heads == 0) return;
  const std::size_t shared = PageWeights::kSlicePages *
                             (sizeof(uint4) + static_cast<std::size_t>(c.group) * sizeof(float));
  const std::int64_t most_pages = std::max<std::int64_t>((p.batch.capacity - 1) / kPageTokens, 1);
  launch_early("weighing pages", weigh_slices,
               dim3(static_cast<unsigned>(PageWeights::slices_of(most_pages)),
                    static_cast<unsigned>(c.heads)),
               kWeighThreads, shared, launch, c);
}

void weigh_pages(const SelectParams& p, const Launch& launch) {
  check(p.logits.digest.weights != nullptr && p.lse != nullptr && p.candidates == nullptr,
        "page weights without a digest or lse, or of candidates");
  weigh_pages({p.shape, p.batch, p.logits, p.selected, p.lse,
               PageWeights::of(p.logits.digest, p.shape.group())},
              launch);
}

}  // namespace sluice::cuda
