#include <algorithm>
#include <cstdint>
#include <numbers>

#include "kernels/decode_attention.h"
#include "kernels/decode_results.cuh"
#include "kernels/decode_rows.cuh"
#include "kernels/decode_warp.cuh"
#include "kernels/dispatch.h"
#include "kernels/early_launch.cuh"
#include "lib/check.h"

namespace sluice::cuda {
namespace {

// The part of the warps that work on rows.
template <typename T, int kHeadDim, int kStages>
__device__ void consume(const DecodeKernelParams& p, const DecodeWork& work,
                        DecodeRing<kHeadDim, kStages> ring) {
  using Shape = DecodeShape<kHeadDim>;
  static_assert(sizeof(DecodeBlock<kHeadDim>) <= Shape::kTileBytes);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const auto bunch = static_cast<int>(blockIdx.y);
  const int queries = min(kBunch, p.group - bunch * kBunch);
  int segment = 0;
  for (DecodeSegment s = work.first(); s.exists(); s = work.after(s)) {
    const std::byte* rows = ring.take();
    DecodeWarp<T, kHeadDim> state(reinterpret_cast<const float*>(rows + Shape::kTileBytes),
                                  queries);
    for (int tile = s.first;; rows = ring.take()) {
      state.add(rows, s.count(tile), s.newest(tile), p.scale);
      if (++tile == s.last) break;
      ring.release();
    }
    // What the warps found takes the place of the last tile.
    sync_decode_warps();
    auto& block = *reinterpret_cast<DecodeBlock<kHeadDim>*>(ring.stage());
    state.store(block.out[warp][0], block.kStride, block.highest[warp], block.sum[warp], queries);
    ring.hand_over(segment++);
  }
}

// The part of the warps that bring what the others found to where it belongs.
template <int kHeadDim, int kStages>
__device__ void finish(const DecodeKernelParams& p, const DecodeWork& work,
                       const DecodeRing<kHeadDim, kStages>& ring) {
  const auto bunch = static_cast<int>(blockIdx.y);
  const bool reports = p.positions != nullptr && bunch == 0 &&
                       threadIdx.x / kWarp == DecodeShape<kHeadDim>::kFirstFinishWarp;
  int segment = 0;
  for (DecodeSegment s = work.first(); s.exists(); s = work.after(s), ++segment) {
    if (reports && s.first == 0) report_resident(p, s.head);
    const DecodeSharers sharers = work.sharers_of(s);
    const auto& block = *reinterpret_cast<DecodeBlock<kHeadDim>*>(ring.take_found(segment));
    finish_segment(p, s.head, bunch, sharers, block);
    ring.release_found(segment);
  }
}

template <typename T, int kHeadDim, int kStages>
__global__ __launch_bounds__(DecodeShape<kHeadDim>::kThreads) void decode_kernel(
    const __grid_constant__ DecodeKernelParams p) {
  using Ring = DecodeRing<kHeadDim, kStages>;
  using Fetch = DecodeFetch<kHeadDim, kStages>;
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ typename Ring::Barriers barriers;
  __shared__ typename Fetch::Positions positions;
  const Ring ring(shared, barriers);
  if (threadIdx.x == 0) ring.init();
  wait_for_kernel_before();
  allow_next_kernel();
  const DecodeWork work(p, reinterpret_cast<std::int32_t*>(shared + Ring::kBytes));
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  if (warp < kDecodeWarps) {
    consume<T>(p, work, ring);
  } else if (warp < DecodeShape<kHeadDim>::kFirstFinishWarp) {
    Fetch(p, work, ring, positions).run();
  } else {
    finish(p, work, ring);
  }
}

// Shared memory that is not stages: what the kernel declares, and what it needs to know of a
// thousand heads.
constexpr int kDeclaredBytes = 3 << 10;
constexpr int kBesideStages = 11 << 10;

template <typename T, int kHeadDim, int kStages>
void launch_stages(DecodeKernelParams& p, const Launch& launch, std::int64_t most_tiles,
                   std::size_t head_bytes) {
  const auto kernel = decode_kernel<T, kHeadDim, kStages>;
  // One block on a multiprocessor keeps enough rows under way; with more of them whatever else is
  // read waits for longer.
  const int bunches = (p.group + kBunch - 1) / kBunch;
  p.workers = static_cast<int>(
      std::clamp<std::int64_t>(launch.device->multiprocessors / bunches, 1, most_tiles));
  const std::int64_t partials = std::int64_t{bunches} * (p.workers + p.kv_heads);
  p.partial_lse = reinterpret_cast<float2*>(p.partials + partials * kBunch * kHeadDim);
  const auto* const scratch_end = reinterpret_cast<std::byte*>(p.partial_lse + partials * kBunch);
  check(scratch_end <= launch.scratch + launch.scratch_bytes,
        "decode attention: too little scratch memory");
  check(reinterpret_cast<std::uintptr_t>(p.q) % 16 == 0, "decode attention: unaligned queries");
  check(bunches * p.kv_heads <= Launch::kCounters, "decode attention: too many KV heads");
  const std::size_t shared = DecodeRing<kHeadDim, kStages>::kBytes + head_bytes;
  check(shared + kDeclaredBytes <= static_cast<std::size_t>(launch.device->shared_bytes),
        "decode attention: too many KV heads");
  require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared)),
          "shared memory of decode attention");
  launch_early("decode attention", kernel,
               dim3(static_cast<unsigned>(p.workers), static_cast<unsigned>(bunches)),
               DecodeShape<kHeadDim>::kThreads, shared, launch, p);
}

// As many stages as keep about 100 KB under way, if shared memory has room for them.
template <typename T, int kHeadDim>
void launch_shape(DecodeKernelParams& p, const Launch& launch, std::int64_t most_tiles) {
  constexpr int kStage = DecodeShape<kHeadDim>::kStageBytes;
  constexpr int kMost = kHeadDim <= 64 ? 6 : kHeadDim <= 96 ? 4 : 3;
  const bool differ = p.positions != nullptr || p.counts.is_listed;
  const std::size_t head_bytes = differ ? DecodeWork::shared_bytes(p.kv_heads) : 0;
  const std::size_t most = std::size_t{kMost} * kStage + head_bytes + kDeclaredBytes;
  if (most <= static_cast<std::size_t>(launch.device->shared_bytes)) {
    launch_stages<T, kHeadDim, kMost>(p, launch, most_tiles, head_bytes);
  } else {
    launch_stages<T, kHeadDim, 2>(p, launch, most_tiles, head_bytes);
  }
}

void run(DecodeKernelParams& p, const KvShape& shape, const Launch& launch,
         std::int64_t most_tiles) {
  dispatch_rows(shape.dtype, [&](auto element) {
    dispatch_head_dim(shape.head_dim, [&](auto head_dim) {
      launch_shape<decltype(element), head_dim()>(p, launch, most_tiles);
    });
  });
}

DecodeKernelParams common_params(const KvShape& shape, const float* q, float scale, float* out,
                                 float* lse, bool merge, const Launch& launch) {
  DecodeKernelParams p;
  p.q = q;
  p.kv_heads = shape.kv_heads;
  p.group = shape.group();
  p.scale = scale * std::numbers::log2e_v<float>;
  p.out = out;
  p.lse = lse;
  p.merge = merge;
  p.partials = reinterpret_cast<float*>(launch.scratch);
  p.finished = launch.counters;
  return p;
}

std::int64_t longest_of(const HeadCounts& counts, int kv_heads) {
  return counts.is_listed ? *std::max_element(counts.listed, counts.listed + kv_heads)
                          : counts.uniform;
}

std::int64_t most_tiles_of(std::int64_t rows, int kv_heads) {
  return std::max<std::int64_t>(1, (rows + kTileRows - 1) / kTileRows) * kv_heads;
}

__global__ void resident_kernel(const __grid_constant__ DecodeKernelParams p) {
  report_resident(p, static_cast<int>(blockIdx.x));
}

DecodeKernelParams selected_params(const AttendSelectedParams& a, const Launch& launch) {
  DecodeKernelParams p = common_params(a.shape, a.q, a.scale, a.out, a.lse, a.merge, launch);
  const HeadSources sources = head_sources(a.rows);
  p.rows = sources.resident;
  p.home = sources.home;
  p.resident = sources.resident_count;
  p.positions = a.selected.positions;
  p.capacity = a.selected.capacity;
  p.heads = a.selected.heads;
  p.newest = head_rows(a.newest);
  p.counts = head_counts(a.newest);
  p.visible = a.first_query + 1;
  p.alpha = a.alpha;
  p.estimated_lse = a.estimated_lse;
  p.sums = a.mean.sums;
  if (p.sums != nullptr) p.share = 1.0f / static_cast<float>(a.mean.count);
  return p;
}

}  // namespace

bool attend_decode_fits(int head_dim, const DeviceLimits& device) {
  bool fits = false;
  dispatch_head_dim(head_dim, [&](auto constant) {
    constexpr int kStage = DecodeShape<decltype(constant)::value>::kStageBytes;
    fits = 2 * kStage + kBesideStages <= device.shared_bytes;
  });
  return fits;
}

void attend_decode(const AttendParams& a, const Launch& launch) {
  check(a.tokens == 1, "attend_decode is for one token");
  DecodeKernelParams p = common_params(a.shape, a.q, a.scale, a.out, a.lse, a.merge, launch);
  p.rows = head_rows(a.rows);
  p.counts = head_counts(a.rows);
  p.visible = std::max<std::int64_t>(0, a.first_query_position + 1 - a.first_row_position);
  const std::int64_t longest = std::min(longest_of(p.counts, p.kv_heads), p.visible);
  run(p, a.shape, launch, most_tiles_of(longest, p.kv_heads));
}

void attend_decode_selected(const AttendSelectedParams& a, const Launch& launch) {
  check(a.tokens == 1, "attend_decode_selected is for one token");
  check(a.alpha != nullptr || (a.estimated_lse == nullptr && a.mean.sums == nullptr),
        "attend_decode_selected: no alpha");
  check(!a.merge || a.alpha == nullptr, "attend_decode_selected: alpha of a partial");
  check(reinterpret_cast<std::uintptr_t>(a.mean.sums) % 16 == 0,
        "attend_decode_selected: unaligned sums of values");
  DecodeKernelParams p = selected_params(a, launch);
  run(p, a.shape, launch,
      most_tiles_of(a.selected.capacity + longest_of(p.counts, p.kv_heads), p.kv_heads));
}

void count_resident(const AttendSelectedParams& a, const Launch& launch) {
  const DecodeKernelParams p = selected_params(a, launch);
  resident_kernel<<<static_cast<unsigned>(p.kv_heads), kWarp, 0, launch.stream>>>(p);
  require_launch("counting resident rows");
}

}  // namespace sluice::cuda
