// Selecting tokens on the GPU: select() over f16 logits, in logits per second, and column_sums() in
// floating-point operations per second. Calls run from a graph, over inputs that take turns and
// together exceed the cache.
#include <benchmark/benchmark.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "kernels/runtime/error.h"
#include "kernels/runtime/owners.h"
#include "kernels/runtime/page_digest.h"
#include "kernels/runtime/workspace.h"
#include "kernels/scan/scan.h"
#include "kernels/select/select.h"
#include "lib/backend/index_ops.h"

namespace sluice::cuda {
namespace {

constexpr std::int64_t kCacheBytes = std::int64_t{128} << 20;
constexpr std::size_t kScratchBytes = std::size_t{64} << 20;  // as a queue of the backend has

__device__ std::uint32_t mixed(std::uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return static_cast<std::uint32_t>(x >> 32);
}

// Normal numbers. Entry `needle` of every row, if there is one, is 30.
__global__ void fill_normal(__half* x, std::int64_t count, std::int64_t columns, float deviation,
                            std::int64_t needle, std::uint64_t seed) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const std::uint64_t at = (seed << 40) + 2 * static_cast<std::uint64_t>(i);
  const float u = (static_cast<float>(mixed(at)) + 0.5f) * 0x1p-32f;
  const float v = static_cast<float>(mixed(at + 1)) * 0x1p-32f;
  const float normal = sqrtf(-2.0f * logf(fminf(u, 0.99999994f))) * cospif(2.0f * v);
  x[i] = __float2half(i % columns == needle ? 30.0f : deviation * normal);
}

// The digest that a scan of tiles makes of logits [heads, group, columns]; one thread per page of a
// row.
__global__ void fill_digest(const __half* x, std::int64_t count, int group, std::int64_t columns,
                            PageDigest digest) {
  const std::int64_t at =
      (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kPageTokens;
  if (at >= count) return;
  const std::int64_t row = at / columns;
  const std::int64_t page = row / group * digest.pages + at % columns / kPageTokens;
  const std::int64_t place = page * group + row % group;
  const __half* const first = x + at;
  __half* const maxima = reinterpret_cast<__half*>(digest.maxima) + place * kBoundsPerPage;
  __half highest = first[0];
  for (int bound = 0; bound < kBoundsPerPage; ++bound) {
    __half most = first[bound * kBoundTokens];
    for (int i = 1; i < kBoundTokens; ++i) most = __hmax(most, first[bound * kBoundTokens + i]);
    maxima[bound] = most;
    highest = __hmax(highest, most);
  }
  float sum = 0.0f;
  for (int i = 0; i < kPageTokens; ++i) {
    sum += expf(__half2float(first[i]) - __half2float(highest));
  }
  digest.sums[place] = sum;
}

// Every fourth position.
__global__ void fill_list(std::int32_t* list, std::int64_t count, std::int64_t columns) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) list[i] = static_cast<std::int32_t>(i % columns * 4);
}

// Runs `calls` (a multiple of the inputs) per graph launch; the reported time is that of one call.
template <typename Body>
void run_graph(benchmark::State& state, const Workspace& workspace, int calls, const Body& body) {
  const cudaStream_t stream = workspace.launch().stream;
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  for (int i = 0; i < calls; ++i) body(i);
  cudaGraph_t graph = nullptr;
  require(cudaStreamEndCapture(stream, &graph), "capture");
  const GraphOwner graph_owner(graph);
  cudaGraphExec_t executable = nullptr;
  require(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  const GraphExecOwner executable_owner(executable);
  cudaEvent_t events[2];
  for (cudaEvent_t& event : events) require(cudaEventCreate(&event), "an event");
  for (int i = 0; i < 3; ++i) require(cudaGraphLaunch(executable, stream), "warm-up");
  for (auto _ : state) {
    require(cudaEventRecord(events[0], stream), "an event");
    require(cudaGraphLaunch(executable, stream), "launch");
    require(cudaEventRecord(events[1], stream), "an event");
    require(cudaEventSynchronize(events[1]), "an event");
    float milliseconds = 0.0f;
    require(cudaEventElapsedTime(&milliseconds, events[0], events[1]), "an event");
    state.SetIterationTime(static_cast<double>(milliseconds) / 1e3 / calls);
  }
  for (const cudaEvent_t event : events) static_cast<void>(cudaEventDestroy(event));
}

// `count` tokens that choose among up to `most` others: the first among all of them.
std::vector<BatchToken> tokens_of(std::int64_t count, std::int64_t most) {
  std::vector<BatchToken> tokens;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto position = static_cast<std::int32_t>(most * (8 - i % 8) / 8);
    tokens.push_back({static_cast<std::int32_t>(i), position});
  }
  return tokens;
}

// Arguments: tokens, KV heads, group, logits per row of the longest, keep (> 0: k of top_k; 0:
// top_p(0.95); < 0: top_p with this cap), deviation of the logits times 10 (negative: with a
// needle), form (1: the entries are candidates; 2: with the digest of a scan).
void select_rows(benchmark::State& state) {
  const std::int64_t batch = state.range(0);
  const auto kv_heads = static_cast<int>(state.range(1));
  const auto group = static_cast<int>(state.range(2));
  const std::int64_t columns = state.range(3);
  const std::int64_t keep = state.range(4);
  const float deviation = std::fabs(static_cast<float>(state.range(5))) / 10.0f;
  const bool listed = state.range(6) == 1;
  const bool digested = state.range(6) == 2;
  const std::int64_t all_heads = batch * kv_heads;
  const std::int64_t count = columns * all_heads * group;
  const auto inputs = static_cast<int>(std::clamp<std::int64_t>(kCacheBytes / (2 * count), 3, 64));
  const std::int64_t context = listed ? columns * 4 : columns;
  const std::vector<BatchToken> tokens = tokens_of(batch, context);
  const DeviceBlock device_tokens = make_device_block(tokens.size() * sizeof(BatchToken));
  require(cudaMemcpy(device_tokens.get(), tokens.data(), tokens.size() * sizeof(BatchToken),
                     cudaMemcpyDefault),
          "tokens");
  SelectParams p;
  p.shape = {1, kv_heads * group, kv_heads, 128, DType::bf16};
  p.batch = {static_cast<const BatchToken*>(device_tokens.get()), batch, context + 1};
  p.skip_newest = true;
  p.prune = keep > 0 ? Pruner::top_k : Pruner::top_p;
  p.k.share.tokens = keep > 0 ? keep : 0;
  p.p = 0.95f;
  p.cap.share.tokens = keep < 0 ? -keep : 0;

  const auto heads = static_cast<std::size_t>(all_heads);
  const std::size_t list_bytes = heads * static_cast<std::size_t>(columns) * 4;
  const DeviceBlock logits = make_device_block(static_cast<std::size_t>(count * inputs) * 2);
  const DeviceBlock positions = make_device_block(list_bytes);
  const DeviceBlock list = make_device_block(list_bytes);
  const PinnedBlock results = make_pinned_block(2 * heads * sizeof(HeadSelection));
  const PinnedBlock alpha = make_pinned_block(heads * static_cast<std::size_t>(group) * 4);
  auto* const chosen = static_cast<HeadSelection*>(results.get());
  p.selected = {static_cast<std::int32_t*>(positions.get()), columns, chosen};
  p.alpha = static_cast<float*>(alpha.get());
  SelectionView view{static_cast<std::int32_t*>(list.get()), columns, chosen + heads};
  std::int64_t looked_at = 0;
  for (std::size_t h = 0; h < heads; ++h) {
    const BatchToken& token = tokens[h / static_cast<std::size_t>(kv_heads)];
    view.heads[h].count = static_cast<std::int32_t>(token.page_first() * columns / context);
    looked_at += std::int64_t{view.heads[h].count} * group;
  }
  if (listed) {
    const std::int64_t all = columns * all_heads;
    fill_list<<<static_cast<unsigned>((all + 255) / 256), 256>>>(view.positions, all, columns);
    p.candidates = &view;
  }
  const std::int64_t needle = state.range(5) < 0 ? columns / 3 : -1;
  auto* const data = static_cast<std::byte*>(logits.get());
  for (int i = 0; i < inputs; ++i) {
    auto* const to = reinterpret_cast<__half*>(data + i * count * 2);
    fill_normal<<<static_cast<unsigned>((count + 255) / 256), 256>>>(
        to, count, columns, deviation, needle, static_cast<std::uint64_t>(i + 1));
  }
  std::vector<DeviceBlock> blocks;
  std::vector<LogitDigest> digests(static_cast<std::size_t>(inputs));
  for (std::size_t i = 0; digested && i < digests.size(); ++i) {
    const std::int64_t rows = all_heads * group;
    const std::int64_t pages = count / kPageTokens;
    blocks.push_back(make_device_block(PageDigest::bytes_of(rows, columns)));
    digests[i] = LogitDigest::in(static_cast<std::byte*>(blocks.back().get()), rows, columns);
    fill_digest<<<static_cast<unsigned>((pages + 255) / 256), 256>>>(
        reinterpret_cast<const __half*>(data) + static_cast<std::int64_t>(i) * count, count, group,
        columns, PageDigest::of(digests[i]));
  }
  require(cudaDeviceSynchronize(), "fill");
  p.logits = {data, columns};
  const Workspace workspace(kScratchBytes);
  run_graph(state, workspace, inputs, [&](int i) {
    p.logits = {data + i * count * 2, columns, digests[static_cast<std::size_t>(i)]};
    select(p, workspace.launch());
  });
  double kept = 0.0;
  for (std::size_t h = 0; h < heads; ++h) {
    kept += static_cast<double>(chosen[h].count) / static_cast<double>(heads);
  }
  state.counters["kept"] = kept;
  state.counters["logits"] = benchmark::Counter(static_cast<double>(looked_at),
                                                benchmark::Counter::kIsIterationInvariantRate,
                                                benchmark::Counter::kIs1000);
}

// Arguments: probes, rows, rows in host memory.
void sum_columns(benchmark::State& state) {
  const std::int64_t probes = state.range(0);
  const std::int64_t rows = state.range(1);
  ColumnSumsParams p;
  p.shape = {1, 32, 8, 128, DType::bf16};
  const std::size_t bytes = p.shape.row_bytes() * static_cast<std::size_t>(rows) * 8;
  const DeviceBlock device = make_device_block(bytes);
  const PinnedBlock host = make_pinned_block(state.range(2) != 0 ? bytes : 64);
  const DeviceBlock q = make_device_block(static_cast<std::size_t>(probes) * 32 * 128 * 4);
  const PinnedBlock sums = make_pinned_block(static_cast<std::size_t>(rows) * 4);
  // f16 noise serves as bf16 rows, because its bits are finite numbers in bf16, too.
  const auto halves = static_cast<std::int64_t>(bytes / 2);
  fill_normal<<<static_cast<unsigned>((halves + 255) / 256), 256>>>(
      static_cast<__half*>(device.get()), halves, halves, 1.0f, -1, 1);
  std::vector<float> queries(static_cast<std::size_t>(probes) * 32 * 128);
  for (std::size_t i = 0; i < queries.size(); ++i) queries[i] = std::sin(static_cast<float>(i));
  require(cudaMemcpy(q.get(), queries.data(), queries.size() * 4, cudaMemcpyDefault), "queries");
  if (state.range(2) != 0) {
    require(cudaMemcpy(host.get(), device.get(), bytes, cudaMemcpyDefault), "rows");
  }
  std::vector<RowSpan> spans;
  const auto* const base =
      static_cast<const std::byte*>(state.range(2) != 0 ? host.get() : device.get());
  for (std::size_t h = 0; h < 8; ++h) spans.push_back({base + h * (bytes / 8), rows});
  std::vector<std::int64_t> positions(static_cast<std::size_t>(probes));
  for (std::int64_t i = 0; i < probes; ++i) {
    positions[static_cast<std::size_t>(i)] = rows - 1 - (i < probes / 2 ? i : (i * rows) / probes);
  }
  p.q = static_cast<const float*>(q.get());
  p.positions = positions;
  p.rows = spans;
  p.sums = static_cast<float*>(sums.get());
  const Workspace workspace(std::size_t{128} << 20);
  run_graph(state, workspace, 2, [&](int) { column_sums(p, workspace.launch()); });
  const double pairs = static_cast<double>(
      std::accumulate(positions.begin(), positions.end(), std::int64_t{0}) + probes);
  state.counters["FLOP"] =
      benchmark::Counter(pairs * 32 * 128 * 2 * 2, benchmark::Counter::kIsIterationInvariantRate,
                         benchmark::Counter::kIs1000);
}

void select_shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"tokens", "kv_heads", "group", "logits", "keep", "tenths", "form"});
  constexpr std::int64_t kMillion = 1 << 20;
  for (const std::int64_t form : {0, 2}) {
    for (const std::int64_t tenths : {40, 20, -20, 10}) {
      bench->Args({1, 8, 4, kMillion, 0, tenths, form});
    }
    for (const std::int64_t keep : {std::int64_t{-256}, std::int64_t{256}, kMillion / 4}) {
      bench->Args({1, 8, 4, kMillion, keep, 40, form});
    }
  }
  bench->Args({1, 8, 4, kMillion, -256, -40, 2});
  for (const std::int64_t logits : {kMillion / 4, kMillion / 8, kMillion / 32}) {
    for (const std::int64_t keep : {-256, 256}) bench->Args({1, 8, 4, logits, keep, 40, 2});
  }
  for (const std::int64_t heads : {8, 2}) {
    for (const std::int64_t logits : {131072, 32768}) {
      for (const std::int64_t keep : {0, -256, 256})
        bench->Args({1, heads, 4, logits, keep, 40, 0});
    }
  }
  for (const std::int64_t tokens : {4, 16, 64}) {
    for (const std::int64_t logits : {32768, 4096}) {
      for (const std::int64_t keep : {0, -256, 256})
        bench->Args({tokens, 8, 4, logits, keep, 40, 0});
    }
  }
  for (const std::int64_t tokens : {4, 16, 64}) {
    for (const std::int64_t keep : {-256, 256}) bench->Args({tokens, 8, 4, 32768, keep, 40, 2});
  }
  bench->Args({8, 8, 4, kMillion / 4, -256, 40, 2});
  // What quest, sparq, twilight (both of its selections) and values ask for in a batch.
  for (const auto& [tokens, logits] : {std::pair{16, 32768}, std::pair{64, 8192}}) {
    for (const int keep : {1024, 128, logits / 4}) {
      bench->Args({tokens, 8, 4, logits, keep, 20, 0});
    }
    bench->Args({tokens, 8, 4, logits / 4, 0, 20, 1});
    bench->Args({tokens, 8, 4, logits, 64, 20, 2});
  }
  for (const std::int64_t logits : {4096, 16384}) bench->Args({1, 2048, 1, logits, 128, 40, 0});
  for (const std::int64_t heads : {512, 2048}) bench->Args({1, heads, 1, 8192, 0, 20, 1});
  for (const std::int64_t heads : {512, 2048}) bench->Args({1, heads, 1, 30000, 8192, 40, 0});
  bench->UseManualTime()->Unit(benchmark::kMicrosecond);
}

BENCHMARK(select_rows)->Apply(select_shapes);
BENCHMARK(sum_columns)
    ->ArgNames({"probes", "rows", "host"})
    ->Args({128, 32768, 0})
    ->Args({128, 32768, 1})
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace sluice::cuda
