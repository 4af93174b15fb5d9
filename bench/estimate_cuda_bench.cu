// The key index on CUDA: building it, and estimates in bytes of the index per second, beside the
// device's best rates for reads and copies. Calls are replayed from a graph, over several indexes
// if one would fit the L2 cache; the logits are always the same buffer, as between the layers of a
// model.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "kernels/runtime/error.h"
#include "kernels/runtime/owners.h"
#include "kernels/runtime/page_digest.h"
#include "kernels/runtime/workspace.h"
#include "kernels/scan/scan.h"
#include "lib/backend/index_ops.h"
#include "lib/backend/memory.h"

namespace sluice::cuda {
namespace {

constexpr std::size_t kBeyondCache = 256u << 20;
constexpr std::size_t kScratch = 64u << 20;
constexpr int kLeastCalls = 4;
constexpr std::int64_t kStreamed = std::int64_t{1} << 30;  // bytes of the baselines

// Sets every 16 bits to (noise & mask) | bits.
__global__ void fill_kernel(std::uint16_t* to, std::size_t count, std::uint16_t mask,
                            std::uint16_t bits) {
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    std::uint64_t x = (i + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 31) * 0xbf58476d1ce4e5b9u;
    to[i] = static_cast<std::uint16_t>((static_cast<std::uint16_t>(x >> 40) & mask) | bits);
  }
}

__global__ void __launch_bounds__(512)
    read_kernel(const uint4* from, std::int64_t count, std::uint32_t* never) {
  constexpr int kUnroll = 8;
  std::uint32_t sum = 0;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x * kUnroll;
  for (std::int64_t at = std::int64_t{blockIdx.x} * blockDim.x * kUnroll + threadIdx.x; at < count;
       at += step) {
    uint4 words[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) words[i] = __ldcs(from + at + i * blockDim.x);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) sum += words[i].x ^ words[i].y ^ words[i].z ^ words[i].w;
  }
  if (sum == 0x12345678u) *never = sum;
}

// Device memory filled with noise.
class Noise {
 public:
  Noise(std::size_t bytes, std::uint16_t mask, std::uint16_t bits)
      : block_(make_device_block(std::max<std::size_t>(bytes, 256))) {
    fill_kernel<<<1024, 256>>>(static_cast<std::uint16_t*>(block_.get()), bytes / 2, mask, bits);
    require_launch("fill");
    require(cudaDeviceSynchronize(), "fill");
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(block_.get());
  }

 private:
  DeviceBlock block_;
};

Noise bytes_of_noise(std::size_t bytes) { return Noise(bytes, 0xffff, 0); }
// f16 of either sign, 2^-4 to 2.
Noise halves_of_noise(std::size_t count) { return Noise(count * 2, 0x93ff, 0x2c00); }

// Times `call(i)` for i of [0, calls), captured once and replayed.
template <typename Call>
void replay(benchmark::State& state, const Workspace& workspace, int calls, std::size_t bytes,
            const Call& call) {
  const Launch launch = workspace.launch();
  const auto stream = launch.stream;
  for (int i = 0; i < calls; ++i) call(i, launch);
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < calls; ++i) call(i, launch);
  cudaGraph_t captured = nullptr;
  require(cudaStreamEndCapture(stream, &captured), "capture");
  const GraphOwner graph(captured);
  cudaGraphExec_t instance = nullptr;
  require(cudaGraphInstantiate(&instance, captured, 0), "graph");
  const GraphExecOwner exec(instance);
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  require(cudaEventCreate(&begin), "event");
  require(cudaEventCreate(&end), "event");
  const EventOwner begin_owner(begin);
  const EventOwner end_owner(end);
  for (int i = 0; i < 3; ++i) require(cudaGraphLaunch(instance, stream), "graph");
  std::vector<double> times;
  for (auto _ : state) {
    require(cudaEventRecord(begin, stream), "event");
    require(cudaGraphLaunch(instance, stream), "graph");
    require(cudaEventRecord(end, stream), "event");
    require(cudaEventSynchronize(end), "event");
    float milliseconds = 0.0f;
    require(cudaEventElapsedTime(&milliseconds, begin, end), "event");
    times.push_back(static_cast<double>(milliseconds) * 1e-3 / calls);
    state.SetIterationTime(times.back());
  }
  std::sort(times.begin(), times.end());
  const double median = times[times.size() / 2];
  state.counters["median_us"] = median * 1e6;
  state.counters["GB/s"] = static_cast<double>(bytes) / median * 1e-9;
}

void read(benchmark::State& state) {
  const Workspace workspace(kScratch);
  const Noise from = bytes_of_noise(kStreamed);
  replay(state, workspace, kLeastCalls, kStreamed, [&](int, const Launch& launch) {
    const auto blocks = static_cast<unsigned>(launch.device->multiprocessors * 4);
    read_kernel<<<blocks, 512, 0, launch.stream>>>(
        from.as<const uint4>(), kStreamed / 16, reinterpret_cast<std::uint32_t*>(launch.scratch));
  });
}

// Bytes read and bytes written.
void copy(benchmark::State& state) {
  const Workspace workspace(kScratch);
  const Noise from = bytes_of_noise(kStreamed);
  const Noise to = bytes_of_noise(kStreamed);
  replay(state, workspace, kLeastCalls, 2 * kStreamed, [&](int, const Launch& launch) {
    require(cudaMemcpyAsync(to.as<void>(), from.as<void>(), kStreamed, cudaMemcpyDeviceToDevice,
                            launch.stream),
            "copy");
  });
}

// Arguments: tokens, KV heads, head_dim, group, bits, channels, rows of the newest page (which get
// logits unless 0), sequences. Sequence i has (i + 1) / sequences of the tokens.
struct Case {
  explicit Case(const benchmark::State& state)
      : tokens(state.range(0)),
        shape{1, static_cast<int>(state.range(1) * state.range(3)),
              static_cast<int>(state.range(1)), static_cast<int>(state.range(2)), DType::bf16},
        bits(static_cast<int>(state.range(4))),
        channels(static_cast<int>(state.range(5))),
        tail(state.range(6)),
        sequences(state.range(7)) {}

  std::int64_t pages(std::int64_t sequence) const {
    return tokens * (sequence + 1) / sequences / kPageTokens;
  }
  std::int64_t pages() const {
    std::int64_t all = 0;
    for (std::int64_t i = 0; i < sequences; ++i) all += pages(i);
    return all;
  }
  // Whole pages, over all KV heads.
  std::size_t units() const { return static_cast<std::size_t>(pages() * shape.kv_heads); }

  std::int64_t tokens;
  KvShape shape;
  int bits;
  int channels;
  std::int64_t tail;
  std::int64_t sequences;
};

template <typename T>
DeviceBlock upload(const std::vector<T>& values) {
  DeviceBlock block = make_device_block(values.size() * sizeof(T));
  require(cudaMemcpy(block.get(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
          "upload");
  return block;
}

// Parts to allocate besides queries and logits.
struct Parts {
  bool tiles = false;
  bool bounds = false;
  bool rows = false;  // all tokens' rows, not one page that stands for all
};

// As many indexes as exceed the cache, with logits for one of them.
class Memory {
 public:
  Memory(const Case& c, const Parts& parts)
      : case_(c),
        table_pages_(c.pages(c.sequences - 1) + 1),
        table_tiles_((table_pages_ + kTilePages - 1) / kTilePages),
        row_pages_(parts.rows ? c.sequences * table_pages_ : 1),
        q_(halves_of_noise(2 * static_cast<std::size_t>(heads() * c.shape.head_dim))),
        logits_(bytes_of_noise(static_cast<std::size_t>(heads() * stride()) * 2)),
        digest_(bytes_of_noise(PageDigest::bytes_of(heads(), stride()))),
        rows_(
            halves_of_noise(static_cast<std::size_t>(c.shape.kv_heads * row_pages_ * kPageTokens) *
                            c.shape.row_bytes() / 2)),
        tokens_(upload(tokens_of(c))),
        page_table_(upload(page_table())),
        tile_table_(upload(tile_table())) {
    const int d = c.shape.head_dim;
    KeyIndexView view;
    view.tiles.bits = c.bits;
    view.tiles.slots = view.bounds.slots = c.sequences * table_tiles_;
    view.slots = static_cast<const std::int32_t*>(tile_table_.get());
    view.table_stride = table_tiles_;
    bytes_ =
        c.units() * (parts.tiles ? view.tiles.page_bytes(c.channels) : view.bounds.page_bytes(d));
    const auto copies = std::clamp<std::size_t>(kBeyondCache / bytes_ + 1, 1, 64);
    for (std::size_t i = 0; i < copies; ++i) {
      if (parts.tiles) {
        codes_.push_back(bytes_of_noise(view.tiles.codes_bytes(c.shape.kv_heads, d)));
        scales_.push_back(halves_of_noise(view.tiles.scales_bytes(c.shape.kv_heads, d) / 2));
        view.tiles.codes = codes_.back().as<std::byte>();
        view.tiles.scales = scales_.back().as<std::uint16_t>();
      }
      if (parts.bounds) {
        bounds_.push_back(halves_of_noise(view.bounds.bytes(c.shape.kv_heads, d) / 2));
        view.bounds.bounds = bounds_.back().as<std::uint16_t>();
      }
      views_.push_back(view);
    }
  }

  TokenBatch batch() const {
    return {static_cast<const BatchToken*>(tokens_.get()), case_.sequences,
            table_pages_ * kPageTokens};
  }
  PagedRows rows() const {
    PagedRows rows;
    rows.device = rows_.as<std::byte>();
    rows.device_stride = row_pages_ * kPageTokens * row_bytes();
    rows.pages = static_cast<const PageSlots*>(page_table_.get());
    rows.table_stride = table_pages_;
    return rows;
  }
  const KeyIndexView& index(int copy) const {
    return views_[static_cast<std::size_t>(copy) % views_.size()];
  }
  EstimateParams params(Selector method, int copy) const {
    EstimateParams p;
    p.q = q_.as<float>();
    p.q_stride = std::int64_t{case_.shape.query_heads} * case_.shape.head_dim;
    p.shape = case_.shape;
    p.batch = batch();
    p.method = method;
    p.channels = case_.channels;
    p.index = index(copy);
    p.rows = rows();
    p.skip_newest = case_.tail == 0;
    p.logits = {logits_.as<std::byte>(), stride()};
    if (case_.tokens >= kDigestedFrom) {
      p.logits.digest = LogitDigest::in(digest_.as<std::byte>(), heads(), stride());
    }
    return p;
  }
  std::int64_t stride() const { return case_.tokens + 1024; }
  std::size_t bytes() const { return bytes_; }
  int calls() const { return std::max(kLeastCalls, static_cast<int>(views_.size())); }

 private:
  std::int64_t heads() const { return case_.sequences * case_.shape.query_heads; }
  std::int64_t row_bytes() const { return static_cast<std::int64_t>(case_.shape.row_bytes()); }

  static std::vector<BatchToken> tokens_of(const Case& c) {
    std::vector<BatchToken> tokens;
    for (std::int64_t i = 0; i < c.sequences; ++i) {
      const std::int64_t last = c.pages(i) * kPageTokens + std::max<std::int64_t>(c.tail, 1) - 1;
      tokens.push_back({static_cast<std::int32_t>(i), static_cast<std::int32_t>(last)});
    }
    return tokens;
  }
  std::vector<PageSlots> page_table() const {
    std::vector<PageSlots> table(static_cast<std::size_t>(case_.sequences * table_pages_));
    for (std::size_t i = 0; i < table.size(); ++i) {
      table[i].device = static_cast<std::int32_t>(static_cast<std::int64_t>(i) % row_pages_);
    }
    return table;
  }
  std::vector<std::int32_t> tile_table() const {
    std::vector<std::int32_t> table(static_cast<std::size_t>(case_.sequences * table_tiles_));
    std::iota(table.begin(), table.end(), 0);
    return table;
  }

  Case case_;
  std::int64_t table_pages_;  // a sequence's capacity
  std::int64_t table_tiles_;  // a sequence's capacity
  std::int64_t row_pages_;    // allocated
  Noise q_;
  Noise logits_;
  Noise digest_;
  Noise rows_;
  DeviceBlock tokens_;
  DeviceBlock page_table_;
  DeviceBlock tile_table_;
  std::size_t bytes_ = 0;
  std::vector<Noise> codes_;
  std::vector<Noise> scales_;
  std::vector<Noise> bounds_;
  std::vector<KeyIndexView> views_;
};

void tiles(benchmark::State& state) {
  const Case c(state);
  const Workspace workspace(kScratch);
  const Memory memory(c, {.tiles = true});
  const Selector method = c.channels < c.shape.head_dim ? Selector::sparq : Selector::int4;
  replay(state, workspace, memory.calls(), memory.bytes(),
         [&](int i, const Launch& launch) { estimate(memory.params(method, i), launch); });
}

void quest(benchmark::State& state) {
  const Case c(state);
  const Workspace workspace(kScratch);
  const Memory memory(c, {.bounds = true});
  replay(state, workspace, memory.calls(), memory.bytes(),
         [&](int i, const Launch& launch) { estimate(memory.params(Selector::quest, i), launch); });
}

// Logits from exact keys; counts the bytes of keys.
void exact(benchmark::State& state) {
  const Case c(state);
  const Workspace workspace(kScratch);
  const Memory memory(c, {.rows = true});
  const std::size_t bytes =
      c.units() * kPageTokens * static_cast<std::size_t>(c.shape.head_dim) * 2;
  replay(state, workspace, kLeastCalls, bytes,
         [&](int i, const Launch& launch) { estimate(memory.params(Selector::exact, i), launch); });
}

// Estimates one of `apart` tokens from tiles; counts the bytes of the whole index.
void candidates(benchmark::State& state, int apart) {
  const Case c(state);
  const Workspace workspace(kScratch);
  const Memory memory(c, {.tiles = true});
  const std::int64_t count = c.tokens / apart;
  std::vector<std::int32_t> positions;
  std::uint64_t noise = 1;
  for (std::int64_t i = 0; i < count * c.shape.kv_heads; ++i) {
    noise = noise * 6364136223846793005u + 1442695040888963407u;
    positions.push_back(
        static_cast<std::int32_t>(i % count * apart + static_cast<int>(noise >> 33) % apart));
  }
  const DeviceBlock list = upload(positions);
  const auto heads = static_cast<std::size_t>(c.shape.kv_heads);
  const PinnedBlock pinned = make_pinned_block(heads * sizeof(HeadSelection));
  auto* const selections = static_cast<HeadSelection*>(pinned.get());
  for (std::size_t head = 0; head < heads; ++head) {
    selections[head] = {.count = static_cast<std::int32_t>(count)};
  }
  const SelectionView view{static_cast<std::int32_t*>(list.get()), count, selections};
  replay(state, workspace, memory.calls(), memory.bytes(), [&](int i, const Launch& launch) {
    EstimateParams p = memory.params(Selector::int4, i);
    p.candidates = &view;
    estimate(p, launch);
  });
}

// Counts the bytes of keys read.
void build(benchmark::State& state) {
  const Case c(state);
  const Workspace workspace(kScratch);
  const Memory memory(c, {.tiles = true, .bounds = true, .rows = true});
  const PinnedBlock bad = make_pinned_block(static_cast<std::size_t>(c.shape.kv_heads) * 4);
  const PagedRows rows = memory.rows();
  std::vector<RowSpan> spans;
  for (int head = 0; head < c.shape.kv_heads; ++head) {
    spans.push_back({rows.device + head * rows.device_stride, c.tokens});
  }
  const std::size_t bytes =
      c.units() * kPageTokens * static_cast<std::size_t>(c.shape.head_dim) * 2;
  replay(state, workspace, kLeastCalls, bytes, [&](int i, const Launch& launch) {
    build_index(
        {c.shape, memory.index(i), 0, 0, c.pages(), spans, static_cast<std::int32_t*>(bad.get())},
        launch);
  });
}

// A step's build: 128 rows in the newest page build its tile, fewer build nothing.
void build_step(benchmark::State& state) {
  const Case c(state);
  const Workspace workspace(kScratch);
  const Memory memory(c, {.tiles = true});
  const auto flags = static_cast<std::size_t>(c.sequences * c.shape.kv_heads);
  const PinnedBlock bad = make_pinned_block(flags * sizeof(std::int32_t));
  replay(state, workspace, kLeastCalls, 0, [&](int i, const Launch& launch) {
    build_batch({c.shape, memory.index(i), memory.batch(), memory.rows(),
                 static_cast<std::int32_t*>(bad.get())},
                launch);
  });
}

constexpr std::int64_t kMillion = 1 << 20;
constexpr int kIterations = 20;

void names(benchmark::internal::Benchmark* bench) {
  bench
      ->ArgNames(
          {"tokens", "kv_heads", "head_dim", "group", "bits", "channels", "tail", "sequences"})
      ->UseManualTime()
      ->Iterations(kIterations)
      ->Unit(benchmark::kMicrosecond);
}

void tile_shapes(benchmark::internal::Benchmark* bench) {
  names(bench);
  for (const std::int64_t group : {4, 1, 8, 16})
    bench->Args({kMillion, 8, 128, group, 4, 128, 0, 1});
  for (const std::int64_t group : {4, 1, 8}) bench->Args({kMillion, 8, 128, group, 4, 32, 0, 1});
  for (const std::int64_t channels : {16, 64}) {
    bench->Args({kMillion, 8, 128, 4, 4, channels, 0, 1});
  }
  for (const std::int64_t bits : {3, 2, 1}) {
    bench->Args({kMillion, 8, 128, 4, bits, 128, 0, 1});
  }
  bench->Args({kMillion, 8, 128, 4, 2, 32, 0, 1});
  bench->Args({kMillion, 8, 64, 4, 4, 64, 0, 1});
  bench->Args({kMillion, 8, 64, 4, 4, 16, 0, 1});
  bench->Args({kMillion, 8, 80, 4, 4, 80, 0, 1});
  bench->Args({kMillion, 8, 256, 2, 4, 256, 0, 1});
  for (const std::int64_t tokens : {4096, 16384}) {
    bench->Args({tokens, 2048, 128, 1, 4, 32, 0, 1});
    bench->Args({tokens, 2048, 128, 1, 4, 32, 128, 1});
  }
  for (const std::int64_t channels : {32, 128}) {
    for (const std::int64_t tail : {0, 128}) {
      bench->Args({131072, 8, 128, 4, 4, channels, tail, 1});
      bench->Args({131072, 32, 128, 1, 4, channels, tail, 1});
    }
  }
  bench->Args({8192, 8, 128, 4, 4, 32, 128, 1});
  for (const std::int64_t channels : {32, 128}) {
    for (const std::int64_t sequences : {4, 16, 64}) {
      bench->Args({32768, 8, 128, 4, 4, channels, 100, sequences});
    }
  }
}

void quest_shapes(benchmark::internal::Benchmark* bench) {
  names(bench);
  for (const std::int64_t group : {4, 1, 8}) bench->Args({kMillion, 8, 128, group, 4, 128, 0, 1});
  bench->Args({131072, 8, 128, 4, 4, 128, 128, 1});
  bench->Args({32768, 8, 128, 4, 4, 128, 100, 16});
}

void exact_shapes(benchmark::internal::Benchmark* bench) {
  names(bench);
  bench->Args({kMillion, 8, 128, 4, 4, 128, 0, 1});
  bench->Args({kMillion, 8, 64, 4, 4, 64, 0, 1});
  bench->Args({131072, 8, 128, 4, 4, 128, 0, 1});
  bench->Args({32768, 8, 128, 4, 4, 128, 100, 16});
}

void candidate_shapes(benchmark::internal::Benchmark* bench) {
  names(bench);
  bench->Args({131072, 8, 128, 4, 4, 128, 0, 1});
  bench->Args({131072, 8, 128, 4, 4, 128, 128, 1});
  bench->Args({kMillion, 8, 128, 4, 4, 128, 128, 1});
}

void dense_candidate_shapes(benchmark::internal::Benchmark* bench) {
  names(bench);
  bench->Args({30720, 512, 128, 1, 4, 128, 0, 1});
}

void build_shapes(benchmark::internal::Benchmark* bench) {
  names(bench);
  bench->Args({kMillion, 8, 128, 4, 4, 128, 0, 1});
  bench->Args({kMillion, 8, 128, 4, 2, 128, 0, 1});
  bench->Args({kMillion, 8, 64, 4, 4, 64, 0, 1});
  bench->Args({128, 8, 128, 4, 4, 128, 0, 1});
}

void step_shapes(benchmark::internal::Benchmark* bench) {
  names(bench);
  for (const std::int64_t tail : {100, 128}) {
    for (const std::int64_t sequences : {1, 64}) {
      bench->Args({1024, 8, 128, 4, 4, 128, tail, sequences});
    }
  }
}

BENCHMARK(read)->UseManualTime()->Iterations(kIterations)->Unit(benchmark::kMicrosecond);
BENCHMARK(copy)->UseManualTime()->Iterations(kIterations)->Unit(benchmark::kMicrosecond);
BENCHMARK(tiles)->Apply(tile_shapes);
BENCHMARK(quest)->Apply(quest_shapes);
BENCHMARK(exact)->Apply(exact_shapes);
BENCHMARK_CAPTURE(candidates, of_16, 16)->Apply(candidate_shapes);
BENCHMARK_CAPTURE(candidates, of_4, 4)->Apply(dense_candidate_shapes);
BENCHMARK(build)->Apply(build_shapes);
BENCHMARK(build_step)->Apply(step_shapes);

}  // namespace
}  // namespace sluice::cuda

BENCHMARK_MAIN();
