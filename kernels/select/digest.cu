#include <algorithm>
#include <cmath>

#include "kernels/select/cluster_output.cuh"
#include "kernels/select/digest_list.cuh"

namespace sluice::cuda {
namespace {

// Clears counts and histograms for another attempt, and returns when all blocks have done so.
__device__ __forceinline__ void begin_again(const DigestWork& w) {
  __syncthreads();
  set_zero(w);
  __syncthreads();
  w.cluster.sync();
}

// Counts the weights of the entries that reach the lower bound of their row's threshold.
__device__ __forceinline__ void count_reaching(const DigestWork& w) {
  const RowState state = w.shared->states[w.row];
  if (state.bins == 0) return;
  auto weights = weight_counter(w, state);
  const __half2 least = twice(state.least);
#pragma unroll 1
  for (std::int32_t first = w.part * kWarp; first < w.pages; first += w.parts * kWarp) {
    const std::int32_t page = first + lane_id();
    std::uint32_t sectors = 0;
    if (page < w.pages) sectors = reaching(w.maxima[page * w.group + w.row], least);
#pragma unroll 1
    while (__any_sync(kAllLanes, sectors != 0)) {
      uint4 x[kVectors];
#pragma unroll
      for (int j = 0; j < kVectors; j += 2) {
        x[j] = x[j + 1] = all_minus_infinity();
        if (sectors == 0) continue;
        const std::int32_t v = page * kPageVectors + (__ffs(static_cast<int>(sectors)) - 1) * 2;
        sectors &= sectors - 1;
        x[j] = selectable_of(w, v);
        if (v + 1 < w.count) x[j + 1] = selectable_of(w, v + 1);
      }
      weights.add(x);
    }
  }
  weights.end();
}

// The same for functions out of line, which build their own DigestWork.
__device__ __forceinline__ DigestWork begin_again(const DigestCall& call) {
  extern __shared__ uint4 memory[];
  DigestWork w(call, reinterpret_cast<std::byte*>(memory));
  w.share_out(w.shared->extent);
  begin_again(w);
  return w;
}

// Thresholds of top_p for every row: first by the maxima of sectors alone, which gives a lower
// bound, then by the logits of those which reach it.
__device__ __noinline__ void find_exact_thresholds(const DigestCall& call) {
  const DigestWork w = begin_again(call);
  const int g = thread_id();
  if (g < w.group) w.shared->rows[g].threshold = w.shared->states[g].info.threshold;
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {
    find_thresholds(
        w,
        [&] {
          if (w.row >= 0 && turn == 0) {
            count_row(w, w.pages, [&](std::int32_t v) { return w.maxima[v * w.group + w.row]; });
          } else if (w.row >= 0) {
            count_reaching(w);
          }
          __syncthreads();
        },
        turn);
    if (g < w.group && w.shared->states[g].bins > 0) {
      w.shared->states[g].least = w.shared->rows[g].threshold;
    }
    begin_again(w);
  }
}

// Marks the kept entries by the grades of all logits; returns true if top_p wants more.
__device__ __noinline__ bool mark_by_logits(const DigestCall& call) {
  const DigestWork w = begin_again(call);
  if (thread_id() < w.group) w.shared->leasts[thread_id()] = kInfiniteHalf;
  __syncthreads();
  return mark_heaviest(w);
}

// Marks the kept entries by the digest; returns true if top_p wants more. At first top_p is taken
// to want all entries, which is right if it wants all candidates; otherwise thresholds are found.
// If candidates are too many, the listed ones raise the bound, or the digest gives a finer one.
__device__ __forceinline__ bool mark_kept(const DigestCall& call, const DigestWork& w) {
  mark_range(w, 0, w.extent.low);
  if (thread_id() < w.group) {
    w.shared->rows[thread_id()].threshold = static_cast<std::uint16_t>(kMinusInfinities);
  }
  __syncthreads();
  mark_range(w, w.extent.high, w.extent.emit);
  bool has_thresholds = false;
  bool are_found = false;
  bool may_sample = true;
  std::uint32_t raised = 0;
#pragma unroll 1
  for (int turn = 0; turn < kMostTurns; ++turn) {
    if (raised != 0) {
      begin_again(w);
      bound_by_grade(w, raised);
    } else {
      if (has_thresholds && !are_found) {
        find_exact_thresholds(call);
        are_found = true;
      } else if (turn > 0) {
        begin_again(w);
      }
      if (!bound_sectors(w, turn) && !has_thresholds) {
        has_thresholds = w.c.is_top_p;
        continue;
      }
    }
    if (!list_by_digest(w, turn, may_sample && turn + 1 < kMostTurns)) {
      has_thresholds = true;
      raised = 0;
      continue;
    }
    GradeCut cut;
    if (!cut_at_grade(w, cut)) {
      may_sample = false;
      raised = raised_grade(w);
      continue;
    }
    const bool is_all = cut.settled != 0 && cut.grade == 0;
    if (is_all && !has_thresholds) {
      has_thresholds = w.c.is_top_p;
      raised = 0;
      continue;
    }
    if (is_all) mark_listed(w, cut);
    return cut.cut != 0;
  }
  return mark_by_logits(call);
}

__device__ __forceinline__ void select_digested(const DigestCall& call, std::byte* memory) {
  DigestWork w(call, memory);
  if (thread_id() == 0) {
    barrier_init(shared_address(&w.digest->loaded), 1);
    set_up_exchanges(w);
    const auto blocks = static_cast<std::uint32_t>(w.cluster.size);
    for (int turn = 0; turn < kMostTurns; ++turn) {
      w.expect(kSectors + turn, blocks * kSectorBins * 4u);
      w.expect(kListed + turn,
               blocks * static_cast<std::uint32_t>(2 * sizeof(uint2) + kMostRows * 4));
    }
  }
  set_zero(w);
  if (thread_id() < kMostRows) w.digest->own_below[thread_id()] = 0;
  auto* const marks = reinterpret_cast<uint4*>(w.kept);
  for (int i = thread_id(); i < call.capacity * 2 / 16; i += threads()) {
    marks[i] = make_uint4(0, 0, 0, 0);
  }
  begin(w);
  if (!has_logits(w)) return;
  w.share_out(w.shared->extent);
  share_digest(w);
  if (!join_sums(w)) return report_bad(w);
  const bool is_cut = mark_kept(call, w);
  write_kept(w, is_cut);
}

__global__ void __launch_bounds__(kMostWarps* kWarp, 1)
    select_digest(const __grid_constant__ DigestCall call) {
  extern __shared__ uint4 memory[];
  // Every device with bulk copies has clusters.
  if constexpr (kBulkCopies) select_digested(call, reinterpret_cast<std::byte*>(memory));
}

DigestCall digest_call(const SelectCall& c, int blocks) {
  DigestCall l(c);
  const std::int64_t all = (c.entries + kPageTokens - 1) / kPageTokens;
  const std::int64_t step = std::int64_t{blocks} * kPageStep;
  l.pages = static_cast<std::int32_t>((all + step - 1) / step * kPageStep);
  l.capacity = l.pages * kPageVectors;
  const std::int64_t items = std::int64_t{l.pages} * c.group;
  const std::int64_t scratch = ClusterScratch<std::uint32_t>::bytes(blocks * c.group);
  const std::int64_t list = 4 * std::max<std::int64_t>(c.most_keep, c.most_forced);
  l.lay_out(blocks, std::int64_t{sizeof(DigestShared)} + items * 20, scratch, list);
  l.maxima_at = static_cast<std::uint32_t>(sizeof(ClusterShared) + sizeof(DigestShared));
  l.sums_at = l.maxima_at + static_cast<std::uint32_t>(items * 16);
  return l;
}

bool fits(const SelectCall& c, int blocks, const DeviceLimits& device) {
  constexpr std::int64_t kMostOfBlock = 3 << 16;  // entries whose masses add up in 32 bits
  static_assert(kMostOfBlock / kPageTokens <= kMostWarps * kWarp * 8);  // see find_near()
  const DigestCall l = digest_call(c, blocks);
  return std::int64_t{l.capacity} * 8 <= kMostOfBlock && l.bins <= kWarp * kCoarse &&
         l.bytes <= static_cast<std::uint32_t>(device.shared_bytes);
}

// Blocks per KV head, or 0 if none fit.
int blocks_of(const SelectCall& c, const DeviceLimits& device) {
  const int most = most_blocks_of(device);
  // Many heads keep the device busy with fewer blocks each.
  int blocks = 8;
  while (blocks > 2 && std::int64_t{blocks} * c.head_count > device.multiprocessors) blocks /= 2;
  for (; blocks <= most; blocks *= 2) {
    if (fits(c, blocks, device)) return blocks;
  }
  return 0;
}

}  // namespace

bool fits_digest(const SelectCall& c, const DeviceLimits& device) {
  constexpr std::int64_t kMostForced = 4096;
  if (c.entries < device.digested_entries) return false;
  if (device.capability < 90 || c.group > kMostRows) return false;
  if (c.digest.maxima == nullptr || c.list != nullptr) return false;
  if (!c.has_grades || (c.is_top_p && c.p >= 1.0f)) return false;
  // If more are kept, candidates are mostly too many to list.
  if (std::int64_t{c.most_keep} * c.group * 2 > kMostListed || c.most_forced > kMostForced) {
    return false;
  }
  return blocks_of(c, device) > 0;
}

void run_digest(const SelectCall& c, const Launch& launch) {
  const int blocks = blocks_of(c, *launch.device);
  const DigestCall call = digest_call(c, blocks);
  launch_early_clusters("select_digest", select_digest,
                        dim3(static_cast<unsigned>(c.head_count * blocks)), kMostWarps * kWarp,
                        call.bytes, blocks, launch, call);
}

}  // namespace sluice::cuda
