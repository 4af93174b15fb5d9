// A cluster's results for every row: its sum of weights, the threshold of top_p, and a bound of its
// heaviest entries.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/select/cluster.cuh"

namespace sluice::cuda {

// Reads four vectors of the warp's row, kWarp * parts apart; returns false unless all are plain:
// without always kept entries.
__device__ __forceinline__ bool load_vectors(const auto& w, const __half* row, std::int32_t first,
                                             uint4 (&v)[kVectors]) {
  const std::int32_t step = w.parts * kWarp;
  const std::int32_t last = min(first + (kVectors - 1) * step + kWarp, w.count);
  const bool is_plain = w.entry(first) >= w.extent.low && w.entry(last) <= w.extent.high;
  first += lane_id();
  if (is_plain) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const std::int32_t at = first + j * step;
      v[j] = all_minus_infinity();
      if (at < w.count) v[j] = load8(row, w.entry(at));
    }
    return true;
  }
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const std::int32_t at = first + j * step;
    v[j] = at < w.count ? load8_below(row, w.extent.total, w.entry(at)) : all_minus_infinity();
  }
  return false;
}

// By one warp: reads its part of its row into shared memory.
__device__ __forceinline__ RowPart read_part(const auto& w) {
  const __half* const row = w.c.row(w.head, w.row);
  auto* const to = reinterpret_cast<uint4*>(w.shared + 1) + w.row * w.capacity;
  const std::int32_t step = w.parts * kWarp;
  Seen seen;
  std::int32_t first = w.part * kWarp;
  uint4 v[kVectors];
  bool is_plain = first < w.count && load_vectors(w, row, first, v);
#pragma unroll 1
  while (first < w.count) {
    uint4 next[kVectors];
    const std::int32_t next_first = first + kVectors * step;
    const bool is_next_plain = next_first < w.count && load_vectors(w, row, next_first, next);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const std::int32_t at = first + lane_id() + j * step;
      if (at < w.count) to[at] = v[j];
    }
    seen.add(v);
#pragma unroll
    for (int j = 0; j < kVectors && !is_plain; ++j) {
      const std::int32_t at = first + lane_id() + j * step;
      if (at < w.count) add_kept8(w.extent, w.entry(at), v[j], seen.sums);
    }
#pragma unroll
    for (int j = 0; j < kVectors; ++j) v[j] = next[j];
    is_plain = is_next_plain;
    first = next_first;
  }
  const float own = larger_of(seen.most);
  RowPart found;
  found.highest = warp_max(own < INFINITY ? own : INFINITY);
  seen.sums.refer_to(fmaxf(kNoNorm, found.highest * kLog2E));
  found.all = warp_sum(seen.sums.all);
  if (__any_sync(kAllLanes, seen.sums.kept > 0.0f)) {
    found.kept = warp_sum(seen.sums.kept);
    found.tail = warp_sum(seen.sums.tail);
  }
  return found;
}

// Sends this warp's result for its row to all blocks once they have started, and waits for theirs.
__device__ __forceinline__ void exchange_parts(const auto& w, const RowPart& part) {
  w.cluster.wait();
  if (w.row >= 0 && lane_id() < w.cluster.size) {
    w.cluster.send(reinterpret_cast<uint4*>(&w.scratch->parts[w.cluster.rank][warp_id()]),
                   lane_id(), w.barrier(kSums),
                   make_uint4(__float_as_uint(part.highest), __float_as_uint(part.all),
                              __float_as_uint(part.kept), __float_as_uint(part.tail)));
  }
  w.receive(kSums);
}

// Reads the block's logits and sends their sums to all blocks.
__device__ __forceinline__ void share_sums(const auto& w) {
  RowPart part;
  if (w.row >= 0) part = read_part(w);
  exchange_parts(w, part);
}

// By one warp: a row's sums from all its parts.
__device__ __forceinline__ Sums add_parts(const auto& w, int g, float& highest) {
  const auto& parts = w.scratch->parts;
  highest = -INFINITY;
  for_parts(w, g, [&](int block, int i) { highest = fmaxf(highest, parts[block][i].highest); });
  highest = warp_max(highest);
  Sums sums;
  sums.norm = fmaxf(kNoNorm, highest * kLog2E);
  for_parts(w, g, [&](int block, int i) {
    const RowPart part = parts[block][i];
    const float factor = exp2_fast(fmaxf(kNoNorm, part.highest * kLog2E) - sums.norm);
    sums.all = fmaf(factor, part.all, sums.all);
    sums.kept = fmaf(factor, part.kept, sums.kept);
    sums.tail = fmaf(factor, part.tail, sums.tail);
  });
  sums.all = warp_sum(sums.all);
  sums.kept = warp_sum(sums.kept);
  sums.tail = warp_sum(sums.tail);
  return sums;
}

__device__ __forceinline__ RowState state_of(const SelectCall& c, const Sums& sums, float highest) {
  RowState state;
  state.highest = highest;
  state.info.threshold = kInfiniteHalf;
  if (!(highest < INFINITY) || !(highest > -INFINITY)) {
    state.info.bad = 1;
    return state;
  }
  const float of_all = __fdividef(1.0f, sums.all);
  state.info.norm = sums.norm + __log2f(sums.all);
  // Corrects the rounding of the norm.
  state.info.scale = exp2_fast(state.info.norm - sums.norm) * of_all;
  state.info.tail = sums.tail * of_all;
  state.info.kept = sums.kept * of_all;
  state.top = bin_floor(highest);
  state.missing = c.p - state.info.kept;
  if (!c.is_top_p || (state.missing <= 0.0f && c.p < 1.0f)) return state;
  if (c.p >= 1.0f) {
    state.info.threshold = kLowestHalf;
    return state;
  }
  // Weights below (1 - p) / entries of the sum are not needed. bin_range stands for half of that,
  // a margin larger than rounding.
  const std::int32_t floor = bin_floor(state.info.norm * (1.0f / kLog2E) - c.bin_range + 0.5f);
  state.bins = state.top - floor + 1;
  state.least = bin_threshold(floor);
  return state;
}

// By one thread: expects the histograms that this block will receive.
__device__ __forceinline__ void expect_bins(const auto& w) {
  std::int32_t coarse = w.has_sketches ? w.group * kWarp : 0;
  std::int32_t fine = 0;
  for (int g = 0; g < w.group; ++g) {
    const std::int32_t bins = w.shared->states[g].bins;
    coarse += (bins + kCoarse - 1) / kCoarse;
    fine += bins > 0 ? kCoarse : 0;
  }
  const auto bytes = static_cast<std::uint32_t>(w.cluster.size) * 4u;
  w.expect(kCoarseBins, bytes * static_cast<std::uint32_t>(coarse));
  w.expect(kFineBins, bytes * static_cast<std::uint32_t>(fine));
}

// Computes the bounds of all rows; returns false if one is bad.
__device__ __forceinline__ bool join_sums(const auto& w) {
  bool bad = false;
  for (int g = warp_id(); g < w.group; g += warps()) {
    float highest = 0.0f;
    const Sums sums = add_parts(w, g, highest);
    const RowState state = state_of(w.c, sums, highest);
    bad = bad || state.info.bad != 0;
    if (lane_id() == 0) {
      w.shared->states[g] = state;
      w.shared->rows[g] = state.info;
      if (w.cluster.rank == 0) report_lse(w.c, std::int64_t{w.head} * w.group + g, state.info);
    }
  }
  return __syncthreads_or(bad ? 1 : 0) == 0;
}

// The largest of eight logits.
__device__ __forceinline__ float largest8(const uint4& v) {
  const __half2 pair =
      __hmax2(__hmax2(as_half2(v.x), as_half2(v.y)), __hmax2(as_half2(v.z), as_half2(v.w)));
  return __half2float(__hmax(__low2half(pair), __high2half(pair)));
}

// The weights of a row's logits, counted in units of their bin's lower edge. Mostly few matter, so
// a warp queues them and counts kWarp at a time.
template <int kMassShift>
class WeightCounter {
 public:
  __device__ WeightCounter(const RowState& state, std::uint32_t* bins, __half* queue)
      : map_(state.highest), least_(twice(state.least)), top_(bins + state.top), queue_(queue) {}

  // By all lanes: adds kVectors times eight logits of each.
  __device__ __forceinline__ void add(const uint4 (&v)[kVectors]) {
    std::uint32_t bits[kVectors];
    std::uint32_t up_to[kVectors / 2];  // counts of two vectors in a word
#pragma unroll
    for (int j = 0; j < kVectors; ++j) bits[j] = reaching(v[j], least_);
#pragma unroll
    for (int k = 0; k < kVectors / 2; ++k) {
      up_to[k] = warp_inclusive(
          static_cast<std::uint32_t>(__popc(bits[2 * k]) | __popc(bits[2 * k + 1]) << 16));
    }
#pragma unroll
    for (int k = 0; k < kVectors / 2; ++k) {
      const std::uint32_t all = __shfl_sync(kAllLanes, up_to[k], kWarp - 1);
      push(v[2 * k], bits[2 * k], up_to[k] & 0xffffu);
      queued_ += static_cast<int>(all & 0xffffu);
      push(v[2 * k + 1], bits[2 * k + 1], up_to[k] >> 16);
      queued_ += static_cast<int>(all >> 16);
      __syncwarp();
      for (; queued_ >= kWarp; queued_ -= kWarp) count(queue_[queued_ - kWarp + lane_id()]);
      __syncwarp();
    }
  }

  // Counts the logits still queued.
  __device__ __forceinline__ void end() {
    if (lane_id() < queued_) count(queue_[lane_id()]);
    queued_ = 0;
  }

 private:
  // Queues a vector's logits in `bits`; the lanes up to this one have `up_to` of them.
  __device__ __forceinline__ void push(const uint4& v, std::uint32_t bits, std::uint32_t up_to) {
    __half* to = queue_ + queued_ + static_cast<int>(up_to) - __popc(bits);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __half2 pair = as_half2(word_of(v, i));
      if ((bits >> (2 * i) & 1u) != 0) *to++ = __low2half(pair);
      if ((bits >> (2 * i + 1) & 1u) != 0) *to++ = __high2half(pair);
    }
  }
  __device__ __forceinline__ void count(__half x) const {
    std::uint32_t mass;
    const std::int32_t bin = map_.bin(__half2float(x), mass);
    atomicAdd(top_ - bin, (mass + (1u << kMassShift >> 1)) >> kMassShift);
  }

  BinMap map_;
  __half2 least_;
  std::uint32_t* top_;  // the bin of number 0
  __half* queue_;
  int queued_ = 0;
};

// Counts a vector's largest logit in the sketch.
__device__ __forceinline__ void count_maximum(float most, const RowState& state, const BinMap& map,
                                              std::uint32_t* sketch) {
  constexpr float kDepth = static_cast<float>((kSketchBins - 1) * kSketchWidth) / kBinsPerNat;
  if (!(most > state.highest - kDepth)) return;
  std::uint32_t mass;
  const std::int32_t bin = (state.top - map.bin(most, mass)) / kSketchWidth;
  atomicAdd(sketch + bin / 2, bin % 2 == 0 ? 1u : 0x10000u);
}

template <typename Work>
__device__ __forceinline__ auto weight_counter(const Work& w, const RowState& state) {
  return WeightCounter<Work::kMassShift>(state, w.bins + w.row * w.row_bins,
                                         w.scratch->queues[warp_id()]);
}

// Counts the histograms of the warp's part of its row: load(v) gives vector v of `count`, with -Inf
// for entries that are not counted.
template <typename Load>
__device__ __forceinline__ void count_row(const auto& w, std::int32_t count, const Load& load) {
  const RowState state = w.shared->states[w.row];
  const BinMap map(state.highest);
  const float least = __half2float(__ushort_as_half(state.least));
  auto weights = weight_counter(w, state);
  const std::int32_t step = w.parts * kWarp;
#pragma unroll 1
  for (std::int32_t v = w.part * kWarp + lane_id(); v - lane_id() < count; v += kVectors * step) {
    uint4 x[kVectors];
    float highest = -INFINITY;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const std::int32_t at = v + j * step;
      x[j] = at < count ? load(at) : all_minus_infinity();
    }
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const float most = largest8(x[j]);
      if (w.has_sketches) count_maximum(most, state, map, w.shared->sketch[w.row]);
      highest = fmaxf(highest, most);
    }
    if (state.bins > 0 && __any_sync(kAllLanes, highest >= least)) weights.add(x);
  }
  weights.end();
}

// A vector of the warp's row, with -Inf for the always kept entries.
__device__ __forceinline__ uint4 selectable_of(const auto& w, std::int32_t v) {
  const uint4 x = w.rows[w.row * w.capacity + v];
  const std::uint32_t forced = forced8(w.extent, w.entry(v));
  return forced != 0 ? masked(x, ~forced) : x;
}

// Counts the histograms of the selectable entries in the block's part of every row, and sends those
// of the maxima to all blocks.
__device__ __forceinline__ void count_rows(const auto& w) {
  if (w.row >= 0) count_row(w, w.count, [&](std::int32_t v) { return selectable_of(w, v); });
  __syncthreads();
  if (!w.has_sketches || w.row < 0) return;
  const std::uint32_t both = w.shared->sketch[w.row][lane_id()];
  std::uint32_t* const to = w.sketches + (w.cluster.rank * w.group + w.row) * kWarp + lane_id();
  for (int other = w.part; other < w.cluster.size; other += w.parts) {
    w.cluster.send(to, other, w.barrier(kCoarseBins), both);
  }
}

constexpr float kShares = 2147483648.0f;  // a row's weight in units: 2^31

// Turns the histograms of weights into shares of the row's weight, and sends all blocks the sums of
// kCoarse neighbouring bins.
template <typename Work>
__device__ __forceinline__ void weigh_bins(const Work& w) {
  if (w.row < 0) return;
  const RowState& state = w.shared->states[w.row];
  const float scale = state.info.scale * (kShares / (1 << (kMassBits - Work::kMassShift)));
  std::uint32_t* const to = w.coarse + (w.cluster.rank * w.group + w.row) * kWarp;
  for (int i = w.part; i * kCoarse < state.bins; i += w.parts) {
    const std::int32_t bin = i * kCoarse + lane_id() * 4;
    auto* const at = reinterpret_cast<uint4*>(w.bins + w.row * w.row_bins + bin);
    const uint4 mass = *at;
    const float edge = static_cast<float>(state.top - bin) * (1.0f / kBinsPerNat);
    const float unit = scale * exp2_fast(fmaf(edge, kLog2E, -state.info.norm));
    // Times e^(-1 / 128), e^(-2 / 128), e^(-3 / 128).
    const uint4 share =
        make_uint4(__float2uint_rn(static_cast<float>(mass.x) * unit),
                   __float2uint_rn(static_cast<float>(mass.y) * (unit * 0.99221794f)),
                   __float2uint_rn(static_cast<float>(mass.z) * (unit * 0.98449644f)),
                   __float2uint_rn(static_cast<float>(mass.w) * (unit * 0.97683503f)));
    *at = share;
    const std::uint32_t sum = __reduce_add_sync(kAllLanes, share.x + share.y + share.z + share.w);
    if (lane_id() < w.cluster.size) {
      w.cluster.send(to + i, lane_id(), w.barrier(kCoarseBins), sum);
    }
  }
}

// The search for a row's threshold.
struct Place {
  std::uint32_t target = 0;  // weight of the bins up to the threshold's
  std::uint32_t before = 0;  // weight of the bins before the next kCoarse
  std::int32_t first = 0;    // the first of these kCoarse bins
};

// By one warp: finds the kCoarse bins that contain the row's threshold.
__device__ __forceinline__ Place place_of(const auto& w, int g) {
  const RowState& state = w.shared->states[g];
  Place place;
  place.target = static_cast<std::uint32_t>(fmaxf(state.missing, 0.0f) * kShares) + 1;
  const int coarse = (state.bins + kCoarse - 1) / kCoarse;
  std::uint32_t own = 0;
#pragma unroll 4
  for (int i = 0; i < w.cluster.size; ++i) {
    own += w.coarse[(i * w.group + g) * kWarp + lane_id()];
  }
  if (lane_id() >= coarse) own = 0;  // nothing was written there
  const std::uint32_t sum = warp_inclusive(own);
  const unsigned reached = __ballot_sync(kAllLanes, sum >= place.target);
  const int chosen = reached != 0 ? __ffs(static_cast<int>(reached)) - 1 : coarse - 1;
  place.before = __shfl_sync(kAllLanes, sum - own, chosen);
  place.first = chosen * kCoarse;
  return place;
}

// By the warps of a row: sends this block's bins at `place` to all blocks.
__device__ __forceinline__ void send_bins(const auto& w, const Place& place) {
  const std::uint32_t* const bins = w.bins + w.row * w.row_bins + place.first;
  const uint4 four = reinterpret_cast<const uint4*>(bins)[lane_id()];
  uint4* const to = w.scratch->fine + (w.cluster.rank * w.group + w.row) * kWarp + lane_id();
  for (int other = w.part; other < w.cluster.size; other += w.parts) {
    w.cluster.send(to, other, w.barrier(kFineBins), four);
  }
}

// By one warp: the lowest f16 that top_p keeps of a row.
__device__ __forceinline__ std::uint16_t find_threshold(const auto& w, int g, const Place& place) {
  uint4 all = make_uint4(0, 0, 0, 0);
#pragma unroll 4
  for (int i = 0; i < w.cluster.size; ++i) {
    const uint4 x = w.scratch->fine[(i * w.group + g) * kWarp + lane_id()];
    all = make_uint4(all.x + x.x, all.y + x.y, all.z + x.z, all.w + x.w);
  }
  const std::uint32_t four = all.x + all.y + all.z + all.w;
  const std::uint32_t up_to = place.before + warp_inclusive(four);
  const std::uint32_t start = up_to - four;
  // The number of this lane's four bins before the one that reaches the target.
  int within = 0;
  if (start + all.x < place.target) ++within;
  if (start + all.x + all.y < place.target) ++within;
  if (up_to - all.w < place.target) ++within;
  const unsigned reached = __ballot_sync(kAllLanes, up_to >= place.target);
  const int lane = reached != 0 ? __ffs(static_cast<int>(reached)) - 1 : kWarp - 1;
  const std::int32_t bin = place.first + lane * 4 + __shfl_sync(kAllLanes, within, lane);
  const RowState& state = w.shared->states[g];
  return bin_threshold(state.top - min(bin, state.bins - 1));
}

// By one warp: an f16 that at least `keep` entries of the row reach, or -Inf.
__device__ __forceinline__ std::uint16_t find_bound(const auto& w, int g) {
  std::uint32_t low = 0;
  std::uint32_t high = 0;
#pragma unroll 4
  for (int i = 0; i < w.cluster.size; ++i) {
    const std::uint32_t both = w.sketches[(i * w.group + g) * kWarp + lane_id()];
    low += both & 0xffffu;
    high += both >> 16;
  }
  const std::uint32_t sum = warp_inclusive(low + high);
  const auto keep = static_cast<std::uint32_t>(max(w.extent.keep, 1));
  const unsigned reached = __ballot_sync(kAllLanes, sum >= keep);
  if (reached == 0) return static_cast<std::uint16_t>(kMinusInfinities);
  const int lane = __ffs(static_cast<int>(reached)) - 1;
  const bool is_first = __shfl_sync(kAllLanes, sum - high >= keep ? 1 : 0, lane) != 0;
  const int bin = 2 * lane + (is_first ? 0 : 1);
  return bin_threshold(w.shared->states[g].top - (bin * kSketchWidth + kSketchWidth - 1));
}

// Finds the threshold of every row, and a bound of its heaviest entries, from the histograms that
// count() makes.
template <typename Count>
__device__ __forceinline__ void find_thresholds(const auto& w, const Count& count, int turn = 0) {
  if (thread_id() == 0) expect_bins(w);
  count();
  weigh_bins(w);
  __syncthreads();
  const bool searches = w.row >= 0 && w.shared->states[max(w.row, 0)].bins > 0;
  w.receive(kCoarseBins, turn);
  Place place;
  if (searches) {
    place = place_of(w, w.row);
    send_bins(w, place);
  }
  if (w.has_sketches && w.part == w.parts - 1) {
    const std::uint16_t bound = find_bound(w, w.row);
    if (lane_id() == 0) w.shared->states[w.row].bound = bound;
  }
  if (searches && w.part == 0) {
    w.receive(kFineBins, turn);
    const std::uint16_t threshold = find_threshold(w, w.row, place);
    if (lane_id() == 0) w.shared->rows[w.row].threshold = threshold;
  }
  __syncthreads();
}

}  // namespace sluice::cuda
