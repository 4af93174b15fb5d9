// Attention to the chosen pages. Blocks divide a head's pages, each warp reads one at a time; the
// last block of a head adds up all sums, gives the remaining weight to the mean value, and merges.
#include "kernels/runtime/device_math.cuh"
#include "kernels/runtime/early_launch.cuh"
#include "kernels/runtime/ticket.cuh"
#include "kernels/values/finish.cuh"
#include "kernels/values/page_ring.cuh"
#include "kernels/values/read_page.cuh"
#include "lib/check.h"

namespace sluice::cuda {
namespace {

constexpr int kSumWarps = kReadWarps / 2;  // sums in shared memory, each of two warps

// A lane's sums over its warp's pages.
template <int kBlocks>
struct PageSums {
  float results[kBlocks][kBlockResults] = {};
  float mass = 0.0f;  // weights of the query head of the lane's column, lane / 4

  static constexpr int kNumbers = kBlocks * kBlockResults + 1;  // per lane
  static constexpr int kSize = kNumbers * kWarp;

  // Places that for_each() gives a query head's sum of a channel, and its mass.
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

// A lane's inputs for a page besides the page itself.
__device__ __forceinline__ PageLogits page_logits(const TilesCall& c, const BlockPart& part,
                                                  int page) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto* const masks = reinterpret_cast<const std::uint32_t*>(part.masks + page);
  const __half* logits = nullptr;
  if (lane / 4 < part.queries) {
    logits = c.row(part.head, part.first_query + lane / 4) + std::int64_t{page} * kPageTokens +
             lane % 4 * kThreadTokens;
  }
  return PageLogits(logits, __ldcg(masks + lane % 4));
}

template <int kBits, int kBlocks>
__device__ __forceinline__ void add_page(const TilesCall& c, const std::byte* page,
                                         const ColumnWeights& w, PageSums<kBlocks>& sums) {
  constexpr float kUnit = static_cast<float>(1 << (24 - kTopShift<kBits>));
  sums.mass = fmaf(w.factor, w.sum, sums.mass);
  const ColumnFactors factors(w, kUnit);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    add_block<kBits>(page, c.channels, b * kBlockChannels, w, factors, sums.results[b]);
  }
}

// Bytes of shared memory for the bins of the choice, then for the pages in flight, and last for the
// sums of kSumWarps warps or for those of finish().
template <int kBlocks>
__host__ __device__ constexpr std::size_t shared_bytes(const TilesCall& c) {
  // Lanes without channels read past the last page.
  constexpr std::size_t kBehind = std::size_t{kBlocks} * kBlockChannels * 4;
  constexpr std::size_t kBins = PageChoice::kBins * sizeof(std::uint32_t);
  constexpr std::size_t kSums = std::size_t{kSumWarps} * PageSums<kBlocks>::kSize * sizeof(float);
  constexpr std::size_t kFinished = kReadThreads * sizeof(float4);
  constexpr std::size_t kMost = kBins > kSums ? kBins : kSums;
  constexpr std::size_t kBeside = kMost > kFinished ? kMost : kFinished;
  const std::size_t pages =
      static_cast<std::size_t>(c.readers * c.stages * c.values.page_bytes) + kBehind;
  return pages > kBeside ? pages : kBeside;
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

// The sum over the block's warps at a place.
template <int kBlocks>
__device__ __forceinline__ float sum_of(const float* memory, int place) {
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kSumWarps; ++warp) {
    sum += memory[warp * PageSums<kBlocks>::kSize + place];
  }
  return sum;
}

template <int kBlocks>
__device__ void write_partial(const TilesCall& c, const BlockPart& part, const float* memory) {
  using Sums = PageSums<kBlocks>;
  const Partial to(c, part, part.split);
  const auto thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < part.queries * c.channels; i += kReadThreads) {
    to.sums[i] = sum_of<kBlocks>(memory, Sums::place_of(i / c.channels, i % c.channels));
  }
  if (thread < part.queries) to.masses[thread] = sum_of<kBlocks>(memory, Sums::mass_place(thread));
}

// Adds up a warp's share of `count` listed pages.
template <int kBits, int kBlocks>
__device__ __forceinline__ void read_listed(const TilesCall& c, const BlockPart& part,
                                            const PageChoice& pages, int count, float norm,
                                            PageRing& ring, PageSums<kBlocks>& sums) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const std::int32_t sequence = c.token_of(part.head).sequence;
  // Entry i of the list: its page, or -1, and the page's slot.
  const auto page_of = [&](int i) { return i < count ? pages.listed(i) : -1; };
  const auto slot_of = [&](int page) { return page < 0 ? 0 : c.values.slot_of(sequence, page); };
  const auto fetch = [&](int page, std::int32_t slot) {
    const std::int64_t place = TilePool::place_of(slot, page);
    ring.fetch(page < 0 ? nullptr : c.values.at(part.head % c.kv_heads, place));
  };
  int next = warp;
  for (int stage = 0; stage < c.stages; ++stage, next += c.readers) {
    fetch(page_of(next), slot_of(page_of(next)));
  }
#pragma unroll 1
  for (int i = warp; i < count; i += c.readers, next += c.readers) {
    // Looks up the next page to fetch and computes this page's weights while this page arrives.
    const std::int32_t slot = slot_of(page_of(next));
    const ColumnWeights w = weigh_page<kBits>(page_logits(c, part, pages.listed(i)), norm);
    add_page<kBits, kBlocks>(c, ring.take(), w, sums);
    ring.release();
    fetch(page_of(next), slot);
  }
}

// Adds up a warp's share of the block's pages. Warps past c.readers have none.
template <int kBits, int kBlocks>
__device__ __forceinline__ void read_own(const TilesCall& c, const BlockPart& part,
                                         PageChoice& pages, std::byte* stages,
                                         PageSums<kBlocks>& sums) {
  __shared__ std::uint64_t barriers[kReadWarps][PageRing::kMostStages];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t row = std::int64_t{part.head} * c.group + part.first_query;
  const float norm = __ldcg(c.lse + row + min(lane / 4, part.queries - 1)) * kLog2E;
  const auto page_bytes = static_cast<int>(c.values.page_bytes);
  PageRing ring(stages + min(warp, c.readers - 1) * c.stages * page_bytes, c.stages, page_bytes,
                barriers[warp]);
  int left = (part.chosen - part.split + part.splits - 1) / part.splits;
  pages.list(part.split, part.splits);
#pragma unroll 1
  for (int round = 1;; ++round) {
    __syncthreads();
    const int count = min(left, PageChoice::kMostListed);
    if (warp < min(c.readers, count)) {
      read_listed<kBits>(c, part, pages, count, norm, ring, sums);
    }
    left -= count;
    if (left == 0) return;
    __syncthreads();
    pages.list_later(part.split, part.splits, round);
  }
}

// Blocks per multiprocessor, and registers of their threads: beside these blocks one of a kernel
// that begins early still has room, such as the dense product that loads its weights meanwhile.
template <int kBlocks>
constexpr int kBlocksAtOnce = kBlocks <= 4 ? 2 : 1;
template <int kBlocks>
constexpr int kMostRegisters = kBlocks <= 4 ? 112 : 224;

template <int kBits, int kBlocks>
__global__ void __maxnreg__(kMostRegisters<kBlocks>)
    read_pages(const __grid_constant__ TilesCall c) {
  extern __shared__ float4 memory[];  // see shared_bytes()
  __shared__ PageChoice::Shared choice;
  __shared__ bool is_last;
  auto* const floats = reinterpret_cast<float*>(memory);
  auto* const bytes = reinterpret_cast<std::byte*>(memory);
  if (!c.is_beside) {
    wait_for_kernel_before();
    allow_next_kernel();
  }
  BlockPart part(c);
  if (part.pages > 0 && __ldcg(&c.selections[part.head].bad) != 0) part.pages = 0;
  PageChoice pages(c.weights.from(part.head).weights, part.pages, choice);
  const int chosen =
      part.pages > 0 ? pages.choose(c.share, reinterpret_cast<std::uint32_t*>(memory)) : 0;
  part.share_out(c, chosen);
  const auto thread = static_cast<int>(threadIdx.x);
  if (part.split == 0 && blockIdx.z == 0 && thread == 0 && c.pages_read != nullptr) {
    c.pages_read[part.head] = part.chosen * c.query_parts;
  }
  if (part.split >= part.splits) return;
  // Orders the reads of bins before the bulk copies of pages into the same memory.
  if constexpr (kBulkCopies) shared_write_fence();
  PageSums<kBlocks> sums;
  read_own<kBits>(c, part, pages, bytes, sums);
  __syncthreads();
  join_warps(sums, floats);
  write_partial<kBlocks>(c, part, floats);
  __syncthreads();
  if (thread == 0) is_last = takes_last_ticket(c.tickets + part.place, part.splits);
  __syncthreads();
  if (!is_last) return;
  if (c.is_beside) {
    wait_for_kernel_before();
    allow_next_kernel();
  }
  if (thread == 0) c.tickets[part.place] = 0;
  if (c.basis != nullptr) return finish_components(c, part, floats);
  finish(c, part, memory);
}

// Calls body(std::integral_constant<int, blocks of kBlockChannels>()), enough for a page.
template <typename Body>
void dispatch_blocks(int channels, const Body& body) {
  const int blocks = (channels + kBlockChannels - 1) / kBlockChannels;
  if (blocks <= 2) return body(std::integral_constant<int, 2>());
  if (blocks == 3) return body(std::integral_constant<int, 3>());
  if (blocks == 4) return body(std::integral_constant<int, 4>());
  return body(std::integral_constant<int, 8>());
}

// Upper bound of a block's static shared memory.
constexpr std::size_t kDeclaredBytes = 8192;
static_assert(sizeof(PageChoice::Shared) + 2048 < kDeclaredBytes);

// Bytes that a block may use beside its static shared memory.
std::size_t room_of(const DeviceLimits& device) {
  return static_cast<std::size_t>(device.shared_bytes) - kDeclaredBytes;
}

// The least memory: one stage for half the warps.
TilesCall with_least(TilesCall c) {
  c.readers = kReadWarps / 2;
  c.stages = 1;
  return c;
}

// Chooses two stages for all warps if kBlocksAtOnce blocks fit a multiprocessor with them; else one
// stage, and only for half the warps if the block would not fit otherwise.
template <int kBlocks>
TilesCall with_stages(TilesCall c, std::size_t room) {
  c.readers = kReadWarps;
  c.stages = 2;
  const std::size_t blocks_room = room + kDeclaredBytes;
  if (kBlocksAtOnce<kBlocks> * (shared_bytes<kBlocks>(c) + kDeclaredBytes) <= blocks_room) return c;
  c.stages = 1;
  if (shared_bytes<kBlocks>(c) <= room) return c;
  c = with_least(c);
  check(shared_bytes<kBlocks>(c) <= room, "attend_tiles: shared memory");
  return c;
}

template <int kBits>
void run_bits(const TilesCall& call, const Launch& launch) {
  check(call.most_pages <= kMostTilePages, "attend_tiles: pages");
  dispatch_blocks(call.channels, [&](auto blocks) {
    constexpr int kBlocks = decltype(blocks)::value;
    const TilesCall c = with_stages<kBlocks>(call, room_of(*launch.device));
    const auto kernel = read_pages<kBits, kBlocks>;
    const dim3 grid(static_cast<unsigned>(c.splits), static_cast<unsigned>(c.heads),
                    static_cast<unsigned>(c.query_parts));
    launch_early("attention to value tiles", kernel, grid, kReadThreads, shared_bytes<kBlocks>(c),
                 launch, c);
  });
}

// One row per warp.
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
    case 1:
      return run_bits<1>(c, launch);
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

// In plain order, because it may wait for the host, whose partial it merges: early_launch.cuh knows
// of kernels alone.
void merge_partials(const MergePartialsParams& p, const Launch& launch) {
  if (p.rows == 0) return;
  const auto blocks = static_cast<unsigned>((p.rows + kReadWarps - 1) / kReadWarps);
  merge_rows<<<blocks, kReadThreads, 0, launch.stream>>>(p);
  require_launch("merging partials");
}

}  // namespace sluice::cuda
