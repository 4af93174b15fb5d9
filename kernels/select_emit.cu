// Writes the kept positions in order. A block takes a chunk of a KV head's entries, reads again
// what may be kept of it, and finds where that goes from the chunks before it.
#include "kernels/select_large.cuh"
#include "kernels/select_look_back.cuh"
#include "kernels/select_sectors.cuh"

namespace sluice::cuda {
namespace {

constexpr int kHeadsAtOnce = 4;
static_assert(kChunk == kThreads * 32);

struct Shared {
  RowInfo rows[kMostGroup];
  // Bit e of word w is entry 32 w + e of the chunk, and belongs to thread w.
  std::uint32_t kept_bits[kThreads];
  std::uint32_t equal_bits[kThreads];
  std::uint16_t queues[kWarps][kStripSectors];
  std::uint32_t part[kWarp];
  Counts before;
  std::uint32_t pages;
  std::uint32_t totals[3];  // emitted, wanted, pages
  float alphas[kWarps][kMostGroup];
  std::uint16_t kept[kChunk];
};

struct Chunk {
  std::int32_t head;
  std::int32_t chunk;
  std::int32_t first;   // its first entry
  std::int32_t strip;   // of this warp, counted in the row
  std::int32_t active;  // chunks of this head
  bool bad;
  Extent extent;
  const std::int32_t* list;  // [emit] or null
};

__device__ Chunk chunk_of(const LargeCall& call, Shared* shared) {
  const auto block = static_cast<std::int32_t>(blockIdx.x);
  Chunk chunk;
  chunk.head = block / call.chunks;
  chunk.chunk = block % call.chunks;
  chunk.first = chunk.chunk * kChunk;
  chunk.strip = chunk.chunk * kWarps + static_cast<std::int32_t>(threadIdx.x) / kWarp;
  chunk.list = call.call.head_list(chunk.head);
  chunk.extent = call.extents[chunk.head];
  chunk.bad = load_infos(call, chunk.head, shared->rows);
  if (chunk.bad) chunk.extent.emit = 0;
  chunk.active = max(1, (chunk.extent.emit + kChunk - 1) / kChunk);
  return chunk;
}

__device__ std::uint8_t* byte_of(std::uint32_t* bits, const Chunk& chunk, std::int32_t i) {
  return reinterpret_cast<std::uint8_t*>(bits) + (i - chunk.first) / 8;
}

// Logits of some query heads for eight entries. Past the last head it comes again.
struct Batch {
  uint4 v[kHeadsAtOnce];

  __device__ __forceinline__ Batch(const SelectCall& c, const Chunk& chunk, int first,
                                   std::int32_t i) {
#pragma unroll
    for (int k = 0; k < kHeadsAtOnce; ++k) {
      const int g = min(first + k, c.group - 1);
      v[k] = load8_raw(c, c.row(chunk.head, g), chunk.extent.total, i);
    }
  }
  // Adds the weights of the entries in `bits` but for the rows' scales.
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

// By one warp: the weights that its lanes have summed.
__device__ __forceinline__ void put_sums(const SelectCall& c, int first,
                                         const float (&sums)[kHeadsAtOnce], Shared* shared) {
#pragma unroll
  for (int k = 0; k < kHeadsAtOnce; ++k) {
    const float sum = warp_sum(sums[k]);
    if (threadIdx.x % kWarp == 0 && first + k < c.group) {
      shared->alphas[threadIdx.x / kWarp][first + k] = shared->rows[first + k].scale * sum;
    }
  }
}

// By one warp: weights of what is kept of its strip, in an order that depends on nothing else.
__device__ __noinline__ void add_weights(const SelectCall& c, const Chunk& chunk, Shared* shared) {
  const std::uint32_t own = shared->kept_bits[threadIdx.x];
  std::uint16_t* const queue = shared->queues[threadIdx.x / kWarp];
  __syncwarp();
  const int count = queue_sectors((own & 0xffffu) != 0, own >> 16 != 0, 0, queue);
  __syncwarp();
#pragma unroll 1
  for (int first = 0; first < c.group; first += kHeadsAtOnce) {
    float sums[kHeadsAtOnce] = {};
    visit_sectors(queue, count, chunk.strip * kStrip, [&](std::int32_t i) {
      const std::uint32_t bits = *byte_of(shared->kept_bits, chunk, i);
      if (bits == 0) return;
      Batch(c, chunk, first, i).add(bits, first, c.group, shared->rows, sums);
    });
    put_sums(c, first, sums, shared);
  }
}

// By one warp: the entries of its strip that some query head keeps.
__device__ void find_reached(const LargeCall& call, const Chunk& chunk, Shared* shared) {
  const SelectCall& c = call.call;
  const auto warp = static_cast<std::int32_t>(threadIdx.x) / kWarp;
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarp;
  const std::int32_t first = chunk.strip * kStrip;
  shared->kept_bits[threadIdx.x] = 0;
  if (first >= chunk.extent.emit) {
    if (lane == 0) {
      for (int g = 0; g < c.group; ++g) shared->alphas[warp][g] = 0.0f;
    }
    return;
  }
  const std::uint32_t* const maxima = call.strip_maxima(chunk.head * c.group, chunk.strip, lane);
  std::uint32_t reaches = 0;
#pragma unroll 4
  for (int g = 0; g < c.group; ++g) {
    const std::uint32_t word = maxima[g * LargeCall::kPageWords];
    reaches |= __hge2_mask(as_half2(word), twice(shared->rows[g].threshold));
  }
  // The maxima leave out what is always kept.
  const bool all = first < chunk.extent.low || first + kStrip > chunk.extent.high;
  std::uint16_t* const queue = shared->queues[warp];
  const int count =
      queue_sectors(all || (reaches & 0xffffu) != 0, all || reaches >> 16 != 0, 0, queue);
  __syncwarp();
  const bool adds = c.group <= kHeadsAtOnce;
  float sums[kHeadsAtOnce] = {};
  visit_sectors(queue, count, first, [&](std::int32_t i) {
    if (i >= chunk.extent.emit) return;
    const std::uint32_t allowed = allowed8(c, chunk.list, chunk.extent, i);
    std::uint32_t bits = allowed & free8(chunk.extent, i);
    for (int g = 0; g < c.group; g += kHeadsAtOnce) {
      const Batch batch(c, chunk, g, i);
#pragma unroll
      for (int k = 0; k < kHeadsAtOnce; ++k) {
        const std::uint16_t threshold = shared->rows[min(g + k, c.group - 1)].threshold;
        bits |= allowed & reaching(batch.v[k], twice(threshold));
      }
      if (adds) batch.add(bits, 0, c.group, shared->rows, sums);
    }
    *byte_of(shared->kept_bits, chunk, i) = static_cast<std::uint8_t>(bits);
  });
  if (adds) put_sums(c, 0, sums, shared);
}

// Which of the eight entries from i on are above the cut, and which equal it.
__device__ void compare_keys(const LargeCall& call, const Chunk& chunk, const KeyCut& cut,
                             std::int32_t i, const RowInfo* rows, std::uint32_t& above,
                             std::uint32_t& equal) {
  const SelectCall& c = call.call;
  above = 0;
  equal = 0;
  if (i >= chunk.extent.emit) return;
  const std::uint32_t allowed = allowed8(c, chunk.list, chunk.extent, i);
  const std::uint32_t forced = allowed & free8(chunk.extent, i);
  if (call.keys == nullptr) {
    const uint4 v = load8_raw(c, c.row(chunk.head, 0), chunk.extent.total, i);
    std::uint32_t others = allowed & ~forced;
    if (c.is_top_p) others &= reaching(v, twice(rows[0].threshold));
    LogitCut(cut).compare8(v, others, above, equal);
  } else {
    const auto* const from = reinterpret_cast<const uint4*>(
        call.keys + static_cast<std::int64_t>(chunk.head) * call.key_chunks * kKeyChunk + i);
    const uint4 low = from[0];
    const uint4 high = from[1];
    const std::uint32_t keys[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    compare8(cut, keys, above, equal);
  }
  above |= forced;
}

__device__ void find_heaviest(const LargeCall& call, const Chunk& chunk, const KeyCut& cut,
                              Shared* shared) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const std::int32_t i =
        chunk.first + (j * kThreads + static_cast<std::int32_t>(threadIdx.x)) * 8;
    std::uint32_t above;
    std::uint32_t equal;
    compare_keys(call, chunk, cut, i, shared->rows, above, equal);
    *byte_of(shared->kept_bits, chunk, i) = static_cast<std::uint8_t>(above);
    *byte_of(shared->equal_bits, chunk, i) = static_cast<std::uint8_t>(equal);
  }
}

__device__ void write_alphas(const LargeCall& call, const Chunk& chunk, const Shared* shared) {
  const auto g = static_cast<std::int32_t>(threadIdx.x);
  const int group = call.call.group;
  if (g >= group) return;
  float sum = 0.0f;
  for (int warp = 0; warp < kWarps; ++warp) sum += shared->alphas[warp][g];
  call.alphas[(static_cast<std::int64_t>(chunk.head) * call.chunks + chunk.chunk) * group + g] =
      sum;
}

__device__ std::int32_t position_of(const Chunk& chunk, std::int32_t i) {
  return chunk.list != nullptr ? chunk.list[i] : i;
}

// Writes the first `emitted` kept positions of the chunk to `at`.
__device__ void write_positions(const LargeCall& call, const Chunk& chunk, std::int64_t at,
                                std::int32_t emitted, Shared* shared) {
  const SelectCall& c = call.call;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  std::int32_t* const to = c.positions + chunk.head * c.capacity + at;
  std::uint32_t pages = 0;
  for (std::int32_t i = thread; i < emitted; i += kThreads) {
    const std::int32_t position = position_of(chunk, chunk.first + shared->kept[i]);
    to[i] = position;
    if (i == 0 || position_of(chunk, chunk.first + shared->kept[i - 1]) / kPageTokens !=
                      position / kPageTokens) {
      ++pages;
    }
  }
  pages = __reduce_add_sync(kAllLanes, pages);
  if (thread % kWarp == 0 && pages != 0) atomicAdd(&shared->pages, pages);
}

__device__ void write_result(const LargeCall& call, const Chunk& chunk, std::int32_t wanted,
                             std::int32_t emitted, const Shared* shared) {
  ChunkResult result;
  result.wanted = wanted;
  result.emitted = emitted;
  result.pages = static_cast<std::int32_t>(shared->pages);
  if (emitted > 0) {
    result.first_page = position_of(chunk, chunk.first + shared->kept[0]) / kPageTokens;
    result.last_page = position_of(chunk, chunk.first + shared->kept[emitted - 1]) / kPageTokens;
  }
  call.results[static_cast<std::int64_t>(chunk.head) * call.chunks + chunk.chunk] = result;
}

// By the last block of a head.
__device__ void finish_head(const LargeCall& call, const Chunk& chunk, const KeyCut& cut,
                            Shared* shared) {
  const SelectCall& c = call.call;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int64_t slot = static_cast<std::int64_t>(chunk.head) * call.chunks;
  const ChunkResult* const results = call.results + slot;
  if (thread < 3) shared->totals[thread] = 0;
  __syncthreads();
  std::uint32_t sums[3] = {0, 0, 0};
  for (std::int32_t i = thread; i < chunk.active; i += kThreads) {
    const ChunkResult result = results[i];
    sums[0] += static_cast<std::uint32_t>(result.emitted);
    sums[1] += static_cast<std::uint32_t>(result.wanted);
    if (result.emitted == 0) continue;
    sums[2] += static_cast<std::uint32_t>(result.pages);
    std::int32_t before = i - 1;
    while (before >= 0 && results[before].emitted == 0) --before;
    if (before >= 0 && results[before].last_page == result.first_page) --sums[2];
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const std::uint32_t sum = __reduce_add_sync(kAllLanes, sums[i]);
    if (thread % kWarp == 0) atomicAdd(shared->totals + i, sum);
  }
  const int lane = thread % kWarp;
  for (int g = thread / kWarp; g < c.group; g += kWarps) {
    double alpha = 0.0;
    for (std::int32_t i = lane; i < chunk.active; i += kWarp) {
      alpha += static_cast<double>(call.alphas[(slot + i) * c.group + g]);
    }
    for (int step = kWarp / 2; step > 0; step /= 2) {
      alpha += __shfl_xor_sync(kAllLanes, alpha, step);
    }
    const RowInfo info = shared->rows[g];
    alpha = fmin(alpha + static_cast<double>(info.tail), 1.0) * static_cast<double>(info.share);
    if (lane == 0) {
      c.alpha[static_cast<std::int64_t>(chunk.head) * c.group + g] =
          chunk.bad ? 0.0f : static_cast<float>(alpha);
    }
  }
  __syncthreads();
  if (thread != 0) return;
  HeadSelection result;
  result.count = static_cast<std::int32_t>(shared->totals[0]);
  result.cut = cut.cut != 0 || shared->totals[1] > shared->totals[0] ? 1 : 0;
  result.pages = static_cast<std::int32_t>(shared->totals[2]);
  result.bad = chunk.bad ? 1 : 0;
  c.heads[chunk.head] = result;
}

// Writes what the chunk keeps.
template <bool kByKeys>
__device__ void emit_chunk(const LargeCall& call, const Chunk& chunk, const KeyCut& cut,
                           Shared* shared) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  std::uint32_t kept = shared->kept_bits[thread];
  const std::uint32_t equal = kByKeys ? shared->equal_bits[thread] : 0;
  // Both counts in one word, equal ones above: a chunk has 2^13 entries.
  std::uint32_t total = 0;
  const auto own = static_cast<std::uint32_t>(__popc(kept) | __popc(equal) << 16);
  const std::uint32_t within = block_exclusive(own, shared->part, total);
  const Counts counts{total & 0xffffu, total >> 16};
  if (thread < kWarp) {
    std::uint64_t* const states = call.states + static_cast<std::int64_t>(chunk.head) * call.chunks;
    const Counts before = exchange(states, chunk.chunk, counts);
    if (thread == 0) shared->before = before;
  }
  // Meanwhile, for hardly ever is something left out after all.
  if (!kByKeys && call.call.group > kHeadsAtOnce) add_weights(call.call, chunk, shared);
  __syncthreads();
  const Counts before = shared->before;
  // Of those equal to the cut, as many as it has ties.
  const auto ties = [&](std::uint32_t equals) {
    return static_cast<std::int32_t>(min(before.equal + equals, cut.ties)) -
           static_cast<std::int32_t>(min(before.equal, cut.ties));
  };
  const std::int32_t wanted = static_cast<std::int32_t>(counts.above) + ties(counts.equal);
  const std::int64_t at = static_cast<std::int64_t>(before.above) + min(before.equal, cut.ties);
  const auto emitted = static_cast<std::int32_t>(
      min(static_cast<std::int64_t>(wanted), max(std::int64_t{0}, call.call.capacity - at)));
  auto slot = static_cast<std::int32_t>(within & 0xffffu);
  if (kByKeys) {
    const std::uint32_t equals = within >> 16;
    const std::int32_t first = ties(equals);
    kept |= first_bits(equal, ties(equals + static_cast<std::uint32_t>(__popc(equal))) - first);
    slot += first;
  }
  kept = first_bits(kept, emitted - slot);
  for (std::uint32_t rest = kept; rest != 0; rest &= rest - 1) {
    shared->kept[slot++] =
        static_cast<std::uint16_t>(thread * 32 + __ffs(static_cast<int>(rest)) - 1);
  }
  if (kByKeys || emitted < wanted) {
    shared->kept_bits[thread] = kept;
    add_weights(call.call, chunk, shared);
  }
  __syncthreads();
  write_positions(call, chunk, at, emitted, shared);
  write_alphas(call, chunk, shared);
  __syncthreads();
  if (thread == 0) write_result(call, chunk, wanted, emitted, shared);
}

template <bool kByKeys>
__global__ void __launch_bounds__(kThreads, 4) emit(const __grid_constant__ LargeCall call) {
  __shared__ Shared shared;
  if (threadIdx.x == 0) shared.pages = 0;
  wait_for_kernel_before();
  allow_next_kernel();
  const std::int32_t head = static_cast<std::int32_t>(blockIdx.x) / call.chunks;
  if (call.list_capacity > 0 && call.settled[head] != 0) return;
  const Chunk chunk = chunk_of(call, &shared);
  if (chunk.chunk >= chunk.active) return;
  KeyCut cut;
  if constexpr (kByKeys) {
    cut = call.cuts[head];
    find_heaviest(call, chunk, cut, &shared);
  } else {
    find_reached(call, chunk, &shared);
  }
  __syncthreads();
  emit_chunk<kByKeys>(call, chunk, cut, &shared);
  if (is_last_of(call.done + head, chunk.active)) finish_head(call, chunk, cut, &shared);
}

}  // namespace

void run_emit(const LargeCall& call, const Launch& launch) {
  const std::int64_t blocks = std::int64_t{call.call.kv_heads} * call.chunks;
  launch_early("emit", call.has_keys ? emit<true> : emit<false>,
               dim3(static_cast<unsigned>(blocks)), kThreads, 0, launch, call);
}

}  // namespace sluice::cuda
