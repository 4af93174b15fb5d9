// Selection with a small k or cap by a digest: one cluster of blocks per KV head holds the digest
// in its shared memories and reads only the few logits that may be kept.
//
// The blocks hold consecutive pages. They exchange
//   maxima and sums of their parts of every row,
//   a histogram of their sectors' maxima, whose k-th heaviest bounds the lightest weight kept,
//   the number of candidates in the sectors that reach the bound, then their grades, which the
//     cluster cuts as it does with all logits in shared memory,
//   the weight that each block has kept.
// top_p needs no threshold if the pages below the bound hold more weight than it may drop, because
// then it wants all candidates. Otherwise thresholds are found first, from the sectors that may
// matter. If many sectors reach the bound because weights are nearly equal, a sample raises it. If
// candidates are still too many to list, all logits are read, as by a cluster.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/select/cluster_cut.cuh"
#include "kernels/select/cluster_output.cuh"

namespace sluice::cuda {
namespace {

constexpr int kPageVectors = kPageTokens / 8;
constexpr int kPageStep = 4;  // pages: bulk copies begin and end at multiples of it
constexpr int kSectorBins = 256;
constexpr int kSampled = 256;  // sectors in a block's sample, at least
// Sectors are counted by their distance below the heaviest, in nats. The bin comes from the upper
// bits of the f16 4 + distance, so that bins grow wider with distance.
constexpr std::uint32_t kFours = 0x44004400u;
constexpr int kEdgeShift = 4;
constexpr float kLightest = -120.0f;  // log2; lighter weights bound no sum over query heads

struct DigestCall : ClusterCall {
  std::int32_t pages = 0;  // of a block at most
  std::uint32_t maxima_at = 0;
  std::uint32_t sums_at = 0;

  using ClusterCall::ClusterCall;
};

struct alignas(16) DigestShared {
  // Other blocks write here.
  alignas(16) std::uint32_t below[kMostBlocks][kMostRows];  // shares of pages below the bounds
  uint2 reached[kMostBlocks];                               // see grades_reached()
  // Only this block's.
  RowPart parts[kMostWarps][kMostRows];
  alignas(16) std::uint32_t own_below[kMostRows];
  std::uint64_t loaded;                 // barrier of the digest
  std::uint32_t references[kMostRows];  // logits of the heaviest weight, f16 twice
  float weight;                         // lower bound of the lightest kept
  float highest;                        // about log2 of the heaviest candidate's weight
  int digit_shift;                      // from a grade less the bound to its digit
  std::uint32_t is_bounded;
};

struct DigestWork : WorkOf<std::uint32_t> {
  DigestShared* digest;
  uint4* maxima;  // [pages, group]: of a page's sectors, without always kept entries
  float* sums;    // [pages, group], of plain pages
  std::int32_t first_page = 0;
  std::int32_t pages = 0;
  // Plain pages: digested, without always kept entries.
  std::int32_t first_plain = 0;
  std::int32_t last_plain = 0;

  __device__ DigestWork(const DigestCall& call, std::byte* memory)
      : WorkOf(call, memory),
        digest(reinterpret_cast<DigestShared*>(shared + 1)),
        maxima(reinterpret_cast<uint4*>(memory + call.maxima_at)),
        sums(reinterpret_cast<float*>(memory + call.sums_at)) {
    has_sketches = false;
  }

  __device__ void share_out(const Extent& known) {
    extent = known;
    const std::int32_t all = (extent.total + kPageTokens - 1) / kPageTokens;
    const int step = kPageStep * cluster.size;
    const std::int32_t own = (all + step - 1) / step * kPageStep;
    first_page = cluster.rank * own;
    pages = min(max(all - first_page, 0), own);
    first = first_page * kPageVectors;
    count = max(0, min(pages * kPageVectors, (extent.total + 7) / 8 - first));
    each = (count + threads() - 1) / threads() * kWarp;
    rows = reinterpret_cast<const uint4*>(c.row(head, 0)) + first;
    capacity = static_cast<std::int32_t>(c.stride / 8);
    constexpr std::int32_t kStep = kPageStep * kPageTokens;
    const std::int32_t low = (extent.low + kStep - 1) / kStep * kPageStep;
    const std::int32_t high = extent.high / kStep * kPageStep;
    first_plain = min(max(low - first_page, 0), pages);
    last_plain = min(max(high - first_page, first_plain), pages);
  }
};

// By one thread: begins to read the digest of plain pages.
__device__ __forceinline__ void load_digest(const DigestWork& w) {
  const std::int32_t count = (w.last_plain - w.first_plain) * w.group;
  const std::uint32_t barrier = shared_address(&w.digest->loaded);
  const std::int32_t to = w.first_plain * w.group;
  const std::int64_t from =
      (static_cast<std::int64_t>(w.head) * w.c.digest.pages + w.first_page + w.first_plain) *
      w.group;
  const auto bytes = static_cast<std::uint32_t>(count);
  barrier_expect(barrier, bytes * static_cast<std::uint32_t>(sizeof(uint4) + sizeof(float)));
  if (count == 0) return;
  copy_bulk(w.maxima + to, w.c.digest.maxima + from * kBoundsPerPage, bytes * 16u, barrier);
  copy_bulk(w.sums + to, w.c.digest.sums + from, bytes * 4u, barrier);
}

// By one warp: reads its part of its row's pages that are not plain, and puts their maxima into the
// digest.
__device__ __forceinline__ Seen read_special(const DigestWork& w) {
  const __half* const row = w.c.row(w.head, w.row);
  auto* const maxima = reinterpret_cast<__half*>(w.maxima);
  const std::int32_t gap = (w.last_plain - w.first_plain) * kPageVectors;
  Seen seen;
  Sums& sums = seen.sums;
#pragma unroll 1
  for (std::int32_t at = w.part * kWarp; at < w.pages * kPageVectors - gap; at += w.parts * kWarp) {
    std::int32_t v = at + lane_id();
    if (v >= w.first_plain * kPageVectors) v += gap;
    uint4 x = all_minus_infinity();
    if (v < w.count) x = load8_below(row, w.extent.total, w.entry(v));
    const __half2 both = __hmax2_nan(__hmax2_nan(as_half2(x.x), as_half2(x.y)),
                                     __hmax2_nan(as_half2(x.z), as_half2(x.w)));
    seen.most = __hmax2_nan(seen.most, both);
    sums.refer_to(fmaxf(sums.norm, larger_of(both) * kLog2E));
    sums.all += weight8(x, sums.norm);
    add_kept8(w.extent, w.entry(v), x, sums);
    float most = largest8(masked(x, ~forced8(w.extent, w.entry(v))));
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
    if (v % 2 != 0 || v >= w.pages * kPageVectors) continue;
    const std::int32_t place = v / kPageVectors * w.group + w.row;
    maxima[place * kBoundsPerPage + v % kPageVectors / 2] = __float2half_rn(most);
  }
  return seen;
}

// Reduces by add() over the lanes of each row; the row's first lane gets the result. Lane l has
// page l / group and row l % group; lanes beyond the last whole page do not count.
template <typename T, typename Add>
__device__ __forceinline__ T over_pages(int group, T x, const Add& add) {
  const int pages = kWarp / group;
  const int page = lane_id() / group;
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const T other = __shfl_down_sync(kAllLanes, x, step * group);
    if (page < step && page + step < pages) x = add(x, other);
  }
  return x;
}

// Calls body(i) for this lane's items of the digest's plain pages, i = page * group + row.
template <typename Body>
__device__ __forceinline__ void for_plain(const DigestWork& w, const Body& body) {
  const int pages = kWarp / w.group;
  const int page = lane_id() / w.group;
  if (page >= pages) return;
#pragma unroll 2
  for (std::int32_t at = w.first_plain + warp_id() * pages + page; at < w.last_plain;
       at += warps() * pages) {
    body(at * w.group + lane_id() % w.group);
  }
}

// Finds every row's maximum and sum over the block's plain pages.
__device__ __forceinline__ void read_plain(const DigestWork& w) {
  barrier_wait(shared_address(&w.digest->loaded), 0);
  Seen seen;
  for_plain(w, [&](std::int32_t i) { seen.add(w.maxima[i], w.sums[i]); });
  RowPart part;
  const float own = larger_of(seen.most);
  part.highest = over_pages(w.group, own < INFINITY ? own : INFINITY,
                            [](float a, float b) { return fmaxf(a, b); });
  const float highest = __shfl_sync(kAllLanes, part.highest, lane_id() % w.group);
  seen.sums.refer_to(fmaxf(kNoNorm, highest * kLog2E));
  part.all = over_pages(w.group, seen.sums.all, [](float a, float b) { return a + b; });
  if (lane_id() < w.group) w.digest->parts[warp_id()][lane_id()] = part;
}

// By one warp: the result for its part of its row, from `seen` and from the plain pages that the
// warps w.part, w.part + w.parts, ... have read.
__device__ __forceinline__ RowPart join_parts(const DigestWork& w, Seen seen) {
  RowPart plain;
  plain.highest = -INFINITY;
  if (lane_id() < warps() && lane_id() % w.parts == w.part) {
    plain = w.digest->parts[lane_id()][w.row];
  }
  const float own = larger_of(seen.most);
  RowPart part;
  part.highest = warp_max(fmaxf(own < INFINITY ? own : INFINITY, plain.highest));
  const float norm = fmaxf(kNoNorm, part.highest * kLog2E);
  seen.sums.refer_to(norm);
  const float factor = exp2_fast(fmaxf(kNoNorm, plain.highest * kLog2E) - norm);
  part.all = warp_sum(fmaf(factor, plain.all, seen.sums.all));
  part.kept = warp_sum(seen.sums.kept);
  part.tail = warp_sum(seen.sums.tail);
  return part;
}

// Reads the digest and sends this block's sums to all blocks.
__device__ __forceinline__ void share_digest(const DigestWork& w) {
  if (thread_id() == 0) load_digest(w);
  Seen seen;
  if (w.row >= 0) seen = read_special(w);
  read_plain(w);
  __syncthreads();
  RowPart part;
  if (w.row >= 0) part = join_parts(w, seen);
  exchange_parts(w, part);
}

// ---- Bounds of the weights that may be kept: first from the cluster's digest, then tighter ones
// from the candidates.

// The logarithm to base 2 of the largest weight. Called by every warp.
__device__ __forceinline__ float heaviest_of(const DigestWork& w) {
  const RowState& state = w.shared->states[min(lane_id(), w.group - 1)];
  return warp_max(fmaf(state.highest, kLog2E, -state.info.norm));
}

// Calls body(g, maxima) for a page's rows, in an order in which lanes with neighbouring pages read
// different banks of shared memory.
template <typename Body>
__device__ __forceinline__ void for_rows(const DigestWork& w, std::int32_t page, const Body& body) {
  int g = lane_id() * w.group / 8 % w.group;
#pragma unroll 4
  for (int i = 0; i < w.group; ++i) {
    body(g, w.maxima[page * w.group + g]);
    g = g + 1 == w.group ? 0 : g + 1;
  }
}

// Counts two sectors; `below` has their negated distances below the heaviest.
__device__ __forceinline__ void count_pair(std::uint32_t* counts, __half2 below) {
  const std::uint32_t distances = word_of_half2(__hsub2(as_half2(kFours), below));
  const std::uint32_t low = ((distances & 0xffffu) - (kFours & 0xffffu)) >> kEdgeShift;
  const std::uint32_t high = ((distances >> 16) - (kFours >> 16)) >> kEdgeShift;
  if (low < kSectorBins) atomicAdd(counts + low, 1u);
  if (high < kSectorBins) atomicAdd(counts + high, 1u);
}

// The largest weight that some query head gives an entry of a page, as its negated distance below
// the heaviest: one for the even sectors, one for the odd ones.
__device__ __forceinline__ __half2 heaviest_of_page(const DigestWork& w, std::int32_t page) {
  __half2 most = as_half2(kMinusInfinities);
  for_rows(w, page, [&](int g, const uint4& x) {
    const __half2 own =
        __hmax2(__hmax2(as_half2(x.x), as_half2(x.y)), __hmax2(as_half2(x.z), as_half2(x.w)));
    most = __hmax2(most, __hsub2(own, as_half2(w.digest->references[g])));
  });
  return most;
}

// Counts every sector of a page by the largest weight that some query head gives an entry there
// that it wants.
__device__ __forceinline__ void count_page(const DigestWork& w, std::int32_t page,
                                           std::uint32_t* counts) {
  __half2 most[4];
#pragma unroll
  for (__half2& x : most) x = as_half2(kMinusInfinities);
  for_rows(w, page, [&](int g, const uint4& maxima) {
    const __half2 reference = as_half2(w.digest->references[g]);
    const __half2 threshold = twice(w.shared->rows[g].threshold);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __half2 x = as_half2(word_of(maxima, i));
      const std::uint32_t wanted = __hge2_mask(x, threshold);
      const std::uint32_t below = word_of_half2(__hsub2(x, reference));
      most[i] = __hmax2(most[i], as_half2((below & wanted) | (kMinusInfinities & ~wanted)));
    }
  });
#pragma unroll
  for (const __half2 x : most) count_pair(counts, x);
}

// Counts the block's sectors by the largest weight that some query head gives an entry there that
// it wants, and sends the counts to all blocks. The first turn, where all entries are wanted,
// counts only two sectors of every page.
__device__ __forceinline__ void count_sectors(const DigestWork& w, float heaviest, int turn) {
  std::uint32_t* const counts = w.shared->digits + kDigits;
  // Rounded up, so that distances are never too short.
  if (thread_id() < w.group) {
    const float norm = w.shared->rows[thread_id()].norm;
    w.digest->references[thread_id()] =
        std::uint32_t{__half_as_ushort(__float2half_ru((norm + heaviest) * kLn2))} * 0x10001u;
  }
  __syncthreads();
#pragma unroll 1
  for (std::int32_t page = thread_id(); page < w.pages; page += threads()) {
    if (turn == 0) {
      count_pair(counts, heaviest_of_page(w, page));
    } else {
      count_page(w, page, counts);
    }
  }
  __syncthreads();
  std::uint32_t* const to = w.bins + w.cluster.rank * kSectorBins;
  for (int other = warp_id(); other < w.cluster.size; other += warps()) {
#pragma unroll
    for (int i = lane_id() * 4; i < kSectorBins; i += kWarp * 4) {
      w.cluster.send(reinterpret_cast<uint4*>(to + i), other, w.barrier(kSectors + turn),
                     *reinterpret_cast<const uint4*>(counts + i));
    }
  }
  w.receive(kSectors + turn);
}

// Logarithms to base 2 of weights that query heads give entries.
struct KnownWeights {
  float highest;  // about the largest
  float reached;  // by more than `keep` sectors; -Inf if no such weight is known
};

// The distance below the heaviest, in log2, where a bin of sectors begins.
__device__ __forceinline__ float bin_distance(int bin) {
  const auto edge = static_cast<std::uint16_t>((kFours & 0xffffu) + bin * (1 << kEdgeShift));
  return (__half2float(__ushort_as_half(edge)) - 4.0f) * kLog2E;
}

// By one warp: finds the weights from all blocks' counts of sectors.
__device__ __forceinline__ KnownWeights find_weights(const DigestWork& w, float heaviest) {
  constexpr int kEach = kSectorBins / kWarp;
  std::uint32_t counts[kEach] = {};
#pragma unroll 4
  for (int i = 0; i < w.cluster.size; ++i) {
    const auto* const from =
        reinterpret_cast<const uint4*>(w.bins + i * kSectorBins + lane_id() * kEach);
#pragma unroll
    for (int j = 0; j < kEach; ++j) counts[j] += word_of(from[j / 4], j % 4);
  }
  std::uint32_t own = 0;
#pragma unroll
  for (const std::uint32_t x : counts) own += x;
  const std::uint32_t sum = warp_inclusive(own);
  const auto target = static_cast<std::uint32_t>(w.extent.keep) + 1;
  const unsigned reached = __ballot_sync(kAllLanes, sum >= target);
  if (reached == 0) return {heaviest, -INFINITY};
  std::uint32_t before = sum - own;
  int empty = 0;
  int within = 0;
#pragma unroll
  for (const std::uint32_t x : counts) {
    before += x;
    if (before == 0) ++empty;
    if (before < target) ++within;
  }
  const auto bin_of = [&](unsigned lanes, int i) {
    const int lane = __ffs(static_cast<int>(lanes)) - 1;
    return lane * kEach + __shfl_sync(kAllLanes, i, lane);
  };
  const int first = bin_of(__ballot_sync(kAllLanes, sum > 0), empty);
  const int last = bin_of(reached, within);
  // Distances are rounded.
  return {heaviest - bin_distance(first), heaviest - bin_distance(last + 1) * (1.0f + 0x1p-10f)};
}

// By the first warp: sets the bounds that candidates reach, as set_bounds() does.
__device__ __forceinline__ void set_digest_bounds(const DigestWork& w, const KnownWeights& known) {
  const int g = min(lane_id(), w.group - 1);
  const RowInfo& row = w.shared->rows[g];
  // Norms are rounded, and so are sums of weights.
  constexpr float kLess = 0x1p-10f;
  const bool is_bounded = known.reached > -INFINITY && (w.group == 1 || known.reached > kLightest);
  const float rounded = fabsf(__log2f(row.scale)) + fabsf(row.norm) * 0x1p-20f;
  const float log_weight = known.reached - warp_max(rounded) - kLess;
  const float weight = exp2_fast(log_weight);
  const float each =
      w.group == 1 ? log_weight : log_weight - __log2f(static_cast<float>(w.group)) - kLess;
  std::uint16_t least = row.threshold;
  if (is_bounded) least = __half_as_ushort(__float2half_rd((each + row.norm) * kLn2));
  if (lane_id() < w.group) w.shared->leasts[g] = least;
  if (lane_id() != 0) return;
  w.digest->is_bounded = is_bounded ? 1 : 0;
  w.digest->weight = is_bounded ? weight : 0.0f;
  std::uint32_t grade = 1;
  if (is_bounded) grade = w.group == 1 ? grade_of_logit(least) : grade_of_weight(weight);
  w.shared->bound_grade = grade;
  const float most = static_cast<float>(w.group) * exp2_fast(known.highest);
  const __half logit = __float2half_ru((known.highest + row.norm) * kLn2);
  const std::uint32_t highest =
      w.group == 1 ? grade_of_logit(__half_as_ushort(logit)) : grade_of_weight(most);
  w.digest->highest = known.highest;
  w.digest->digit_shift =
      max(32 - __clz(static_cast<int>(max(highest, grade) - grade)) - kDigitBits, 0);
}

// Finds bounds of the entries that may be kept; returns false if there are none.
__device__ __forceinline__ bool bound_sectors(const DigestWork& w, int turn) {
  const float heaviest = heaviest_of(w);
  count_sectors(w, heaviest, turn);
  if (warp_id() == 0) set_digest_bounds(w, find_weights(w, heaviest));
  __syncthreads();
  return w.digest->is_bounded != 0;
}

// Sets the bounds by a grade that more than `keep` candidates reach.
__device__ __forceinline__ void bound_by_grade(const DigestWork& w, std::uint32_t grade) {
  KnownWeights known{w.digest->highest, 0.0f};
  __syncthreads();
  if (w.group > 1) {
    known.reached = __log2f(__uint_as_float(grade >> 1));
  } else {
    const float logit = __half2float(__ushort_as_half(half_of_ordered(grade >> 16)));
    known.reached = fmaf(logit, kLog2E, -w.shared->rows[0].norm);
  }
  if (warp_id() == 0) set_digest_bounds(w, known);
  __syncthreads();
}

// Candidates per block, such that half of the blocks have more than `keep` together.
__device__ __forceinline__ std::uint32_t part_of_kept(const DigestWork& w) {
  return static_cast<std::uint32_t>(2 * w.extent.keep / w.cluster.size) + 1;
}

// Counts a grade by its distance above the bound.
__device__ __forceinline__ void count_grade(const DigestWork& w, std::uint32_t grade) {
  const std::uint32_t above = (grade - w.shared->bound_grade) >> w.digest->digit_shift;
  atomicAdd(w.shared->digits + (kDigits - 1 - min(above, std::uint32_t{kDigits - 1})), 1u);
}

// Grades that candidates of the block reach: x is reached by more than `keep` of them, y by
// part_of_kept(). 0 if the block has fewer candidates, or so few that a higher bound will hardly be
// needed. A sample's grades are counted already; without a sample, those of the list are counted
// here.
__device__ __forceinline__ uint2 grades_reached(const DigestWork& w, bool is_sample) {
  const std::uint32_t most = is_sample ? ~0u : static_cast<std::uint32_t>(kMostListedOwn);
  const std::uint32_t found = min(w.shared->counts[0], most);
  const auto all = static_cast<std::uint32_t>(w.extent.keep) + 1;
  const std::uint32_t part = part_of_kept(w);
  const std::uint32_t few = kMostListed / static_cast<unsigned>(w.cluster.size) / 4;
  if (found < part || (found < few && !is_sample)) return make_uint2(0, 0);
#pragma unroll 1
  for (auto i = static_cast<std::uint32_t>(thread_id()); i < found && !is_sample;
       i += static_cast<std::uint32_t>(threads())) {
    count_grade(w, w.shared->own_grades[i]);
  }
  __syncthreads();
  const auto reached_by = [&](std::uint32_t wanted) {
    if (warp_id() == 0) find_digit(w, wanted);
    __syncthreads();
    const auto digit = static_cast<std::uint32_t>(kDigits - 1 - w.shared->found.bin);
    __syncthreads();
    return w.shared->bound_grade + (digit << w.digest->digit_shift);
  };
  const uint2 grades = make_uint2(found < all ? 0 : reached_by(all), reached_by(part));
  for (int i = thread_id(); i < kDigits; i += threads()) w.shared->digits[i] = 0;
  __syncthreads();
  return grades;
}

// The bound for a retry after too many candidates: the largest grade that more than `keep` of them
// are known to reach, or 0 if it rules none out.
__device__ __forceinline__ std::uint32_t raised_grade(const DigestWork& w) {
  const bool is_one = lane_id() < w.cluster.size;
  const uint2 own = is_one ? w.digest->reached[lane_id()] : make_uint2(0, 0);
  const std::uint32_t part = part_of_kept(w);
  const std::uint32_t blocks = (static_cast<std::uint32_t>(w.extent.keep) + part) / part;
  std::uint32_t rank = 0;
#pragma unroll 4
  for (int i = 0; i < w.cluster.size; ++i) {
    const std::uint32_t other = __shfl_sync(kAllLanes, own.y, i);
    if (other > own.y || (other == own.y && i < lane_id())) ++rank;
  }
  const std::uint32_t parts = is_one && rank + 1 == blocks ? own.y : 0;
  const std::uint32_t grade = __reduce_max_sync(kAllLanes, max(own.x, parts));
  return grade > w.shared->bound_grade ? grade : 0;
}

// ---- The sectors that reach the bounds, and the candidates in them.

// Returns true if a sector may hold candidates: its maxima weigh enough together, and some query
// head wants one of them.
__device__ __forceinline__ bool matters(const DigestWork& w, std::int32_t sector) {
  const __half* const maxima = reinterpret_cast<const __half*>(w.maxima) +
                               sector / kBoundsPerPage * w.group * kBoundsPerPage +
                               sector % kBoundsPerPage;
  float weight = 0.0f;
  bool is_wanted = false;
#pragma unroll 4
  for (int g = 0; g < w.group; ++g) {
    const __half x = maxima[g * kBoundsPerPage];
    const RowInfo& row = w.shared->rows[g];
    weight += weight_of(x, row);
    is_wanted = is_wanted || __hge(x, __ushort_as_half(row.threshold));
  }
  return weight >= w.digest->weight && is_wanted;
}

// Finds the sectors of this thread's pages, threads() apart, that reach some query head's bound: a
// byte for each page. Adds their number to counts[1].
__device__ __forceinline__ std::uint64_t find_near(const DigestWork& w) {
  std::uint64_t near = 0;
#pragma unroll 1
  for (int round = 0; round * threads() < w.pages; ++round) {
    const std::int32_t page = round * threads() + thread_id();
    if (page >= w.pages) break;
    std::uint32_t sectors = 0;
    for_rows(w, page,
             [&](int g, const uint4& x) { sectors |= reaching(x, twice(w.shared->leasts[g])); });
    near |= std::uint64_t{sectors} << (kBoundsPerPage * round);
  }
  const auto own = static_cast<std::uint32_t>(__popcll(near));
  const std::uint32_t all = __reduce_add_sync(kAllLanes, own);
  if (lane_id() == 0 && all > 0) atomicAdd(&w.shared->counts[1], all);
  return near;
}

// Queues every `step`-th of the sectors that a warp has found near in a round, unless it holds no
// candidates, and prefetches the first kSampled.
__device__ __forceinline__ void queue_sectors(const DigestWork& w, int round, std::uint64_t near,
                                              int step) {
  std::uint32_t* const list = w.bins + warp_id() * (kWarp * kBoundsPerPage);
  const auto sectors = static_cast<std::uint32_t>(near >> (kBoundsPerPage * round)) & 0xffu;
  const auto own = static_cast<std::uint32_t>(__popc(sectors));
  const std::uint32_t up_to = warp_inclusive(own);
  const auto count = static_cast<int>(__shfl_sync(kAllLanes, up_to, kWarp - 1));
  const auto page = static_cast<std::uint32_t>(round * threads() + thread_id());
  std::uint32_t* to = list + (up_to - own);
#pragma unroll 1
  for (std::uint32_t bits = sectors; bits != 0; bits &= bits - 1) {
    *to++ = page * kBoundsPerPage + static_cast<std::uint32_t>(__ffs(static_cast<int>(bits)) - 1);
  }
  __syncwarp();
#pragma unroll 1
  for (int first = step / 2; first < count; first += kWarp * step) {
    const int i = first + lane_id() * step;
    const auto sector = static_cast<std::int32_t>(list[min(i, count - 1)]);
    const bool is_one = i < count && matters(w, sector);
    const unsigned all = __ballot_sync(kAllLanes, is_one);
    std::uint32_t slot = 0;
    if (lane_id() == 0 && all != 0) {
      slot = atomicAdd(&w.shared->counts[2], static_cast<std::uint32_t>(__popc(all)));
    }
    slot = __shfl_sync(kAllLanes, slot, 0) + __popc(all & ((1u << lane_id()) - 1u));
    if (!is_one || slot >= kMostNear) continue;
    w.scratch->entries.near[slot] = static_cast<std::uint32_t>(sector);
    if (slot >= kSampled) continue;  // beyond that, enough reads are in flight together
#pragma unroll 4
    for (int g = 0; g < w.group; ++g) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(w.rows + g * w.capacity + sector * 2));
    }
  }
  __syncwarp();
}

// Adds up the shares of a row in pages where no entry reaches its bound.
__device__ __forceinline__ void weigh_below(const DigestWork& w) {
  const int g = lane_id() % w.group;
  const RowInfo row = w.shared->rows[g];
  const float least = __half2float(__ushort_as_half(w.shared->leasts[g]));
  float own = 0.0f;
  for_plain(w, [&](std::int32_t i) {
    const float most = largest8(w.maxima[i]);
    // The sums refer to the rounded product.
    if (most < least) own = fmaf(w.sums[i], exp2_fast(__fmul_rn(most, kLog2E) - row.norm), own);
  });
  const auto share = static_cast<std::uint32_t>(own * row.scale * kShares);
  const std::uint32_t sum =
      over_pages(w.group, share, [](std::uint32_t a, std::uint32_t b) { return a + b; });
  if (lane_id() < w.group) atomicAdd(&w.digest->own_below[g], sum);
}

// Lists a candidate, if there is room; counts it in any case.
__device__ __forceinline__ void list_one(const DigestWork& w, std::uint32_t entry,
                                         std::uint32_t grade) {
  const std::uint32_t slot = atomicAdd(&w.shared->counts[0], 1u);
  if (slot >= kMostListedOwn) return;
  w.shared->own_grades[slot] = grade;
  w.scratch->entries.own[slot] = entry;
}

// Lists the candidates in few sectors, at most two entries per thread. Separate from
// list_many(), because code that runs once is faster the shorter it is.
__device__ __forceinline__ void list_few(const DigestWork& w, std::uint32_t sectors) {
  constexpr int kPairs = kBoundTokens / 2;
  const auto* const pairs = reinterpret_cast<const std::uint32_t*>(w.rows);
  const auto i = static_cast<std::uint32_t>(thread_id());
  if (i >= sectors * kPairs) return;
  const auto pair =
      static_cast<std::int32_t>(w.scratch->entries.near[i / kPairs] * kPairs + i % kPairs);
  const std::int32_t entry = w.first * 8 + pair * 2;
  float low = 0.0f;
  float high = 0.0f;
  std::uint32_t wanted = 0;
  std::uint32_t word = 0;
#pragma unroll 4
  for (int g = 0; g < w.group; ++g) {
    word = pairs[g * w.capacity * 4 + pair];
    const RowInfo& row = w.shared->rows[g];
    wanted |= __hge2_mask(as_half2(word), twice(row.threshold));
    // Computed as all other grades, so that they compare.
    const float2 x = __half22float2(as_half2(word));
    low = fmaf(row.scale, exp2_fast(fmaf(x.x, kLog2E, -row.norm)), low);
    high = fmaf(row.scale, exp2_fast(fmaf(x.y, kLog2E, -row.norm)), high);
  }
  std::uint32_t grades[2] = {grade_of_weight(low), grade_of_weight(high)};
  if (w.group == 1) {
    const std::uint32_t numbers = ordered2(word);
    grades[0] = numbers << 16;
    grades[1] = numbers & 0xffff0000u;
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (entry + e < w.extent.low || entry + e >= w.extent.high) continue;
    if (grades[e] < w.shared->bound_grade || (wanted >> (16 * e) & 1u) == 0) continue;
    list_one(w, static_cast<std::uint32_t>(pair * 2 + e), grades[e]);
  }
}

// Lists the candidates in any number of sectors, or counts their grades if they are a sample's.
__device__ __forceinline__ void list_many(const DigestWork& w, std::uint32_t sectors,
                                          bool is_sample) {
  constexpr std::uint32_t kHalves = kBoundTokens / 8;
  std::uint32_t counted = 0;
#pragma unroll 1
  for (auto i = static_cast<std::uint32_t>(thread_id()); i < sectors * kHalves;
       i += static_cast<std::uint32_t>(threads())) {
    const std::uint32_t v = w.scratch->entries.near[i / kHalves] * kHalves + i % kHalves;
    std::uint32_t grades[8];
    grades_of(w, static_cast<std::int32_t>(v), grades);
#pragma unroll
    for (std::uint32_t e = 0; e < 8; ++e) {
      if (grades[e] < w.shared->bound_grade) continue;
      ++counted;
      if (is_sample) {
        count_grade(w, grades[e]);
      } else {
        list_one(w, v * 8 + e, grades[e]);
      }
    }
  }
  if (!is_sample) return;
  counted = __reduce_add_sync(kAllLanes, counted);
  if (lane_id() == 0) atomicAdd(&w.shared->counts[0], counted);
}

// Lists the candidates in the queued sectors, or counts their grades if they are a sample's.
__device__ __forceinline__ void list_queued(const DigestWork& w, bool is_sample) {
  const std::uint32_t sectors = min(w.shared->counts[2], static_cast<std::uint32_t>(kMostNear));
  if (!is_sample && sectors * (kBoundTokens / 2) <= static_cast<std::uint32_t>(threads())) {
    list_few(w, sectors);
  } else {
    list_many(w, sectors, is_sample);
  }
}

// Marks the block's part of entries [first, last) of the head as kept.
__device__ __forceinline__ void mark_range(const DigestWork& w, std::int32_t first,
                                           std::int32_t last) {
  auto* const words = reinterpret_cast<std::uint32_t*>(w.kept);
  const std::int32_t from = max(first - w.first * 8, 0);
  const std::int32_t to = min(last - w.first * 8, w.count * 8);
#pragma unroll 1
  for (std::int32_t i = from / 32 + thread_id(); i * 32 < to; i += threads()) {
    const std::uint32_t above = ~0u << max(from - i * 32, 0);
    const std::int32_t left = to - i * 32;
    words[i] |= left < 32 ? above & ((1u << left) - 1u) : above;
  }
}

// Clears the counts and the queue of a sample.
__device__ __forceinline__ void forget_sample(const DigestWork& w) {
  __syncthreads();
  if (thread_id() == 0) w.shared->counts[0] = w.shared->counts[2] = 0;
  for (int i = thread_id(); i < kDigits; i += threads()) w.shared->digits[i] = 0;
  __syncthreads();
}

// Lists candidates and returns false; or counts only those in a sample of sectors, for a better
// bound, and returns true. It takes the sample only if it may and there are many sectors, and goes
// back to listing if the sample shows few candidates.
__device__ __forceinline__ bool list_near_sectors(const DigestWork& w, bool may_sample) {
  static_assert(kMostWarps * kWarp * kBoundsPerPage <= kMostNear);  // a round's sectors fit
  const std::uint64_t near = find_near(w);
  __syncthreads();
  const auto all = static_cast<int>(w.shared->counts[1]);
  // If many entries are kept, many sectors do not mean that the bound is bad.
  const int sample = max(kSampled, 16 * static_cast<int>(part_of_kept(w)));
  // A sample that was not needed costs about as much as reading some more sectors.
  bool is_sample = may_sample && all > 8 * sample;
  const int rounds = (w.pages + threads() - 1) / threads();
#pragma unroll 1
  for (int round = 0; round < rounds;) {
    const int step = is_sample ? all / sample : 1;
    queue_sectors(w, round++, near, step);
    if ((is_sample || all <= kMostNear) && round < rounds) continue;
    __syncthreads();
    bool are_few = is_sample && static_cast<int>(w.shared->counts[2]) * step <= 2 * sample;
    if (!are_few) list_queued(w, is_sample);
    __syncthreads();
    if (is_sample) {
      const std::uint32_t found = w.shared->counts[0] * static_cast<std::uint32_t>(step);
      are_few = are_few || found <= kMostListed / static_cast<std::uint32_t>(w.cluster.size);
      if (!are_few) return true;
      forget_sample(w);
      is_sample = false;
      round = 0;
    } else if (round < rounds) {
      if (thread_id() == 0) w.shared->counts[2] = 0;
      __syncthreads();
    }
  }
  return false;
}

// Lists candidates and sends their number to all blocks; returns false if thresholds are not known
// and top_p may not want all candidates.
__device__ __forceinline__ bool list_by_digest(const DigestWork& w, int turn, bool may_sample) {
  const bool is_sure = !w.c.is_top_p || turn > 0;
  const bool is_sample = list_near_sectors(w, may_sample);
  if (!is_sure) weigh_below(w);
  __syncthreads();
  const uint2 reached = grades_reached(w, is_sample);
  if (thread_id() < w.cluster.size) {
    const bool is_long = is_sample || w.shared->counts[0] > kMostListedOwn;
    const std::uint32_t listed = is_long ? kTooMany : w.shared->counts[0];
    w.cluster.send(&w.shared->counted[w.cluster.rank], thread_id(), w.barrier(kListed + turn),
                   make_uint2(listed, listed));
    w.cluster.send(&w.digest->reached[w.cluster.rank], thread_id(), w.barrier(kListed + turn),
                   reached);
    auto* const own = reinterpret_cast<const uint4*>(w.digest->own_below);
    auto* const to = reinterpret_cast<uint4*>(w.digest->below[w.cluster.rank]);
    for (int i = 0; i < kMostRows / 4; ++i) {
      w.cluster.send(to + i, thread_id(), w.barrier(kListed + turn), own[i]);
    }
  }
  w.receive(kListed + turn);
  if (is_sure) return true;
  // A margin, because rounding may have added weight.
  const float rest = (1.0f - w.c.p) * (1.0f + 0x1p-12f) + 0x1p-16f;
  const auto enough = static_cast<std::uint32_t>(rest * kShares);
  bool all = true;
#pragma unroll 1
  for (int g = 0; g < w.group; ++g) {
    const std::uint32_t own = lane_id() < w.cluster.size ? w.digest->below[lane_id()][g] : 0u;
    all = __reduce_add_sync(kAllLanes, own) > enough && all;
  }
  return all;
}

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
