// Softmax weights summed over probes and query heads, in two passes over the keys: sums of
// exponentials, then weights.
//
// Logits come from tensor cores. A query is split into two numbers of the keys' dtype, its rounded
// value and the rounding error, so that it keeps twice the digits. The inner product may take the
// channels in any order, so a lane reads 8 neighbouring channels of a key at once and uses them as
// its elements of two fragments of 16 channels.
// Source: lane layout of mma.m16n8k16 from the PTX ISA, "Warp-level matrix fragments".
#include <algorithm>
#include <cmath>
#include <string>

#include "kernels/runtime/error.h"
#include "kernels/runtime/heads.h"
#include "kernels/runtime/rows.cuh"
#include "kernels/scan/scan.h"
#include "lib/check.h"
#include "sluice/errors.h"

namespace sluice::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kTileKeys = 16;                   // per warp: two fragments of 8
constexpr int kBlockKeys = kWarps * kTileKeys;  // per block at a time
constexpr int kTileQueries = 16;
constexpr int kMostProbes = 128;   // per launch
constexpr int kMostQueries = 512;  // per KV head and launch, padded to whole tiles

// Arguments for the queries of up to kMostProbes probes. The queries of a KV head are numbered
// probe by probe and padded to whole tiles.
struct Call {
  const float* q = nullptr;  // [probes, query_heads, head_dim], from the first of these KV heads
  std::int32_t query_heads = 0;  // per probe
  std::int32_t positions[kMostProbes]{};
  std::int32_t probes = 0;
  std::int32_t kv_heads = 0;
  std::int32_t group = 0;
  std::int32_t head_dim = 0;
  std::int64_t row_bytes = 0;
  bool is_coded = false;   // rows are; their keys are rounded to bf16
  std::int32_t count = 0;  // rows
  float factor = 0.0f;     // log2(e) / sqrt(head_dim)
  HeadRows rows;
  std::byte* staged = nullptr;  // [kv_heads, count, head_dim]: copy of the keys, or null
  bool is_staged = false;       // `staged` is filled
  std::int32_t tiles = 0;       // tiles of queries per KV head
  std::int32_t strips = 0;      // blocks per KV head
  std::int32_t strip_keys = 0;
  uint4* fragments = nullptr;    // [kv_heads, tiles, steps, 2, kWarp]: values, rounding errors
  float2* partials = nullptr;    // [kv_heads, strips, tiles * 16]: largest log2, sum relative to it
  float* norms = nullptr;        // [kv_heads, tiles * 16]: log2 of the sum
  float* sums = nullptr;         // [kv_heads, count]
  std::uint32_t* bad = nullptr;  // [1]: a query's logits had NaN or +Inf, or were all -Inf
  bool is_first = false;         // false: sums and bad hold results of earlier probes

  __host__ __device__ std::int32_t queries() const { return tiles * kTileQueries; }
};

__host__ __device__ constexpr int channel_blocks(int head_dim) { return (head_dim + 31) / 32; }

// Two neighbouring channels of a query, or with `rest` their rounding errors; zeros past its end.
template <typename T>
__device__ std::uint32_t query_pair(const Call& call, std::int32_t head, std::int32_t query,
                                    int channel, bool rest) {
  if (query >= call.probes * call.group || channel >= call.head_dim) return 0;
  const std::int64_t row = static_cast<std::int64_t>(query / call.group) * call.query_heads +
                           head * call.group + query % call.group;
  const float* const q = call.q + row * call.head_dim + channel;
  float pair[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    pair[i] = q[i];
    if (rest) pair[i] -= to_float(from_float<T>(pair[i]));
  }
  return pack(T(), pair[0], pair[1]);
}

// Lays the queries out as fragments: in step 2 b + s, for block b of 32 channels, lane l has
// channel 32 b + 8 (l % 4) + 4 s and the three after it.
template <typename T>
__global__ void __launch_bounds__(kThreads) lay_out(const __grid_constant__ Call call) {
  const int steps = 2 * channel_blocks(call.head_dim);
  const std::int32_t i = static_cast<std::int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (i == 0 && call.is_first) *call.bad = 0;
  if (i >= call.kv_heads * call.tiles * steps * 2 * kWarp) return;
  const int lane = i % kWarp;
  const bool rest = i / kWarp % 2 != 0;
  const int step = i / (2 * kWarp) % steps;
  const std::int32_t tile = i / (2 * kWarp * steps) % call.tiles;
  const std::int32_t head = i / (2 * kWarp * steps * call.tiles);
  const int channel = step / 2 * 32 + lane % 4 * 8 + step % 2 * 4;
  const std::int32_t query = tile * kTileQueries + lane / 4;
  call.fragments[i] = make_uint4(query_pair<T>(call, head, query, channel, rest),
                                 query_pair<T>(call, head, query + 8, channel, rest),
                                 query_pair<T>(call, head, query, channel + 2, rest),
                                 query_pair<T>(call, head, query + 8, channel + 2, rest));
}

// Sixteen keys of a warp. For every block b, lane l holds the 8 channels from 32 b + 8 (l % 4) on
// of keys l / 4 and 8 + l / 4.
template <int kBlocks>
struct Keys {
  uint4 channels[2][kBlocks];
  std::int32_t first;  // the first of this lane's columns of the logits
};

// Loads keys from their rows or from `staged`. If there is a `staged` that is not filled yet, it
// gets a copy, because rows in host memory are slow to read twice.
template <int kBlocks>
__device__ void load_keys(const Call& call, std::int32_t head, std::int32_t first, bool is_staged,
                          Keys<kBlocks>& keys) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t key_bytes = call.head_dim * 2;
  std::byte* const staged =
      call.staged == nullptr ? nullptr : call.staged + head * call.count * key_bytes;
  const std::byte* const rows = is_staged ? staged : call.rows[head];
  const std::int64_t row_bytes = is_staged ? key_bytes : call.row_bytes;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const std::int32_t key = first + 8 * n + lane / 4;
    const std::byte* const row = rows + key * row_bytes;
    const bool is_coded = call.is_coded && !is_staged;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int vector = 4 * b + lane % 4;
      const bool exists = key < call.count && vector * 8 < call.head_dim;
      keys.channels[n][b] = !exists    ? make_uint4(0, 0, 0, 0)
                            : is_coded ? rounded_elements(Int8Code(), row, vector)
                                       : reinterpret_cast<const uint4*>(row)[vector];
      if (exists && staged != nullptr && !is_staged)
        reinterpret_cast<uint4*>(staged + key * key_bytes)[vector] = keys.channels[n][b];
    }
  }
  keys.first = first + 2 * (lane % 4);
}

// Logits of a tile of queries in units of log2; -Inf where a query does not see a key.
// x[n][0], x[n][1] belong to query l / 4 of the tile, x[n][2] and x[n][3] to query 8 + l / 4.
template <typename T, int kBlocks>
__device__ __forceinline__ void logits_of(const Call& call, const uint4* fragments,
                                          const Keys<kBlocks>& keys, const std::int32_t (&sees)[2],
                                          float (&x)[2][4]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i / 4][i % 4] = 0.0f;
#pragma unroll
  for (int step = 0; step < 2 * kBlocks; ++step) {
#pragma unroll
    for (int rest = 0; rest < 2; ++rest) {
      const uint4 packed = fragments[(step * 2 + rest) * kWarp + lane];
      const std::uint32_t a[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const uint4& key = keys.channels[n][step / 2];
        if (step % 2 == 0) {
          mma(T(), x[n], a, key.x, key.y);
        } else {
          mma(T(), x[n], a, key.z, key.w);
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool visible = keys.first + 8 * n + i % 2 <= sees[i / 2];
      x[n][i] = visible ? x[n][i] * call.factor : -INFINITY;
    }
  }
}

// Positions of the queries and the last position of every tile.
struct Sight {
  std::int32_t queries[kMostQueries];
  std::int32_t tiles[kMostQueries / kTileQueries];
};

__device__ void look_up_sight(const Call& call, Sight& sight) {
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < call.queries(); i += kThreads) {
    sight.queries[i] = i < call.probes * call.group ? call.positions[i / call.group] : -1;
  }
  __syncthreads();
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < call.tiles; i += kThreads) {
    std::int32_t last = -1;
    for (int j = 0; j < kTileQueries; ++j) last = max(last, sight.queries[i * kTileQueries + j]);
    sight.tiles[i] = last;
  }
  __syncthreads();
}

// Calls body(first key) for every 16 keys of the block's strip that belong to this warp.
template <typename Body>
__device__ void for_tiles(const Call& call, const Body& body) {
  const std::int32_t strip = static_cast<std::int32_t>(blockIdx.x) % call.strips;
  const std::int32_t last = min(call.count, (strip + 1) * call.strip_keys);
  const auto warp = static_cast<std::int32_t>(threadIdx.x) / kWarp;
  for (std::int32_t first = strip * call.strip_keys + warp * kTileKeys; first < last;
       first += kBlockKeys) {
    body(first);
  }
}

__device__ float2 merged(float2 a, float2 b) {
  if (b.x == -INFINITY) return a;
  if (a.x == -INFINITY) return b;
  const float most = fmaxf(a.x, b.x);
  return make_float2(most, a.y * exp2f(a.x - most) + b.y * exp2f(b.x - most));
}

// Adds one query's logits over a warp's keys to `sum`. Four lanes hold them; the first one adds.
__device__ __forceinline__ void add_logits(const float (&x)[2][4], int half, float2& sum) {
  float most = -INFINITY;
  float all = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) most = fmaxf(most, x[i / 2][2 * half + i % 2]);
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, step));
  }
  // The maximum ignores NaN, the sum does not.
  const float from = most == -INFINITY ? 0.0f : most;
#pragma unroll
  for (int i = 0; i < 4; ++i) all += exp2f(x[i / 2][2 * half + i % 2] - from);
#pragma unroll
  for (int step = 1; step < 4; step *= 2) all += __shfl_xor_sync(kAllLanes, all, step);
  if (threadIdx.x % 4 != 0) return;
  if (all != all) most = INFINITY;
  sum = merged(sum, make_float2(most, all));
}

template <typename T, int kBlocks>
__global__ void __launch_bounds__(kThreads, 2) sum_rows(const __grid_constant__ Call call) {
  __shared__ Sight sight;
  __shared__ float2 sums[kWarps][kMostQueries];
  const std::int32_t head = static_cast<std::int32_t>(blockIdx.x) / call.strips;
  const auto warp = static_cast<std::int32_t>(threadIdx.x) / kWarp;
  const auto row = static_cast<std::int32_t>(threadIdx.x) % kWarp / 4;
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < kWarps * kMostQueries; i += kThreads) {
    sums[i / kMostQueries][i % kMostQueries] = make_float2(-INFINITY, 0.0f);
  }
  look_up_sight(call, sight);
  for_tiles(call, [&](std::int32_t first) {
    Keys<kBlocks> keys;
    load_keys(call, head, first, call.is_staged, keys);
    for (std::int32_t tile = 0; tile < call.tiles; ++tile) {
      if (sight.tiles[tile] < first) continue;
      const std::int32_t query = tile * kTileQueries + row;
      const std::int32_t sees[2] = {sight.queries[query], sight.queries[query + 8]};
      float x[2][4];
      logits_of<T>(call,
                   call.fragments +
                       static_cast<std::int64_t>(head * call.tiles + tile) * (4 * kBlocks * kWarp),
                   keys, sees, x);
      add_logits(x, 0, sums[warp][query]);
      add_logits(x, 1, sums[warp][query + 8]);
    }
  });
  __syncthreads();
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < call.queries(); i += kThreads) {
    float2 sum = sums[0][i];
    for (int w = 1; w < kWarps; ++w) sum = merged(sum, sums[w][i]);
    call.partials[static_cast<std::int64_t>(blockIdx.x) * call.queries() + i] = sum;
  }
}

// Computes the norm of every query from its strips.
__global__ void __launch_bounds__(kThreads) add_strips(const __grid_constant__ Call call) {
  const auto i = static_cast<std::int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (i >= call.kv_heads * call.queries()) return;
  const std::int32_t head = i / call.queries();
  const std::int32_t query = i % call.queries();
  float2 sum = make_float2(-INFINITY, 0.0f);
  for (std::int32_t strip = 0; strip < call.strips; ++strip) {
    const std::int64_t part = static_cast<std::int64_t>(head) * call.strips + strip;
    sum = merged(sum, call.partials[part * call.queries() + query]);
  }
  const bool is_query = query < call.probes * call.group;
  if (is_query && !(fabsf(sum.x) < INFINITY && sum.y < INFINITY)) *call.bad = 1;
  call.norms[i] = sum.x + log2f(sum.y);
}

template <typename T, int kBlocks>
__global__ void __launch_bounds__(kThreads, 2) sum_columns(const __grid_constant__ Call call) {
  __shared__ Sight sight;
  __shared__ float norms[kMostQueries];
  const std::int32_t head = static_cast<std::int32_t>(blockIdx.x) / call.strips;
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarp;
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < call.queries(); i += kThreads) {
    norms[i] = call.norms[static_cast<std::int64_t>(head) * call.queries() + i];
  }
  look_up_sight(call, sight);
  for_tiles(call, [&](std::int32_t first) {
    Keys<kBlocks> keys;
    load_keys(call, head, first, call.staged != nullptr, keys);
    float columns[4] = {};
    for (std::int32_t tile = 0; tile < call.tiles; ++tile) {
      if (sight.tiles[tile] < first) continue;
      const std::int32_t query = tile * kTileQueries + lane / 4;
      const std::int32_t sees[2] = {sight.queries[query], sight.queries[query + 8]};
      float x[2][4];
      logits_of<T>(call,
                   call.fragments +
                       static_cast<std::int64_t>(head * call.tiles + tile) * (4 * kBlocks * kWarp),
                   keys, sees, x);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = x[i / 2][i % 2];
        const float high = x[i / 2][2 + i % 2];
        // A query that sees nothing has no norm.
        if (low > -INFINITY) columns[i] += exp2f(low - norms[query]);
        if (high > -INFINITY) columns[i] += exp2f(high - norms[query + 8]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int step = 4; step < kWarp; step *= 2) {
        columns[i] += __shfl_xor_sync(kAllLanes, columns[i], step);
      }
      const std::int32_t key = keys.first + i / 2 * 8 + i % 2;
      if (lane >= 4 || key >= call.count) continue;
      float& sum = call.sums[static_cast<std::int64_t>(head) * call.count + key];
      sum = call.is_first ? columns[i] : sum + columns[i];
    }
  });
}

// Sums over the KV heads, and adds to `out` unless these KV heads are the first.
__global__ void __launch_bounds__(kThreads)
    add_heads(const float* sums, const std::uint32_t* bad, std::int32_t kv_heads,
              std::int32_t count, bool is_first, float* out) {
  const auto i = static_cast<std::int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (i >= count) return;
  float sum = is_first ? 0.0f : out[i];
  for (std::int32_t head = 0; head < kv_heads; ++head) {
    sum += sums[static_cast<std::int64_t>(head) * count + i];
  }
  out[i] = *bad != 0 ? NAN : sum;
}

unsigned blocks_for(std::int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

template <typename T, int kBlocks>
void run(const Call& call, cudaStream_t stream) {
  const std::int64_t queries = static_cast<std::int64_t>(call.kv_heads) * call.queries();
  lay_out<T><<<blocks_for(queries * 4 * kBlocks * 2), kThreads, 0, stream>>>(call);
  require_launch("lay_out");
  const auto blocks = static_cast<unsigned>(call.kv_heads * call.strips);
  sum_rows<T, kBlocks><<<blocks, kThreads, 0, stream>>>(call);
  require_launch("sum_rows");
  add_strips<<<blocks_for(queries), kThreads, 0, stream>>>(call);
  require_launch("add_strips");
  sum_columns<T, kBlocks><<<blocks, kThreads, 0, stream>>>(call);
  require_launch("sum_columns");
}

template <typename T>
void run_for(const Call& call, cudaStream_t stream) {
  switch (channel_blocks(call.head_dim)) {
    case 1:
      return run<T, 1>(call, stream);
    case 2:
      return run<T, 2>(call, stream);
    case 3:
      return run<T, 3>(call, stream);
    case 4:
      return run<T, 4>(call, stream);
    case 8:
      return run<T, 8>(call, stream);
    default:
      throw Error(ErrorCode::unsupported, "the CUDA backend has no column sums for head_dim " +
                                              std::to_string(call.head_dim));
  }
}

// The call for KV heads [first, first + heads), without probes and scratch.
Call call_of(const ColumnSumsParams& p, std::int32_t first, std::int32_t heads,
             const Launch& launch) {
  const std::span<const RowSpan> rows =
      p.rows.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(heads));
  Call call;
  call.query_heads = p.shape.query_heads;
  call.kv_heads = heads;
  call.group = p.shape.group();
  call.head_dim = p.shape.head_dim;
  call.row_bytes = static_cast<std::int64_t>(p.shape.row_bytes());
  call.is_coded = p.shape.rows.key().is_coded();
  check(rows[0].count < std::int64_t{1} << 31, "too many rows for column_sums()");
  check(call.head_dim % 8 == 0 && call.group <= kMostQueries, "a shape without column sums");
  call.count = static_cast<std::int32_t>(rows[0].count);
  call.factor = kLog2E / std::sqrt(static_cast<float>(call.head_dim));
  call.rows = head_rows(rows);
  const std::int64_t most_strips =
      std::max<std::int64_t>(1, 4 * launch.device->multiprocessors / call.kv_heads);
  const std::int64_t blocks = (call.count + kBlockKeys - 1) / kBlockKeys;
  const std::int64_t each = std::max<std::int64_t>(1, (blocks + most_strips - 1) / most_strips);
  call.strip_keys = static_cast<std::int32_t>(each * kBlockKeys);
  call.strips = static_cast<std::int32_t>(std::max<std::int64_t>(1, (blocks + each - 1) / each));
  return call;
}

// Places the call's arrays in scratch, each aligned to 16 bytes, and `staged` if it fits; returns
// the bytes of the arrays without `staged`.
std::size_t place(Call& call, const Launch& launch) {
  std::size_t used = 0;
  const auto take = [&](auto*& array, std::int64_t count) {
    array = reinterpret_cast<std::decay_t<decltype(array)>>(launch.scratch + used);
    used += (static_cast<std::size_t>(count) * sizeof(*array) + 15) / 16 * 16;
  };
  const std::int64_t queries = static_cast<std::int64_t>(call.kv_heads) * kMostQueries;
  const int steps = 2 * channel_blocks(call.head_dim);
  const std::int64_t keys = static_cast<std::int64_t>(call.kv_heads) * call.count;
  take(call.bad, 1);
  take(call.norms, queries);
  take(call.partials, queries * call.strips);
  take(call.fragments, queries / kTileQueries * steps * 2 * kWarp);
  take(call.sums, keys);
  // Rows in host memory are slow to read twice.
  const std::size_t key_bytes = static_cast<std::size_t>(keys * call.head_dim) * 2;
  const std::size_t arrays = used;
  if (used + key_bytes <= launch.scratch_bytes)
    take(call.staged, static_cast<std::int64_t>(key_bytes));
  return arrays;
}

// KV heads whose arrays fit in scratch at once.
std::int32_t heads_at_once(const ColumnSumsParams& p, const Launch& launch) {
  std::int32_t heads = p.shape.kv_heads;
  while (true) {
    Call call = call_of(p, 0, heads, launch);
    if (place(call, launch) <= launch.scratch_bytes) return heads;
    if (heads == 1) break;
    heads = (heads + 1) / 2;
  }
  throw Error(ErrorCode::unsupported,
              "the prompt is too long for zipvl on this device: its scores do not fit the scratch "
              "memory; give it in parts or prefill densely");
}

// Adds the sums of KV heads [first, first + heads) to params.sums; the first ones overwrite it.
void sum_heads(const ColumnSumsParams& params, std::int32_t first, std::int32_t heads,
               const Launch& launch) {
  Call call = call_of(params, first, heads, launch);
  place(call, launch);
  const std::int64_t width = std::int64_t{params.shape.query_heads} * call.head_dim;
  const auto probes = static_cast<std::int64_t>(params.positions.size());
  const std::int32_t most = std::min(kMostProbes, kMostQueries / call.group);
  for (std::int64_t probe = 0; probe < probes; probe += most) {
    call.q = params.q + probe * width + std::int64_t{first} * call.group * call.head_dim;
    call.probes = static_cast<std::int32_t>(std::min<std::int64_t>(most, probes - probe));
    call.is_first = probe == 0;
    call.is_staged = probe > 0 && call.staged != nullptr;
    call.tiles = (call.probes * call.group + kTileQueries - 1) / kTileQueries;
    for (std::int32_t i = 0; i < call.probes; ++i) {
      const std::int64_t position = params.positions[static_cast<std::size_t>(probe + i)];
      check(position < call.count, "a probe beyond the rows of column_sums()");
      call.positions[i] = static_cast<std::int32_t>(position);
    }
    dispatch_key(params.shape.rows.key(),
                 [&](auto element) { run_for<MathOf<decltype(element)>>(call, launch.stream); });
  }
  add_heads<<<blocks_for(call.count), kThreads, 0, launch.stream>>>(
      call.sums, call.bad, call.kv_heads, call.count, first == 0, params.sums);
  require_launch("add_heads");
}

}  // namespace

void column_sums(const ColumnSumsParams& params, const Launch& launch) {
  if (params.rows.empty() || params.rows[0].count == 0) return;
  if (params.positions.empty()) {
    const auto bytes = static_cast<std::size_t>(params.rows[0].count) * sizeof(float);
    require(cudaMemsetAsync(params.sums, 0, bytes, launch.stream), "column sums of no probe");
    return;
  }
  const std::int32_t step = heads_at_once(params, launch);
  for (std::int32_t first = 0; first < params.shape.kv_heads; first += step) {
    sum_heads(params, first, std::min(step, params.shape.kv_heads - first), launch);
  }
}

}  // namespace sluice::cuda
