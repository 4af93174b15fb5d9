// One look at a unit of a row by one block: maximum, sums and, for top_p, a histogram of weights.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/select_large.cuh"

namespace sluice::cuda {

constexpr int kWarps = kPieceThreads / kWarp;
constexpr int kVectors = 4;               // of 8 entries, per thread and piece
constexpr std::int32_t kMarginBins = 96;  // of a guessed floor
constexpr float kMostRise = 40.0f;        // nats above its reference that a sum takes
constexpr float kNoReference = -1e30f;
constexpr std::uint32_t kHintZero = 0x40000000u;

struct WarpStats {
  float highest = -INFINITY;
  float sum = 0.0f;  // of e^(x - highest)
  float kept = 0.0f;
  float tail = 0.0f;
};

// What enters the histogram.
struct Window {
  BinMap map;
  std::int32_t floor = INT32_MAX;
  std::uint16_t threshold = kInfiniteHalf;  // of `floor`
  float limit = INFINITY;                   // bins above it would repeat
};

struct StatsShared {
  WarpStats warps[kWarps];
  float highests[kWarps];
  WarpStats piece;  // the unit's first
  float light;      // of its sum, what may be left out
  Window window;
  Extent extent;
  Crossing<std::uint64_t> found;
  std::uint64_t part[kWarp];
  std::int32_t tops[kMostUnits];
  std::int32_t floors[kMostUnits];
  std::int32_t shifts[kMostUnits];  // of units' histograms against the row's
  RowInfo info;
  double sum;
  double kept;
  float highest;
  std::uint32_t bad;
  std::uint32_t overflows;
  std::uint32_t is_last;
  alignas(16) std::uint32_t own[16][kPieceThreads];  // a thread's logits, where it can index them
  alignas(16) std::uint32_t ring[kRing];             // masses of bins
};

// Where vector j of this thread lies: a warp reads 1024 consecutive entries.
__device__ inline std::int32_t entry_of(std::int32_t piece, int j) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  return piece * kPieceEntries + thread / kWarp * (8 * kWarp * kVectors) + j * 8 * kWarp +
         thread % kWarp * 8;
}

__device__ inline void load_piece(const SelectCall& c, const __half* row, const std::int32_t* list,
                                  const Extent& extent, std::int32_t piece, uint4 (&v)[kVectors]) {
  const bool whole = c.is_aligned && (piece + 1) * kPieceEntries <= extent.total &&
                     (c.eligible == nullptr || piece * kPieceEntries >= extent.emit);
  if (whole) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      v[j] = *reinterpret_cast<const uint4*>(row + entry_of(piece, j));
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kVectors; ++j) v[j] = load8(c, row, list, extent, entry_of(piece, j));
}

// Adds what is always kept of a piece, and takes it out. It may have any reference.
__device__ inline void take_kept(const Extent& extent, std::int32_t piece, float norm,
                                 uint4 (&v)[kVectors], WarpStats& sums) {
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const std::int32_t i = entry_of(piece, j);
    const std::uint32_t bits = free8(extent, i);
    if (bits == 0) continue;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 x = __half22float2(as_half2(word_of(v[j], w)));
      const float low = (bits >> (2 * w) & 1u) != 0 ? exp2_fast(fmaf(x.x, kLog2E, -norm)) : 0.0f;
      const float high =
          (bits >> (2 * w + 1) & 1u) != 0 ? exp2_fast(fmaf(x.y, kLog2E, -norm)) : 0.0f;
      sums.kept += low + high;
      if (i + 2 * w >= extent.emit) sums.tail += low;
      if (i + 2 * w + 1 >= extent.emit) sums.tail += high;
    }
    v[j] = masked(v[j], ~bits);
  }
}

__device__ __forceinline__ __half2 maximum_of(const uint4 (&v)[kVectors]) {
  __half2 most = as_half2(v[0].x);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
#pragma unroll
    for (int w = 0; w < 4; ++w) most = __hmax2_nan(most, as_half2(word_of(v[j], w)));
  }
  return most;
}

__device__ __forceinline__ float larger_of(__half2 pair) {
  return __half2float(__hmax_nan(__low2half(pair), __high2half(pair)));
}

__device__ __forceinline__ float rescaled(float sum, float from, float to) {
  return from > -INFINITY ? sum * exp2_fast((from - to) * kLog2E) : 0.0f;
}

__device__ inline WarpStats rescaled(const WarpStats& stats, float to) {
  return {to, rescaled(stats.sum, stats.highest, to), rescaled(stats.kept, stats.highest, to),
          rescaled(stats.tail, stats.highest, to)};
}

// Sums of a row as one thread sees them, above a reference that its warp shares. The reference
// is close to the largest logit, or well above or below it, but never so that the sum overflows.
class RunningSums {
 public:
  __device__ explicit RunningSums(float reference) { refer_to(reference); }

  __device__ __forceinline__ void add(const Extent& extent, std::int32_t piece,
                                      uint4 (&v)[kVectors]) {
    float even = 0.0f;
    float odd = 0.0f;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 x = __half22float2(as_half2(word_of(v[j], w)));
        even += exp2_fast(fmaf(x.x, kLog2E, -norm_));
        odd += exp2_fast(fmaf(x.y, kLog2E, -norm_));
      }
    }
    sums_.sum += even + odd;
    if (piece * kPieceEntries < extent.low || (piece + 1) * kPieceEntries > extent.high) {
      take_kept(extent, piece, norm_, v, sums_);
    }
  }

  // By a whole warp, to a reference that has risen.
  __device__ void raise(float reference) {
    const WarpStats sums = rescaled(own(), reference);
    refer_to(reference);
    sums_ = sums;
    // own() multiplies by what the new norm falls short of.
    const float factor = 1.0f / shortfall(reference, norm_);
    sums_.sum *= factor;
    sums_.kept *= factor;
    sums_.tail *= factor;
  }

  // Of the whole warp.
  __device__ WarpStats total() const {
    const WarpStats sums = own();
    return {sums.highest, warp_sum(sums.sum), warp_sum(sums.kept), warp_sum(sums.tail)};
  }

 private:
  __device__ void refer_to(float reference) {
    sums_.highest = reference;
    norm_ = reference * kLog2E;
  }
  __device__ WarpStats own() const {
    const float factor = sums_.highest > kNoReference ? shortfall(sums_.highest, norm_) : 1.0f;
    return {sums_.highest, factor * sums_.sum, factor * sums_.kept, factor * sums_.tail};
  }

  WarpStats sums_;
  float norm_ = 0.0f;
};

// Calls fold(x, of another lane) until the result covers 16 lanes.
template <typename Fold>
__device__ __forceinline__ float over_warps(float x, const Fold& fold) {
  static_assert(kWarps == 16);
#pragma unroll
  for (int step = 1; step < kWarps; step *= 2) x = fold(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}
__device__ __forceinline__ float sum_over_warps(float x) {
  return over_warps(x, [](float a, float b) { return a + b; });
}
__device__ __forceinline__ float max_over_warps(float x) {
  return over_warps(x, [](float a, float b) { return fmaxf(a, b); });
}

// By one warp: adds up the first piece and opens a window that surely holds what matters of it.
__device__ inline void open_window(const LargeCall& call, StatsShared* shared) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const WarpStats own = shared->warps[lane % kWarps];
  const float highest = max_over_warps(own.highest);
  const WarpStats scaled = rescaled(own, highest);
  const float sum = sum_over_warps(scaled.sum);
  const float kept = sum_over_warps(scaled.kept);
  const float tail = sum_over_warps(scaled.tail);
  if (call.bins > 0 && highest > -INFINITY && highest < INFINITY) {
    // A sum without the two heaviest warps: a needle says nothing about what is around it.
    float weight = scaled.sum;
    for (int i = 0; i < 2; ++i) {
      const unsigned heaviest = __ballot_sync(kAllLanes, weight == max_over_warps(weight));
      if (lane % kWarps == (__ffs(static_cast<int>(heaviest)) - 1) % kWarps) weight = 0.0f;
    }
    const float light = sum_over_warps(weight) * (1.0f - call.call.p);
    const float mean = light / static_cast<float>(kPieceEntries);
    const float floor = highest + fmaxf(logf(mean) - 1.0f, -call.call.bin_range);
    if (lane == 0) {
      Window window;
      window.map = BinMap(highest);
      window.floor = bin_floor(floor);
      window.threshold = bin_threshold(window.floor);
      window.limit = static_cast<float>(window.floor + kRing - 1) / kBinsPerNat;
      shared->window = window;
      shared->light = light;
    }
  }
  if (lane == 0) shared->piece = {highest, sum, kept, tail};
}

// Bit w: the low half of word w is not below the threshold; bit 16 + w: its high half.
__device__ __forceinline__ std::uint32_t pass_mask(const uint4 (&v)[kVectors],
                                                   std::uint16_t threshold) {
  const __half2 least = twice(threshold);
  std::uint32_t mask = 0;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      mask |= __hge2_mask(as_half2(word_of(v[j], w)), least) & (0x10001u << (4 * j + w));
    }
  }
  return mask;
}

__device__ __forceinline__ void stash(const uint4 (&v)[kVectors], StatsShared* shared) {
#pragma unroll
  for (int i = 0; i < 16; ++i) shared->own[i][threadIdx.x] = word_of(v[i / 4], i % 4);
}

// Adds the stashed logits in `mask` to the histogram.
__device__ __forceinline__ void add_masses(std::uint32_t mask, BinMap map, StatsShared* shared) {
  while (mask != 0) {
    std::uint32_t bit;
    asm("bfind.u32 %0, %1;" : "=r"(bit) : "r"(mask));
    mask ^= 1u << bit;
    const std::uint32_t word = shared->own[bit % 16][threadIdx.x] >> (bit & 16u);
    std::uint32_t mass;
    const std::int32_t bin = map.bin(__low2float(as_half2(word)), mass);
    atomicAdd(shared->ring + (static_cast<std::uint32_t>(bin) & (kRing - 1)), mass);
  }
}

// The unit's own threshold after its first piece, less a margin, or that of units before it if it
// is lower: what is lighter need not enter the histogram.
__device__ inline void raise_floor(const LargeCall& call, std::int32_t row, StatsShared* shared) {
  const Window window = shared->window;
  const WarpStats piece = shared->piece;
  const std::int32_t top = bin_floor(piece.highest);
  const double missing =
      1.0 - static_cast<double>(piece.kept + shared->light) / static_cast<double>(piece.sum);
  const float scale = 1.0f / piece.sum;
  const auto share_of = [&](std::int32_t below) {
    const std::uint32_t mass = shared->ring[(top - below) & (kRing - 1)];
    return share_units(
        static_cast<double>(static_cast<float>(mass) * mass_unit(below, piece.highest) * scale));
  };
  find_crossing(share_of, top - window.floor + 1, share_units(missing) + 1, &shared->found,
                shared->part);
  if (threadIdx.x != 0) return;
  std::uint32_t* const hint = call.tickets + call.call.kv_heads * call.call.group + row;
  std::int32_t floor = window.floor;
  if (shared->found.reached && missing > 0.0) {
    const std::uint32_t own = kHintZero - static_cast<std::uint32_t>(top - shared->found.bin);
    const std::uint32_t lowest = max(own, atomicMax(hint, own));
    floor = max(floor, static_cast<std::int32_t>(kHintZero - lowest) - kMarginBins);
  }
  shared->window.floor = floor;
  shared->window.threshold = bin_threshold(floor);
}

struct Unit {
  std::int32_t row;
  std::int32_t unit;
  std::int32_t first;  // its pieces
  std::int32_t last;
  const __half* logits;
  const std::int32_t* list;
};

__device__ inline Unit unit_of(const LargeCall& call, std::int32_t row, std::int32_t unit,
                               const Extent& extent) {
  const SelectCall& c = call.call;
  const int head = row / c.group;
  const std::int32_t first = unit * call.unit_pieces;
  const std::int32_t last =
      min(first + call.unit_pieces, (extent.total + kPieceEntries - 1) / kPieceEntries);
  return {row, unit, first, last, c.row(head, row % c.group), c.head_list(head)};
}

__device__ inline void clear_ring(StatsShared* shared) {
  auto* const ring = reinterpret_cast<uint4*>(shared->ring);
  for (int i = static_cast<int>(threadIdx.x); i < kRing / 4; i += kPieceThreads) {
    ring[i] = make_uint4(0, 0, 0, 0);
  }
}

__device__ inline void write_masses(const LargeCall& call, const Unit& unit, std::int32_t top,
                                    StatsShared* shared) {
  std::uint32_t* const to =
      call.masses + (static_cast<std::int64_t>(unit.row) * call.units + unit.unit) * call.bins;
  for (auto k = static_cast<std::int32_t>(threadIdx.x); k < call.bins; k += kPieceThreads) {
    to[k] = shared->ring[(top - k) & (kRing - 1)];
  }
}

// The histogram of a unit once more, down to a floor that is known. No bin repeats, for the floor
// is no further below the row's maximum than call.bins.
__device__ inline void look_again(const LargeCall& call, std::int32_t row, std::int32_t number,
                                  std::int32_t floor, StatsShared* shared) {
  const Extent extent = shared->extent;
  const Unit unit = unit_of(call, row, number, extent);
  clear_ring(shared);
  __syncthreads();
  const BinMap map(shared->highest);
  for (std::int32_t piece = unit.first; piece < unit.last; ++piece) {
    uint4 v[kVectors];
    load_piece(call.call, unit.logits, unit.list, extent, piece, v);
    WarpStats unused;
    take_kept(extent, piece, 0.0f, v, unused);
    stash(v, shared);
    add_masses(pass_mask(v, bin_threshold(floor)), map, shared);
    __syncwarp();
  }
  __syncthreads();
  write_masses(call, unit, shared->tops[number], shared);
  __syncthreads();
}

// The first piece of a unit: its sums, and what of it enters the histogram.
__device__ inline void begin_unit(const LargeCall& call, const Unit& unit, const Extent& extent,
                                  uint4 (&v)[kVectors], StatsShared* shared) {
  const float highest = warp_max(larger_of(maximum_of(v)));
  RunningSums sums(highest > -INFINITY ? highest : 0.0f);
  sums.add(extent, unit.first, v);
  WarpStats stats = sums.total();
  stats.highest = highest;
  if (threadIdx.x % kWarp == 0) shared->warps[threadIdx.x / kWarp] = stats;
  __syncthreads();
  if (threadIdx.x < kWarp) open_window(call, shared);
  __syncthreads();
}

// Adds the warps' sums and writes what is known of the unit; returns its largest logit.
__device__ inline float end_unit(const LargeCall& call, const Unit& unit, __half2 most,
                                 const WarpStats& stats, StatsShared* shared) {
  const float own = larger_of(most);
  const bool bad = __any_sync(kAllLanes, !(own < INFINITY));
  const float highest = warp_max(own);
  if (threadIdx.x % kWarp == 0) {
    shared->warps[threadIdx.x / kWarp] = stats;
    shared->highests[threadIdx.x / kWarp] = highest;
    if (bad) shared->bad = 1;
  }
  __syncthreads();
  const float all = max_over_warps(shared->highests[threadIdx.x % kWarps]);
  if (threadIdx.x < kWarp) {
    WarpStats scaled;
    if (all > -INFINITY) scaled = rescaled(shared->warps[threadIdx.x % kWarps], all);
    const float sum = sum_over_warps(scaled.sum);
    const float kept = sum_over_warps(scaled.kept);
    const float tail = sum_over_warps(scaled.tail);
    if (threadIdx.x == 0) {
      const std::int32_t floor = shared->overflows != 0 ? INT32_MAX : shared->window.floor;
      call.unit_heads[static_cast<std::int64_t>(unit.row) * call.units + unit.unit] = {
          all, sum, kept, tail, bin_floor(all), floor, shared->bad, 0};
    }
  }
  return all;
}

// Looks at one unit and writes its head and histogram.
__device__ inline void look_at_unit(const LargeCall& call, std::int32_t row, std::int32_t number,
                                    StatsShared* shared) {
  const SelectCall& c = call.call;
  const Extent extent = shared->extent;
  const Unit unit = unit_of(call, row, number, extent);
  if (call.bins > 0) clear_ring(shared);
  uint4 v[kVectors] = {all_minus_infinity(), all_minus_infinity(), all_minus_infinity(),
                       all_minus_infinity()};
  if (unit.first < unit.last) load_piece(c, unit.logits, unit.list, extent, unit.first, v);
  __half2 most = maximum_of(v);
  begin_unit(call, unit, extent, v, shared);
  const WarpStats piece_sums = shared->piece;
  const bool is_finite = fabsf(piece_sums.highest) < INFINITY;
  RunningSums sums(is_finite ? piece_sums.highest : kNoReference);
  const float window_limit = shared->window.limit;
  float limit = is_finite ? fminf(piece_sums.highest + kMostRise, window_limit) : kNoReference;
  for (std::int32_t piece = unit.first; piece < unit.last; ++piece) {
    if (piece > unit.first) {
      const __half2 pair = maximum_of(v);
      most = __hmax2_nan(most, pair);
      const float own = larger_of(pair);
      if (__any_sync(kAllLanes, own > limit)) {
        const float highest = warp_max(own);
        if (highest > window_limit) shared->overflows = 1;
        sums.raise(highest);
        limit = highest + kMostRise;
        if (highest <= window_limit) limit = fminf(limit, window_limit);
      }
      sums.add(extent, piece, v);
    }
    std::uint32_t mask = 0;
    if (call.bins > 0) {
      mask = pass_mask(v, shared->window.threshold);
      stash(v, shared);
    }
    if (piece + 1 < unit.last) load_piece(c, unit.logits, unit.list, extent, piece + 1, v);
    if (mask != 0) add_masses(mask, shared->window.map, shared);
    // Else lanes with few entries run ahead on their own.
    __syncwarp();
    if (call.bins > 0 && piece == unit.first && piece + 1 < unit.last) {
      __syncthreads();
      if (is_finite) raise_floor(call, row, shared);
      __syncthreads();
    }
  }
  WarpStats stats = sums.total();
  if (threadIdx.x < kWarp && piece_sums.highest > -INFINITY) {
    const WarpStats first = rescaled(piece_sums, stats.highest);
    stats.sum += first.sum;
    stats.kept += first.kept;
    stats.tail += first.tail;
  }
  const float highest = end_unit(call, unit, most, stats, shared);
  if (call.bins > 0 && highest > -INFINITY) {
    write_masses(call, unit, bin_floor(highest), shared);
  }
}

}  // namespace sluice::cuda
