#include <algorithm>
#include <limits>
#include <numbers>

#include "kernels/decode_attention.h"
#include "kernels/decode_results.cuh"
#include "kernels/decode_rows.cuh"
#include "kernels/decode_warp.cuh"
#include "kernels/dispatch.h"
#include "kernels/error.h"
#include "lib/check.h"

namespace sluice::cuda {
namespace {

template <typename T, int kHeadDim, int kStages>
__global__ __launch_bounds__(kDecodeWarps* kWarp) void decode_kernel(
    const __grid_constant__ DecodeKernelParams p) {
  using Rows = DecodeRows<kHeadDim, kStages>;
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ std::uint64_t barriers[kDecodeWarps][kStages];
  auto& block = *reinterpret_cast<DecodeBlock<kHeadDim>*>(shared);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const auto bunch = static_cast<int>(blockIdx.y);
  const DecodeWork work(p, reinterpret_cast<std::int32_t*>(shared + p.stage_bytes));
  const std::int64_t end = work.begin(static_cast<int>(blockIdx.x) + 1);
  Rows rows(p, shared + warp * Rows::kBytes, barriers[warp]);

  for (std::int64_t begin = work.begin(static_cast<int>(blockIdx.x)); begin < end;) {
    const DecodeSegment segment = work.segment(begin, end);
    rows.begin(segment);
    DecodeWarp<T, kHeadDim> state(p, segment.head, bunch);
    for (std::int64_t tile = segment.first; tile < segment.last; ++tile) {
      state.add(rows.take(), rows.count(tile), p.scale);
      rows.release();
    }
    // The stages become the block's memory, and then stages again.
    __syncthreads();
    state.store(block.out[warp][0], block.highest[warp], block.sum[warp]);
    __syncthreads();
    finish_segment(p, work, segment, bunch, block);
    if (p.positions != nullptr && segment.first == 0 && bunch == 0)
      report_resident(p, segment.head);
    Rows::reuse_memory();
    __syncthreads();
    begin = work.before(segment.head) + segment.last;
  }
}

// Shared memory beside the stages: tiles before each of up to 2,500 heads, and what the kernel
// declares.
constexpr int kBesideStages = 12 << 10;
constexpr int kTileBytes = 10 << 10;

template <typename T, int kHeadDim, int kStages>
void launch_stages(DecodeKernelParams& p, const Launch& launch, std::int64_t most_tiles) {
  constexpr int kShared = std::max(kDecodeWarps * kStages * DecodeShape<kHeadDim>::kStageBytes,
                                   static_cast<int>(sizeof(DecodeBlock<kHeadDim>)));
  const auto kernel = decode_kernel<T, kHeadDim, kStages>;
  const int resident = std::max(1, launch.device->shared_bytes / kShared);
  // Two blocks on a multiprocessor keep enough rows under way; more would only be more parts to
  // merge.
  const std::int64_t slots = std::int64_t{launch.device->multiprocessors} * std::min(resident, 2);
  const int bunches = (p.group + kBunch - 1) / kBunch;
  p.workers = static_cast<int>(std::clamp<std::int64_t>(slots / bunches, 1, most_tiles));
  const std::int64_t partials = std::int64_t{bunches} * (p.workers + p.kv_heads);
  p.partial_lse = p.partials + partials * kBunch * kHeadDim;
  const auto* const scratch_end = reinterpret_cast<std::byte*>(p.partial_lse + partials * kBunch);
  check(scratch_end <= launch.scratch + launch.scratch_bytes,
        "decode attention: too little scratch memory");
  // The last block of a head weighs the parts of all others in the memory of its stages.
  check(static_cast<std::size_t>(kBunch) * (static_cast<std::size_t>(p.workers) + 1) *
                sizeof(float) <=
            kShared,
        "decode attention: too many multiprocessors");
  check(bunches * p.kv_heads <= Launch::kCounters, "decode attention: too many KV heads");
  p.stage_bytes = kShared;
  const bool differ = p.positions != nullptr || p.counts.is_listed;
  const std::size_t shared =
      kShared + (differ ? (static_cast<std::size_t>(p.kv_heads) + 1) * sizeof(std::int32_t) : 0);
  check(shared - kShared <= kTileBytes, "decode attention: too many KV heads");
  require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared)),
          "shared memory of decode attention");
  kernel<<<dim3(static_cast<unsigned>(p.workers), static_cast<unsigned>(bunches)),
           kDecodeWarps * kWarp, shared, launch.stream>>>(p);
  require_launch("decode attention");
}

// As many stages as shared memory has room for.
template <typename T, int kHeadDim>
void launch_shape(DecodeKernelParams& p, const Launch& launch, std::int64_t most_tiles) {
  constexpr int kStage = kDecodeWarps * DecodeShape<kHeadDim>::kStageBytes;
  constexpr int kMost = kHeadDim <= 64 ? 5 : 3;
  if (kMost * kStage + kBesideStages <= launch.device->shared_bytes) {
    launch_stages<T, kHeadDim, kMost>(p, launch, most_tiles);
  } else {
    launch_stages<T, kHeadDim, 2>(p, launch, most_tiles);
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
  return p;
}

}  // namespace

bool attend_decode_fits(int head_dim, const DeviceLimits& device) {
  bool fits = false;
  dispatch_head_dim(head_dim, [&](auto constant) {
    constexpr int kStage = kDecodeWarps * DecodeShape<decltype(constant)::value>::kStageBytes;
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
