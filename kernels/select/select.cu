#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "kernels/select/chain.cuh"
#include "kernels/select/select.h"
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

constexpr std::int64_t kMostTokens = std::int64_t{1} << 31;  // of a context

std::uint32_t to_tokens(std::int64_t x) {
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(x, 0, kMostTokens));
}

TokenQuota::Part part_of(const Budget& budget, std::int64_t unlimited) {
  if (budget.tokens > 0) return {to_tokens(budget.tokens), 0};
  if (budget.divisor > 0) return {0, to_tokens(budget.divisor)};
  return {to_tokens(unlimited), 0};
}

TokenQuota device_quota(const Quota& quota) {
  const std::int32_t extra = quota.extra < 0 ? -1 : to_int(quota.extra);
  return {part_of(quota.share, kMostTokens), part_of(quota.least, 0), extra};
}

// Returns true if a cap may drop some of up to `most` entries of the whole pages.
bool may_cut(const Quota& cap, std::int64_t most) {
  return cap.share.tokens > 0 ? cap.share.tokens < most : cap.share.divisor > 1;
}

// Sets the number of entries and all that follows from it; throws Error{unsupported} if there are
// more than kMostEntries.
void set_entries(SelectCall& c, const SelectParams& p) {
  const std::int64_t last = std::max<std::int64_t>(p.batch.capacity, 1) - 1;
  const bool listed = p.candidates != nullptr;
  const std::int64_t emit = listed ? p.candidates->capacity : last / kPageTokens * kPageTokens;
  const std::int64_t newest = p.skip_newest ? 0 : listed ? kPageTokens : last - emit + 1;
  const std::int64_t entries = p.logits.data == nullptr ? 0 : emit + newest;
  if (entries > kMostEntries) {
    throw Error(ErrorCode::unsupported, "selecting among " + std::to_string(entries) +
                                            " tokens: the CUDA backend takes up to " +
                                            std::to_string(kMostEntries));
  }
  check(entries <= c.stride, "rows of logits that are too short for select()");
  check(c.digest.maxima == nullptr || c.digest.pages >= LogitDigest::pages_of(entries),
        "a digest of fewer logits than select() is to choose from");
  c.entries = to_int(entries);
  const Quota& quota = c.is_top_p ? p.cap : p.k;
  c.quota = device_quota(quota);
  c.has_grades = !c.is_top_p || may_cut(quota, emit);
  c.most_keep = to_int(std::min(quota.of(last + 1), emit));
  c.most_forced = to_int(std::min(std::min(p.sinks, emit) + std::min(p.recent, emit), emit));
  const double light = (1.0 - static_cast<double>(p.p)) /
                       (2.0 * static_cast<double>(std::max<std::int64_t>(entries, 1)));
  c.bin_range = c.is_top_p && p.p < 1.0f ? static_cast<float>(-std::log(light)) : 0.0f;
}

SelectCall call_of(const SelectParams& p) {
  SelectCall c;
  c.tokens = p.batch.tokens;
  c.kv_heads = p.shape.kv_heads;
  c.head_count = to_int(p.batch.count * p.shape.kv_heads);
  c.group = p.shape.group();
  check(c.group <= kMostGroup, "more query heads per KV head than select() takes");
  c.logits = reinterpret_cast<const __half*>(p.logits.data);
  c.stride = p.logits.stride;
  check(reinterpret_cast<std::uintptr_t>(p.logits.data) % 16 == 0 && c.stride % 8 == 0,
        "rows of logits that select() cannot load 16 bytes at a time");
  c.skip_newest = p.skip_newest;
  c.digest = PageDigest::of(p.logits.digest);
  c.page_weights = PageWeights::of(p.logits.digest, c.group);
  if (p.candidates != nullptr) {
    check(p.logits.data != nullptr, "candidates without logits");
    c.list = p.candidates->positions;
    c.list_capacity = p.candidates->capacity;
    c.list_heads = p.candidates->heads;
  }
  c.is_top_p = p.prune == Pruner::top_p;
  c.p = p.p;
  set_entries(c, p);
  c.sinks = p.sinks;
  c.recent = p.recent;
  c.positions = p.selected.positions;
  c.capacity = p.selected.capacity;
  c.heads = p.selected.heads;
  c.share = p.share;
  c.alpha = p.alpha;
  c.lse = p.lse;
  return c;
}

// The call for heads [first, first + count) alone.
SelectCall part_of(SelectCall c, std::int32_t first, std::int32_t count) {
  const std::int64_t row = static_cast<std::int64_t>(first) * c.group;
  c.first_head += first;
  c.head_count = count;
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

// Hands out scratch, every part aligned to 16 bytes.
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

// Candidates to shortlist per head; 0 if the shortlist would take longer than it saves, because one
// block per head picks among the candidates: they are too many, or entries too few.
std::int32_t shortlist_capacity_of(const SelectCall& c) {
  constexpr std::int64_t kMostListedInAll = std::int64_t{1} << 23;
  constexpr std::int64_t kMostForced = 16384;
  constexpr std::int64_t kMostLeast = 2048;
  constexpr std::int64_t kLeastShare = 64;  // of the entries
  const std::int64_t least = 2 * std::int64_t{c.most_keep} * c.group;
  if (least > kMostLeast || c.entries < kLeastShare * least) return 0;
  const std::int64_t most = kMostListedInAll / std::max(c.head_count, 1);
  if (least > most || c.most_forced > kMostForced) return 0;
  return static_cast<std::int32_t>(
      std::clamp<std::int64_t>(8 * least, std::min<std::int64_t>(8192, most), most));
}

// Divides the rows among blocks, by sizes alone.
ChainCall chain_call(const SelectCall& c, const DeviceLimits& device) {
  ChainCall l;
  l.call = c;
  const std::int64_t rows = static_cast<std::int64_t>(c.head_count) * c.group;
  // About one round of four blocks per multiprocessor.
  const std::int64_t blocks = 4 * device.multiprocessors;
  l.strips = std::max(1, ceil_div(c.entries, kStrip));
  const std::int32_t strips =
      std::max(ceil_div(l.strips * rows, blocks), ceil_div(l.strips, kMostUnits));
  l.unit_strips = std::min(ceil_div(strips, kWarps) * kWarps, kUnitStrips);
  l.units = ceil_div(l.strips, l.unit_strips);
  if (c.is_top_p && c.p < 1.0f) {
    l.bins = static_cast<std::int32_t>(std::ceil(c.bin_range * kBinsPerNat)) + 4;
  }
  l.chunks = std::max(1, ceil_div(c.entries, kChunk));
  l.shortlist_strips =
      std::int64_t{l.chunks} * c.head_count > std::min<std::int64_t>(blocks, kMostShortlistChunks)
          ? 2
          : 1;
  // Two strips per warp if one would take more than two blocks per multiprocessor, so that all
  // blocks of emit run at once.
  const bool fills = std::int64_t{l.strips} * c.head_count > 2 * kWarps * device.multiprocessors;
  l.warp_strips = fills ? kMostWarpStrips : 1;
  l.spans = std::max(1, ceil_div(c.entries, l.span_entries()));
  if (c.has_grades) l.shortlist_capacity = shortlist_capacity_of(c);
  l.grade_chunks = std::max(1, ceil_div(c.entries, kGradeChunk));
  // Two blocks per multiprocessor: those of one round, or of all rounds if shortlist mostly leaves
  // them nothing to do.
  const std::int64_t grade_blocks =
      2 * device.multiprocessors / (l.shortlist_capacity > 0 ? grade_rounds(c.group) : 1);
  l.grade_loops = std::max(1, ceil_div(static_cast<std::int64_t>(l.grade_chunks) * c.head_count,
                                       std::max<std::int64_t>(grade_blocks, 1)));
  return l;
}

// Lays the call's arrays out in scratch; returns the bytes they take.
std::size_t place(ChainCall& l, std::byte* scratch) {
  const std::int64_t heads = l.call.head_count;
  const std::int64_t rows = heads * l.call.group;
  const std::int64_t spans = heads * l.spans;
  Carver carver(scratch);
  l.zeroed = carver.take<std::uint64_t>(0);
  l.masses = carver.take<std::uint64_t>(rows * l.bins);
  l.states = carver.take<std::uint64_t>(spans);
  l.cuts = carver.take<GradeCut>(heads);
  l.grade_bins =
      carver.take<std::uint32_t>(l.call.has_grades ? kGradeRounds * heads * kMostGradeBins : 0);
  l.grade_done = carver.take<std::uint32_t>(kGradeRounds * heads);
  l.rounds_done = carver.take<std::uint32_t>(heads);
  l.rows_done = carver.take<std::uint32_t>(rows);
  l.chunks_listed = carver.take<std::uint32_t>(2 * heads);
  l.listed = carver.take<std::uint32_t>(2 * heads);
  l.done = carver.take<std::uint32_t>(heads);
  l.settled = carver.take<std::uint32_t>(heads);
  l.zeroed_words = static_cast<std::int64_t>(carver.used() / sizeof(std::uint64_t));
  l.rows = carver.take<RowInfo>(rows);
  l.searches = carver.take<RowSearch>(rows);
  l.extents = carver.take<Extent>(heads);
  if (l.call.digest.maxima != nullptr) {
    // In the digest, row_sums overwrites the maxima of strips that are not plain.
    l.maxima = reinterpret_cast<std::uint32_t*>(l.call.digest.maxima);
    l.pages = l.call.digest.pages;
  } else {
    l.pages = std::int64_t{l.strips} * kStripPages;
    l.maxima = carver.take<std::uint32_t>(rows * l.pages * ChainCall::kPageWords);
  }
  l.unit_heads = carver.take<UnitHead>(rows * l.units);
  const bool has_bounds = l.bins > 0 || l.shortlist_capacity > 0;
  l.rough = carver.take<uint2>(has_bounds ? rows * l.units * kRoughBins : 0);
  l.results = carver.take<ChunkResult>(spans);
  l.alphas = carver.take<float>(spans * l.call.group);
  l.listed_grades = carver.take<std::uint32_t>(2 * heads * l.shortlist_capacity);
  l.listed_entries = carver.take<std::int32_t>(2 * heads * l.shortlist_capacity);
  l.listed_chunks = carver.take<uint2>(l.shortlist_capacity > 0 ? heads * l.shortlist_chunks() : 0);
  const bool stores_grades = l.call.has_grades && l.call.group > 1;
  auto* const grades =
      carver.take<std::uint32_t>(stores_grades ? heads * l.grade_chunks * kGradeChunk : 0);
  l.grades = stores_grades ? grades : nullptr;
  return carver.used();
}

// The scratch for selecting for this many heads at once.
std::size_t scratch_of(const SelectCall& c, std::int32_t heads, const DeviceLimits& device) {
  const auto bytes_of = [&](std::int32_t count) {
    ChainCall l = chain_call(part_of(c, 0, count), device);
    return place(l, nullptr);
  };
  // The last part may have fewer heads, and then more blocks share a row.
  const std::int32_t rest = c.head_count % heads;
  return std::max(bytes_of(heads), rest == 0 ? 0 : bytes_of(rest));
}

// The number of heads to run at once; halved until the scratch fits.
std::int32_t heads_at_once(const SelectCall& c, const Launch& launch) {
  auto heads =
      static_cast<std::int32_t>(std::clamp<std::int64_t>(kRowsAtOnce / c.group, 1, c.head_count));
  while (heads > 1 && scratch_of(c, heads, *launch.device) > launch.scratch_bytes) {
    heads = (heads + 1) / 2;
  }
  return heads;
}

void run_chain(const SelectCall& c, const Launch& launch) {
  const std::int32_t step = heads_at_once(c, launch);
  for (std::int32_t first = 0; first < c.head_count; first += step) {
    ChainCall l =
        chain_call(part_of(c, first, std::min(step, c.head_count - first)), *launch.device);
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
    const bool shortlists = l.shortlist_capacity > 0;
    if (shortlists && l.bins > 0) run_shortlist(l, false, launch);
    if (l.bins > 0) run_row_thresholds(l, launch);
    if (shortlists) run_shortlist(l, true, launch);
    if (l.call.has_grades) run_grade_rounds(l, launch);
    run_emit(l, launch);
  }
}

}  // namespace

void select(const SelectParams& params, const Launch& launch) {
  const SelectCall c = call_of(params);
  if (c.head_count == 0) return;
  if (c.logits == nullptr) return run_fixed(c, launch);
  if (fits_few(c, *launch.device)) return run_few(c, launch);
  if (fits_small(c, *launch.device)) {
    return fits_top_k(c) ? run_top_k(c, launch) : run_small(c, launch);
  }
  if (fits_digest(c, *launch.device)) return run_digest(c, launch);
  if (fits_cluster(c, *launch.device)) return run_cluster(c, launch);
  run_chain(c, launch);
}

bool leaves_page_weights(const SelectParams& params, const DeviceLimits& device) {
  const SelectCall c = call_of(params);
  return c.page_weights.masks != nullptr && fits_few(c, device);
}

}  // namespace sluice::cuda
