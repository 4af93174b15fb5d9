// Writes the kept positions in order. A block takes the next chunk of a KV head's entries and finds
// what it keeps; where that goes follows from the chunks before it, whose counts the block looks up
// while they come in.
// Source of the look-back: Merrill and Garland 2016, "Single-pass parallel prefix scan with
// decoupled look-back".
#include "kernels/error.h"
#include "kernels/select_large.cuh"

namespace sluice::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMostVectors = 4;  // of 8 entries, per thread and chunk
constexpr int kHeadsAtOnce = 4;

__host__ __device__ constexpr std::int32_t chunk_size(int vectors) {
  return kThreads * 8 * vectors;
}

// Kept entries and those equal to the cut. While blocks exchange them, in one word with a flag.
struct Counts {
  std::uint32_t above = 0;
  std::uint32_t equal = 0;

  static constexpr std::uint64_t kOwn = std::uint64_t{1} << 62;  // of this chunk
  static constexpr std::uint64_t kAll = std::uint64_t{1} << 63;  // and of all before it

  __device__ std::uint64_t word(std::uint64_t flag) const {
    return flag | static_cast<std::uint64_t>(equal) << 31 | above;
  }
  __device__ static Counts of(std::uint64_t word) {
    return {static_cast<std::uint32_t>(word) & 0x7fffffffu,
            static_cast<std::uint32_t>(word >> 31) & 0x7fffffffu};
  }
};

struct Shared {
  RowInfo rows[kMostGroup];
  std::uint32_t part[kWarp];
  std::uint32_t is_last;
  Counts before;
  std::uint32_t pages;
  std::uint32_t totals[3];  // emitted, wanted, pages
  float alphas[kMostGroup];
  std::uint16_t kept[kThreads * 8 * kMostVectors];
};

struct Chunk {
  std::int32_t head;
  std::int32_t chunk;
  std::int32_t first;   // its first entry
  std::int32_t active;  // chunks of this head
  bool bad;
  Extent extent;
  const RowInfo* rows;       // [group]
  const std::int32_t* list;  // [emit] or null
};

// What is known of a chunk from the call alone.
template <int kVectors>
__device__ Chunk chunk_of(const LargeCall& call, Shared* shared) {
  const SelectCall& c = call.call;
  const auto block = static_cast<std::int32_t>(blockIdx.x);
  Chunk chunk;
  // The last heads were read last, and may still be in the cache.
  chunk.head = c.kv_heads - 1 - block / call.chunks;
  chunk.chunk = block % call.chunks;
  chunk.first = chunk.chunk * chunk_size(kVectors);
  chunk.rows = shared->rows;
  chunk.list = c.head_list(chunk.head);
  if (chunk.list == nullptr) chunk.extent = extent_of(c, chunk.head);
  return chunk;
}

// And what the kernels before have found out.
template <int kVectors>
__device__ void complete(const LargeCall& call, Chunk& chunk, Shared* shared) {
  const SelectCall& c = call.call;
  if (chunk.list != nullptr) chunk.extent = call.extents[chunk.head];
  bool bad = false;
  if (threadIdx.x < static_cast<unsigned>(c.group)) {
    const RowInfo row = call.rows[static_cast<std::int64_t>(chunk.head) * c.group + threadIdx.x];
    shared->rows[threadIdx.x] = row;
    bad = row.bad != 0;
  }
  chunk.bad = __syncthreads_or(bad ? 1 : 0) != 0;
  if (chunk.bad) chunk.extent.emit = 0;
  const std::int32_t size = chunk_size(kVectors);
  chunk.active = max(1, (chunk.extent.emit + size - 1) / size);
}

// Bits per vector of this thread: what is kept, and what equals the cut.
template <int kVectors>
struct Bits {
  std::uint32_t above[kVectors] = {};
  std::uint32_t equal[kVectors] = {};
};

// Entry of this thread's vector j.
__device__ std::int32_t entry_of(const Chunk& chunk, int j) {
  return chunk.first + (j * kThreads + static_cast<std::int32_t>(threadIdx.x)) * 8;
}

// Logits of some query heads for some of a thread's vectors, in a chunk none of whose entries is
// anything special. They are loaded before the first is used.
template <int kVectors>
struct Batch {
  static constexpr int kStep = kVectors < 2 ? 1 : 2;

  uint4 v[kStep][kHeadsAtOnce];

  // Heads from `first` on, vectors from `j` on. Past the last head it comes again.
  __device__ __forceinline__ void load(const SelectCall& c, const Chunk& chunk, int first, int j) {
    const __half* const rows = c.row(chunk.head, 0);
#pragma unroll
    for (int i = 0; i < kStep * kHeadsAtOnce; ++i) {
      const int g = min(first + i % kHeadsAtOnce, c.group - 1);
      v[i / kHeadsAtOnce][i % kHeadsAtOnce] = *reinterpret_cast<const uint4*>(
          rows + g * c.stride + entry_of(chunk, j + i / kHeadsAtOnce));
    }
  }
  __device__ __forceinline__ void find(const SelectCall& c, const Chunk& chunk, int first, int j,
                                       Bits<kVectors>& bits) const {
#pragma unroll
    for (int i = 0; i < kStep * kHeadsAtOnce; ++i) {
      const int g = min(first + i % kHeadsAtOnce, c.group - 1);
      bits.above[j + i / kHeadsAtOnce] |=
          reaching(v[i / kHeadsAtOnce][i % kHeadsAtOnce], twice(chunk.rows[g].threshold));
    }
  }
};

// The kept entries of such a chunk; `batch` has the first vectors of the first heads.
template <int kVectors>
__device__ void find_reached(const SelectCall& c, const Chunk& chunk, Batch<kVectors>& batch,
                             Bits<kVectors>& bits) {
  for (int first = 0; first < c.group; first += kHeadsAtOnce) {
#pragma unroll
    for (int j = 0; j < kVectors; j += Batch<kVectors>::kStep) {
      if (first > 0 || j > 0) batch.load(c, chunk, first, j);
      batch.find(c, chunk, first, j, bits);
    }
  }
}

// Which of the eight entries from i on are kept, and which equal the cut.
template <bool kByKeys>
__device__ void find_kept(const LargeCall& call, const Chunk& chunk, const KeyCut& cut,
                          std::int32_t i, std::uint32_t& above, std::uint32_t& equal) {
  const SelectCall& c = call.call;
  above = 0;
  equal = 0;
  if (i >= chunk.extent.emit) return;
  const auto load = [&](int g) {
    return load8_raw(c, c.row(chunk.head, g), chunk.extent.total, i);
  };
  const std::uint32_t allowed = allowed8(c, chunk.list, chunk.extent, i);
  const std::uint32_t forced = allowed & free8(chunk.extent, i);
  if constexpr (!kByKeys) {
    above = (reached8(c.group, chunk.rows, load) & allowed) | forced;
  } else if (call.keys == nullptr) {
    const uint4 v = load(0);
    std::uint32_t others = allowed & ~forced;
    if (c.is_top_p) others &= reaching(v, twice(chunk.rows[0].threshold));
    LogitCut(cut).compare8(v, others, above, equal);
    above |= forced;
  } else {
    const auto* const from = reinterpret_cast<const uint4*>(
        call.keys + static_cast<std::int64_t>(chunk.head) * call.key_chunks * kKeyChunk + i);
    const uint4 low = from[0];
    const uint4 high = from[1];
    const std::uint32_t keys[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    compare8(cut, keys, above, equal);
    above |= forced;
  }
}

// Whether all entries of the chunk are there, and none is left out or always kept.
template <int kVectors>
__device__ bool is_plain(const SelectCall& c, const Chunk& chunk) {
  return c.is_aligned && c.eligible == nullptr && chunk.list == nullptr &&
         chunk.first >= chunk.extent.low &&
         chunk.first + chunk_size(kVectors) <= min(chunk.extent.high, chunk.extent.emit);
}

// By one warp: the counts of all chunks before this one.
__device__ Counts look_back(const std::uint64_t* states, std::int32_t chunk) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  Counts sum;
  for (std::int32_t last = chunk - 1; last >= 0; last -= kWarp) {
    const std::int32_t at = last - lane;
    std::uint64_t word = Counts::kAll;
    do {
      if (at >= 0) word = *static_cast<const volatile std::uint64_t*>(states + at);
    } while (__any_sync(kAllLanes, word == 0));
    const unsigned whole = __ballot_sync(kAllLanes, (word & Counts::kAll) != 0);
    const int nearest = whole == 0 ? kWarp : __ffs(static_cast<int>(whole)) - 1;
    Counts own = lane <= nearest ? Counts::of(word) : Counts();
    sum.above += __reduce_add_sync(kAllLanes, own.above);
    sum.equal += __reduce_add_sync(kAllLanes, own.equal);
    if (whole != 0) break;
  }
  return sum;
}

// By one warp: publishes this chunk's counts and returns those before it.
__device__ Counts exchange(std::uint64_t* states, std::int32_t chunk, const Counts& own) {
  const bool is_first_lane = threadIdx.x % kWarp == 0;
  auto* const state = static_cast<volatile std::uint64_t*>(states + chunk);
  if (is_first_lane && chunk > 0) *state = own.word(Counts::kOwn);
  const Counts before = look_back(states, chunk);
  if (is_first_lane) {
    *state = Counts{before.above + own.above, before.equal + own.equal}.word(Counts::kAll);
  }
  return before;
}

__device__ std::int32_t position_of(const Chunk& chunk, std::int32_t i) {
  return chunk.list != nullptr ? chunk.list[i] : i;
}

// Weights of the chunk's emitted entries, summed in an order that depends on nothing else.
__device__ void sum_alphas(const LargeCall& call, const Chunk& chunk, std::int32_t emitted,
                           Shared* shared) {
  const SelectCall& c = call.call;
  const auto warp = static_cast<int>(threadIdx.x) / kWarp;
  const auto lane = static_cast<int>(threadIdx.x) % kWarp;
  const int parts = max(1, kWarps / c.group);
  for (int q = warp; q < c.group * parts; q += kWarps) {
    const int g = q % c.group;
    const __half* const row = c.row(chunk.head, g) + chunk.first;
    const RowInfo info = chunk.rows[g];
    float sum = 0.0f;
#pragma unroll 4
    for (std::int32_t i = q / c.group * kWarp + lane; i < emitted; i += parts * kWarp) {
      sum += weight_of(row[shared->kept[i]], info);
    }
    sum = warp_sum(sum);
    if (lane == 0) shared->alphas[q] = sum;
  }
  __syncthreads();
  const auto g = static_cast<int>(threadIdx.x);
  if (g >= c.group) return;
  float sum = 0.0f;
  for (int part = 0; part < parts; ++part) sum += shared->alphas[part * c.group + g];
  call.alphas[(static_cast<std::int64_t>(chunk.head) * call.chunks + chunk.chunk) * c.group + g] =
      sum;
}

// Writes the first `emitted` kept positions of the chunk to `at`, and what became of it.
__device__ void write_chunk(const LargeCall& call, const Chunk& chunk, std::int64_t at,
                            std::int32_t wanted, std::int32_t emitted, Shared* shared) {
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
  sum_alphas(call, chunk, emitted, shared);  // has a barrier
  if (thread != 0) return;
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
    const RowInfo info = chunk.rows[g];
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

// For every vector of this thread, the counts of all entries before it in the chunk; `total` of
// the whole chunk. Both counts are in one word, equal ones above: a chunk has 2^13 entries.
template <int kVectors>
__device__ void scan_counts(const Bits<kVectors>& bits, std::uint32_t (&before)[kVectors],
                            std::uint32_t& total, Shared* shared) {
  static_assert(kVectors * kWarps <= kWarp);
  const auto lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const auto own =
        static_cast<std::uint32_t>(__popc(bits.above[j]) | __popc(bits.equal[j]) << 16);
    const std::uint32_t inclusive = warp_inclusive(own);
    before[j] = inclusive - own;
    if (lane == kWarp - 1) shared->part[j * kWarps + warp] = inclusive;
  }
  __syncthreads();
  const std::uint32_t part = lane < kVectors * kWarps ? shared->part[lane] : 0;
  const std::uint32_t scanned = warp_inclusive(part);
  total = __shfl_sync(kAllLanes, scanned, kWarp - 1);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    before[j] += __shfl_sync(kAllLanes, scanned - part, j * kWarps + warp);
  }
}

// Writes what the chunk keeps.
template <bool kByKeys, int kVectors>
__device__ void emit_chunk(const LargeCall& call, const Chunk& chunk, const KeyCut& cut,
                           const Bits<kVectors>& bits, Shared* shared) {
  const SelectCall& c = call.call;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  std::uint32_t within[kVectors];
  std::uint32_t total = 0;
  scan_counts<kVectors>(bits, within, total, shared);
  const Counts counts{total & 0xffffu, total >> 16};
  if (thread < kWarp) {
    std::uint64_t* const states = call.states + static_cast<std::int64_t>(chunk.head) * call.chunks;
    const Counts before = exchange(states, chunk.chunk, counts);
    if (thread == 0) shared->before = before;
  }
  __syncthreads();
  const Counts before = shared->before;
  // Of those equal to the cut, as many as it has ties.
  const auto ties = [&](std::uint32_t equals) {
    return static_cast<std::int32_t>(min(before.equal + equals, cut.ties)) -
           static_cast<std::int32_t>(min(before.equal, cut.ties));
  };
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    std::uint32_t kept = bits.above[j];
    auto slot = static_cast<std::int32_t>(within[j] & 0xffffu);
    if (kByKeys) {
      const std::uint32_t equals = within[j] >> 16;
      const std::int32_t first = ties(equals);
      const std::int32_t last = ties(equals + static_cast<std::uint32_t>(__popc(bits.equal[j])));
      kept |= first_bits(bits.equal[j], last - first);
      slot += first;
    }
    for (; kept != 0; kept &= kept - 1) {
      shared->kept[slot++] = static_cast<std::uint16_t>((j * kThreads + thread) * 8 +
                                                        __ffs(static_cast<int>(kept)) - 1);
    }
  }
  __syncthreads();
  const std::int32_t wanted = static_cast<std::int32_t>(counts.above) + ties(counts.equal);
  const std::int64_t at = static_cast<std::int64_t>(before.above) + min(before.equal, cut.ties);
  const auto emitted = static_cast<std::int32_t>(
      min(static_cast<std::int64_t>(wanted), max(std::int64_t{0}, c.capacity - at)));
  write_chunk(call, chunk, at, wanted, emitted, shared);
}

// Blocks wait for those before them: the device starts blocks in their order.
template <bool kByKeys, int kVectors>
__global__ void __launch_bounds__(kThreads, 4) emit(const __grid_constant__ LargeCall call) {
  __shared__ Shared shared;
  const SelectCall& c = call.call;
  if (threadIdx.x == 0) shared.pages = 0;
  Chunk chunk = chunk_of<kVectors>(call, &shared);
  // The logits are there before the thresholds are.
  const bool plain = !kByKeys && is_plain<kVectors>(c, chunk);
  Batch<kVectors> batch;
  if (plain) batch.load(c, chunk, 0, 0);
  wait_for_kernel_before();
  complete<kVectors>(call, chunk, &shared);
  if (chunk.chunk >= chunk.active) return;
  KeyCut cut;
  if constexpr (kByKeys) cut = call.cuts[chunk.head];
  Bits<kVectors> bits;
  if (plain && !chunk.bad) {
    find_reached<kVectors>(c, chunk, batch, bits);
  } else {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      find_kept<kByKeys>(call, chunk, cut, entry_of(chunk, j), bits.above[j], bits.equal[j]);
    }
  }
  emit_chunk<kByKeys, kVectors>(call, chunk, cut, bits, &shared);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const std::uint32_t before = atomicAdd(call.done + chunk.head, 1u);
    shared.is_last = before + 1 == static_cast<std::uint32_t>(chunk.active) ? 1 : 0;
    __threadfence();
  }
  __syncthreads();
  if (shared.is_last != 0) finish_head(call, chunk, cut, &shared);
}

template <bool kByKeys, int kVectors>
void launch(const LargeCall& call, bool overlaps, cudaStream_t stream) {
  static_assert(kVectors == 1 || kVectors == kMostVectors);
  static_assert(chunk_size(kVectors) == chunk_entries(kVectors == 1));
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(call.call.kv_heads * call.chunks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlaps ? 1 : 0;
  require(cudaLaunchKernelEx(&config, emit<kByKeys, kVectors>, call), "emit");
}

}  // namespace

void run_emit(const LargeCall& call, bool overlaps, cudaStream_t stream) {
  if (call.is_fine) {
    return call.has_keys ? launch<true, 1>(call, overlaps, stream)
                         : launch<false, 1>(call, overlaps, stream);
  }
  return call.has_keys ? launch<true, kMostVectors>(call, overlaps, stream)
                       : launch<false, kMostVectors>(call, overlaps, stream);
}

}  // namespace sluice::cuda
