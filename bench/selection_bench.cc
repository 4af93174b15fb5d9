// Selecting tokens on the CPU: scans of the key index in bytes per second, beside a plain streaming
// read of the same bytes, and the pruners in tokens per second.
#include <benchmark/benchmark.h>

#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "cpu/attention/attention.h"
#include "cpu/runtime/memory.h"
#include "cpu/runtime/threads.h"
#include "cpu/scan/key_score.h"
#include "cpu/scan/scan.h"
#include "cpu/select/select.h"
#include "sluice/half.h"

namespace sluice::cpu {
namespace {

constexpr int kKvHeads = 8;

// Memory in huge pages, as in a backend, filled with noise.
class Noise {
 public:
  explicit Noise(std::size_t bytes) : bytes_(bytes), data_(memory_.take(Tier::host, bytes)) {
    auto* const words = reinterpret_cast<std::uint64_t*>(data_);
    std::uint64_t random = 1;
    for (std::size_t i = 0; i < bytes / sizeof(std::uint64_t); ++i) {
      random = random * 6364136223846793005u + 1442695040888963407u;
      words[i] = random ^ random >> 29;
    }
  }
  Noise(const Noise&) = delete;
  Noise& operator=(const Noise&) = delete;
  ~Noise() { memory_.give_back(Tier::host, data_, bytes_); }

  std::byte* data() const { return data_; }

 private:
  CpuMemory memory_{MemoryAccount::kNoCap, MemoryAccount::kNoCap};
  std::size_t bytes_;
  std::byte* data_;
};

void count_bytes(benchmark::State& state, std::size_t bytes) {
  state.counters["bytes"] =
      benchmark::Counter(static_cast<double>(bytes), benchmark::Counter::kIsIterationInvariantRate,
                         benchmark::Counter::kIs1000);
}

// The token after `tokens` others that fill their pages; its own row is not scanned.
BatchToken next_page(std::int64_t tokens) { return {0, static_cast<std::int32_t>(tokens)}; }

// Arguments: tokens, head_dim, group, bits, channels read, threads (0: one per core).
struct Scan {
  explicit Scan(const benchmark::State& state)
      : tokens(state.range(0)),
        shape{1, kKvHeads * static_cast<int>(state.range(2)), kKvHeads,
              static_cast<int>(state.range(1)), DType::bf16},
        channels(static_cast<int>(state.range(4))) {
    view.tiles.bits = static_cast<int>(state.range(3));
    view.tiles.slots = tokens / kPageTokens / kTilePages;
    slots.resize(static_cast<std::size_t>(view.tiles.slots));
    std::iota(slots.begin(), slots.end(), 0);
    view.slots = slots.data();
    view.table_stride = view.tiles.slots;
  }
  Scan(const Scan&) = delete;
  Scan& operator=(const Scan&) = delete;
  std::int64_t pages() const { return tokens / kPageTokens * kKvHeads; }
  std::size_t bytes() const {
    return static_cast<std::size_t>(pages()) * view.tiles.page_bytes(channels);
  }

  std::int64_t tokens;
  KvShape shape;
  int channels;
  KeyIndexView view;
  std::vector<std::int32_t> slots;  // the table of tiles
};

void scan(benchmark::State& state) {
  Scan s(state);
  const Noise codes(s.view.tiles.codes_bytes(kKvHeads, s.shape.head_dim));
  const std::size_t scales_bytes = s.view.tiles.scales_bytes(kKvHeads, s.shape.head_dim);
  const Noise scales(scales_bytes);
  auto* const halves = reinterpret_cast<std::uint16_t*>(scales.data());
  for (std::size_t i = 0; i < scales_bytes / sizeof(std::uint16_t); ++i) {
    halves[i] = float_to_f16(0.25f);
  }
  s.view.tiles.codes = codes.data();
  s.view.tiles.scales = halves;
  std::vector<float> q(static_cast<std::size_t>(s.shape.query_heads * s.shape.head_dim));
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = std::sin(static_cast<float>(i));
  const Noise logits(static_cast<std::size_t>(s.shape.query_heads * s.tokens) * sizeof(float));
  const BatchToken next = next_page(s.tokens);
  EstimateParams p;
  p.q = q.data();
  p.q_stride = std::int64_t{s.shape.query_heads} * s.shape.head_dim;
  p.shape = s.shape;
  p.batch = {&next, 1, next.count()};
  p.method = s.channels < s.shape.head_dim ? Selector::sparq : Selector::int4;
  p.channels = s.channels;
  p.index = s.view;
  p.skip_newest = true;
  p.logits = {logits.data(), s.tokens};
  Threads threads(static_cast<int>(state.range(5)));
  for (auto _ : state) estimate(p, threads);
  count_bytes(state, s.bytes());
}

std::uint64_t sum_of(const std::uint64_t* words, std::size_t count) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += words[i];
  return sum;
}

// The upper bound for a scan with the same arguments.
void streaming_read(benchmark::State& state) {
  const Scan s(state);
  const Noise memory(s.bytes());
  Threads threads(static_cast<int>(state.range(5)));
  const auto* const words = reinterpret_cast<const std::uint64_t*>(memory.data());
  constexpr std::int64_t kPieces = 64;
  const std::size_t piece = s.bytes() / sizeof(std::uint64_t) / kPieces;
  for (auto _ : state) {
    threads.for_each(kPieces, [&](std::int64_t i) {
      benchmark::DoNotOptimize(sum_of(words + static_cast<std::size_t>(i) * piece, piece));
    });
  }
  count_bytes(state, s.bytes());
}

// Arguments: tokens, group, top_p (0: top_k), threads.
void prune(benchmark::State& state) {
  const std::int64_t tokens = state.range(0);
  const int group = static_cast<int>(state.range(1));
  const KvShape shape{1, kKvHeads * group, kKvHeads, 128, DType::bf16};
  std::vector<float> logits(static_cast<std::size_t>(shape.query_heads * tokens));
  std::uint64_t random = 1;
  std::vector<float> fresh = logits;
  for (float& x : fresh) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    x = static_cast<float>(random >> 40) * 0x1p-20f;  // uniform in [0, 16)
  }
  std::vector<std::int32_t> positions(static_cast<std::size_t>(kKvHeads * tokens));
  std::vector<HeadSelection> heads(kKvHeads);
  std::vector<float> alpha(static_cast<std::size_t>(shape.query_heads));
  const BatchToken next = next_page(tokens);
  SelectParams p;
  p.shape = shape;
  p.batch = {&next, 1, next.count()};
  p.logits = {reinterpret_cast<std::byte*>(logits.data()), tokens};
  p.skip_newest = true;
  p.prune = state.range(2) != 0 ? Pruner::top_p : Pruner::top_k;
  p.k.share.tokens = 256;
  p.p = 0.95f;
  p.selected = {positions.data(), tokens, heads.data()};
  p.alpha = alpha.data();
  Threads threads(static_cast<int>(state.range(3)));
  for (auto _ : state) {
    state.PauseTiming();
    logits = fresh;
    state.ResumeTiming();
    select(p, threads);
  }
  state.counters["logits"] = benchmark::Counter(static_cast<double>(logits.size()),
                                                benchmark::Counter::kIsIterationInvariantRate,
                                                benchmark::Counter::kIs1000);
}

void scan_shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"tokens", "head_dim", "group", "bits", "channels", "threads"});
  for (const std::int64_t threads : {1, 0}) {
    for (const std::int64_t group : {1, 4, 8}) bench->Args({1 << 20, 128, group, 4, 128, threads});
    // Larger than any last-level cache, like the indexes of all layers together.
    for (const std::int64_t group : {1, 4}) bench->Args({4 << 20, 128, group, 4, 128, threads});
    bench->Args({1 << 20, 128, 4, 4, 32, threads});
    bench->Args({1 << 20, 128, 4, 2, 128, threads});
    bench->Args({1 << 20, 64, 4, 4, 64, threads});
    bench->Args({1 << 20, 64, 4, 4, 16, threads});
  }
  bench->UseRealTime()->Unit(benchmark::kMillisecond);
}

void prune_shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"tokens", "group", "top_p", "threads"});
  for (const std::int64_t top_p : {0, 1}) {
    for (const std::int64_t tokens : {32 << 10, 1 << 20}) bench->Args({tokens, 4, top_p, 1});
  }
  bench->UseRealTime()->Unit(benchmark::kMillisecond);
}

BENCHMARK(streaming_read)->Apply(scan_shapes);
BENCHMARK(scan)->Apply(scan_shapes);
BENCHMARK(prune)->Apply(prune_shapes);

}  // namespace
}  // namespace sluice::cpu
