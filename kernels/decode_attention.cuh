// The kernels of decode_attention.h.
#pragma once

#include "kernels/device_math.cuh"
#include "kernels/heads.h"

namespace sluice::cuda {

// Queries that one block serves: with their rounding errors they fill the 16 rows of a matrix
// instruction.
inline constexpr int kBunch = 8;
// Rows that a warp takes at a time, and warps of a block.
inline constexpr int kWarpRows = 16;
inline constexpr int kDecodeWarps = 4;
inline constexpr int kTileRows = kWarpRows * kDecodeWarps;

struct DecodeKernelParams {
  const float* q = nullptr;  // [kv_heads * group, head_dim]
  int kv_heads = 0;
  int group = 0;
  HeadRows rows;                            // row 0 of each head
  HeadRows home;                            // of selected rows: those from `resident` on
  const std::int32_t* positions = nullptr;  // [kv_heads, capacity]; null: every row in turn
  std::int64_t capacity = 0;
  HeadCounts resident;
  std::int64_t count = 0;  // rows of every head, if `listed` is null
  // Device memory [kv_heads]: rows of each head; [kv_heads + 1]: tiles of the heads before it.
  const std::int32_t* listed = nullptr;
  const std::int64_t* tiles_before = nullptr;
  float scale = 0.0f;    // of logits, times log2(e)
  float* out = nullptr;  // [kv_heads * group, head_dim]
  float* lse = nullptr;  // [kv_heads * group], natural logarithm
  bool merge = false;
  float* partials = nullptr;          // [bunches, workers + kv_heads, kBunch, head_dim]
  float* partial_lse = nullptr;       // [bunches, workers + kv_heads, kBunch], base 2
  std::uint32_t* finished = nullptr;  // [bunches, kv_heads], zero
  int workers = 0;                    // gridDim.x; gridDim.y is the number of bunches
};

template <int kHeadDim>
struct DecodeShape {
  static constexpr int kRowBytes = (4 * kHeadDim + 63) / 64 * 64;
  // An odd number of 16-byte units: the eight rows of a matrix then lie in different banks.
  static constexpr int kStride = kRowBytes + 16;
  static constexpr int kStageBytes = kWarpRows * kStride;
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr int kRowChunks = kRowBytes / 16;
};

// What a block works on: tiles [first, last) of one head, as part of what `worker` does.
struct DecodeSegment {
  int head = 0;
  std::int64_t first = 0;
  std::int64_t last = 0;
  std::int64_t rows = 0;   // of the head
  std::int64_t tiles = 0;  // of the head
};

__device__ __forceinline__ std::int64_t tiles_of(std::int64_t rows) {
  const std::int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  return tiles > 0 ? tiles : 1;  // a head without rows still has a result: an empty partial
}

// Tiles of all heads, numbered head by head, divided evenly among workers.
class DecodeWork {
 public:
  __device__ explicit DecodeWork(const DecodeKernelParams& p) : p_(p) {
    uniform_ = p.listed == nullptr ? tiles_of(p.count) : 0;
    total_ = uniform_ > 0 ? uniform_ * p.kv_heads : p.tiles_before[p.kv_heads];
    // Then every worker has a tile, and those between a head's first and last all have one of it.
    workers_ = static_cast<int>(min(static_cast<std::int64_t>(p.workers), total_));
  }

  __device__ std::int64_t begin(int worker) const {
    return worker < workers_ ? total_ * worker / workers_ : total_;
  }

  // The worker that has tile number `tile`.
  __device__ int worker_of(std::int64_t tile) const {
    return static_cast<int>(((tile + 1) * workers_ - 1) / total_);
  }

  __device__ std::int64_t before(int head) const {
    return uniform_ > 0 ? uniform_ * head : p_.tiles_before[head];
  }

  __device__ int head_of(std::int64_t tile) const {
    if (uniform_ > 0) return static_cast<int>(tile / uniform_);
    int low = 0;
    int high = p_.kv_heads - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (p_.tiles_before[middle] <= tile) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

  // The part of tiles [begin, end) that lies in the head of `begin`.
  __device__ DecodeSegment segment(std::int64_t begin, std::int64_t end) const {
    DecodeSegment s;
    s.head = head_of(begin);
    s.rows = p_.listed == nullptr ? p_.count : p_.listed[s.head];
    s.tiles = tiles_of(s.rows);
    s.first = begin - before(s.head);
    s.last = min(s.tiles, end - before(s.head));
    return s;
  }

 private:
  const DecodeKernelParams& p_;
  std::int64_t uniform_ = 0;
  std::int64_t total_ = 0;
  int workers_ = 0;
};

// Running attention of one warp: up to kBunch queries over the rows it was given. Lane l holds
// query l / 4; rows 8 to 15 of the matrices carry what rounding took from rows 0 to 7.
template <typename T, int kHeadDim>
class DecodeWarp {
  using Shape = DecodeShape<kHeadDim>;

 public:
  __device__ DecodeWarp(const DecodeKernelParams& p, int head, int bunch) {
    const int lane = threadIdx.x % kWarp;
    const int query = bunch * kBunch + lane / 4;
    const float* const q = p.q + (static_cast<std::int64_t>(head) * p.group + query) * kHeadDim;
#pragma unroll
    for (int step = 0; step < Shape::kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int channel = step * 16 + half * 8 + lane % 4 * 2;
        float x = 0.0f;
        float y = 0.0f;
        if (query < p.group) {
          x = q[channel];
          y = q[channel + 1];
        }
        split(x, y, q_[step][2 * half], q_[step][2 * half + 1]);
      }
    }
#pragma unroll
    for (auto& tile : out_) {
      for (float& x : tile) x = 0.0f;
    }
  }

  // Adds kWarpRows rows in shared memory, of which the first `count` exist and the rest are zero.
  __device__ void add(const std::byte* rows, int count, float scale) {
    float logits[2][4] = {};
    const int lane = threadIdx.x % kWarp;
    const std::byte* const key =
        rows + (lane % 8 + lane / 16 * 8) * Shape::kStride + lane / 8 % 2 * 16;
#pragma unroll
    for (int step = 0; step < Shape::kSteps; ++step) {
      std::uint32_t k[4];
      load_matrices(k, key + step * 32);
      mma(T(), logits[0], q_[step], k[0], k[1]);
      mma(T(), logits[1], q_[step], k[2], k[3]);
    }
    float weights[4];
    soften(logits, count, scale, weights);
    std::uint32_t p[4];
    split(weights[0], weights[1], p[0], p[1]);
    split(weights[2], weights[3], p[2], p[3]);
    const std::byte* const value = rows + (lane % 8 + lane / 8 % 2 * 8) * Shape::kStride +
                                   kHeadDim * sizeof(T) + lane / 16 * 16;
#pragma unroll
    for (int step = 0; step < Shape::kSteps; ++step) {
      std::uint32_t v[4];
      load_matrices_transposed(v, value + step * 32);
      mma(T(), out_[2 * step], p, v[0], v[1]);
      mma(T(), out_[2 * step + 1], p, v[2], v[3]);
    }
  }

  // [kBunch, head_dim] outputs that are not normalised yet, [kBunch] highest logits (base 2) and
  // [kBunch] sums of weights relative to them.
  __device__ void store(float* out, float* highest, float* sums) {
    const int lane = threadIdx.x % kWarp;
    float sum = sum_ + __shfl_xor_sync(kAllLanes, sum_, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    if (lane % 4 == 0) {
      highest[lane / 4] = highest_;
      sums[lane / 4] = sum;
    }
#pragma unroll
    for (int tile = 0; tile < 2 * Shape::kSteps; ++tile) {
      float* const to = out + lane / 4 * kHeadDim + tile * 8 + lane % 4 * 2;
      to[0] = out_[tile][0] + out_[tile][2];
      to[1] = out_[tile][1] + out_[tile][3];
    }
  }

 private:
  // Two numbers as pairs of T whose sums they are, but for 2^-17 (bf16) of their size.
  __device__ static void split(float x, float y, std::uint32_t& high, std::uint32_t& low) {
    const T x_high = from_float<T>(x);
    const T y_high = from_float<T>(y);
    high = pack(T(), to_float(x_high), to_float(y_high));
    low = pack(T(), x - to_float(x_high), y - to_float(y_high));
  }

  // Turns logits into weights relative to the highest so far, and what was summed before with it.
  __device__ void soften(float (&logits)[2][4], int count, float scale, float (&weights)[4]) {
    const int lane = threadIdx.x % kWarp;
    float highest = highest_;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float logit = (logits[i / 2][i % 2] + logits[i / 2][i % 2 + 2]) * scale;
      const int row = i / 2 * 8 + lane % 4 * 2 + i % 2;
      weights[i] = row < count ? logit : -INFINITY;
      // A NaN stays in the weights; fmaxf would hide it from the maximum only.
      highest = fmaxf(highest, weights[i]);
    }
    highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 2));
    const float reference = highest == -INFINITY ? 0.0f : highest;
    const float factor = exp2f(highest_ - reference);
    sum_ *= factor;
#pragma unroll
    for (float& weight : weights) {
      weight = exp2f(weight - reference);
      sum_ += weight;
    }
    if (__any_sync(kAllLanes, factor != 1.0f)) {
#pragma unroll
      for (auto& tile : out_) {
        for (float& x : tile) x *= factor;
      }
    }
    highest_ = highest;
  }

  std::uint32_t q_[Shape::kSteps][4];
  float out_[2 * Shape::kSteps][4];
  float highest_ = -INFINITY;
  float sum_ = 0.0f;  // this lane's part
};

// Brings rows of a segment to shared memory, kWarpRows at a time and kStages - 1 ahead of their
// use. One per warp. From Hopper on a row is one instruction of the bulk copy engine.
template <int kHeadDim, int kStages>
class DecodeRows {
  using Shape = DecodeShape<kHeadDim>;

 public:
  static constexpr int kBytes = kStages * Shape::kStageBytes;

  // `stages` [kBytes] and `barriers` [kStages] are shared memory of this warp.
  __device__ DecodeRows(const DecodeKernelParams& p, std::byte* stages, std::uint64_t* barriers)
      : p_(p), stages_(stages), barriers_(barriers) {
    if constexpr (kBulkCopies) {
      if (lane() == 0) {
        for (int i = 0; i < kStages; ++i) barrier_init(&barriers[i]);
        barrier_init_done();
      }
      __syncwarp();
    }
  }

  // Goes to a segment; the warp has used all rows of the one before.
  __device__ void begin(const DecodeSegment& s) {
    rows_ = s.rows;
    next_ = s.first;
    last_ = s.last;
    base_ = p_.rows[s.head];
    if (p_.positions != nullptr) {
      positions_ = p_.positions + s.head * p_.capacity;
      home_ = p_.home[s.head];
      resident_ = p_.resident[s.head];
    }
    look_up();
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) fetch((stage_ + i) % kStages);
  }

  // The next kWarpRows rows; those past the last one are zero.
  __device__ const std::byte* take() {
    if constexpr (kBulkCopies) {
      barrier_wait(&barriers_[stage_], phases_ >> stage_ & 1u);
      phases_ ^= 1u << stage_;
    } else {
      copy_async_wait<kStages - 2>();
    }
    __syncwarp();
    return stages_ + stage_ * Shape::kStageBytes;
  }

  // The rows that take() gave are done with.
  __device__ void release() {
    __syncwarp();
    fetch(stage_ == 0 ? kStages - 1 : stage_ - 1);
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
  }

  // Other uses of the stages' memory by this thread are over.
  __device__ static void reuse_memory() {
    if constexpr (kBulkCopies) before_bulk_copies();
  }

  // How many of a tile's rows exist.
  __device__ int count(std::int64_t tile) const {
    const std::int64_t left = rows_ - first(tile);
    return static_cast<int>(left < 0 ? 0 : left < kWarpRows ? left : kWarpRows);
  }

 private:
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static constexpr bool kBulkCopies = true;
#else
  static constexpr bool kBulkCopies = false;
#endif

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ std::int64_t first(std::int64_t tile) const {
    return tile * kTileRows + static_cast<int>(threadIdx.x) / kWarp * kWarpRows;
  }

  // Positions are asked for one tile before their rows are, so that nothing waits for them.
  __device__ void look_up() {
    if (positions_ == nullptr || next_ >= last_ || lane() >= count(next_)) return;
    position_ = positions_[first(next_) + lane()];
  }

  // Where row number lane() of the next tile is.
  __device__ const std::byte* row() const {
    if (positions_ == nullptr) return base_ + (first(next_) + lane()) * Shape::kRowBytes;
    const std::byte* const base = position_ < resident_ ? base_ : home_;
    return base + static_cast<std::int64_t>(position_) * Shape::kRowBytes;
  }

  __device__ void fetch(int stage) {
    std::byte* const to = stages_ + stage * Shape::kStageBytes;
    if (next_ < last_) {
      if constexpr (kBulkCopies) {
        fetch_bulk(to, &barriers_[stage]);
      } else {
        fetch_chunks(to);
      }
      ++next_;
      look_up();
    }
    if constexpr (!kBulkCopies) copy_async_commit();
  }

  __device__ void fetch_bulk(std::byte* to, std::uint64_t* barrier) const {
    const int existing = count(next_);
    if (lane() == 0) {
      barrier_expect(barrier, static_cast<std::uint32_t>(existing * Shape::kRowBytes));
    }
    __syncwarp();
    std::byte* const own = to + lane() * Shape::kStride;
    if (lane() < existing) {
      copy_bulk(own, row(), Shape::kRowBytes, barrier);
    } else if (lane() < kWarpRows) {
      for (int i = 0; i < Shape::kRowBytes; i += 16) {
        *reinterpret_cast<uint4*>(own + i) = make_uint4(0, 0, 0, 0);
      }
    }
  }

  __device__ void fetch_chunks(std::byte* to) const {
    const int existing = count(next_);
    const auto own = reinterpret_cast<unsigned long long>(lane() < existing ? row() : base_);
#pragma unroll
    for (int i = 0; i < kWarpRows * Shape::kRowChunks / kWarp; ++i) {
      const int chunk = lane() + i * kWarp;
      const int number = chunk / Shape::kRowChunks;
      const int column = chunk % Shape::kRowChunks * 16;
      const auto* const from =
          reinterpret_cast<const std::byte*>(__shfl_sync(kAllLanes, own, number));
      const bool valid = number < existing;
      copy_async_or_zero(to + number * Shape::kStride + column, from + (valid ? column : 0), valid);
    }
  }

  const DecodeKernelParams& p_;
  std::byte* stages_;
  std::uint64_t* barriers_;
  const std::byte* base_ = nullptr;
  const std::byte* home_ = nullptr;
  const std::int32_t* positions_ = nullptr;
  std::int64_t resident_ = 0;
  std::int64_t rows_ = 0;
  std::int64_t next_ = 0;  // tile to fetch
  std::int64_t last_ = 0;
  std::int32_t position_ = 0;
  int stage_ = 0;             // to use next
  std::uint32_t phases_ = 0;  // of the barriers, a bit each
};

// exp2(x - y), and 0 for x = -inf whatever y is.
__device__ __forceinline__ float weight_of(float x, float y) {
  return x == -INFINITY ? 0.0f : exp2f(x - y);
}

// A result of one query head that is finished: log-sum-exp in base 2.
struct DecodeResult {
  float4 value;  // of four channels
  float lse;
};

// a x + b y, but for what has no weight.
__device__ __forceinline__ float4 mix(float a, const float4& x, float b, const float4& y) {
  const auto one = [&](float p, float q) {
    return (a == 0.0f ? 0.0f : a * p) + (b == 0.0f ? 0.0f : b * q);
  };
  return make_float4(one(x.x, y.x), one(x.y, y.y), one(x.z, y.z), one(x.w, y.w));
}

// Calls body(round, query, channel) for this thread's share of a bunch of queries, four channels at
// a time.
template <int kHeadDim, typename Body>
__device__ void for_results(int queries, const Body& body) {
  constexpr int kQuads = kHeadDim / 4;
  constexpr int kThreads = kDecodeWarps * kWarp;
#pragma unroll
  for (int round = 0; round < (kBunch * kQuads + kThreads - 1) / kThreads; ++round) {
    const int i = static_cast<int>(threadIdx.x) + round * kThreads;
    if (i < queries * kQuads) body(round, i / kQuads, i % kQuads * 4);
  }
}

// Writes results of a bunch of queries, or merges them with what is there. The whole block calls
// it; result(query, channel) gives each.
template <int kHeadDim, typename Result>
__device__ void write_results(const DecodeKernelParams& p, std::int64_t first_query, int queries,
                              const Result& result) {
  constexpr float kLn2 = 0.69314718055994531f;
  constexpr int kThreads = kDecodeWarps * kWarp;
  float new_lse[(kBunch * kHeadDim / 4 + kThreads - 1) / kThreads];
  for_results<kHeadDim>(queries, [&](int round, int query, int channel) {
    const DecodeResult own = result(query, channel);
    const float lse = own.lse * kLn2;
    auto& out = *reinterpret_cast<float4*>(p.out + (first_query + query) * kHeadDim + channel);
    new_lse[round] = lse;
    if (!p.merge) {
      out = own.value;
      return;
    }
    const float old = p.lse[first_query + query];
    new_lse[round] = old;
    if (own.lse == -INFINITY) return;
    const float highest = fmaxf(old, lse);
    const float a = old == -INFINITY ? 0.0f : expf(old - highest);
    const float b = expf(lse - highest);
    out = mix(a / (a + b), out, b / (a + b), own.value);
    new_lse[round] = highest + logf(a + b);
  });
  // Every thread has read the old log-sum-exp before one of them replaces it.
  __syncthreads();
  for_results<kHeadDim>(queries, [&](int round, int query, int channel) {
    if (channel == 0) p.lse[first_query + query] = new_lse[round];
  });
}

// What the warps of a block found of one segment.
template <int kHeadDim>
struct DecodeBlock {
  float out[kDecodeWarps][kBunch][kHeadDim];
  float highest[kDecodeWarps][kBunch];
  float sum[kDecodeWarps][kBunch];

  __device__ DecodeResult operator()(int query, int channel) const {
    float top = -INFINITY;
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) top = fmaxf(top, highest[w][query]);
    float total = 0.0f;
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) {
      const float factor = weight_of(highest[w][query], top);
      total += factor * sum[w][query];
      value = mix(1.0f, value, factor, *reinterpret_cast<const float4*>(&out[w][query][channel]));
    }
    if (total == 0.0f) return {make_float4(0.0f, 0.0f, 0.0f, 0.0f), -INFINITY};
    const float inverse = 1.0f / total;
    return {make_float4(value.x * inverse, value.y * inverse, value.z * inverse, value.w * inverse),
            top + log2f(total)};
  }
};

// The partials of one head, from `sharers` workers in a row.
template <int kHeadDim>
class DecodeMerge {
 public:
  // `weights`: shared memory [kBunch, sharers + 1]; the whole block comes here.
  __device__ DecodeMerge(const float* partials, const float* lses, int sharers, int queries,
                         float* weights)
      : partials_(partials),
        weights_(weights),
        lse_(weights + kBunch * sharers),
        sharers_(sharers) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    for (int q = static_cast<int>(threadIdx.x) / kWarp; q < queries; q += kDecodeWarps) {
      float top = -INFINITY;
      for (int i = lane; i < sharers; i += kWarp) top = fmaxf(top, __ldcg(lses + i * kBunch + q));
      top = warp_max(top);
      float total = 0.0f;
      for (int i = lane; i < sharers; i += kWarp) {
        const float weight = weight_of(__ldcg(lses + i * kBunch + q), top);
        weights[q * sharers + i] = weight;
        total += weight;
      }
      total = warp_sum(total);
      if (lane == 0) lse_[q] = total == 0.0f ? -INFINITY : top + log2f(total);
      const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
      for (int i = lane; i < sharers; i += kWarp) weights[q * sharers + i] *= inverse;
    }
    __syncthreads();
  }

  __device__ DecodeResult operator()(int query, int channel) const {
    const float* const own = partials_ + query * kHeadDim + channel;
    const float* const weights = weights_ + query * sharers_;
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (int i = 0; i < sharers_; ++i) {
      const float4 part = __ldcg(reinterpret_cast<const float4*>(own + i * (kBunch * kHeadDim)));
      value = mix(1.0f, value, weights[i], part);
    }
    return {value, lse_[query]};
  }

 private:
  const float* partials_;
  float* weights_;
  float* lse_;
  int sharers_;
};

// Where a worker's partial of a head is: both only grow from segment to segment, so their sum names
// a slot.
__device__ __forceinline__ std::int64_t slot_of(const DecodeKernelParams& p, int bunch, int worker,
                                                int head) {
  return static_cast<std::int64_t>(bunch) * (p.workers + p.kv_heads) + worker + head;
}

template <int kHeadDim>
__device__ void store_partial(const DecodeKernelParams& p, std::int64_t slot, int queries,
                              const DecodeBlock<kHeadDim>& block) {
  for_results<kHeadDim>(queries, [&](int, int query, int channel) {
    const DecodeResult own = block(query, channel);
    auto* const to = p.partials + (slot * kBunch + query) * kHeadDim + channel;
    *reinterpret_cast<float4*>(to) = own.value;
    if (channel == 0) p.partial_lse[slot * kBunch + query] = own.lse;
  });
}

// Counts this block's part of a head; true for the block that comes last, which sees all parts.
__device__ __forceinline__ bool finish_part(std::uint32_t* finished, int sharers) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(finished, 1u) + 1 == static_cast<std::uint32_t>(sharers);
    if (is_last) *finished = 0;
  }
  __syncthreads();
  if (is_last) __threadfence();
  return is_last;
}

// Brings what the block found of a segment to where it belongs.
template <int kHeadDim>
__device__ void finish_segment(const DecodeKernelParams& p, const DecodeWork& work,
                               const DecodeSegment& segment, int bunch,
                               DecodeBlock<kHeadDim>& block) {
  const int queries = min(kBunch, p.group - bunch * kBunch);
  const int head = segment.head;
  const std::int64_t first_query = static_cast<std::int64_t>(head) * p.group + bunch * kBunch;
  if (segment.first == 0 && segment.last == segment.tiles) {
    return write_results<kHeadDim>(p, first_query, queries, block);
  }
  store_partial(p, slot_of(p, bunch, static_cast<int>(blockIdx.x), head), queries, block);
  const std::int64_t before = work.before(head);
  const int first_worker = work.worker_of(before);
  const int sharers = work.worker_of(before + segment.tiles - 1) - first_worker + 1;
  if (!finish_part(p.finished + static_cast<std::int64_t>(bunch) * p.kv_heads + head, sharers)) {
    return;
  }
  const std::int64_t slot = slot_of(p, bunch, first_worker, head);
  const DecodeMerge<kHeadDim> merge(p.partials + slot * kBunch * kHeadDim,
                                    p.partial_lse + slot * kBunch, sharers, queries,
                                    reinterpret_cast<float*>(&block));
  write_results<kHeadDim>(p, first_query, queries, merge);
}

template <typename T, int kHeadDim, int kStages>
__global__ __launch_bounds__(kDecodeWarps* kWarp) void decode_kernel(
    const __grid_constant__ DecodeKernelParams p) {
  using Rows = DecodeRows<kHeadDim, kStages>;
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ std::uint64_t barriers[kDecodeWarps][kStages];
  auto& block = *reinterpret_cast<DecodeBlock<kHeadDim>*>(shared);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const auto bunch = static_cast<int>(blockIdx.y);
  const DecodeWork work(p);
  const std::int64_t end = work.begin(static_cast<int>(blockIdx.x) + 1);
  Rows rows(p, shared + warp * Rows::kBytes, barriers[warp]);

  for (std::int64_t begin = work.begin(static_cast<int>(blockIdx.x)); begin < end;) {
    const DecodeSegment segment = work.segment(begin, end);
    rows.begin(segment);
    DecodeWarp<T, kHeadDim> state(p, segment.head, bunch);
    for (std::int64_t tile = segment.first; tile < segment.last; ++tile) {
      state.add(rows.take(), rows.count(tile), p.scale);
      rows.release();
    }
    // The stages become the block's memory, and then stages again.
    __syncthreads();
    state.store(block.out[warp][0], block.highest[warp], block.sum[warp]);
    __syncthreads();
    finish_segment(p, work, segment, bunch, block);
    Rows::reuse_memory();
    __syncthreads();
    begin = work.before(segment.head) + segment.last;
  }
}

}  // namespace sluice::cuda
