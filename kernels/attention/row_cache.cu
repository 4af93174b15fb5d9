#include <algorithm>
#include <cstdint>

#include "kernels/attention/attention.h"
#include "kernels/runtime/device_math.cuh"
#include "kernels/runtime/early_launch.cuh"
#include "kernels/runtime/paged.cuh"
#include "lib/check.h"

namespace sluice::cuda {
namespace {

constexpr int kFindWarps = 16;
constexpr int kFindThreads = kFindWarps * kWarp;
// Rows that a thread looks up at a time, so that it waits for several at once.
constexpr int kLookups = 4;
constexpr int kLot = kFindThreads * kLookups;
constexpr int kMostTokens = 64;
// Of a block, about: each of its warps finds a few, one after the other.
constexpr std::int64_t kBlockRows = 64;

static_assert(RowCacheView::kWays == kWarp, "a warp looks at a set at once");

__device__ __forceinline__ std::uint64_t tag_of(int layer, std::int32_t home) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(layer)) << 32 |
         static_cast<std::uint32_t>(home);
}

// See RowCacheView, whose members a kernel cannot call.
__device__ __forceinline__ int set_of(std::uint64_t tag, std::int64_t sets) {
  const std::uint64_t hash = tag * 0x9E3779B97F4A7C15ull >> 32;
  return static_cast<int>(hash * static_cast<std::uint64_t>(sets) >> 32);
}
__device__ __forceinline__ std::int32_t heated(std::int32_t heat, std::int32_t fresh) {
  constexpr int kOctave = RowCacheView::kOctave;
  const std::int32_t apart = heat > fresh ? heat - fresh : fresh - heat;
  const std::int32_t more = kOctave >> min(apart / kOctave, 31);
  return max(heat, fresh) + more - (more * (apart % kOctave) / kOctave >> 1);
}

// A selected row that is not on the device by the tables of pages.
struct AwayRow {
  std::int64_t index;  // of places
  std::int32_t home;
  int set;
};

struct FindShared {
  std::int32_t before[kMostTokens + 1];  // selected rows of the tokens before
  std::int32_t counts[kLookups * kFindWarps];
  AwayRow rows[kLot];
};

// Blocks divide the sets of a KV head among them, and warps those of a block: so what happens in a
// set happens in the order of the batch, whatever there is of either.
class Finder {
 public:
  __device__ Finder(const FindRowsParams& p, FindShared& shared)
      : p_(p),
        shared_(shared),
        lane_(static_cast<int>(threadIdx.x) % kWarp),
        warp_(static_cast<int>(threadIdx.x) / kWarp),
        head_(static_cast<int>(blockIdx.y)),
        first_set_(p.cache.sets * blockIdx.x / gridDim.x),
        last_set_(p.cache.sets * (blockIdx.x + 1) / gridDim.x) {}

  __device__ void find() {
    fresh_ = RowCacheView::kFade * *p_.cache.clock;
    add_up();
    for_own<true>([&](const AwayRow& row) { look_up(row); });
    // Rows that are there are warm by now: none of them makes room.
    for_own<false>([&](const AwayRow& row) { take_way(row); });
  }

 private:
  // Selected rows of every token's KV head.
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

  // Where selected row `item` of the KV head is; `set` is -1 if the tables of pages say so.
  __device__ AwayRow find_page(std::int32_t item, bool places) const {
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
    const std::int64_t index =
        (std::int64_t{number} * p_.shape.kv_heads + head_) * p_.selected.capacity + item -
        shared_.before[number];
    const std::int32_t position = p_.selected.positions[index];
    const PageSlots page =
        page_table_of(p_.rows, p_.batch.tokens[number].sequence)[page_of(position)];
    constexpr auto kRows = static_cast<std::int32_t>(kPageTokens);
    if (is_on_device(page)) {
      if (places && blockIdx.x == 0) {
        p_.places[index] = {page.device * kRows + place_in_page(position), PlacedRow::kDevice};
      }
      return {index, 0, -1};
    }
    const std::int32_t home = page.host * kRows + place_in_page(position);
    return {index, home, set_of(tag_of(p_.layer, home), p_.cache.sets)};
  }

  // Calls body(row), with a whole warp, for all rows of this block's sets.
  template <bool kPlaces, typename Body>
  __device__ void for_own(const Body& body) const {
    const std::int32_t total = shared_.before[p_.batch.count];
#pragma unroll 1
    for (std::int32_t first = 0; first < total; first += kLot) {
      const int count = list_own<kPlaces>(first, total);
#pragma unroll 1
      for (int at = 0; at < count; at += kWarp) {
        const bool exists = at + lane_ < count;
        const bool is_own = exists && shared_.rows[at + lane_].set % kFindWarps == warp_;
        for (unsigned left = __ballot_sync(kAllLanes, is_own); left != 0; left &= left - 1) {
          body(shared_.rows[at + __ffs(static_cast<int>(left)) - 1]);
          __syncwarp();
        }
      }
      __syncthreads();
    }
  }

  // Of a lot of rows those of this block's sets, in order; how many.
  template <bool kPlaces>
  __device__ int list_own(std::int32_t first, std::int32_t total) const {
    AwayRow rows[kLookups];
    unsigned own[kLookups];
#pragma unroll
    for (int i = 0; i < kLookups; ++i) {
      const std::int32_t item = first + i * kFindThreads + static_cast<int>(threadIdx.x);
      rows[i] = item < total ? find_page(item, kPlaces) : AwayRow{0, 0, -1};
    }
#pragma unroll
    for (int i = 0; i < kLookups; ++i) {
      const bool is_own = rows[i].set >= first_set_ && rows[i].set < last_set_;
      own[i] = __ballot_sync(kAllLanes, is_own);
      if (lane_ == 0) shared_.counts[i * kFindWarps + warp_] = __popc(own[i]);
    }
    __syncthreads();
    int before = 0;
    int total_own = 0;
    static_assert(kLookups * kFindWarps == 2 * kWarp);
    const std::int32_t low = warp_inclusive(shared_.counts[lane_]);
    const std::int32_t high = warp_inclusive(shared_.counts[kWarp + lane_]);
    const std::int32_t low_sum = __shfl_sync(kAllLanes, low, kWarp - 1);
    total_own = low_sum + __shfl_sync(kAllLanes, high, kWarp - 1);
#pragma unroll
    for (int i = 0; i < kLookups; ++i) {
      const int at = i * kFindWarps + warp_;
      const std::int32_t below_low = __shfl_sync(kAllLanes, low, (at - 1) & (kWarp - 1));
      const std::int32_t below_high = __shfl_sync(kAllLanes, high, (at - 1) & (kWarp - 1));
      before = at == 0 ? 0 : at <= kWarp ? below_low : low_sum + below_high;
      const unsigned below = own[i] & ((1u << lane_) - 1);
      if ((own[i] >> lane_ & 1u) != 0) shared_.rows[before + __popc(below)] = rows[i];
    }
    __syncthreads();
    return total_own;
  }

  __device__ std::int64_t first_way(const AwayRow& row) const {
    return (head_ * p_.cache.sets + row.set) * kWarp;
  }
  // The way of a set that has a row; -1 if none.
  __device__ int way_of(const AwayRow& row) const {
    const std::uint64_t tag = p_.cache.tags[first_way(row) + lane_];
    return __ffs(static_cast<int>(__ballot_sync(kAllLanes, tag == tag_of(p_.layer, row.home)))) - 1;
  }
  __device__ void heat(const AwayRow& row, int way) const {
    if (lane_ != way) return;
    std::int32_t& heat = p_.cache.heat[first_way(row) + way];
    heat = heated(heat, fresh_);
  }

  __device__ void look_up(const AwayRow& row) const {
    const int way = way_of(row);
    if (way >= 0) heat(row, way);
    if (lane_ != 0) return;
    p_.places[row.index] = way >= 0 ? PlacedRow{row.set * kWarp + way, PlacedRow::kCached}
                                    : PlacedRow{row.home, PlacedRow::kHome};
  }

  __device__ void take_way(const AwayRow& row) const {
    if (p_.places[row.index].place != PlacedRow::kHome) return;
    if (const int way = way_of(row); way >= 0) return heat(row, way);
    const std::int32_t heat = p_.cache.heat[first_way(row) + lane_];
    const std::int32_t coldest = __reduce_min_sync(kAllLanes, heat);
    if (coldest >= fresh_) return;
    const int way = __ffs(static_cast<int>(__ballot_sync(kAllLanes, heat == coldest))) - 1;
    if (lane_ == way) {
      p_.cache.tags[first_way(row) + way] = tag_of(p_.layer, row.home);
      p_.cache.heat[first_way(row) + way] = fresh_;
    }
    if (lane_ == 0) p_.places[row.index].place = row.set * kWarp + way;
  }

  const FindRowsParams& p_;
  FindShared& shared_;
  int lane_;
  int warp_;
  int head_;
  std::int64_t first_set_;
  std::int64_t last_set_;
  std::int32_t fresh_ = 0;
};

__global__ __launch_bounds__(kFindThreads) void find_rows_kernel(
    const __grid_constant__ FindRowsParams p) {
  __shared__ FindShared shared;
  wait_for_kernel_before();
  allow_next_kernel();
  Finder(p, shared).find();
}

constexpr int kForgetThreads = 256;

__global__ __launch_bounds__(kForgetThreads) void forget_rows_kernel(
    const __grid_constant__ ForgetRowsParams p) {
  take_turn();
  const std::int64_t ways = p.shape.kv_heads * p.cache.sets * kWarp;
  const std::int64_t threads = std::int64_t{gridDim.x} * kForgetThreads;
  for (std::int64_t way = std::int64_t{blockIdx.x} * kForgetThreads + threadIdx.x; way < ways;
       way += threads) {
    const std::uint64_t tag = p.cache.tags[way];
    const auto home = static_cast<std::int64_t>(tag & 0xFFFFFFFFu);
    const bool named = tag != RowCacheView::kNothing && home >= p.first && home - p.first < p.count;
    if (!p.all && !named) continue;
    p.cache.tags[way] = RowCacheView::kNothing;
    p.cache.heat[way] = RowCacheView::kCold;
  }
}

}  // namespace

void find_rows(const FindRowsParams& p, const Launch& launch) {
  if (p.batch.count == 0) return;
  check(p.batch.count <= kMostTokens, "find_rows: more tokens than a step has");
  const std::int64_t rows = p.batch.count * std::min(p.selected.capacity, p.batch.capacity);
  const std::int64_t most =
      std::max<std::int64_t>(2 * launch.device->multiprocessors / p.shape.kv_heads, 1);
  const dim3 grid(static_cast<unsigned>(std::clamp<std::int64_t>(rows / kBlockRows, 1, most)),
                  static_cast<unsigned>(p.shape.kv_heads));
  launch_early("find_rows", find_rows_kernel, grid, kFindThreads, 0, launch, p);
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
