// The key index on CUDA: building it, and estimates in bytes of the index per second beside what
// the device reads and copies at best. Calls are replayed from a graph, over several indexes where
// one would fit the L2 cache; the logits are always the same, as between the layers of a model.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/error.h"
#include "kernels/estimate.h"
#include "kernels/key_index.h"
#include "kernels/owners.h"
#include "kernels/workspace.h"
#include "lib/backend.h"

namespace sluice::cuda {
namespace {

constexpr std::size_t kBeyondCache = 256u << 20;
constexpr std::size_t kScratch = 64u << 20;
constexpr int kLeastCalls = 4;
constexpr std::int64_t kStreamed = std::int64_t{1} << 30;  // bytes of the baselines

// Every 16 bits are (noise & mask) | bits.
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

// Arguments: tokens, KV heads, head_dim, group, bits, channels, rows after the pages.
struct Case {
  explicit Case(const benchmark::State& state)
      : tokens(state.range(0)),
        shape{1, static_cast<int>(state.range(1) * state.range(3)),
              static_cast<int>(state.range(1)), static_cast<int>(state.range(2)), DType::bf16},
        bits(static_cast<int>(state.range(4))),
        channels(static_cast<int>(state.range(5))),
        tail(state.range(6)) {}

  std::int64_t pages() const { return tokens / kPageTokens; }
  std::size_t units() const { return static_cast<std::size_t>(pages() * shape.kv_heads); }

  std::int64_t tokens;
  KvShape shape;
  int bits;
  int channels;
  std::int64_t tail;
};

// Indexes enough not to fit the cache, with logits for one of them.
class Memory {
 public:
  Memory(const Case& c, bool tiles, bool bounds)
      : case_(c),
        q_(halves_of_noise(2 * static_cast<std::size_t>(c.shape.query_heads * c.shape.head_dim))),
        logits_(bytes_of_noise(static_cast<std::size_t>(c.shape.query_heads * stride()) * 2)),
        digest_(bytes_of_noise(LogitDigest::bytes_of(c.shape.query_heads, stride()))),
        rows_(halves_of_noise(static_cast<std::size_t>(c.shape.kv_heads * c.tail) *
                              c.shape.row_bytes() / 2)) {
    const int d = c.shape.head_dim;
    KeyIndexView view;
    view.tiles.bits = c.bits;
    view.tiles.capacity = view.bounds.capacity = c.pages();
    bytes_ = c.units() * (tiles ? view.tiles.page_bytes(c.channels) : view.bounds.page_bytes(d));
    const auto copies = std::clamp<std::size_t>(kBeyondCache / bytes_ + 1, 1, 64);
    for (std::size_t i = 0; i < copies; ++i) {
      if (tiles) {
        codes_.push_back(bytes_of_noise(view.tiles.codes_bytes(c.shape.kv_heads, d)));
        scales_.push_back(halves_of_noise(c.units() * static_cast<std::size_t>(d) * 2));
        view.tiles.codes = codes_.back().as<std::byte>();
        view.tiles.scales = scales_.back().as<std::uint16_t>();
      }
      if (bounds) {
        bounds_.push_back(halves_of_noise(c.units() * view.bounds.page_bytes(d) / 2));
        view.bounds.bounds = bounds_.back().as<std::uint16_t>();
      }
      views_.push_back(view);
    }
    for (int head = 0; head < c.shape.kv_heads; ++head) {
      spans_.push_back(
          {rows_.as<std::byte>() + static_cast<std::size_t>(head * c.tail) * c.shape.row_bytes(),
           c.tail});
    }
  }

  EstimateParams params(Selector method, int copy) const {
    EstimateParams p;
    p.q = q_.as<float>();
    p.shape = case_.shape;
    p.method = method;
    p.channels = case_.channels;
    p.index = views_[static_cast<std::size_t>(copy) % views_.size()];
    p.pages = case_.pages();
    p.rows = spans_;
    p.logits = {logits_.as<std::byte>(), stride()};
    if (case_.tokens >= kDigestedFrom) {
      p.logits.digest = LogitDigest::in(digest_.as<std::byte>(), case_.shape.query_heads, stride());
    }
    return p;
  }
  std::int64_t stride() const { return case_.tokens + 1024; }
  std::size_t bytes() const { return bytes_; }
  int calls() const { return std::max(kLeastCalls, static_cast<int>(views_.size())); }

 private:
  Case case_;
  Noise q_;
  Noise logits_;
  Noise digest_;
  Noise rows_;
  std::size_t bytes_ = 0;
  std::vector<Noise> codes_;
  std::vector<Noise> scales_;
  std::vector<Noise> bounds_;
  std::vector<KeyIndexView> views_;
  std::vector<RowSpan> spans_;
};

void tiles(benchmark::State& state) {
  const Case c(state);
  const Workspace workspace(kScratch);
  const Memory memory(c, true, false);
  const Selector method = c.channels < c.shape.head_dim ? Selector::sparq : Selector::int4;
  replay(state, workspace, memory.calls(), memory.bytes(),
         [&](int i, const Launch& launch) { estimate(memory.params(method, i), launch); });
}

void quest(benchmark::State& state) {
  const Case c(state);
  const Workspace workspace(kScratch);
  const Memory memory(c, false, true);
  replay(state, workspace, memory.calls(), memory.bytes(),
         [&](int i, const Launch& launch) { estimate(memory.params(Selector::quest, i), launch); });
}

// Logits of the rows themselves; counts the bytes of keys.
void exact(benchmark::State& state) {
  Case c(state);
  const Workspace workspace(kScratch);
  const Memory memory(c, true, false);
  const auto bytes = static_cast<std::size_t>(c.tail * c.shape.kv_heads * c.shape.head_dim) * 2;
  replay(state, workspace, kLeastCalls, bytes, [&](int i, const Launch& launch) {
    EstimateParams p = memory.params(Selector::exact, i);
    p.pages = 0;
    estimate(p, launch);
  });
}

// One of `apart` tokens, by their tiles; counts the bytes of the whole index.
void candidates(benchmark::State& state, int apart) {
  const Case c(state);
  const Workspace workspace(kScratch);
  const Memory memory(c, true, false);
  const std::int64_t count = c.tokens / apart;
  std::vector<std::int32_t> positions;
  std::uint64_t noise = 1;
  for (std::int64_t i = 0; i < count * c.shape.kv_heads; ++i) {
    noise = noise * 6364136223846793005u + 1442695040888963407u;
    positions.push_back(
        static_cast<std::int32_t>(i % count * apart + static_cast<int>(noise >> 33) % apart));
  }
  const DeviceBlock list = make_device_block(positions.size() * 4);
  require(cudaMemcpy(list.get(), positions.data(), positions.size() * 4, cudaMemcpyHostToDevice),
          "upload");
  const auto heads = static_cast<std::size_t>(c.shape.kv_heads);
  const PinnedBlock pinned = make_pinned_block(heads * sizeof(HeadSelection));
  auto* const selections = static_cast<HeadSelection*>(pinned.get());
  for (std::size_t head = 0; head < heads; ++head) {
    selections[head] = {static_cast<std::int32_t>(count), 0, 0, 0, 0};
  }
  const SelectionView view{static_cast<std::int32_t*>(list.get()), count, selections};
  replay(state, workspace, memory.calls(), memory.bytes(), [&](int i, const Launch& launch) {
    EstimateParams p = memory.params(Selector::int4, i);
    p.candidates = &view;
    estimate(p, launch);
  });
}

// Counts the bytes of keys read; the rows of all tokens are `tail`.
void build(benchmark::State& state) {
  Case c(state);
  const Workspace workspace(kScratch);
  const Memory memory(c, true, true);
  const Noise rows = halves_of_noise(static_cast<std::size_t>(c.tokens * c.shape.kv_heads) *
                                     c.shape.row_bytes() / 2);
  const PinnedBlock bad = make_pinned_block(static_cast<std::size_t>(c.shape.kv_heads) * 4);
  std::vector<RowSpan> spans;
  for (int head = 0; head < c.shape.kv_heads; ++head) {
    spans.push_back(
        {rows.as<std::byte>() + static_cast<std::size_t>(head * c.tokens) * c.shape.row_bytes(),
         c.tokens});
  }
  const auto bytes = static_cast<std::size_t>(c.tokens * c.shape.kv_heads * c.shape.head_dim) * 2;
  replay(state, workspace, kLeastCalls, bytes, [&](int i, const Launch& launch) {
    build_index({c.shape, memory.params(Selector::int4, i).index, 0, c.pages(), spans,
                 static_cast<std::int32_t*>(bad.get())},
                launch);
  });
}

constexpr std::int64_t kMillion = 1 << 20;
constexpr int kIterations = 20;

void names(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"tokens", "kv_heads", "head_dim", "group", "bits", "channels", "tail"})
      ->UseManualTime()
      ->Iterations(kIterations)
      ->Unit(benchmark::kMicrosecond);
}

void tile_shapes(benchmark::internal::Benchmark* bench) {
  names(bench);
  for (const std::int64_t group : {4, 1, 8, 16}) bench->Args({kMillion, 8, 128, group, 4, 128, 0});
  for (const std::int64_t group : {4, 1, 8}) bench->Args({kMillion, 8, 128, group, 4, 32, 0});
  for (const std::int64_t channels : {16, 64}) {
    bench->Args({kMillion, 8, 128, 4, 4, channels, 0});
  }
  bench->Args({kMillion, 8, 128, 4, 2, 128, 0});
  bench->Args({kMillion, 8, 128, 4, 2, 32, 0});
  bench->Args({kMillion, 8, 64, 4, 4, 64, 0});
  bench->Args({kMillion, 8, 64, 4, 4, 16, 0});
  bench->Args({kMillion, 8, 80, 4, 4, 80, 0});
  bench->Args({kMillion, 8, 256, 2, 4, 256, 0});
  for (const std::int64_t tokens : {4096, 16384}) {
    bench->Args({tokens, 2048, 128, 1, 4, 32, 0});
    bench->Args({tokens, 2048, 128, 1, 4, 32, 128});
  }
  for (const std::int64_t channels : {32, 128}) {
    for (const std::int64_t tail : {0, 128}) {
      bench->Args({131072, 8, 128, 4, 4, channels, tail});
      bench->Args({131072, 32, 128, 1, 4, channels, tail});
    }
  }
  bench->Args({8192, 8, 128, 4, 4, 32, 128});
}

void quest_shapes(benchmark::internal::Benchmark* bench) {
  names(bench);
  for (const std::int64_t group : {4, 1, 8}) bench->Args({kMillion, 8, 128, group, 4, 128, 0});
  bench->Args({131072, 8, 128, 4, 4, 128, 128});
}

void exact_shapes(benchmark::internal::Benchmark* bench) {
  names(bench);
  bench->Args({128, 8, 128, 4, 4, 128, kMillion});
  bench->Args({128, 8, 64, 4, 4, 64, kMillion});
  bench->Args({128, 8, 128, 4, 4, 128, 131072});
}

void candidate_shapes(benchmark::internal::Benchmark* bench) {
  names(bench);
  bench->Args({131072, 8, 128, 4, 4, 128, 0});
  bench->Args({131072, 8, 128, 4, 4, 128, 128});
  bench->Args({kMillion, 8, 128, 4, 4, 128, 128});
}

void dense_candidate_shapes(benchmark::internal::Benchmark* bench) {
  names(bench);
  bench->Args({30720, 512, 128, 1, 4, 128, 0});
}

void build_shapes(benchmark::internal::Benchmark* bench) {
  names(bench);
  bench->Args({kMillion, 8, 128, 4, 4, 128, 0});
  bench->Args({kMillion, 8, 128, 4, 2, 128, 0});
  bench->Args({kMillion, 8, 64, 4, 4, 64, 0});
  bench->Args({128, 8, 128, 4, 4, 128, 0});
}

BENCHMARK(read)->UseManualTime()->Iterations(kIterations)->Unit(benchmark::kMicrosecond);
BENCHMARK(copy)->UseManualTime()->Iterations(kIterations)->Unit(benchmark::kMicrosecond);
BENCHMARK(tiles)->Apply(tile_shapes);
BENCHMARK(quest)->Apply(quest_shapes);
BENCHMARK(exact)->Apply(exact_shapes);
BENCHMARK_CAPTURE(candidates, of_16, 16)->Apply(candidate_shapes);
BENCHMARK_CAPTURE(candidates, of_4, 4)->Apply(dense_candidate_shapes);
BENCHMARK(build)->Apply(build_shapes);

}  // namespace
}  // namespace sluice::cuda

BENCHMARK_MAIN();
