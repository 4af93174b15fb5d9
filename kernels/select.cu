#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "kernels/select.h"
#include "kernels/select_large.cuh"
#include "lib/check.h"
#include "sluice/errors.h"

namespace sluice::cuda {
namespace {

constexpr std::int64_t kRowsAtOnce = 512;
static_assert(kRowsAtOnce + kMostGroup <= Launch::kCounters);

std::int32_t to_int(std::int64_t x) {
  return static_cast<std::int32_t>(
      std::clamp<std::int64_t>(x, 0, std::numeric_limits<std::int32_t>::max()));
}

SelectCall call_of(const SelectParams& p) {
  SelectCall c;
  c.logits = reinterpret_cast<const __half*>(p.logits.data);
  c.stride = p.logits.stride;
  c.is_aligned =
      reinterpret_cast<std::uintptr_t>(p.logits.data) % 16 == 0 && p.logits.stride % 8 == 0;
  c.digest = p.logits.digest;
  c.kv_heads = p.shape.kv_heads;
  c.group = p.shape.group();
  const bool listed = p.candidates != nullptr;
  const std::int64_t entries = listed ? p.candidates->capacity + p.tail : p.count;
  if (entries > kMostEntries) {
    throw Error(ErrorCode::unsupported, "selecting among " + std::to_string(entries) +
                                            " tokens: the CUDA backend takes up to " +
                                            std::to_string(kMostEntries));
  }
  check(c.group <= kMostGroup, "more query heads per KV head than select() takes");
  check(c.digest.maxima == nullptr || c.digest.pages >= LogitDigest::pages_of(entries),
        "a digest of fewer logits than select() is to choose from");
  c.entries = to_int(entries);
  c.count = to_int(p.count);
  c.end = to_int(p.end);
  if (listed) {
    c.list = p.candidates->positions;
    c.list_capacity = p.candidates->capacity;
    c.list_heads = p.candidates->heads;
    c.tail = to_int(p.tail);
  }
  c.is_top_p = p.prune == Pruner::top_p;
  c.p = p.p;
  const double light = (1.0 - static_cast<double>(p.p)) /
                       (2.0 * static_cast<double>(std::max<std::int64_t>(entries, 1)));
  c.bin_range = c.is_top_p && p.p < 1.0f ? static_cast<float>(-std::log(light)) : 0.0f;
  c.keep = to_int(c.is_top_p ? p.cap : p.k);
  c.sinks = to_int(p.sinks);
  c.recent_first = to_int(p.recent_first);
  c.eligible = p.eligible;
  c.is_mask_aligned = reinterpret_cast<std::uintptr_t>(p.eligible) % 8 == 0;
  c.positions = p.selected.positions;
  c.capacity = p.selected.capacity;
  c.heads = p.selected.heads;
  c.share = p.share;
  c.alpha = p.alpha;
  c.lse = p.lse;
  return c;
}

// The call for KV heads [first, first + count) alone.
SelectCall part_of(SelectCall c, std::int32_t first, std::int32_t count) {
  const std::int64_t row = static_cast<std::int64_t>(first) * c.group;
  c.kv_heads = count;
  c.logits += row * c.stride;
  if (c.digest.maxima != nullptr) {
    c.digest.maxima += row * c.digest.pages * kBoundsPerPage;
    c.digest.sums += row * c.digest.pages;
  }
  if (c.list != nullptr) {
    c.list += first * c.list_capacity;
    c.list_heads += first;
  }
  c.positions += first * c.capacity;
  c.heads += first;
  if (c.share != nullptr) c.share += row;
  c.alpha += row;
  if (c.lse != nullptr) c.lse += row;
  return c;
}

// Hands out scratch, every piece aligned to 16 bytes.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(reinterpret_cast<std::uintptr_t>(base)) {}
  template <typename T>
  T* take(std::int64_t count) {
    auto* const at = reinterpret_cast<T*>(base_ + used_);
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + 15) / 16 * 16;
    return at;
  }
  std::size_t used() const { return used_; }

 private:
  std::uintptr_t base_;
  std::size_t used_ = 0;
};

std::int32_t ceil_div(std::int64_t a, std::int64_t b) {
  return static_cast<std::int32_t>((a + b - 1) / b);
}

// How many candidates to gather per KV head, or 0: too few sectors for a bound, or too many
// positions for one block to pick.
std::int32_t list_capacity_of(const SelectCall& c) {
  constexpr std::int64_t kMostListed = 65536;
  constexpr std::int64_t kMostListedInAll = std::int64_t{1} << 23;
  constexpr std::int64_t kMostForced = 16384;
  const std::int64_t forced = std::int64_t{c.sinks} + std::max(c.end - c.recent_first, 0);
  const std::int64_t least = 2 * std::int64_t{c.keep} * c.group;
  const std::int64_t most = std::min(kMostListed, kMostListedInAll / std::max(c.kv_heads, 1));
  if (least > most || forced > kMostForced) return 0;
  // What is picked is not cut by the capacity.
  if (c.capacity < std::max<std::int64_t>(c.keep, forced)) return 0;
  if (std::int64_t{c.keep} * kSector * 4 > std::int64_t{c.entries} * 3) return 0;
  return static_cast<std::int32_t>(
      std::clamp<std::int64_t>(8 * least, std::min<std::int64_t>(8192, most), most));
}

// How the rows are shared out, from sizes alone.
LargeCall large_call(const SelectCall& c, const DeviceLimits& device) {
  LargeCall l;
  l.call = c;
  const std::int64_t rows = static_cast<std::int64_t>(c.kv_heads) * c.group;
  // About one round of four blocks per multiprocessor.
  const std::int64_t blocks = 4 * device.multiprocessors;
  l.strips = std::max(1, ceil_div(c.entries, kStrip));
  l.unit_strips =
      std::min(ceil_div(ceil_div(l.strips * rows, blocks), kWarps) * kWarps, kUnitStrips);
  l.units = ceil_div(l.strips, l.unit_strips);
  if (c.is_top_p && c.p < 1.0f) {
    l.bins = static_cast<std::int32_t>(std::ceil(c.bin_range * kBinsPerNat)) + 4;
  }
  l.chunks = std::max(1, ceil_div(c.entries, kChunk));
  l.gather_strips =
      std::int64_t{l.chunks} * c.kv_heads > std::min<std::int64_t>(blocks, kMostGatherChunks) ? 2
                                                                                              : 1;
  // So that all blocks of emit run at once, where that takes no more strips per warp.
  const bool fills = std::int64_t{l.strips} * c.kv_heads > 2 * kWarps * device.multiprocessors;
  l.warp_strips = fills ? kMostWarpStrips : 1;
  l.spans = std::max(1, ceil_div(c.entries, l.span_entries()));
  l.has_keys = !c.is_top_p || c.keep < c.entries;
  if (l.has_keys) l.list_capacity = list_capacity_of(c);
  l.key_chunks = std::max(1, ceil_div(c.entries, kKeyChunk));
  // Two blocks per multiprocessor: of one round, or of all where mostly they have nothing to do.
  const std::int64_t key_blocks =
      2 * device.multiprocessors / (l.list_capacity > 0 ? key_rounds(c.group) : 1);
  l.key_loops = std::max(1, ceil_div(static_cast<std::int64_t>(l.key_chunks) * c.kv_heads,
                                     std::max<std::int64_t>(key_blocks, 1)));
  return l;
}

// Lays the call's arrays out in scratch; returns the bytes they take.
std::size_t place(LargeCall& l, std::byte* scratch) {
  const std::int64_t heads = l.call.kv_heads;
  const std::int64_t rows = heads * l.call.group;
  const std::int64_t spans = heads * l.spans;
  Carver carver(scratch);
  l.zeroed = carver.take<std::uint64_t>(0);
  l.masses = carver.take<std::uint64_t>(rows * l.bins);
  l.states = carver.take<std::uint64_t>(spans);
  l.cuts = carver.take<KeyCut>(heads);
  l.key_bins = carver.take<std::uint32_t>(l.has_keys ? kKeyRounds * heads * kMostKeyBins : 0);
  l.key_done = carver.take<std::uint32_t>(kKeyRounds * heads);
  l.rounds_done = carver.take<std::uint32_t>(heads);
  l.rows_done = carver.take<std::uint32_t>(rows);
  l.gathered = carver.take<std::uint32_t>(2 * heads);
  l.listed = carver.take<std::uint32_t>(2 * heads);
  l.done = carver.take<std::uint32_t>(heads);
  l.settled = carver.take<std::uint32_t>(heads);
  l.zeroed_words = static_cast<std::int64_t>(carver.used() / sizeof(std::uint64_t));
  l.rows = carver.take<RowInfo>(rows);
  l.searches = carver.take<RowSearch>(rows);
  l.extents = carver.take<Extent>(heads);
  if (l.call.digest.maxima != nullptr) {
    // Those of strips that have something special are put in their place.
    l.maxima = reinterpret_cast<std::uint32_t*>(l.call.digest.maxima);
    l.pages = l.call.digest.pages;
  } else {
    l.pages = std::int64_t{l.strips} * kStripPages;
    l.maxima = carver.take<std::uint32_t>(rows * l.pages * LargeCall::kPageWords);
  }
  l.unit_heads = carver.take<UnitHead>(rows * l.units);
  const bool has_bounds = l.bins > 0 || l.list_capacity > 0;
  l.rough = carver.take<uint2>(has_bounds ? rows * l.units * kRoughBins : 0);
  l.results = carver.take<ChunkResult>(spans);
  l.alphas = carver.take<float>(spans * l.call.group);
  l.listed_keys = carver.take<std::uint32_t>(2 * heads * l.list_capacity);
  l.listed_entries = carver.take<std::int32_t>(2 * heads * l.list_capacity);
  l.listed_chunks = carver.take<uint2>(l.list_capacity > 0 ? heads * l.gather_chunks() : 0);
  const bool stores_keys = l.has_keys && l.call.group > 1;
  auto* const keys = carver.take<std::uint32_t>(stores_keys ? heads * l.key_chunks * kKeyChunk : 0);
  l.keys = stores_keys ? keys : nullptr;
  return carver.used();
}

std::int32_t most_heads_at_once(const SelectCall& c) {
  return static_cast<std::int32_t>(
      std::clamp<std::int64_t>(kRowsAtOnce / c.group, 1, std::max(c.kv_heads, 1)));
}

// What it takes to select for so many heads at once.
std::size_t scratch_of(const SelectCall& c, std::int32_t heads, const DeviceLimits& device) {
  const auto bytes_of = [&](std::int32_t count) {
    LargeCall l = large_call(part_of(c, 0, count), device);
    return place(l, nullptr);
  };
  // The last heads may be fewer, and then more blocks share a row.
  const std::int32_t rest = c.kv_heads % heads;
  return std::max(bytes_of(heads), rest == 0 ? 0 : bytes_of(rest));
}

// Fewer heads take less scratch.
std::int32_t heads_at_once(const SelectCall& c, const Launch& launch) {
  std::int32_t heads = most_heads_at_once(c);
  while (heads > 1 && scratch_of(c, heads, *launch.device) > launch.scratch_bytes) {
    heads = (heads + 1) / 2;
  }
  return heads;
}

void select_large(const SelectCall& c, const Launch& launch) {
  const std::int32_t step = heads_at_once(c, launch);
  for (std::int32_t first = 0; first < c.kv_heads; first += step) {
    LargeCall l = large_call(part_of(c, first, std::min(step, c.kv_heads - first)), *launch.device);
    check(l.units <= kMostUnits, "a row too long for select()");
    l.tickets = launch.counters;
    const std::size_t needed = place(l, launch.scratch);
    if (needed > launch.scratch_bytes) {
      throw Error(ErrorCode::unsupported,
                  "selecting among " + std::to_string(c.entries) + " tokens for " +
                      std::to_string(c.group) + " query heads of a KV head takes " +
                      std::to_string(needed) + " bytes of scratch on the device and there are " +
                      std::to_string(launch.scratch_bytes) + "; shorten the context");
    }
    run_row_sums(l, launch);
    const bool gathers = l.list_capacity > 0;
    if (gathers && l.bins > 0) run_gather(l, false, launch);
    if (l.bins > 0) run_row_thresholds(l, launch);
    if (gathers) run_gather(l, true, launch);
    if (l.has_keys) run_key_rounds(l, launch);
    run_emit(l, launch);
  }
}

}  // namespace

std::size_t select_scratch_bytes(const SelectParams& params, const DeviceLimits& device) {
  const SelectCall c = call_of(params);
  if (fits_small(c, device) || fits_cluster(c, device) || fits_digest(c, device)) return 0;
  return scratch_of(c, most_heads_at_once(c), device);
}

void select(const SelectParams& params, const Launch& launch) {
  const SelectCall c = call_of(params);
  if (c.kv_heads == 0) return;
  if (fits_small(c, *launch.device)) {
    return fits_top_k(c) ? run_top_k(c, launch) : run_small(c, launch);
  }
  if (fits_digest(c, *launch.device)) return run_digest(c, launch);
  if (fits_cluster(c, *launch.device)) return run_cluster(c, launch);
  select_large(c, launch);
}

}  // namespace sluice::cuda
