// Decode attention in one kernel. A block has three kinds of warps, in this order, and a ring of
// tiles in shared memory:
//   kDecodeWarps   consume(): attend to the rows of a tile (decode_warp.cuh), and write rows that
//                  are new to the row cache into their ways
//   kFetchWarps    DecodeFetch: look up positions and pages, and fetch rows from device or host
//                  memory into the ring (decode_rows.cuh)
//   kFinishWarps   finish(): combine the results of a segment, in the block and between blocks,
//                  and write them (decode_results.cuh), while the others work on the next segment
#include <algorithm>
#include <cstdint>
#include <limits>
#include <numbers>

#include "kernels/attention/attention.h"
#include "kernels/attention/decode_results.cuh"
#include "kernels/attention/decode_rows.cuh"
#include "kernels/attention/decode_warp.cuh"
#include "kernels/runtime/dispatch.h"
#include "kernels/runtime/early_launch.cuh"
#include "lib/check.h"
#include "lib/gpu_sizes.h"

namespace sluice::cuda {
namespace {

// Writes this warp's rows of a tile into the cache ways assigned to them.
template <typename Shape>
__device__ void keep_rows(const DecodeKernelParams& p, int kv_head, const std::byte* rows,
                          const std::int32_t* ways) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int first = static_cast<int>(threadIdx.x) / kWarp * kWarpRows;
  const std::int32_t own = lane < kWarpRows ? ways[first + lane] : -1;
  for (unsigned left = __ballot_sync(kAllLanes, own >= 0); left != 0; left &= left - 1) {
    const int row = __ffs(static_cast<int>(left)) - 1;
    const std::int64_t way = __shfl_sync(kAllLanes, own, row);
    const std::byte* const from = rows + Shape::place(first + row);
    std::byte* const to = p.cache + kv_head * p.cache_stride + way * Shape::kRowBytes;
    for (int chunk = lane; chunk < Shape::kRowChunks; chunk += kWarp) {
      *reinterpret_cast<uint4*>(to + chunk * 16) =
          *reinterpret_cast<const uint4*>(from + chunk * 16);
    }
  }
}

// Runs in the warps that work on rows.
template <typename Shape>
__device__ void consume(const DecodeKernelParams& p, const DecodeWork<Shape>& work,
                        DecodeRing<Shape> ring) {
  using Block = DecodeBlock<Shape>;
  static_assert(sizeof(Block) <= Shape::kStageBytes);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const auto bunch = static_cast<int>(blockIdx.y);
  const int queries = min(kBunch, p.group - bunch * kBunch);
  typename DecodeRing<Shape>::Turn turn;
  for (DecodeSegment<Shape> s = work.first(); s.exists(); s = work.after(s)) {
    const std::byte* rows = ring.take();
    DecodeWarp<Shape> state(reinterpret_cast<const float*>(rows + Shape::kTileBytes), queries);
    for (int tile = s.first;; rows = ring.take()) {
      state.add(rows, s.count(tile), s.newest(tile), p.scale);
      if (bunch == 0 && p.places != nullptr) {
        keep_rows<Shape>(p, s.kv_head, rows, ring.ways());
      }
      if (++tile == s.last) break;
      ring.release();
    }
    // The warps' results overwrite the last tile.
    sync_decode_warps<Shape>();
    auto& block = *reinterpret_cast<Block*>(ring.stage());
    state.store(block.out[warp][0], block.kStride, block.highest[warp], block.sum[warp], queries);
    ring.hand_over(turn);
    turn = ring.after(turn);
  }
}

// Runs in the warps that combine and write the others' results.
template <typename Shape>
__device__ void finish(const DecodeKernelParams& p, const DecodeWork<Shape>& work,
                       const DecodeRing<Shape>& ring) {
  const auto bunch = static_cast<int>(blockIdx.y);
  const bool reports = counts_resident(p) && threadIdx.x / kWarp == Shape::kFirstFinishWarp;
  typename DecodeRing<Shape>::Turn turn;
  for (DecodeSegment<Shape> s = work.first(); s.exists();
       s = work.after(s), turn = ring.after(turn)) {
    const DecodeSharers sharers = work.sharers_of(s);
    const auto& block = *reinterpret_cast<DecodeBlock<Shape>*>(ring.take_found(turn));
    const int resident = reports ? ring.take_resident(turn) : 0;
    finish_segment(p, s, bunch, sharers, block, reports, resident);
    ring.release_found(turn);
  }
}

// The page tables of the sequences are prefetched before the selection is known, each by one block.
// The last blocks do it, because they are idle if rows are few.
__device__ __forceinline__ void prefetch_page_tables(const DecodeKernelParams& p) {
  if (blockIdx.y != 0) return;
  for (auto number = static_cast<int>(gridDim.x - 1 - blockIdx.x); number < p.count;
       number += static_cast<int>(gridDim.x)) {
    prefetch_page_table(p.rows, p.tokens[number]);
  }
}

template <typename Shape>
__global__ __launch_bounds__(Shape::kThreads) void decode_kernel(
    const __grid_constant__ DecodeKernelParams p) {
  using Ring = DecodeRing<Shape>;
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ typename Ring::Barriers barriers;
  __shared__ DecodeLookups<Shape> lookups;
  const Ring ring(shared, p.stages, barriers);
  if (threadIdx.x == 0) ring.init();
  DecodeWork<Shape> work(p,
                         reinterpret_cast<std::int32_t*>(shared + p.stages * Shape::kStageBytes));
  if (p.selects()) {
    prefetch_page_tables(p);
    wait_for_kernel_before();
  }
  work.divide();
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  // Warps that read or write memory wait for the preceding kernel, unless they did so above.
  if (warp < Shape::kDecodeWarps) {
    consume(p, work, ring);
  } else if (warp < Shape::kFirstFinishWarp) {
    if (p.selects()) {
      DecodeFetch<Shape, true>(p, work, ring, lookups).run();
    } else {
      DecodeFetch<Shape, false>(p, work, ring, lookups).run();
    }
  } else {
    wait_for_kernel_before();
    allow_next_kernel();
    finish(p, work, ring);
  }
}

// Shared memory that the kernel declares, with a margin for objects that are not named here.
template <typename Shape>
constexpr int kDeclaredBytes = sizeof(typename DecodeRing<Shape>::Barriers) +
                               sizeof(DecodeLookups<Shape>) + 512;

// Shared memory, of `shared` per block, that a launch may use besides its declared memory and
// stages.
template <typename Shape>
constexpr std::int64_t room_of(std::int64_t shared, int stages) {
  return shared - kDeclaredBytes<Shape> - std::int64_t{stages} * Shape::kStageBytes;
}

// True if a ring of two stages fits beside the data of one token of several hundred KV heads.
template <typename Shape>
constexpr bool fits(std::int64_t shared) {
  return room_of<Shape>(shared, 2) >= 6 << 10;
}

// What a launch needs.
struct DecodeSize {
  std::int64_t head_tiles = 1;   // per head, at most
  std::int64_t token_bytes = 0;  // of shared memory per token, beside the stages
};

// Bytes of scratch per partial.
template <int kHeadDim>
constexpr std::int64_t kPartialBytes = kBunch*(kHeadDim * sizeof(float) + sizeof(float2)) +
                                       sizeof(std::int32_t);

// Tokens that one launch can serve: almost always all.
template <typename Shape>
std::int64_t tokens_at_once(const DecodeKernelParams& p, const Launch& launch,
                            const DecodeSize& size, std::int64_t bunches, std::int64_t workers) {
  constexpr std::int64_t kMostTiles = std::numeric_limits<std::int32_t>::max();
  const std::int64_t partials =
      static_cast<std::int64_t>(launch.scratch_bytes) / kPartialBytes<Shape::kHeadDim> / bunches -
      workers;
  std::int64_t tokens = std::min({std::int64_t{p.count}, partials / p.kv_heads,
                                  Launch::kHalfCounters / (bunches * p.kv_heads),
                                  kMostTiles / (size.head_tiles * p.kv_heads)});
  if (size.token_bytes > 0) {
    const std::int64_t room = room_of<Shape>(launch.device->shared_bytes, p.stages);
    tokens = std::min(tokens, (room - kDecodeBytesBeside) / size.token_bytes);
  }
  check(tokens > 0, "decode attention: too many KV heads");
  return tokens;
}

// The parameters of `count` tokens from number `first` on.
template <int kHeadDim>
DecodeKernelParams part_of(DecodeKernelParams p, std::int64_t first, std::int64_t count) {
  const std::int64_t heads = first * p.kv_heads;
  const std::int64_t queries = heads * p.group;
  const auto skip = [](auto& pointer, std::int64_t by) {
    if (pointer != nullptr) pointer += by;
  };
  p.q += first * p.q_stride;
  p.tokens += first;
  p.count = static_cast<int>(count);
  p.heads = p.count * p.kv_heads;
  skip(p.gaps, first);
  skip(p.positions, heads * p.capacity);
  skip(p.places, heads * p.capacity);
  skip(p.selections, heads);
  skip(p.resident, heads);
  p.out += queries * kHeadDim;
  p.lse += queries;
  skip(p.alpha, queries);
  skip(p.estimated_lse, queries);
  skip(p.sums, heads * kHeadDim);
  return p;
}

template <typename Shape>
void launch_stages(const DecodeKernelParams& all, const Launch& launch, const DecodeSize& size) {
  constexpr int kHeadDim = Shape::kHeadDim;
  const auto kernel = decode_kernel<Shape>;
  // One block on a multiprocessor keeps enough rows under way; with more, all other reads wait for
  // longer.
  const int bunches = (all.group + kBunch - 1) / kBunch;
  const int most_workers = std::max(1, launch.device->multiprocessors / bunches);
  const std::int64_t at_once = tokens_at_once<Shape>(all, launch, size, bunches, most_workers);
  for (std::int64_t first = 0; first < all.count; first += at_once) {
    DecodeKernelParams p = part_of<kHeadDim>(all, first, std::min(at_once, all.count - first));
    p.workers = static_cast<int>(std::min<std::int64_t>(most_workers, size.head_tiles * p.heads));
    const std::int64_t partials = std::int64_t{bunches} * (p.workers + p.heads);
    p.partial_lse = reinterpret_cast<float2*>(p.partials + partials * kBunch * kHeadDim);
    p.partial_resident = reinterpret_cast<std::int32_t*>(p.partial_lse + partials * kBunch);
    const std::int64_t beside =
        size.token_bytes > 0 ? kDecodeBytesBeside + p.count * size.token_bytes : 0;
    const auto bytes = static_cast<std::size_t>(p.stages * Shape::kStageBytes + beside);
    launch_early("decode attention", kernel,
                 dim3(static_cast<unsigned>(p.workers), static_cast<unsigned>(bunches)),
                 Shape::kThreads, bytes, launch, p);
  }
}

// Chooses as many stages as fit in shared memory beside the data of all tokens. `rows`: of a head,
// at most.
template <typename Shape>
void launch_shape(DecodeKernelParams p, const Launch& launch, std::int64_t rows) {
  DecodeSize size;
  size.head_tiles = (rows - 1) / Shape::kTileRows + 1;
  const bool differ = p.selects() || p.count > 1;
  if (differ) size.token_bytes = decode_token_bytes(p.kv_heads);
  const std::int64_t wanted = kDecodeBytesBeside + p.count * size.token_bytes;
  p.stages = DecodeRing<Shape>::kMostStages;
  while (p.stages > 2 && room_of<Shape>(launch.device->shared_bytes, p.stages) < wanted) --p.stages;
  launch_stages<Shape>(p, launch, size);
}

// Launches with as many warps as leave room for two stages, because a tile has 16 rows per warp: 4
// everywhere, but 2 for rows of 1 KiB where a block has 99 KiB.
template <typename Rows, int kHeadDim, int kWarps = 4>
void launch_fitting(const DecodeKernelParams& p, const Launch& launch, std::int64_t rows) {
  using Shape = DecodeShape<Rows, kHeadDim, kWarps>;
  if constexpr (!fits<Shape>(gpu::kLeastSharedBytes)) {
    if (!fits<Shape>(launch.device->shared_bytes)) {
      return launch_fitting<Rows, kHeadDim, kWarps / 2>(p, launch, rows);
    }
  }
  launch_shape<Shape>(p, launch, rows);
}

// Kernel parameters common to AttendBatchParams and AttendSelectedParams.
template <typename Params>
DecodeKernelParams common_params(const Params& a, const Launch& launch) {
  check(reinterpret_cast<std::uintptr_t>(a.q) % 16 == 0 && a.q_stride % 4 == 0,
        "decode attention: unaligned queries");
  check(reinterpret_cast<std::uintptr_t>(a.rows.pages) % sizeof(PageSlots) == 0,
        "decode attention: unaligned table of pages");
  check(a.batch.capacity > 0, "decode attention: a batch without room for positions");
  DecodeKernelParams p;
  p.q = a.q;
  p.q_stride = a.q_stride;
  p.tokens = a.batch.tokens;
  p.count = static_cast<int>(a.batch.count);
  p.kv_heads = a.shape.kv_heads;
  p.group = a.shape.group();
  p.rows = a.rows;
  p.scale = a.scale * std::numbers::log2e_v<float>;
  p.out = a.out;
  p.lse = a.lse;
  p.partials = reinterpret_cast<float*>(launch.scratch);
  p.finished = launch.counters;
  p.slow_bus = SlowBus(launch);
  return p;
}

// Launches decode for heads of at most `rows` rows.
void run(const DecodeKernelParams& p, const KvShape& shape, const Launch& launch,
         std::int64_t rows) {
  dispatch_rows(shape.rows, [&](auto types) {
    dispatch_head_dim(shape.head_dim, [&](auto head_dim) {
      launch_fitting<decltype(types), head_dim()>(p, launch, rows);
    });
  });
}

}  // namespace

void attend_decode(const AttendBatchParams& a, const Launch& launch) {
  if (a.batch.count == 0) return;
  check(!a.in_gaps, "decode attention: gaps are the host's");
  check(a.window == 0, "decode attention: a window");
  DecodeKernelParams p = common_params(a, launch);
  p.gaps = a.gaps;
  run(p, a.shape, launch, a.batch.capacity);
}

void attend_decode_selected(const AttendSelectedParams& a, const Launch& launch) {
  if (a.batch.count == 0) return;
  check(a.alpha != nullptr || (a.estimated_lse == nullptr && a.value_sums == nullptr),
        "attend_decode_selected: no alpha");
  check(reinterpret_cast<std::uintptr_t>(a.value_sums) % 16 == 0,
        "attend_decode_selected: unaligned sums of values");
  DecodeKernelParams p = common_params(a, launch);
  p.positions = a.selected.positions;
  p.capacity = a.selected.capacity;
  p.selections = a.selected.heads;
  p.resident = a.resident;
  p.places = a.places;
  p.cache = a.cache.rows;
  p.cache_stride =
      a.cache.sets * RowCacheView::kWays * static_cast<std::int64_t>(a.shape.row_bytes());
  p.alpha = a.alpha;
  p.estimated_lse = a.estimated_lse;
  p.sums = a.value_sums;
  run(p, a.shape, launch, std::min(a.batch.capacity, a.selected.capacity + kPageTokens));
}

}  // namespace sluice::cuda
