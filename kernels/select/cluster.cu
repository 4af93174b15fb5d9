#include <algorithm>
#include <cmath>

#include "kernels/select/cluster_cut.cuh"
#include "kernels/select/cluster_output.cuh"

namespace sluice::cuda {
namespace {

__device__ __forceinline__ void select_head(const auto& w) {
  share_sums(w);
  if (!join_sums(w)) return report_bad(w);
  if (w.row_bins > 0 || w.c.has_grades) find_thresholds(w, [&] { count_rows(w); });
  bool is_cut = false;
  if (w.c.has_grades) {
    set_bounds(w);
    is_cut = mark_heaviest(w);
  } else {
    mark_reached(w);
  }
  write_kept(w, is_cut);
}

__device__ __forceinline__ void select_in_cluster(const ClusterCall& call, std::byte* memory) {
  WorkOf<std::uint16_t> work(call, memory);
  if (thread_id() == 0) set_up_exchanges(work);
  set_zero(work);
  begin(work);
  if (!has_logits(work)) return;
  work.share_out(work.shared->extent);
  select_head(work);
}

__global__ void __launch_bounds__(kMostWarps* kWarp, 1)
    select_cluster(const __grid_constant__ ClusterCall call) {
  extern __shared__ uint4 memory[];
  // Every device with bulk copies has clusters.
  if constexpr (kBulkCopies) select_in_cluster(call, reinterpret_cast<std::byte*>(memory));
}

ClusterCall cluster_call(const SelectCall& c, int blocks) {
  ClusterCall l(c);
  const std::int32_t vectors = (c.entries + 7) / 8;
  l.capacity = (vectors + 8 * blocks - 1) / (8 * blocks) * 8;
  const std::int64_t rows = std::int64_t{l.capacity} * c.group * std::int64_t{sizeof(uint4)};
  l.lay_out(blocks, rows, ClusterScratch<std::uint16_t>::bytes(blocks * c.group),
            std::int64_t{l.capacity} * 16);
  return l;
}

bool fits(const SelectCall& c, int blocks, const DeviceLimits& device) {
  const ClusterCall l = cluster_call(c, blocks);
  return l.capacity * 8 <= kMassedEntries && l.bins <= kWarp * kCoarse &&
         l.bytes <= static_cast<std::uint32_t>(device.shared_bytes);
}

// Blocks per KV head, or 0 if none fit. As many as have enough work: fewer take longer to read
// their entries, more take longer to exchange results. Heads that do not all run at once have as
// few as hold their logits.
int blocks_of(const SelectCall& c, const DeviceLimits& device) {
  constexpr std::int64_t kWorth = 16384;  // logits per block that are worth a block
  // Less than all, because clusters leave a few multiprocessors of each part of the device unused.
  const std::int64_t at_once = device.multiprocessors * 7 / 8;
  const std::int64_t in_two_turns = 2 * device.multiprocessors;
  const std::int64_t heads = c.head_count;
  const std::int64_t work = std::int64_t{c.entries} * c.group;
  int found = 0;
  for (int blocks = heads * 4 <= at_once ? 4 : 2; blocks <= most_blocks_of(device); blocks *= 2) {
    if (heads * blocks > (found > 0 ? at_once : in_two_turns)) break;
    if (!fits(c, blocks, device)) continue;
    found = blocks;
    if (work <= blocks * kWorth) break;
  }
  return found;
}

}  // namespace

bool fits_cluster(const SelectCall& c, const DeviceLimits& device) {
  if (device.capability < 90 || c.group > kMostRows) return false;
  // If more are kept, candidates are mostly too many to list.
  if (c.has_grades && std::int64_t{c.most_keep} * c.group * 2 > kMostListed) return false;
  return blocks_of(c, device) > 0;
}

void run_cluster(const SelectCall& c, const Launch& launch) {
  const int blocks = blocks_of(c, *launch.device);
  const ClusterCall call = cluster_call(c, blocks);
  const int threads = call.capacity * c.group <= 1024 ? 256 : kMostWarps * kWarp;
  launch_early_clusters("select_cluster", select_cluster,
                        dim3(static_cast<unsigned>(c.head_count * blocks)), threads, call.bytes,
                        blocks, launch, call);
}

}  // namespace sluice::cuda
