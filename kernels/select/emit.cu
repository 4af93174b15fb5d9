// Writes the kept positions in order. A block takes a span of a KV head's entries, reads again the
// sectors that may be kept, and gets its offset in the output from the spans before it.
#include "kernels/select/chain.cuh"
#include "kernels/select/sectors.cuh"

namespace sluice::cuda {
namespace {

constexpr int kHeadsAtOnce = 4;
constexpr int kStaged = 8192;  // kept entries that are written at once

// Kept entries and those equal to the cut.
struct Counts {
  std::uint32_t above = 0;
  std::uint32_t equal = 0;
};

struct EmitShared {
  RowInfo rows[kMostGroup];
  // Bit e of word w is entry 32 w + e of the span.
  std::uint32_t kept_bits[kMostSpan / 32];
  std::uint16_t queues[kWarps][kMostWarpStrips * kStripSectors];
  std::uint32_t part[kWarp];
  Counts before;
  std::uint32_t pages;
  std::uint32_t totals[2];  // emitted, pages
  float alphas[kWarps][kMostGroup];
};

// Kept entries of the span, counted from its first, ascending. Element 0 is the last entry of the
// batch staged before.
struct Staged {
  std::uint16_t entries[1 + kStaged];
};

struct Span {
  std::int32_t head;
  std::int32_t number;  // in its head
  std::int32_t first;   // its first entry
  std::int32_t each;    // strips per warp
  std::int32_t strip;   // the first of this warp, counted in the row
  std::int32_t active;  // spans of this head
  bool bad;
  Extent extent;
  const std::int32_t* list;  // [emit] or null

  // The warp's number of strips and its offset in words of kept bits.
  __device__ std::int32_t warp_strips() const {
    const std::int32_t strips = (extent.emit + kStrip - 1) / kStrip;
    return min(max(strips - strip, 0), each);
  }
  __device__ std::int32_t warp_words() const {
    return static_cast<std::int32_t>(threadIdx.x) / kWarp * each * kWarp;
  }
  // True if a strip has entries that are always kept.
  __device__ bool is_special(std::int32_t number_in_row) const {
    const std::int32_t at = number_in_row * kStrip;
    return at < extent.low || at + kStrip > extent.high;
  }
};

__device__ Span span_of(const ChainCall& call, EmitShared* shared) {
  const auto block = static_cast<std::int32_t>(blockIdx.x);
  Span span;
  span.head = block / call.spans;
  span.number = block % call.spans;
  span.each = call.warp_strips;
  span.first = span.number * call.span_entries();
  span.strip = (span.number * kWarps + static_cast<std::int32_t>(threadIdx.x) / kWarp) * span.each;
  span.list = call.call.head_list(span.head);
  span.extent = call.extents[span.head];
  span.bad = load_infos(call, span.head, shared->rows);
  if (span.bad) span.extent.emit = 0;
  span.active = max(1, (span.extent.emit + call.span_entries() - 1) / call.span_entries());
  return span;
}

__device__ __forceinline__ std::uint8_t* byte_of(std::uint32_t* bits, const Span& span,
                                                 std::int32_t i) {
  return reinterpret_cast<std::uint8_t*>(bits) + (i - span.first) / 8;
}

// Logits of some query heads for eight entries; beyond the last head, that head is repeated.
struct Batch {
  uint4 v[kHeadsAtOnce];

  __device__ __forceinline__ Batch(const SelectCall& c, const Span& span, int first,
                                   std::int32_t i) {
#pragma unroll
    for (int k = 0; k < kHeadsAtOnce; ++k) {
      const int g = min(first + k, c.group - 1);
      v[k] = load8(c.row(span.head, g), i);
    }
  }
  // Adds the weights of the entries in `bits`, without the rows' scales.
  __device__ __forceinline__ void add(std::uint32_t bits, int first, int group, const RowInfo* rows,
                                      float (&sums)[kHeadsAtOnce]) const {
    if (bits == 0) return;
#pragma unroll
    for (int k = 0; k < kHeadsAtOnce; ++k) {
      const float norm = rows[min(first + k, group - 1)].norm;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 x = __half22float2(as_half2(word_of(v[k], w)));
        if ((bits >> (2 * w) & 1u) != 0) sums[k] += exp2_fast(fmaf(x.x, kLog2E, -norm));
        if ((bits >> (2 * w + 1) & 1u) != 0) sums[k] += exp2_fast(fmaf(x.y, kLog2E, -norm));
      }
    }
  }
};

// Called by one warp: adds the weights that its lanes have summed.
__device__ __forceinline__ void put_sums(const SelectCall& c, int first,
                                         const float (&sums)[kHeadsAtOnce], EmitShared* shared) {
#pragma unroll
  for (int k = 0; k < kHeadsAtOnce; ++k) {
    const float sum = warp_sum(sums[k]);
    if (threadIdx.x % kWarp == 0 && first + k < c.group) {
      shared->alphas[threadIdx.x / kWarp][first + k] = shared->rows[first + k].scale * sum;
    }
  }
}

// Called by one warp: weights of its strips' kept entries, summed in a fixed order.
__device__ __noinline__ void add_weights(const SelectCall& c, const Span& span,
                                         EmitShared* shared) {
  std::uint16_t* const queue = shared->queues[threadIdx.x / kWarp];
  const std::uint32_t* const words = shared->kept_bits + span.warp_words() + threadIdx.x % kWarp;
  __syncwarp();
  int count = 0;
  for (std::int32_t s = 0; s < span.each; ++s) {
    const std::uint32_t own = words[s * kWarp];
    count += queue_sectors((own & 0xffffu) != 0, own >> 16 != 0,
                           static_cast<std::uint16_t>(s * kStripSectors), queue + count);
  }
  __syncwarp();
#pragma unroll 1
  for (int first = 0; first < c.group; first += kHeadsAtOnce) {
    float sums[kHeadsAtOnce] = {};
    visit_sectors(queue, count, span.strip * kStrip, [&](std::int32_t i) {
      const std::uint32_t bits = *byte_of(shared->kept_bits, span, i);
      if (bits == 0) return;
      Batch(c, span, first, i).add(bits, first, c.group, shared->rows, sums);
    });
    put_sums(c, first, sums, shared);
  }
}

// Called by one warp: clears the bits of its strips.
__device__ __forceinline__ void clear_bits(const Span& span, EmitShared* shared) {
  for (std::int32_t s = 0; s < span.each; ++s) {
    shared->kept_bits[span.warp_words() + s * kWarp + threadIdx.x % kWarp] = 0;
  }
  __syncwarp();
}

// Called by one warp with cleared bits: marks the entries of its strips that some query head keeps.
__device__ __forceinline__ void find_reached(const ChainCall& call, const Span& span,
                                             EmitShared* shared) {
  const SelectCall& c = call.call;
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarp;
  std::uint16_t* const queue = shared->queues[threadIdx.x / kWarp];
  const std::int32_t strips = span.warp_strips();
  int count = 0;
  for (std::int32_t s = 0; s < strips; ++s) {
    const std::uint32_t* const maxima =
        call.strip_maxima(span.head * c.group, span.strip + s, lane);
    std::uint32_t reaches = 0;
#pragma unroll 4
    for (int g = 0; g < c.group; ++g) {
      const std::uint32_t word = maxima[g * ChainCall::kPageWords];
      reaches |= __hge2_mask(as_half2(word), twice(shared->rows[g].threshold));
    }
    // Strips with always kept entries are read whole, because maxima leave these out.
    const bool all = span.is_special(span.strip + s);
    count += queue_sectors(all || (reaches & 0xffffu) != 0, all || reaches >> 16 != 0,
                           static_cast<std::uint16_t>(s * kStripSectors), queue + count);
  }
  __syncwarp();
  const bool adds = c.group <= kHeadsAtOnce;
  float sums[kHeadsAtOnce] = {};
  visit_sectors(queue, count, span.strip * kStrip, [&](std::int32_t i) {
    if (i >= span.extent.emit) return;
    const std::uint32_t allowed = allowed8(span.extent, i);
    std::uint32_t bits = allowed & forced8(span.extent, i);
    for (int g = 0; g < c.group; g += kHeadsAtOnce) {
      const Batch batch(c, span, g, i);
#pragma unroll
      for (int k = 0; k < kHeadsAtOnce; ++k) {
        const std::uint16_t threshold = shared->rows[min(g + k, c.group - 1)].threshold;
        bits |= allowed & reaching(batch.v[k], twice(threshold));
      }
      if (adds) batch.add(bits, 0, c.group, shared->rows, sums);
    }
    *byte_of(shared->kept_bits, span, i) = static_cast<std::uint8_t>(bits);
  });
  if (adds) put_sums(c, 0, sums, shared);
}

__device__ void write_alphas(const ChainCall& call, const Span& span, const EmitShared* shared) {
  const auto g = static_cast<std::int32_t>(threadIdx.x);
  const int group = call.call.group;
  if (g >= group) return;
  float sum = 0.0f;
  for (int warp = 0; warp < kWarps; ++warp) sum += shared->alphas[warp][g];
  call.alphas[(static_cast<std::int64_t>(span.head) * call.spans + span.number) * group + g] = sum;
}

__device__ __forceinline__ std::int32_t position_of(const Span& span, std::int32_t i) {
  return span.list != nullptr ? span.list[i] : i;
}

// Writes `count` staged positions to `to`; `result` is thread 0's.
__device__ void write_positions(const Span& span, std::int32_t* to, std::int32_t count,
                                bool is_first, Staged* staged, EmitShared* shared,
                                ChunkResult& result) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const auto page_at = [&](std::int32_t slot) {
    return position_of(span, span.first + staged->entries[slot]) / kPageTokens;
  };
  std::uint32_t pages = 0;
  for (std::int32_t i = thread; i < count; i += kThreads) {
    const std::int32_t position = position_of(span, span.first + staged->entries[1 + i]);
    to[i] = position;
    if ((is_first && i == 0) || page_at(i) != position / kPageTokens) ++pages;
  }
  pages = __reduce_add_sync(kAllLanes, pages);
  if (thread % kWarp == 0 && pages != 0) atomicAdd(&shared->pages, pages);
  // Only thread 0 reads element 0, so it may overwrite it.
  if (thread != 0) return;
  if (is_first) result.first_page = page_at(1);
  result.last_page = page_at(count);
  staged->entries[0] = staged->entries[count];
}

// Called by the last block of a head.
__device__ void finish_head(const ChainCall& call, const Span& span, const GradeCut& cut,
                            EmitShared* shared) {
  const SelectCall& c = call.call;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int64_t slot = static_cast<std::int64_t>(span.head) * call.spans;
  const ChunkResult* const results = call.results + slot;
  if (thread < 2) shared->totals[thread] = 0;
  __syncthreads();
  std::uint32_t sums[2] = {0, 0};
  for (std::int32_t i = thread; i < span.active; i += kThreads) {
    const ChunkResult result = results[i];
    sums[0] += static_cast<std::uint32_t>(result.emitted);
    if (result.emitted == 0) continue;
    sums[1] += static_cast<std::uint32_t>(result.pages);
    std::int32_t before = i - 1;
    while (before >= 0 && results[before].emitted == 0) --before;
    if (before >= 0 && results[before].last_page == result.first_page) --sums[1];
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t sum = __reduce_add_sync(kAllLanes, sums[i]);
    if (thread % kWarp == 0) atomicAdd(shared->totals + i, sum);
  }
  const int lane = thread % kWarp;
  for (int g = thread / kWarp; g < c.group; g += kWarps) {
    double alpha = 0.0;
    for (std::int32_t i = lane; i < span.active; i += kWarp) {
      alpha += static_cast<double>(call.alphas[(slot + i) * c.group + g]);
    }
    for (int step = kWarp / 2; step > 0; step /= 2) {
      alpha += __shfl_xor_sync(kAllLanes, alpha, step);
    }
    const RowInfo info = shared->rows[g];
    alpha = fmin(alpha + static_cast<double>(info.tail), 1.0) * static_cast<double>(info.share);
    if (lane == 0) {
      c.alpha[static_cast<std::int64_t>(span.head) * c.group + g] =
          span.bad ? 0.0f : static_cast<float>(alpha);
    }
  }
  __syncthreads();
  if (thread != 0) return;
  HeadSelection result;
  result.count = static_cast<std::int32_t>(shared->totals[0]);
  result.cut = cut.cut != 0 ? 1 : 0;
  result.pages = static_cast<std::int32_t>(shared->totals[1]);
  result.bad = span.bad ? 1 : 0;
  c.heads[span.head] = result;
}

// Called by one warp: publishes this span's counts and adds up those of the spans before it, a scan
// over blocks in one pass. Spinning on them ends because the device starts blocks in order. A state
// holds both counts above a flag.
__device__ Counts exchange(std::uint64_t* states, std::int32_t span, const Counts& own) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarp;
  auto* const words = static_cast<volatile std::uint64_t*>(states);
  if (lane == 0) {
    words[span] = static_cast<std::uint64_t>(own.above) << 32 | own.equal << 1 | 1u;
  }
  Counts sum;
  for (std::int32_t at = lane; at < span; at += kWarp) {
    std::uint64_t word = 0;
    while (word == 0) word = words[at];
    sum.above += static_cast<std::uint32_t>(word >> 32);
    sum.equal += static_cast<std::uint32_t>(word) >> 1;
  }
  return {__reduce_add_sync(kAllLanes, sum.above), __reduce_add_sync(kAllLanes, sum.equal)};
}

// Writes the span's kept entries. `equal_bits`, laid out as kept_bits, are the entries equal to the
// cut; read only by grades.
template <bool kByGrades>
__device__ __forceinline__ void emit_span(const ChainCall& call, const Span& span,
                                          const GradeCut& cut, const std::uint32_t* equal_bits,
                                          Staged* staged, EmitShared* shared) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  std::uint32_t kept[kMostWarpStrips];
  std::uint32_t equal[kMostWarpStrips];
  // Both counts in one word, equal ones above: a span has at most 2^15 entries.
  std::uint32_t own = 0;
#pragma unroll
  for (int w = 0; w < kMostWarpStrips; ++w) {
    const bool has = w < span.each;
    kept[w] = has ? shared->kept_bits[thread * span.each + w] : 0;
    equal[w] = kByGrades && has ? equal_bits[thread * span.each + w] : 0;
    own += static_cast<std::uint32_t>(__popc(kept[w]) | __popc(equal[w]) << 16);
  }
  std::uint32_t total = 0;
  std::uint32_t within = block_exclusive(own, shared->part, total);
  const Counts counts{total & 0xffffu, total >> 16};
  if (thread < kWarp) {
    std::uint64_t* const states = call.states + static_cast<std::int64_t>(span.head) * call.spans;
    const Counts before = exchange(states, span.number, counts);
    if (thread == 0) shared->before = before;
  }
  // Computed while the first warp waits.
  if (!kByGrades && call.call.group > kHeadsAtOnce) add_weights(call.call, span, shared);
  __syncthreads();
  const Counts before = shared->before;
  // Keeps as many entries equal to the cut as there are ties to keep.
  const auto ties = [&](std::uint32_t equals) {
    return static_cast<std::int32_t>(min(before.equal + equals, cut.ties)) -
           static_cast<std::int32_t>(min(before.equal, cut.ties));
  };
  const std::int32_t emitted = static_cast<std::int32_t>(counts.above) + ties(counts.equal);
  const std::int64_t at = static_cast<std::int64_t>(before.above) + min(before.equal, cut.ties);
  std::int32_t slots[kMostWarpStrips];
#pragma unroll
  for (int w = 0; w < kMostWarpStrips; ++w) {
    slots[w] = static_cast<std::int32_t>(within & 0xffffu);
    const auto above = static_cast<std::uint32_t>(__popc(kept[w]));
    if (kByGrades) {
      const std::uint32_t equals = within >> 16;
      const auto here = static_cast<std::uint32_t>(__popc(equal[w]));
      const std::int32_t first = ties(equals);
      kept[w] |= first_bits(equal[w], ties(equals + here) - first);
      slots[w] += first;
      within += here << 16;
    }
    within += above;
  }
  if (kByGrades) {
    for (int w = 0; w < span.each; ++w) shared->kept_bits[thread * span.each + w] = kept[w];
    add_weights(call.call, span, shared);
  }
  ChunkResult result;
  result.emitted = emitted;
  for (std::int32_t base = 0; base < emitted; base += kStaged) {
#pragma unroll
    for (int w = 0; w < kMostWarpStrips; ++w) {
      std::int32_t slot = slots[w] - base;
      if (slot <= -32) continue;
      for (std::uint32_t rest = kept[w]; rest != 0 && slot < kStaged; rest &= rest - 1, ++slot) {
        if (slot < 0) continue;
        staged->entries[1 + slot] = static_cast<std::uint16_t>((thread * span.each + w) * 32 +
                                                               __ffs(static_cast<int>(rest)) - 1);
      }
    }
    __syncthreads();
    const std::int32_t count = min(emitted - base, kStaged);
    write_positions(span, call.call.positions + span.head * call.call.capacity + at + base, count,
                    base == 0, staged, shared, result);
    __syncthreads();
  }
  __syncthreads();
  write_alphas(call, span, shared);
  if (thread != 0) return;
  result.pages = static_cast<std::int32_t>(shared->pages);
  call.results[static_cast<std::int64_t>(span.head) * call.spans + span.number] = result;
}

struct Shared {
  EmitShared common;
  Staged staged;
  std::uint32_t equal_bits[kMostSpan / 32];  // by grades: those equal to the cut
};

// Compares the eight entries from i on with the cut: bits of those above and of those equal.
__device__ void compare_grades(const ChainCall& call, const Span& span, const GradeCut& cut,
                               std::int32_t i, const RowInfo* rows, std::uint32_t& above,
                               std::uint32_t& equal) {
  const SelectCall& c = call.call;
  above = 0;
  equal = 0;
  if (i >= span.extent.emit) return;
  if (call.grades == nullptr) {
    const uint4 v = load8(c.row(span.head, 0), i);
    std::uint32_t others = selectable8(span.extent, i);
    if (c.is_top_p) others &= reaching(v, twice(rows[0].threshold));
    LogitCut(cut).compare8(v, others, above, equal);
  } else {
    const auto* const from = reinterpret_cast<const uint4*>(
        call.grades + static_cast<std::int64_t>(span.head) * call.grade_chunks * kGradeChunk + i);
    const uint4 low = from[0];
    const uint4 high = from[1];
    const std::uint32_t grades[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    compare8(cut, grades, above, equal);
  }
  above |= allowed8(span.extent, i) & forced8(span.extent, i);
}

__device__ void find_heaviest(const ChainCall& call, const Span& span, const GradeCut& cut,
                              Shared* shared) {
  EmitShared* const common = &shared->common;
  const std::int32_t last = span.first + call.span_entries();
  for (std::int32_t i = span.first + static_cast<std::int32_t>(threadIdx.x) * 8; i < last;
       i += kThreads * 8) {
    std::uint32_t above;
    std::uint32_t equal;
    compare_grades(call, span, cut, i, common->rows, above, equal);
    *byte_of(common->kept_bits, span, i) = static_cast<std::uint8_t>(above);
    *byte_of(shared->equal_bits, span, i) = static_cast<std::uint8_t>(equal);
  }
}

template <bool kByGrades>
__global__ void __launch_bounds__(kThreads, 4) emit(const __grid_constant__ ChainCall call) {
  __shared__ Shared memory;
  EmitShared* const shared = &memory.common;
  if (threadIdx.x == 0) shared->pages = 0;
  wait_for_kernel_before();
  allow_next_kernel();
  const std::int32_t head = static_cast<std::int32_t>(blockIdx.x) / call.spans;
  if (call.shortlist_capacity > 0 && call.settled[head] != 0) return;
  const Span span = span_of(call, shared);
  if (span.number >= span.active) return;
  GradeCut cut;
  if constexpr (kByGrades) {
    cut = call.cuts[head];
    find_heaviest(call, span, cut, &memory);
  } else {
    clear_bits(span, shared);
    find_reached(call, span, shared);
  }
  __syncthreads();
  emit_span<kByGrades>(call, span, cut, memory.equal_bits, &memory.staged, shared);
  if (is_last_of(call.done + head, span.active)) finish_head(call, span, cut, shared);
}

}  // namespace

void run_emit(const ChainCall& call, const Launch& launch) {
  const std::int64_t blocks = std::int64_t{call.call.head_count} * call.spans;
  launch_early("emit", call.call.has_grades ? emit<true> : emit<false>,
               dim3(static_cast<unsigned>(blocks)), kThreads, 0, launch, call);
}

}  // namespace sluice::cuda
