// top_k with a small k by a scan's digest: one block per head, which reads little besides the
// digest.
//
// The digest's maxima bound every sector from above. A sample of sectors, the most promising of
// each part of the context, is read first: its k heaviest entries bound the kept ones from below.
// Few other sectors reach that bound. The entries there that reach it are listed, and the heaviest
// are found by bisection. If too many reach it because weights are nearly equal, those that fit the
// list raise the bound, and the search starts again.
#include <cmath>
#include <cstdint>

#include "kernels/runtime/page_weights.h"
#include "kernels/select/paths.cuh"
#include "kernels/select/strip.cuh"

namespace sluice::cuda {
namespace {

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

// Finds the kept entries of one head. Loops that run once are not unrolled, because fetching their
// instructions takes longer than executing them.
class FewChoice : public FewHead {
 public:
  __device__ __forceinline__ FewChoice(const SelectCall& c, FewShared& shared, int head,
                                       const Extent& extent)
      : FewHead(c, shared, head, extent) {}

  __device__ __forceinline__ void run() {
    const bool is_empty = extent_.total == 0;
    if (!is_empty) read_digest();
    __syncthreads();
    if (is_empty || !join_rows()) return report_none(c_, head_, !is_empty);
    const std::int32_t wanted =
        min(max(extent_.keep - extent_.forced(), 0), extent_.high - extent_.low);
    if (wanted > 0) keep_heaviest(wanted);
    __syncthreads();
    const std::int32_t count = list_kept(wanted);
    report(count, wanted);
    if (c_.page_weights.masks != nullptr) weigh_pages(count);
  }

 private:
  // Stores the largest logit of every page, and each thread's sums for its row.
  __device__ __forceinline__ void read_digest() {
    Sums sums;
    bool is_bad = false;
    const auto see = [&](float logit) {
      is_bad = is_bad || !(logit < INFINITY);
      const float norm = __fmul_rn(logit, kLog2E);
      sums.refer_to(fmaxf(sums.norm, norm));
      return norm;
    };
#pragma unroll 4
    for (int page = first_page_; page < pages_; page += page_step_) {
      const int item = page * c_.group + row_;
      const uint4 maxima = maxima_[item];
      const float sum = sums_[item];
      const __half2 most = __hmax2_nan(__hmax2_nan(as_half2(maxima.x), as_half2(maxima.y)),
                                       __hmax2_nan(as_half2(maxima.z), as_half2(maxima.w)));
      const float norm = see(larger_of(most));
      sums.all = fmaf(sum, exp2_fast(norm - sums.norm), sums.all);
      shared_.tops[item] = norm;
    }
    // The digest's sums include the always kept entries, but not the newest.
    const __half* const row = c_.row(head_, row_);
    const std::int32_t newest = extent_.total - extent_.emit;
#pragma unroll 1
    for (int i = first_page_; i < newest + extent_.forced(); i += page_step_) {
      const bool is_newest = i < newest;
      const std::int32_t entry = is_newest ? extent_.emit + i : forced_entry(i - newest);
      const float norm = see(__half2float(row[entry]));
      const float weight = exp2_fast(norm - sums.norm);
      sums.kept += weight;
      if (is_newest) sums.all += weight;
    }
    if (is_bad) sums.norm = INFINITY;
    shared_.parts[thread()] = sums;
  }

  // Computes the bounds of every row, one warp each; returns false if one is bad.
  __device__ __forceinline__ bool join_rows() {
    bool is_bad = false;
    if (warp() < c_.group) {
      Sums sums;
#pragma unroll 1
      for (int i = lane(); i < page_step_; i += kWarp) {
        const Sums part = shared_.parts[i * c_.group + warp()];
        sums.refer_to(fmaxf(sums.norm, part.norm));
        const float factor = exp2_fast(part.norm - sums.norm);
        sums.all = fmaf(factor, part.all, sums.all);
        sums.kept = fmaf(factor, part.kept, sums.kept);
      }
      sums.refer_to(warp_max(sums.norm));
      sums.all = warp_sum(sums.all);
      sums.kept = warp_sum(sums.kept);
      is_bad = !(sums.norm < INFINITY) || sums.norm == kNoNorm;
      RowInfo info;
      set_norm(info, static_cast<double>(sums.norm) + static_cast<double>(__log2f(sums.all)));
      info.kept = sums.kept / sums.all;
      if (lane() == 0) {
        shared_.rows[warp()] = info;
        if (!is_bad) report_lse(c_, std::int64_t{head_} * c_.group + warp(), info);
      }
    }
    return __syncthreads_or(is_bad ? 1 : 0) == 0;
  }

  // Leaves in `winners` the entries kept by weight, in any order.
  __device__ __forceinline__ void keep_heaviest(std::int32_t wanted) {
    // If a page's rows belong to several teams, each team may sample the page.
    const bool is_one_teams = kTeamLanes % c_.group == 0;
    constexpr int kMostTeams = 3;
    static_assert(kMostFewRows <= 2 * kTeamLanes);
    const std::int32_t sampled = is_one_teams ? wanted : kMostTeams * wanted;
    Bound bound = sample(static_cast<std::uint32_t>(sampled));
#pragma unroll 1
    while (true) {
      const std::int32_t sectors = list_sectors(bound.log_weight);
      list_entries(sectors, bound.key);
      const std::uint32_t listed = shared_.listed;
      if (listed >= static_cast<std::uint32_t>(wanted) && listed <= kMostFewRanked) {
        return keep_ranked(listed, wanted);
      }
      const std::uint64_t own = thread() < listed ? shared_.keys[thread()] : 0;
      const std::uint64_t least = largest_key(own, static_cast<std::uint32_t>(wanted));
      if (listed < static_cast<std::uint32_t>(wanted)) {
        // Too few reach the bound; without one there are enough.
        bound = {};
        continue;
      }
      if (listed <= kFewThreads) {
        if (own >= least) shared_.winners[atomicAdd(&shared_.won, 1u)] = entry_of_key(own);
        return;
      }
      bound = {log_weight_of(least), least};
    }
  }

  // For short lists: one thread per entry compares it with all others.
  __device__ __forceinline__ void keep_ranked(std::uint32_t listed, std::int32_t wanted) const {
    if (thread() >= listed) return;
    const std::uint64_t own = shared_.keys[thread()];
    std::int32_t rank = 0;
#pragma unroll 4
    for (std::uint32_t i = 0; i < listed; ++i) rank += shared_.keys[i] > own ? 1 : 0;
    if (rank < wanted) shared_.winners[rank] = entry_of_key(own);
  }

  // A bound that at least `wanted` threads' entries reach in a sample. Every team reads one sector,
  // that with the largest weight among its threads' pages and rows, except pages with always kept
  // entries; a thread counts the heaviest of its entries there.
  __device__ __forceinline__ Bound sample(std::uint32_t wanted) const {
    const std::int32_t first = (extent_.low + kPageTokens - 1) / kPageTokens;
    const std::int32_t last = extent_.high / kPageTokens;
    const float norm = shared_.rows[row_].norm;
    float most = -INFINITY;
    std::int32_t item = -1;
    shared_.bins[thread()] = 0;
    if (thread() == 0) shared_.bound = 0;
    __syncthreads();
#pragma unroll 1
    for (int page = first_page_; page < last; page += page_step_) {
      const float weight = shared_.tops[page * c_.group + row_] - norm;
      if (page < first || weight <= most) continue;
      most = weight;
      item = page * c_.group + row_;
    }
#pragma unroll
    for (int step = 1; step < kTeamLanes; step *= 2) {
      const float other = __shfl_xor_sync(kAllLanes, most, step);
      const std::int32_t other_item = __shfl_xor_sync(kAllLanes, item, step);
      if (other > most || (other == most && other_item > item)) {
        most = other;
        item = other_item;
      }
    }
    std::uint32_t own = 0;
    std::uint32_t two = 0;
    if (item >= 0) two = reinterpret_cast<const std::uint32_t*>(maxima_ + item)[team_lane()];
    const float2 maxima = __half22float2(as_half2(two));
    const float top = item >= 0 ? shared_.tops[item] : NAN;
    const unsigned even = __ballot_sync(kAllLanes, __fmul_rn(maxima.x, kLog2E) == top);
    const unsigned odd = __ballot_sync(kAllLanes, __fmul_rn(maxima.y, kLog2E) == top);
    if (item >= 0) {
      const int shift = lane() - team_lane();
      const int pair = __ffs(static_cast<int>((even | odd) >> shift)) - 1;
      const int sector = 2 * pair + ((even >> (shift + pair) & 1u) != 0 ? 0 : 1);
      const uint4 grades = grades_of(item / c_.group * kPageTokens + sector * kBoundTokens +
                                     team_lane() * kTeamEntries);
      own = max(max(grades.x, grades.y), max(grades.z, grades.w));
    }
    const std::uint64_t key = std::uint64_t{reached(own, wanted)} << 32;
    return {log_weight_of(key), key};
  }

  // The largest lower edge of a bin that at least `wanted` threads' `own` reach, or 0.
  __device__ __forceinline__ std::uint32_t reached(std::uint32_t own, std::uint32_t wanted) const {
    // Bins of f32 by exponent and two more bits, of ordered f16 by exponent and four more.
    const int shift = c_.group > 1 ? 21 : 6;
    static_assert(kFewThreads == 1 << (31 - 21) && kFewThreads == 1 << (16 - 6));
    if (own > 0) atomicAdd(&shared_.bins[kFewThreads - 1 - (own >> shift)], 1u);
    __syncthreads();
    std::uint32_t all;
    const std::uint32_t in_bin = shared_.bins[thread()];
    const std::uint32_t before = block_exclusive(in_bin, shared_.part, all);
    if (before < wanted && before + in_bin >= wanted) {
      shared_.bound = static_cast<std::uint32_t>(kFewThreads - 1 - thread()) << shift;
    }
    __syncthreads();
    return shared_.bound;
  }

  // The wanted-th largest of the threads' keys, or a number between it and the next smaller one.
  // Keys differ unless they are 0; at least `wanted` are not 0.
  __device__ __forceinline__ static std::uint64_t largest_key(std::uint64_t own,
                                                              std::uint32_t wanted) {
    std::uint64_t found = 0;
#pragma unroll 1
    for (std::uint64_t bit = std::uint64_t{1} << 63; bit > 0; bit >>= 1) {
      const auto reach = static_cast<std::uint32_t>(__syncthreads_count(own >= (found | bit)));
      if (reach < wanted) continue;
      found |= bit;
      if (reach == wanted) break;
    }
    return found;
  }

  // Returns true if the rows' maxima in a sector reach a weight together.
  __device__ __forceinline__ bool may_reach(std::int32_t sector, float weight) const {
    const __half* const maxima = reinterpret_cast<const __half*>(maxima_) +
                                 sector / kBoundsPerPage * c_.group * kBoundsPerPage +
                                 sector % kBoundsPerPage;
    float sum = 0.0f;
#pragma unroll 4
    for (int g = 0; g < c_.group; ++g) {
      sum += weight_of(maxima[g * kBoundsPerPage], shared_.rows[g]);
    }
    return sum >= weight;
  }

  // Lists the sectors that may hold entries of this weight, and returns their number. An entry's
  // largest weight in one row is at least 1 / group of the sum, so one row can rule a sector out.
  __device__ __forceinline__ std::int32_t list_sectors(float log_weight) {
    if (thread() < kMostFewSectors / 32) shared_.near[thread()] = 0;
    if (thread() == 0) shared_.queued = shared_.listed = shared_.won = shared_.nears = 0;
    __syncthreads();
    const float least = log_weight - __log2f(static_cast<float>(c_.group)) - kFewSlack;
    const float norm = shared_.rows[row_].norm;
    const __half2 least_logit = twice(__half_as_ushort(__float2half_rd((least + norm) * kLn2)));
#pragma unroll 1
    for (int page = first_page_; page < pages_; page += page_step_) {
      const int item = page * c_.group + row_;
      if (shared_.tops[item] - norm < least) continue;
      const std::uint32_t sectors = reaching(maxima_[item], least_logit);
      if (sectors == 0) continue;
      const std::uint32_t bits = sectors << 8 * (page % 4);
      const std::uint32_t before = atomicOr(shared_.near + page / 4, bits);
      atomicAdd(&shared_.nears, static_cast<std::uint32_t>(__popc(bits & ~before)));
    }
    __syncthreads();
    // If few are near, all are read without checking the digest again.
    const bool are_few = shared_.nears <= kFewThreads / kTeamLanes;
    const float weight = exp2_fast(log_weight - kFewSlack);
    const std::int32_t sectors = pages_ * kBoundsPerPage;
#pragma unroll 1
    for (std::int32_t first = warp() * kWarp; first < sectors; first += kFewThreads) {
      // One word of `near` per warp.
      const std::int32_t sector = first + lane();
      const bool is_near = (shared_.near[first / kWarp] >> lane() & 1u) != 0;
      const bool is_one = is_near && (are_few || may_reach(sector, weight));
      const unsigned ones = __ballot_sync(kAllLanes, is_one);
      if (ones == 0) continue;
      std::uint32_t slot = 0;
      if (lane() == 0) slot = atomicAdd(&shared_.queued, static_cast<std::uint32_t>(__popc(ones)));
      slot = __shfl_sync(kAllLanes, slot, 0) +
             static_cast<std::uint32_t>(__popc(ones & ((1u << lane()) - 1u)));
      if (is_one) shared_.sectors[slot] = static_cast<std::uint16_t>(sector);
    }
    __syncthreads();
    return static_cast<std::int32_t>(shared_.queued);
  }

  // Lists the entries of these sectors that reach the bound, until there are too many. Every team
  // takes consecutive sectors, so that an incomplete list still covers the whole context.
  __device__ __forceinline__ void list_entries(std::int32_t sectors, std::uint64_t bound) {
    constexpr int kTeams = kFewThreads / kTeamLanes;
    const std::int32_t each = (sectors + kTeams - 1) / kTeams;
    const std::int32_t first = thread() / kTeamLanes * each;
#pragma unroll 1
    for (std::int32_t i = first; i < min(first + each, sectors); ++i) {
      if (*static_cast<volatile std::uint32_t*>(&shared_.listed) > kFewThreads) break;
      const std::int32_t entry = shared_.sectors[i] * kBoundTokens + team_lane() * kTeamEntries;
      const uint4 grades = grades_of(entry);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const std::uint64_t key = key_of(entry + e, word_of(grades, e));
        if (key < bound || entry + e < extent_.low || entry + e >= extent_.high) continue;
        const std::uint32_t slot = atomicAdd(&shared_.listed, 1u);
        if (slot < kFewThreads) shared_.keys[slot] = key;
      }
    }
    __syncthreads();
  }

  // Lists the kept entries in order; returns their number.
  __device__ __forceinline__ std::int32_t list_kept(std::int32_t wanted) {
    if (thread() < wanted) {
      const std::int32_t own = shared_.winners[thread()];
      std::int32_t rank = extent_.low;
#pragma unroll 1
      for (int i = 0; i < wanted; ++i) rank += shared_.winners[i] < own ? 1 : 0;
      shared_.kept[rank] = own;
    }
    if (thread() < extent_.forced()) {
      shared_.kept[thread() + (thread() < extent_.low ? 0 : wanted)] = forced_entry(thread());
    }
    __syncthreads();
    return extent_.forced() + wanted;
  }

  __device__ bool begins_page(std::int32_t i) const {
    return i == 0 || shared_.kept[i] / kPageTokens != shared_.kept[i - 1] / kPageTokens;
  }

  __device__ __forceinline__ void report(std::int32_t count, std::int32_t wanted) const {
    if (thread() < count) c_.positions[head_ * c_.capacity + thread()] = shared_.kept[thread()];
    if (warp() < c_.group) {
      const RowInfo& info = shared_.rows[warp()];
      const __half* const row = c_.row(head_, warp());
      float sum = 0.0f;
#pragma unroll 1
      for (std::int32_t i = lane(); i < wanted; i += kWarp) {
        sum += weight_of(row[shared_.kept[extent_.low + i]], info);
      }
      sum = warp_sum(sum);
      const std::int64_t at = std::int64_t{head_} * c_.group + warp();
      if (lane() == 0) c_.alpha[at] = fminf(info.kept + sum, 1.0f) * share_of(c_, at);
    }
    const int pages = __syncthreads_count(thread() < count && begins_page(thread()));
    if (thread() != 0) return;
    HeadSelection result;
    result.count = count;
    result.pages = pages;
    c_.heads[head_] = result;
  }

  // Weighs every page without its kept entries: by the digest, or by its logits if it has any.
  __device__ __forceinline__ void weigh_pages(std::int32_t count) {
    const PageWeights to = c_.page_weights.from(head_);
    const RowInfo info = shared_.rows[row_];
#pragma unroll 4
    for (int page = first_page_; page < pages_; page += page_step_) {
      const int item = page * c_.group + row_;
      shared_.tops[item] = sums_[item] * info.scale * exp2_fast(shared_.tops[item] - info.norm);
      if (row_ == 0) shared_.masks[page] = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    if (thread() < count) {
      const std::int32_t at = shared_.kept[thread()];
      atomicOr(reinterpret_cast<std::uint32_t*>(shared_.masks) + at / kWarp, 1u << at % kWarp);
    }
    __syncthreads();
    weigh_marked(count);
    __syncthreads();
    float mass = 0.0f;
#pragma unroll 1
    for (int page = thread(); page < pages_; page += kFewThreads) {
      float sum = 0.0f;
#pragma unroll 1
      for (int g = 0; g < c_.group; ++g) sum += shared_.tops[page * c_.group + g];
      to.weights[page] = sum;
      to.masks[page] = shared_.masks[page];
    }
    if (warp() >= c_.group) return;
#pragma unroll 4
    for (int page = lane(); page < pages_; page += kWarp) {
      mass += shared_.tops[page * c_.group + warp()];
    }
    mass = warp_sum(mass);
#pragma unroll 1
    for (int slice = lane(); slice < PageWeights::slices_of(pages_); slice += kWarp) {
      to.masses[slice * c_.group + warp()] = slice == 0 ? mass : 0.0f;
    }
  }

  // Weighs the pages that have kept entries: half a warp per page and row.
  __device__ __forceinline__ void weigh_marked(std::int32_t count) {
    constexpr int kLanes = kPageTokens / 8;
    const int part = lane() % kLanes;
    const unsigned lanes = 0xffffu << (lane() / kLanes * kLanes);
#pragma unroll 1
    for (std::int32_t item = thread() / kLanes; item < count * c_.group;
         item += kFewThreads / kLanes) {
      const std::int32_t i = item / c_.group;
      const int g = item - i * c_.group;
      if (!begins_page(i)) continue;
      const std::int32_t page = shared_.kept[i] / kPageTokens;
      const uint4 x = reinterpret_cast<const uint4*>(c_.row(head_, g))[page * kLanes + part];
      const std::uint32_t mask =
          reinterpret_cast<const std::uint32_t*>(shared_.masks + page)[part / 4];
      const RowInfo& info = shared_.rows[g];
      float sum = info.scale * weight8(masked(x, ~(mask >> part % 4 * 8)), info.norm);
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(lanes, sum, step);
      if (part == 0) shared_.tops[page * c_.group + g] = sum;
    }
  }
};

// With few registers, two blocks share a multiprocessor and hide each other's waits.
template <int kRegisters>
__global__ void __maxnreg__(kRegisters) select_few(const __grid_constant__ SelectCall c) {
  extern __shared__ uint4 memory[];
  const auto head = static_cast<int>(blockIdx.x);
  const TokenBounds token = bounds_of(c, head);
  wait_for_kernel_before();
  allow_next_kernel();
  const Extent extent = {token.page_first + token.newest, token.page_first, token.low, token.high,
                         token.keep};
  FewChoice(c, *reinterpret_cast<FewShared*>(memory), head, extent).run();
}

}  // namespace

bool fits_few(const SelectCall& c, const DeviceLimits& device) {
  if (c.is_top_p || c.digest.maxima == nullptr || c.list != nullptr) return false;
  const std::int32_t pages = c.entries / kPageTokens;
  return c.group <= kMostFewRows && pages * c.group <= kMostFewItems &&
         pages * kBoundsPerPage <= kMostFewSectors && c.most_keep <= kMostFewKept &&
         c.most_forced <= kMostFewKept &&
         static_cast<int>(sizeof(FewShared)) <= device.shared_bytes;
}

void run_few(const SelectCall& call, const Launch& launch) {
  const bool is_one_round = call.head_count <= launch.device->multiprocessors;
  launch_early("select_few", is_one_round ? select_few<64> : select_few<32>,
               dim3(static_cast<unsigned>(call.head_count)), kFewThreads, sizeof(FewShared), launch,
               call);
}

}  // namespace sluice::cuda
