// State of the kernel `few`, and the order of entries and bounds. Items are (page, row) pairs.
#pragma once

#include <cstdint>

#include "kernels/select/paths.cuh"
#include "kernels/select/strip.cuh"

namespace sluice::cuda {

constexpr int kFewThreads = 1024;
constexpr int kMostFewRows = 8;
constexpr std::int32_t kMostFewKept = 64;      // by weight, and as many that are always kept
constexpr std::int32_t kMostFewItems = 8192;   // pages times rows
constexpr std::uint32_t kMostFewRanked = 128;  // listed entries
constexpr std::int32_t kMostFewSectors = 16384;
static_assert(kMostFewSectors / 32 <= kFewThreads && kMostFewSectors <= 1 << 16);
// A team: threads that read a sector together, and the entries of each.
constexpr int kTeamLanes = 4;
constexpr int kTeamEntries = kBoundTokens / kTeamLanes;
// In log2 of weight: more than the rounding of norms, products and halves.
constexpr float kFewSlack = 0x1p-3f;

struct FewShared {
  float tops[kMostFewItems];  // largest logit times log2(e), later weight; of pages and rows
  std::uint64_t keys[kFewThreads];
  union {
    Sums parts[kFewThreads];  // each thread's, of its row
    std::uint32_t bins[kFewThreads];
  };
  union {
    std::uint16_t sectors[kMostFewSectors];
    uint4 masks[kMostFewSectors / kBoundsPerPage];  // of pages, a bit for each kept entry
  };
  std::uint32_t near[kMostFewSectors / 32];  // a bit for each sector
  RowInfo rows[kMostFewRows];
  std::int32_t winners[kMostFewKept];
  std::int32_t kept[2 * kMostFewKept];  // entries, ascending
  std::uint32_t part[kWarp];
  std::uint32_t bound;
  std::uint32_t nears;   // set bits of `near`
  std::uint32_t queued;  // sectors
  std::uint32_t listed;  // entries that fit among the keys
  std::uint32_t won;
};

// One head and the order of its entries: by grade, the older first among equal grades. Grades are
// the bits of weights summed over rows, or of the ordered logit of a single row; not the numbers of
// grades.cuh. Consecutive threads take the rows of a page, then those of the next page.
class FewHead {
 protected:
  // A lower bound of the kept entries: their keys are at least `key`, their weights at least
  // 2^log_weight.
  struct Bound {
    float log_weight = -INFINITY;  // to base 2
    std::uint64_t key = 0;
  };

  __device__ __forceinline__ FewHead(const SelectCall& c, FewShared& shared, int head,
                                     const Extent& extent)
      : c_(c),
        shared_(shared),
        head_(head),
        extent_(extent),
        pages_(extent.emit / kPageTokens),
        page_step_(kFewThreads / c.group),
        first_page_(thread() / c.group),
        row_(thread() - first_page_ * c.group),
        maxima_(reinterpret_cast<const uint4*>(c.digest.maxima) +
                std::int64_t{head} * c.digest.pages * c.group),
        sums_(c.digest.sums + std::int64_t{head} * c.digest.pages * c.group) {
    // Threads beyond the last whole page get none.
    if (first_page_ >= page_step_) first_page_ = 1 << 30;
  }

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int lane() { return thread() % kWarp; }
  __device__ static int warp() { return thread() / kWarp; }
  __device__ static int team_lane() { return thread() % kTeamLanes; }

  // The i-th of the entries that are always kept, the first and the last.
  __device__ std::int32_t forced_entry(std::int32_t i) const {
    return i < extent_.low ? i : i - extent_.low + extent_.high;
  }

  __device__ __forceinline__ static std::uint64_t key_of(std::int32_t entry, std::uint32_t grade) {
    return std::uint64_t{grade} << 32 | ~static_cast<std::uint32_t>(entry);
  }
  __device__ static std::int32_t entry_of_key(std::uint64_t key) {
    return static_cast<std::int32_t>(~static_cast<std::uint32_t>(key));
  }

  // Grades of four entries from `entry` on, a multiple of 4.
  __device__ __forceinline__ uint4 grades_of(std::int32_t entry) const {
    float sums[4] = {};
    uint2 x{};
    const auto* from = reinterpret_cast<const uint2*>(c_.row(head_, 0)) + entry / 4;
#pragma unroll 4
    for (int g = 0; g < c_.group; ++g, from += c_.stride / 4) {
      x = *from;
      const RowInfo& row = shared_.rows[g];
      const float2 low = __half22float2(as_half2(x.x));
      const float2 high = __half22float2(as_half2(x.y));
      const float logits[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sums[e] = fmaf(row.scale, exp2_fast(fmaf(logits[e], kLog2E, -row.norm)), sums[e]);
      }
    }
    if (c_.group > 1) {
      return make_uint4(__float_as_uint(sums[0]), __float_as_uint(sums[1]),
                        __float_as_uint(sums[2]), __float_as_uint(sums[3]));
    }
    const uint2 numbers = make_uint2(ordered2(x.x), ordered2(x.y));
    return make_uint4(numbers.x & 0xffffu, numbers.x >> 16, numbers.y & 0xffffu, numbers.y >> 16);
  }

  // The key's weight in log2; -Inf for key 0, whose f16 is NaN.
  __device__ __forceinline__ float log_weight_of(std::uint64_t key) const {
    const auto grade = static_cast<std::uint32_t>(key >> 32);
    if (c_.group > 1) return __log2f(__uint_as_float(grade));
    const float logit = __half2float(__ushort_as_half(half_of_ordered(grade)));
    return fmaxf(fmaf(logit, kLog2E, -shared_.rows[0].norm), -INFINITY);
  }

  const SelectCall& c_;
  FewShared& shared_;
  int head_;
  Extent extent_;
  std::int32_t pages_;
  // This thread's pages and row.
  std::int32_t page_step_;
  std::int32_t first_page_;
  int row_;
  const uint4* maxima_;  // [pages, group]
  const float* sums_;    // of the same shape
};

}  // namespace sluice::cuda
