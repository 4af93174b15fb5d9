// Lists every KV head's entries whose grade reaches a lower bound of the lightest kept. There are
// about `keep` times the query heads of them, unless many weigh the same; the last block of a head
// puts them in order and picks the heaviest. If they are too many, or too few because top_p wants
// others, the head is left to grade_rounds and emit.
//
// While top_p's thresholds are not known, a head is settled if the heaviest entries lie above the
// thresholds' upper bounds.
#include <cstdint>

#include "kernels/select/chain.cuh"
#include "kernels/select/sectors.cuh"

namespace sluice::cuda {
namespace {

// ---- Picks the heaviest of a KV head's candidates, by one block.

constexpr std::int32_t kMostHeld = 3072;  // candidates in shared memory

constexpr int kPickBits = 11;
constexpr int kPickBins = 1 << kPickBits;
static_assert(kMostShortlistChunks <= kPickBins);

struct PickShared {
  std::uint32_t bins[kPickBins];  // at first, the distance that each chunk's candidates move
  std::uint32_t part[kWarp];
  std::int32_t counts[kWarps];
  std::uint32_t digit;
  std::uint32_t before;
  std::uint32_t in_bin;
  std::int32_t last_tie;
  std::uint32_t pages;
  float alphas[kWarps][kMostGroup];
  std::uint32_t grades[kMostHeld];
  std::int32_t entries[kMostHeld];
};

// A head's candidates, ascending.
struct Candidates {
  const std::uint32_t* grades;
  const std::int32_t* entries;
  std::int32_t count;
};

// Puts a head's candidates in ascending order, because blocks appended those of their chunks in any
// order; in shared memory if they fit there.
__device__ inline Candidates put_in_order(const ChainCall& call, std::int32_t head,
                                          std::int32_t chunks, std::int32_t count,
                                          PickShared* shared) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int64_t from = static_cast<std::int64_t>(head) * call.shortlist_capacity;
  const std::int64_t to =
      static_cast<std::int64_t>(call.call.head_count + head) * call.shortlist_capacity;
  const bool fits = count <= kMostHeld;
  const std::int32_t each = kChunk * call.shortlist_strips;
  std::uint32_t* const grades = fits ? shared->grades : call.listed_grades + to;
  std::int32_t* const entries = fits ? shared->entries : call.listed_entries + to;
  const uint2* const places =
      call.listed_chunks + static_cast<std::int64_t>(head) * call.shortlist_chunks();
  std::uint32_t before = 0;
  for (std::int32_t first = 0; first < chunks; first += kThreads) {
    const std::int32_t chunk = first + thread;
    const uint2 place = chunk < chunks ? __ldcg(places + chunk) : make_uint2(0, 0);
    std::uint32_t total = 0;
    const std::uint32_t at = before + block_exclusive(place.y, shared->part, total);
    if (chunk < chunks) shared->bins[chunk] = at - place.x;
    before += total;
    __syncthreads();
  }
#pragma unroll 4
  for (std::int32_t i = thread; i < count; i += kThreads) {
    const std::uint32_t grade = __ldcg(call.listed_grades + from + i);
    const std::int32_t entry = __ldcg(call.listed_entries + from + i);
    const std::int32_t at = i + static_cast<std::int32_t>(shared->bins[entry / each]);
    grades[at] = grade;
    entries[at] = entry;
  }
  __syncthreads();
  return {grades, entries, count};
}

// Calls write(i, rank) in order for every i in [0, count) with keeps(i); returns their number.
// keeps(i) is called twice.
template <typename Keeps, typename Write>
__device__ __forceinline__ std::int32_t compact(std::int32_t count, const Keeps& keeps,
                                                const Write& write, PickShared* shared) {
  const auto warp = static_cast<std::int32_t>(threadIdx.x) / kWarp;
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarp;
  const std::int32_t each = (count + kThreads - 1) / kThreads * kWarp;
  const std::int32_t first = min(count, warp * each);
  const std::int32_t last = min(count, first + each);
  std::int32_t own = 0;
  for (std::int32_t i = first + lane; i < last; i += kWarp) own += keeps(i) ? 1 : 0;
  own = __reduce_add_sync(kAllLanes, own);
  __syncthreads();
  if (lane == 0) shared->counts[warp] = own;
  __syncthreads();
  std::int32_t all = 0;
  std::int32_t before = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    before += w < warp ? shared->counts[w] : 0;
    all += shared->counts[w];
  }
#pragma unroll 1
  for (std::int32_t at = first; at < last; at += kWarp) {
    const std::int32_t i = at + lane;
    const bool kept = i < last && keeps(i);
    const unsigned kepts = __ballot_sync(kAllLanes, kept);
    if (kept) write(i, before + __popc(kepts & ((1u << lane) - 1u)));
    before += __popc(kepts);
  }
  return all;
}

// Larger grades are kept, and equal ones up to candidate `last_tie`.
struct Cut {
  std::uint32_t grade = 0;
  std::int32_t last_tie = -1;
};

// Finds the `wanted`-th largest of more grades by radix, 11 bits at a time.
__device__ inline Cut find_cut(const Candidates& from, std::uint32_t wanted, PickShared* shared) {
  constexpr std::int32_t kEach = kPickBins / kThreads;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  Cut cut;
  bool is_all = false;         // all grades with the known digits are kept
  std::int32_t above = kWarp;  // the lowest bit that is known
#pragma unroll 1
  while (above > 0 && !is_all) {
    const std::int32_t shift = max(above - kPickBits, 0);
#pragma unroll
    for (std::int32_t i = 0; i < kEach; ++i) shared->bins[i * kThreads + thread] = 0;
    __syncthreads();
#pragma unroll 1
    for (std::int32_t i = thread; i < from.count; i += kThreads) {
      const std::uint32_t grade = from.grades[i];
      // Bins count from the heaviest.
      const std::uint32_t bin = kPickBins - 1 - (grade >> shift & (kPickBins - 1));
      if (above == kWarp || (grade ^ cut.grade) >> above == 0) atomicAdd(shared->bins + bin, 1u);
    }
    __syncthreads();
    std::uint32_t counts[kEach];
    std::uint32_t own = 0;
#pragma unroll
    for (std::int32_t i = 0; i < kEach; ++i) own += counts[i] = shared->bins[thread * kEach + i];
    std::uint32_t all = 0;
    std::uint32_t before = block_exclusive(own, shared->part, all);
    if (before < wanted && before + own >= wanted) {
#pragma unroll
      for (std::int32_t i = 0; i < kEach; ++i) {
        if (before < wanted && before + counts[i] >= wanted) {
          shared->digit = static_cast<std::uint32_t>(kPickBins - 1 - (thread * kEach + i));
          shared->before = before;
          shared->in_bin = counts[i];
        }
        before += counts[i];
      }
    }
    __syncthreads();
    const std::uint32_t known =
        above - shift == kPickBits ? kPickBins - 1 : (1u << (above - shift)) - 1u;
    cut.grade |= (shared->digit & known) << shift;
    wanted -= shared->before;
    is_all = wanted == shared->in_bin;
    above = shift;
  }
  if (is_all) {
    // All grades with the known digits are kept: the cut is the grade just below them.
    --cut.grade;
    return cut;
  }
  compact(
      from.count, [&](std::int32_t i) { return from.grades[i] == cut.grade; },
      [&](std::int32_t i, std::int32_t rank) {
        if (rank + 1 == static_cast<std::int32_t>(wanted)) shared->last_tie = i;
      },
      shared);
  __syncthreads();
  cut.last_tie = shared->last_tie;
  return cut;
}

// Sums the weights of the kept entries, in an order that depends on nothing else.
__device__ inline void write_alphas(const SelectCall& c, std::int32_t head, const RowInfo* rows,
                                    const std::int32_t* entries, std::int32_t count,
                                    PickShared* shared) {
  const auto warp = static_cast<std::int32_t>(threadIdx.x) / kWarp;
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarp;
  const int parts = max(1, kWarps / c.group);
#pragma unroll 1
  for (int q = warp; q < c.group * parts; q += kWarps) {
    const int g = q % c.group;
    const __half* const row = c.row(head, g);
    float sum = 0.0f;
#pragma unroll 4
    for (std::int32_t i = q / c.group * kWarp + lane; i < count; i += parts * kWarp) {
      sum += weight_of(row[entries[i]], rows[g]);
    }
    sum = warp_sum(sum);
    if (lane == 0) shared->alphas[q / c.group][g] = sum;
  }
  __syncthreads();
  const auto g = static_cast<std::int32_t>(threadIdx.x);
  if (g >= c.group) return;
  float sum = rows[g].kept;
  for (int part = 0; part < parts; ++part) sum += shared->alphas[part][g];
  c.alpha[static_cast<std::int64_t>(head) * c.group + g] = fminf(sum, 1.0f) * rows[g].share;
}

// Writes the positions of the entries in [first, last) to `to`.
__device__ inline void put_positions(const std::int32_t* list, std::int32_t first,
                                     std::int32_t last, std::int32_t* to) {
  for (std::int32_t i = first + static_cast<std::int32_t>(threadIdx.x); i < last; i += kThreads) {
    to[i - first] = list != nullptr ? list[i] : i;
  }
}

// Returns true if every entry reaches one of the query heads' bounds.
__device__ inline bool reach_bounds(const SelectCall& c, std::int32_t head,
                                    const std::int32_t* entries, std::int32_t count,
                                    const std::uint16_t* bounds) {
  bool all = true;
#pragma unroll 1
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < count; i += kThreads) {
    const __half* const logits = c.row(head, 0) + entries[i];
    bool any = false;
#pragma unroll 4
    for (int g = 0; g < c.group; ++g) {
      any |= __hge(logits[g * c.stride], __ushort_as_half(bounds[g]));
    }
    all = all && any;
  }
  return __syncthreads_and(all ? 1 : 0) != 0;
}

// Writes a KV head's always kept positions and the heaviest of its candidates. With `bounds`, one
// per query head, returns false unless every picked candidate reaches one of them; returns true if
// the head is settled.
__device__ __noinline__ static bool pick(const SelectCall& c, std::int32_t head,
                                         const Extent& extent, const RowInfo* rows,
                                         const Candidates& from, const std::uint16_t* bounds,
                                         PickShared* shared) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t* const list = c.head_list(head);
  std::int32_t* const to = c.positions + head * c.capacity;
  const std::int32_t forced = extent.forced();
  const std::int32_t wanted = max(extent.keep - forced, 0);
  const bool all = from.count <= wanted;
  Cut cut;
  if (wanted == 0) {
    cut.grade = ~0u;
  } else if (!all) {
    cut = find_cut(from, static_cast<std::uint32_t>(wanted), shared);
  }
  // Entries of the picked candidates.
  const bool fits = min(from.count, wanted) <= kPickBins;
  auto* const entries = fits ? reinterpret_cast<std::int32_t*>(shared->bins) : to + extent.low;
  const std::int32_t kept = compact(
      from.count,
      [&](std::int32_t i) {
        const std::uint32_t grade = from.grades[i];
        return grade > cut.grade || (grade == cut.grade && i <= cut.last_tie);
      },
      [&](std::int32_t i, std::int32_t rank) { entries[rank] = from.entries[i]; }, shared);
  put_positions(list, 0, extent.low, to);
  put_positions(list, extent.high, extent.emit, to + extent.low + kept);
  __syncthreads();
  if (bounds != nullptr && !reach_bounds(c, head, entries, kept, bounds)) return false;
  write_alphas(c, head, rows, entries, kept, shared);
  if (fits || list != nullptr) {
    __syncthreads();
    for (std::int32_t i = thread; i < kept; i += kThreads) {
      to[extent.low + i] = list != nullptr ? list[entries[i]] : entries[i];
    }
  }
  HeadSelection result;
  result.count = forced + kept;
  if (thread == 0) shared->pages = 0;
  __syncthreads();
  add_pages(to, result.count, &shared->pages);
  __syncthreads();
  result.pages = static_cast<std::int32_t>(shared->pages);
  result.cut = c.is_top_p && forced + from.count > extent.keep ? 1 : 0;
  if (thread == 0) c.heads[head] = result;
  return true;
}

constexpr int kMostStrips = 2;  // of a warp

struct Shared {
  RowInfo rows[kMostGroup];
  std::uint16_t leasts[kMostGroup];
  std::uint16_t mosts[kMostGroup];
  std::uint32_t reaching;
  std::uint32_t sure;
  // Bit e of word w is entry 32 w + e of the chunk.
  std::uint32_t bits[kThreads * kMostStrips];
  std::uint16_t queues[kWarps][kMostStrips * kStripSectors];
  std::uint32_t part[kWarp];
  std::uint32_t place;  // of the chunk's candidates
  PickShared pick;
};

// The lower bound that candidates reach.
struct Bound {
  bool is_valid = false;
  bool is_all = false;      // all entries that top_p wants are candidates, because they are few
  std::uint32_t grade = 1;  // a candidate's grade reaches it
  float weight = 0.0f;      // a candidate's sum of weights reaches it; a little lower
  __half2 logit{};          // a single query head's logit reaches it; twice
};

// The highest of the query heads' bounds.
__device__ Bound bound_of(const ChainCall& call, std::int32_t head, const Extent& extent,
                          bool is_exact, Shared* shared) {
  const SelectCall& c = call.call;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  if (thread < c.group) {
    const RowSearch search = call.searches[static_cast<std::int64_t>(head) * c.group + thread];
    shared->leasts[thread] = search.least;
    shared->mosts[thread] = search.most;
    atomicAdd(&shared->reaching, search.reaching);
    atomicMax(&shared->sure, search.sure);
  }
  __syncthreads();
  Bound bound;
  bound.logit = twice(static_cast<std::uint16_t>(kMinusInfinities));
  // Not valid unless top_p surely wants more than twice the cap: otherwise it may want no more than
  // the cap, or so few more that not all of the heaviest lie above the thresholds' upper bounds.
  if (!is_exact && shared->sure / 2 <= static_cast<std::uint32_t>(extent.keep)) {
    return bound;
  }
  if (is_exact && c.is_top_p &&
      shared->reaching <= static_cast<std::uint32_t>(call.shortlist_capacity)) {
    bound.is_valid = bound.is_all = true;
    return bound;
  }
  if (c.group == 1) {
    bound.logit = twice(shared->leasts[0]);
    bound.grade = ordered2(shared->leasts[0]) << 16;
    bound.is_valid = shared->leasts[0] != static_cast<std::uint16_t>(kMinusInfinities);
    return bound;
  }
  float least = 0.0f;
  for (int g = 0; g < c.group; ++g) {
    least = fmaxf(least, weight_of(__ushort_as_half(shared->leasts[g]), shared->rows[g]));
  }
  // Sums of weights are rounded.
  constexpr float kLess = 1.0f - 0x1p-16f;
  bound.weight = least * kLess * kLess;
  bound.grade = grade_of_weight(least * kLess);
  bound.is_valid = bound.weight > 0.0f;
  return bound;
}

// By one warp: queues the sectors of its strips that may hold candidates; returns their number.
template <int kStrips>
__device__ int queue_strips(const ChainCall& call, std::int32_t head, std::int32_t run,
                            const Extent& extent, const Bound& bound, Shared* shared,
                            std::uint16_t* queue) {
  const SelectCall& c = call.call;
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarp;
  const std::int32_t strips = (extent.emit + kStrip - 1) / kStrip - run * kStrips;
  const std::uint32_t* const maxima = call.strip_maxima(head * c.group, run * kStrips, lane);
  std::uint32_t reaches[kStrips];
  float sums[kStrips][2] = {};
#pragma unroll
  for (std::uint32_t& mask : reaches) mask = c.is_top_p ? 0u : ~0u;
#pragma unroll 4
  for (int g = 0; g < c.group; ++g) {
    const RowInfo& row = shared->rows[g];
#pragma unroll
    for (int s = 0; s < kStrips; ++s) {
      const std::uint32_t word =
          s < strips ? maxima[(s * kStripPages * c.group + g) * ChainCall::kPageWords]
                     : kMinusInfinities;
      const __half2 pair = as_half2(word);
      reaches[s] |= __hge2_mask(pair, twice(row.threshold));
      if (c.group == 1) reaches[s] &= __hge2_mask(pair, bound.logit);
      sums[s][0] += weight_of(__low2half(pair), row);
      sums[s][1] += weight_of(__high2half(pair), row);
    }
  }
  int count = 0;
#pragma unroll
  for (int s = 0; s < kStrips; ++s) {
    const bool any = s < strips;
    count += queue_sectors(any && (reaches[s] & 0xffffu) != 0 && sums[s][0] >= bound.weight,
                           any && reaches[s] >> 16 != 0 && sums[s][1] >= bound.weight,
                           static_cast<std::uint16_t>(s * kStripSectors), queue + count);
  }
  return count;
}

// Bit e: entry i + e is a candidate.
__device__ __forceinline__ std::uint32_t candidates8(const SelectCall& c, std::int32_t head,
                                                     const Extent& extent, std::int32_t i,
                                                     const Bound& bound, const RowInfo* rows) {
  const std::uint32_t selectable = selectable8(extent, i);
  const auto load = [&](int g) { return load8(c.row(head, g), i); };
  std::uint32_t grades[8];
  grades8(c, c.group, rows, selectable, load, grades);
  std::uint32_t bits = 0;
#pragma unroll
  for (int e = 0; e < 8; ++e) bits |= grades[e] >= bound.grade ? 1u << e : 0u;
  return bits;
}

// By one thread: writes the candidates of its word of bits.
__device__ void write_candidates(const ChainCall& call, std::int32_t head, std::int32_t first,
                                 std::uint32_t rank, std::uint32_t bits, const RowInfo* rows) {
  const SelectCall& c = call.call;
  const std::int64_t list = static_cast<std::int64_t>(head) * call.shortlist_capacity;
  for (; bits != 0 && rank < static_cast<std::uint32_t>(call.shortlist_capacity);
       bits &= bits - 1) {
    const std::int32_t entry = first + __ffs(static_cast<int>(bits)) - 1;
    call.listed_grades[list + rank] = grade_of(c.row(head, 0) + entry, c.stride, c.group, rows);
    call.listed_entries[list + rank] = entry;
    ++rank;
  }
}

// Appends the chunk's candidates to the head's list. Thread t has the 32 * kStrips entries from
// 32 * kStrips * t on.
template <int kStrips>
__device__ void list_chunk(const ChainCall& call, std::int32_t head, std::int32_t chunk,
                           const Extent& extent, const Bound& bound, std::int32_t slot,
                           Shared* shared) {
  const SelectCall& c = call.call;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t warp = thread / kWarp;
  const std::int32_t run = chunk * kWarps + warp;
  const std::int32_t first = run * (kStrips * kStrip);
  std::uint32_t* const words = shared->bits + warp * (kWarp * kStrips);
  auto* const bytes = reinterpret_cast<std::uint8_t*>(words);
  std::uint16_t* const queue = shared->queues[warp];
  int count = 0;
#pragma unroll
  for (int w = 0; w < kStrips; ++w) words[w * kWarp + thread % kWarp] = 0;
  if (first < extent.emit)
    count = queue_strips<kStrips>(call, head, run, extent, bound, shared, queue);
  __syncwarp();
  visit_sectors(queue, count, first, [&](std::int32_t i) {
    if (i >= extent.emit) return;
    bytes[(i - first) / 8] =
        static_cast<std::uint8_t>(candidates8(c, head, extent, i, bound, shared->rows));
  });
  __syncwarp();
  std::uint32_t bits[kStrips];
  std::uint32_t own = 0;
#pragma unroll
  for (int w = 0; w < kStrips; ++w) {
    bits[w] = shared->bits[thread * kStrips + w];
    own += static_cast<std::uint32_t>(__popc(bits[w]));
  }
  std::uint32_t total = 0;
  const std::uint32_t within = block_exclusive(own, shared->part, total);
  if (thread == 0) {
    const std::uint32_t place = total == 0 ? 0 : atomicAdd(call.listed + slot, total);
    call.listed_chunks[static_cast<std::int64_t>(head) * call.shortlist_chunks() + chunk] =
        make_uint2(place, total);
    shared->place = place;
  }
  if (total == 0) return;
  __syncthreads();
  std::uint32_t rank = shared->place + within;
#pragma unroll
  for (int w = 0; w < kStrips; ++w) {
    write_candidates(call, head, chunk * (kChunk * kStrips) + (thread * kStrips + w) * 32, rank,
                     bits[w], shared->rows);
    rank += static_cast<std::uint32_t>(__popc(bits[w]));
  }
}

template <int kStrips>
__global__ void __launch_bounds__(kThreads, 4)
    shortlist(const __grid_constant__ ChainCall call, bool is_exact) {
  __shared__ Shared shared;
  const SelectCall& c = call.call;
  if (threadIdx.x == 0) shared.reaching = shared.sure = 0;
  // Allows first, because the next kernel makes no use of rule 4 (early_launch.cuh), and often
  // nothing is left to do here.
  allow_next_kernel();
  wait_for_kernel_before();
  const std::int32_t head = static_cast<std::int32_t>(blockIdx.x) / call.shortlist_chunks();
  const std::int32_t chunk = static_cast<std::int32_t>(blockIdx.x) % call.shortlist_chunks();
  if (call.settled[head] != 0) return;
  const Extent extent = call.extents[head];
  const std::int32_t active = max(1, (extent.emit + kStrips * kChunk - 1) / (kStrips * kChunk));
  if (chunk >= active || load_infos(call, head, shared.rows)) return;
  const Bound bound = bound_of(call, head, extent, is_exact, &shared);
  if (!bound.is_valid) return;
  const std::int32_t slot = (is_exact ? c.head_count : 0) + head;
  list_chunk<kStrips>(call, head, chunk, extent, bound, slot, &shared);
  if (!is_last_of(call.chunks_listed + slot, active)) return;
  const auto count = static_cast<std::int32_t>(__ldcg(call.listed + slot));
  if (count > call.shortlist_capacity) return;
  // top_p may also want lighter entries.
  if (c.is_top_p && !bound.is_all && count <= extent.keep) return;
  const Candidates candidates = put_in_order(call, head, active, count, &shared.pick);
  const bool settles = pick(c, head, extent, shared.rows, candidates,
                            is_exact ? nullptr : shared.mosts, &shared.pick);
  if (settles && threadIdx.x == 0) call.settled[head] = 1;
}

}  // namespace

void run_shortlist(const ChainCall& call, bool is_exact, const Launch& launch) {
  const std::int64_t blocks = std::int64_t{call.call.head_count} * call.shortlist_chunks();
  const auto kernel = call.shortlist_strips == 1 ? shortlist<1> : shortlist<kMostStrips>;
  launch_early("shortlist", kernel, dim3(static_cast<unsigned>(blocks)), kThreads, 0, launch, call,
               is_exact);
}

}  // namespace sluice::cuda
