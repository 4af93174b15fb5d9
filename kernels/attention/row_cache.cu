// find_rows(), in two kernels. look_up_kernel finds every selected row on a device page, in the row
// cache, whose row it heats, or in host memory. take_ways_kernel takes the rows that are in host
// memory alone, in the order of the batch and of positions, and gives each the coldest way of its
// set if that is colder than the row; attend_decode_selected() fills the way. A set belongs to one
// warp and all is integer arithmetic, so results do not depend on timing. Heat: see RowCacheView in
// lib/backend/row_cache.h.
//
// A lot is kLot selected rows of a KV head, which a block reads at a time (not decode's lot).
#include <algorithm>
#include <cstdint>

#include "kernels/attention/attention.h"
#include "kernels/runtime/device_math.cuh"
#include "kernels/runtime/early_launch.cuh"
#include "kernels/runtime/paged.cuh"
#include "lib/check.h"

namespace sluice::cuda {
namespace {

// Each row is looked up by a team of kLookUpLanes lanes; each lane checks four ways.
constexpr int kLookUpLanes = 8;
constexpr int kTeams = kWarp / kLookUpLanes;  // per warp
constexpr int kLookUpThreads = 256;
// Rows per team at a time, so that their loads overlap.
constexpr int kLookUpAhead = 4;
constexpr int kWarpRows = kTeams * kLookUpAhead;
constexpr int kLookUpRows = kLookUpThreads / kWarp * kWarpRows;  // per block
static_assert(RowCacheView::kWays == 4 * kLookUpLanes);

constexpr int kTakeWarps = 16;
constexpr int kTakeThreads = kTakeWarps * kWarp;
// Rows per thread at a time, so that it waits for several loads at once.
constexpr int kTakeRows = 8;
constexpr int kLot = kTakeThreads * kTakeRows;
// Rows that a block assigns ways to, about. It is small because a warp assigns ways one after the
// other, but kMostBlocks bounds the blocks because every block reads all rows of its KV head.
constexpr std::int64_t kBlockRows = 32;
constexpr std::int64_t kMostBlocks = 16;  // per KV head
static_assert(RowCacheView::kWays == kWarp, "a warp looks at a set at once");

using Tag = RowCacheView::Tag;

// Copies of RowCacheView's members, which a kernel cannot call (see paged.cuh).
__device__ __forceinline__ Tag tag_of(const FindRowsParams& p, std::int32_t host) {
  return static_cast<Tag>(static_cast<std::uint32_t>(p.cache.host_rows) *
                              static_cast<std::uint32_t>(p.layer) +
                          static_cast<std::uint32_t>(host));
}
__device__ __forceinline__ int set_of_tag(Tag tag, std::int64_t sets) {
  const std::uint64_t hash = tag * 0x9E3779B97F4A7C15ull >> 32;
  return static_cast<int>(hash * static_cast<std::uint64_t>(sets) >> 32);
}
__device__ __forceinline__ std::int32_t heated(std::int32_t heat, std::int32_t fresh) {
  constexpr int kOctave = RowCacheView::kOctave;
  const std::int32_t apart = heat > fresh ? heat - fresh : fresh - heat;
  const std::int32_t more = kOctave >> min(apart / kOctave, 31);
  return max(heat, fresh) + more - (more * (apart % kOctave) / kOctave >> 1);
}
__device__ __forceinline__ std::int32_t heat_of_new(const FindRowsParams& p) {
  return RowCacheView::kFade * *p.cache.clock;
}

// Returns the way of a row's set that holds the row, or -1; the row's team calls it. `own`: the
// tags of this lane's ways.
__device__ __forceinline__ int find_way(const uint4& own, Tag tag) {
  const int way = tag == own.x ? 0 : tag == own.y ? 1 : tag == own.z ? 2 : tag == own.w ? 3 : -1;
  const unsigned lane = threadIdx.x % kWarp;
  const unsigned first = lane / kLookUpLanes * kLookUpLanes;
  const unsigned found = __ballot_sync(kAllLanes, way >= 0) >> first & ((1u << kLookUpLanes) - 1);
  const int owner = __ffs(static_cast<int>(found)) - 1;
  const int in_owner = __shfl_sync(kAllLanes, way, static_cast<int>(first) + max(owner, 0));
  return owner < 0 ? -1 : 4 * owner + in_owner;
}

// The places of rows of a token's KV head before any is evicted.
class LookUp {
 public:
  __device__ __forceinline__ LookUp(const FindRowsParams& p, int number, int head)
      : p_(p),
        pages_(page_table_of(p.rows, p.batch.tokens[number].sequence)),
        index_(std::int64_t{number} * p.shape.kv_heads + head),
        first_way_(head * p.cache.sets * kWarp) {}

  // By a warp: rows [first, first + kWarpRows) that exist.
  __device__ __forceinline__ void find(std::int32_t first, std::int32_t count) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    std::int32_t rows[kLookUpAhead];
    PlacedRow places[kLookUpAhead];
    Tag tags[kLookUpAhead];
    std::int32_t sets[kLookUpAhead];  // the first ways of the rows' sets
    uint4 own[kLookUpAhead];
#pragma unroll
    for (int i = 0; i < kLookUpAhead; ++i) {
      rows[i] = first + i * kTeams + lane / kLookUpLanes;
      places[i] = host_of(min(rows[i], count - 1));
    }
#pragma unroll
    for (int i = 0; i < kLookUpAhead; ++i) {
      // Rows on the device get a tag that matches none.
      const bool there = places[i].place == PlacedRow::kDevice;
      tags[i] = there ? RowCacheView::kNothing - 1 : tag_of(p_, places[i].number);
      sets[i] = set_of_tag(tags[i], p_.cache.sets) * kWarp;
      const auto* const set = reinterpret_cast<const uint4*>(p_.cache.tags + first_way_ + sets[i]);
      own[i] = there ? uint4{} : set[lane % kLookUpLanes];
    }
    std::int32_t ways[kLookUpAhead];
    std::int32_t heat[kLookUpAhead];
#pragma unroll
    for (int i = 0; i < kLookUpAhead; ++i) {
      const int way = find_way(own[i], tags[i]);
      const bool is_found = way >= 0 && places[i].place == PlacedRow::kHost;
      if (is_found) places[i] = {sets[i] + way, PlacedRow::kCached};
      // One lane of each team goes on.
      ways[i] = is_found && lane % kLookUpLanes == 0 && rows[i] < count ? sets[i] + way : -1;
      if (ways[i] >= 0) heat[i] = p_.cache.heat[first_way_ + ways[i]];
    }
    const std::int32_t fresh = heat_of_new(p_);
#pragma unroll
    for (int i = 0; i < kLookUpAhead; ++i) {
      if (ways[i] >= 0) warm(p_.cache.heat + first_way_ + ways[i], heat[i], fresh);
      if (lane % kLookUpLanes == 0 && rows[i] < count) {
        p_.places[index_ * p_.selected.capacity + rows[i]] = places[i];
      }
    }
  }

 private:
  // The row's place by the page table alone: on the device, else in host memory.
  __device__ __forceinline__ PlacedRow host_of(std::int32_t row) const {
    const std::int32_t position = p_.selected.positions[index_ * p_.selected.capacity + row];
    const PageSlots page = pages_[page_of(position)];
    const bool there = is_on_device(page);
    constexpr auto kRows = static_cast<std::int32_t>(kPageTokens);
    return {(there ? page.device : page.host) * kRows + place_in_page(position),
            there ? PlacedRow::kDevice : PlacedRow::kHost};
  }
  // Tokens of a batch may select the same row at the same time; the result depends on how often,
  // not on the order. A single token selects no row twice.
  __device__ __forceinline__ void warm(std::int32_t* heat, std::int32_t seen,
                                       std::int32_t fresh) const {
    if (p_.batch.count == 1) {
      *heat = heated(seen, fresh);
      return;
    }
    std::int32_t before;
    do {
      before = seen;
      seen = atomicCAS(heat, before, heated(before, fresh));
    } while (seen != before);
  }

  const FindRowsParams& p_;
  const PageSlots* pages_;
  std::int64_t index_;      // of the token's KV head among all
  std::int64_t first_way_;  // of the KV head's part of the cache
};

__global__ __launch_bounds__(kLookUpThreads) void look_up_kernel(
    const __grid_constant__ FindRowsParams p) {
  const auto head = static_cast<int>(blockIdx.y);
  const auto number = static_cast<int>(blockIdx.z);
  const LookUp look_up(p, number, head);
  wait_for_kernel_before();
  allow_next_kernel();
  const std::int64_t index = std::int64_t{number} * p.shape.kv_heads + head;
  if (p.evicted != nullptr && blockIdx.x == 0 && threadIdx.x == 0) p.evicted[index] = 0;
  const std::int32_t count = p.selected.heads[index].count;
  const auto step = static_cast<std::int32_t>(gridDim.x) * kLookUpRows;
  const auto warp = static_cast<std::int32_t>(threadIdx.x) / kWarp;
  // Neighbouring rows go to warps of different blocks, so that few rows keep many multiprocessors
  // busy.
  auto first =
      (warp * static_cast<std::int32_t>(gridDim.x) + static_cast<std::int32_t>(blockIdx.x)) *
      kWarpRows;
  for (; first < count; first += step) look_up.find(first, count);
}

// A row that is only in host memory.
struct AwayRow {
  std::int32_t item;  // index among the KV head's selected rows, of all tokens
  std::int32_t host;
};

struct TakeShared {
  std::int32_t before[kMostBatch + 1];  // selected rows of all preceding tokens
  std::int32_t counts[kTakeRows * kTakeWarps];
  AwayRow rows[kLot];  // found by the block so far
};

// Assigns ways to rows in host memory. Blocks divide the sets of a KV head among them, and warps
// divide a block's sets, so that a set changes in the order of the batch, whatever the number of
// blocks and warps.
class WayTaker {
 public:
  __device__ WayTaker(const FindRowsParams& p, TakeShared& shared)
      : p_(p),
        shared_(shared),
        lane_(static_cast<int>(threadIdx.x) % kWarp),
        warp_(static_cast<int>(threadIdx.x) / kWarp),
        head_(static_cast<int>(blockIdx.y)),
        first_set_(static_cast<int>(p.cache.sets * blockIdx.x / gridDim.x)),
        last_set_(static_cast<int>(p.cache.sets * (blockIdx.x + 1) / gridDim.x)) {}

  __device__ void run() {
    fresh_ = heat_of_new(p_);
    add_up();
    const std::int32_t total = shared_.before[p_.batch.count];
    int listed = 0;
#pragma unroll 1
    for (std::int32_t first = 0; first < total; first += kLot) {
      Lot lot = lot_from(first, total);
      if (listed + lot.count > kLot) {
        take_ways(listed);
        listed = 0;
      }
      list(lot, first, listed);
      listed += lot.count;
    }
    take_ways(listed);
  }

 private:
  // Adds up the selected rows of every token's KV head.
  __device__ void add_up() const {
    if (warp_ == 0) {
      std::int32_t before = 0;
      for (int first = 0; first < p_.batch.count; first += kWarp) {
        const int number = first + lane_;
        const std::int32_t own = number < p_.batch.count
                                     ? p_.selected.heads[number * p_.shape.kv_heads + head_].count
                                     : 0;
        const std::int32_t sum = warp_inclusive(own);
        if (number < p_.batch.count) shared_.before[number] = before + sum - own;
        before += __shfl_sync(kAllLanes, sum, kWarp - 1);
      }
      if (lane_ == 0) shared_.before[p_.batch.count] = before;
    }
    __syncthreads();
  }

  // Number of the token that selected row `item` of the KV head.
  __device__ int number_of(std::int32_t item) const {
    int number = 0;
    int end = static_cast<int>(p_.batch.count);
    while (end - number > 1) {
      const int middle = (number + end) / 2;
      if (shared_.before[middle] <= item) {
        number = middle;
      } else {
        end = middle;
      }
    }
    return number;
  }
  // Number of a token's KV head among all heads.
  __device__ std::int64_t head_of(int number) const {
    return std::int64_t{number} * p_.shape.kv_heads + head_;
  }
  // Index in `places` of selected row `item` of the KV head.
  __device__ std::int64_t index_of(std::int32_t item) const {
    const int number = number_of(item);
    return head_of(number) * p_.selected.capacity + item - shared_.before[number];
  }

  // The rows of a lot that are in host memory and belong to this block's sets.
  struct Lot {
    std::int32_t host_slots[kTakeRows];  // -1: not in host memory
    unsigned own[kTakeRows];             // one bit per lane, set if its row is one of them
    int before[kTakeRows];               // rows of the lot before this warp's
    int count;
  };

  __device__ Lot lot_from(std::int32_t first, std::int32_t total) const {
    Lot lot;
#pragma unroll
    for (int i = 0; i < kTakeRows; ++i) {
      const std::int32_t item = item_of(first, i);
      const PlacedRow place =
          item < total ? p_.places[index_of(item)] : PlacedRow{0, PlacedRow::kDevice};
      lot.host_slots[i] = place.place == PlacedRow::kHost ? place.number : -1;
    }
#pragma unroll
    for (int i = 0; i < kTakeRows; ++i) {
      const int set = set_of({0, lot.host_slots[i]});
      const bool is_own = lot.host_slots[i] >= 0 && set >= first_set_ && set < last_set_;
      if (is_own) prefetch(set);
      lot.own[i] = __ballot_sync(kAllLanes, is_own);
      if (lane_ == 0) shared_.counts[i * kTakeWarps + warp_] = __popc(lot.own[i]);
    }
    __syncthreads();
    // Running sums of this lane's counts, which are consecutive.
    constexpr int kOfLane = kTakeRows * kTakeWarps / kWarp;
    std::int32_t sums[kOfLane];
    std::int32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) sums[i] = sum += shared_.counts[kOfLane * lane_ + i];
    const std::int32_t inclusive = warp_inclusive(sum);
    const std::int32_t before_lane = inclusive - sum;
#pragma unroll
    for (int i = 0; i < kTakeRows; ++i) {
      const int at = i * kTakeWarps + warp_;
      std::int32_t before = before_lane;
#pragma unroll
      for (int n = 0; n + 1 < kOfLane; ++n) {
        if (at % kOfLane == n + 1) before = before_lane + sums[n];
      }
      lot.before[i] = __shfl_sync(kAllLanes, before, at / kOfLane);
    }
    lot.count = __shfl_sync(kAllLanes, inclusive, kWarp - 1);
    __syncthreads();
    return lot;
  }
  // Appends the lot's rows to the `listed` rows so far, in order.
  __device__ void list(const Lot& lot, std::int32_t first, int listed) const {
#pragma unroll
    for (int i = 0; i < kTakeRows; ++i) {
      const unsigned below = lot.own[i] & ((1u << lane_) - 1);
      if ((lot.own[i] >> lane_ & 1u) == 0) continue;
      shared_.rows[listed + lot.before[i] + __popc(below)] = {item_of(first, i), lot.host_slots[i]};
    }
  }
  // Prefetches the memory that take_way() will read.
  __device__ void prefetch(int set) const {
    const std::int64_t way = (head_ * p_.cache.sets + set) * kWarp;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p_.cache.heat + way));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p_.cache.tags + way));
  }

  // Assigns ways to the listed rows.
  __device__ void take_ways(int count) const {
    __syncthreads();
#pragma unroll 1
    for (int at = 0; at < count; at += kWarp) {
      const bool is_own =
          at + lane_ < count && set_of(shared_.rows[at + lane_]) % kTakeWarps == warp_;
      for (unsigned left = __ballot_sync(kAllLanes, is_own); left != 0; left &= left - 1) {
        take_way(shared_.rows[at + __ffs(static_cast<int>(left)) - 1]);
        __syncwarp();
      }
    }
    __syncthreads();
  }
  __device__ static std::int32_t item_of(std::int32_t first, int lookup) {
    return first + lookup * kTakeThreads + static_cast<int>(threadIdx.x);
  }
  __device__ int set_of(const AwayRow& row) const {
    return set_of_tag(tag_of(p_, row.host), p_.cache.sets);
  }

  __device__ void take_way(const AwayRow& row) const {
    const Tag tag = tag_of(p_, row.host);
    const int number = set_of(row);
    const std::int64_t set = (head_ * p_.cache.sets + number) * kWarp;
    Tag* const own_tag = p_.cache.tags + set + lane_;
    std::int32_t* const own_heat = p_.cache.heat + set + lane_;
    const Tag own = *own_tag;
    // Another token of the batch may have assigned the row a way that is not filled yet.
    if (p_.batch.count > 1) {
      const bool taken = own == tag;
      if (taken) *own_heat = heated(*own_heat, fresh_);
      if (__any_sync(kAllLanes, taken)) return;
    }
    const std::int32_t heat = *own_heat;
    const std::int32_t coldest = __reduce_min_sync(kAllLanes, heat);
    if (coldest >= fresh_) return;
    const int way = __ffs(static_cast<int>(__ballot_sync(kAllLanes, heat == coldest))) - 1;
    if (lane_ == way) {
      if (p_.evicted != nullptr && own != RowCacheView::kNothing) {
        atomicAdd(p_.evicted + head_of(number_of(row.item)), 1);
      }
      *own_tag = tag;
      *own_heat = fresh_;
      p_.places[index_of(row.item)].place = number * kWarp + way;
    }
  }

  const FindRowsParams& p_;
  TakeShared& shared_;
  int lane_;
  int warp_;
  int head_;
  int first_set_;
  int last_set_;
  std::int32_t fresh_ = 0;
};

__global__ __launch_bounds__(kTakeThreads) void take_ways_kernel(
    const __grid_constant__ FindRowsParams p) {
  __shared__ TakeShared shared;
  wait_for_kernel_before();
  allow_next_kernel();
  WayTaker(p, shared).run();
}

constexpr int kForgetThreads = 256;

__global__ __launch_bounds__(kForgetThreads) void forget_rows_kernel(
    const __grid_constant__ ForgetRowsParams p) {
  take_turn();
  const std::int64_t ways = p.shape.kv_heads * p.cache.sets * kWarp;
  const std::int64_t threads = std::int64_t{gridDim.x} * kForgetThreads;
  for (std::int64_t way = std::int64_t{blockIdx.x} * kForgetThreads + threadIdx.x; way < ways;
       way += threads) {
    const Tag tag = p.cache.tags[way];
    const std::int64_t host = tag % p.cache.host_rows;
    const bool named = tag != RowCacheView::kNothing && host >= p.first && host - p.first < p.count;
    if (!p.all && !named) continue;
    p.cache.tags[way] = RowCacheView::kNothing;
    p.cache.heat[way] = RowCacheView::kCold;
  }
}

}  // namespace

void find_rows(const FindRowsParams& p, const Launch& launch) {
  if (p.batch.count == 0) return;
  check(p.batch.count <= kMostBatch, "find_rows: more tokens than a step has");
  // Several blocks per multiprocessor, but no more than there is work for.
  const std::int64_t multiprocessors = launch.device->multiprocessors;
  const std::int64_t heads = p.shape.kv_heads;
  const auto blocks = [&](std::int64_t wanted, std::int64_t most) {
    return static_cast<unsigned>(
        std::clamp<std::int64_t>(wanted, 1, std::max<std::int64_t>(most, 1)));
  };
  const std::int64_t rows = std::min(p.selected.capacity, p.batch.capacity);
  const dim3 look_up(
      blocks((rows + kLookUpRows - 1) / kLookUpRows, 8 * multiprocessors / (heads * p.batch.count)),
      static_cast<unsigned>(heads), static_cast<unsigned>(p.batch.count));
  launch_early("find_rows", look_up_kernel, look_up, kLookUpThreads, 0, launch, p);
  const dim3 take(blocks(p.batch.count * rows / kBlockRows, kMostBlocks),
                  static_cast<unsigned>(heads));
  launch_early("find_rows", take_ways_kernel, take, kTakeThreads, 0, launch, p);
}

void forget_rows(const ForgetRowsParams& p, const Launch& launch) {
  const std::int64_t ways = p.shape.kv_heads * p.cache.sets * kWarp;
  const std::int64_t most = std::int64_t{8} * launch.device->multiprocessors;
  const auto blocks =
      std::clamp<std::int64_t>((ways + kForgetThreads - 1) / kForgetThreads, 1, most);
  launch_early("forget_rows", forget_rows_kernel, dim3(static_cast<unsigned>(blocks)),
               kForgetThreads, 0, launch, p);
}

}  // namespace sluice::cuda
