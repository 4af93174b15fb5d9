// Attention on the CPU: decode in bytes of rows per second, beside a plain streaming read of the
// same bytes, and causal prefill in FLOP per second.
#include <benchmark/benchmark.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/attention/attention.h"
#include "cpu/runtime/memory.h"
#include "cpu/runtime/threads.h"

namespace sluice::cpu {
namespace {

// Rows of random bf16 in huge pages, as in a backend.
class Rows {
 public:
  Rows(const KvShape& shape, std::int64_t count)
      : count_(count),
        head_bytes_(static_cast<std::size_t>(count) * shape.row_bytes()),
        bytes_(head_bytes_ * static_cast<std::size_t>(shape.kv_heads)),
        data_(memory_.take(Tier::host, bytes_)) {
    auto* const words = reinterpret_cast<std::uint64_t*>(data_);
    std::uint64_t random = 1;
    for (std::size_t i = 0; i < bytes_ / sizeof(std::uint64_t); ++i) {
      random = random * 6364136223846793005u + 1442695040888963407u;
      // Random signs and fractions with exponents of [1, 4): four numbers of magnitude about 2.
      words[i] = ((random ^ random >> 29) & 0x80ff80ff80ff80ffu) | 0x3f803f803f803f80u;
    }
  }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;
  ~Rows() { memory_.give_back(Tier::host, data_, bytes_); }

  std::vector<RowSpan> spans() const {
    std::vector<RowSpan> spans;
    for (std::size_t at = 0; at < bytes_; at += head_bytes_) spans.push_back({data_ + at, count_});
    return spans;
  }
  const std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  CpuMemory memory_{MemoryAccount::kNoCap, MemoryAccount::kNoCap};
  std::int64_t count_;
  std::size_t head_bytes_;
  std::size_t bytes_;
  std::byte* data_;
};

struct Problem {
  Problem(const KvShape& shape_of, std::int64_t tokens, const std::vector<RowSpan>& spans)
      : shape(shape_of) {
    const auto queries = static_cast<std::size_t>(tokens * shape.query_heads);
    const auto d = static_cast<std::size_t>(shape.head_dim);
    q.resize(queries * d);
    for (std::size_t i = 0; i < q.size(); ++i) q[i] = std::sin(static_cast<float>(i));
    out.resize(queries * d);
    lse.resize(queries);
    params.q = q.data();
    params.tokens = tokens;
    params.q_stride = static_cast<std::int64_t>(shape.query_heads) * shape.head_dim;
    params.first_query_position = spans[0].count - tokens;
    params.shape = shape;
    params.rows = spans;
    params.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    params.out = out.data();
    params.lse = lse.data();
  }

  KvShape shape;
  std::vector<float> q;
  std::vector<float> out;
  std::vector<float> lse;
  AttendParams params;
};

// Arguments: query heads, KV heads, head_dim.
KvShape shape_of(const benchmark::State& state) {
  return {.layers = 1,
          .query_heads = static_cast<int>(state.range(0)),
          .kv_heads = static_cast<int>(state.range(1)),
          .head_dim = static_cast<int>(state.range(2)),
          .rows = DType::bf16};
}

void count_bytes(benchmark::State& state, std::size_t bytes) {
  state.counters["bytes"] =
      benchmark::Counter(static_cast<double>(bytes), benchmark::Counter::kIsIterationInvariantRate,
                         benchmark::Counter::kIs1000);
}

// Further arguments: rows, threads (0: one per core).
void decode(benchmark::State& state) {
  const KvShape shape = shape_of(state);
  const Rows rows(shape, state.range(3));
  const std::vector<RowSpan> spans = rows.spans();
  Problem problem(shape, 1, spans);
  Threads threads(static_cast<int>(state.range(4)));
  for (auto _ : state) attend(problem.params, threads);
  count_bytes(state, rows.bytes());
}

std::uint64_t sum_of(const std::uint64_t* words, std::size_t count) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += words[i];
  return sum;
}

// The upper bound for a decode with the same arguments.
void streaming_read(benchmark::State& state) {
  const Rows rows(shape_of(state), state.range(3));
  Threads threads(static_cast<int>(state.range(4)));
  const auto* const words = reinterpret_cast<const std::uint64_t*>(rows.data());
  constexpr std::int64_t kPieces = 64;
  const std::size_t piece = rows.bytes() / sizeof(std::uint64_t) / kPieces;
  for (auto _ : state) {
    threads.for_each(kPieces, [&](std::int64_t i) {
      benchmark::DoNotOptimize(sum_of(words + static_cast<std::size_t>(i) * piece, piece));
    });
  }
  count_bytes(state, rows.bytes());
}

// Further arguments: tokens, threads, and the kernel.
void prefill(benchmark::State& state) {
  const KvShape shape = shape_of(state);
  const auto kernel = static_cast<AttendKernel>(state.range(5));
  if (!attend_supported(kernel, shape)) {
    state.SkipWithError("this processor lacks the kernel's instructions");
    return;
  }
  const std::int64_t tokens = state.range(3);
  const Rows rows(shape, tokens);
  const std::vector<RowSpan> spans = rows.spans();
  Problem problem(shape, tokens, spans);
  Threads threads(static_cast<int>(state.range(4)));
  for (auto _ : state) attend(problem.params, threads, kernel);
  const auto n = static_cast<double>(tokens);
  const double flop = 4.0 * n * (n + 1) / 2 * shape.query_heads * shape.head_dim;
  state.counters["FLOP"] = benchmark::Counter(flop, benchmark::Counter::kIsIterationInvariantRate,
                                              benchmark::Counter::kIs1000);
}

void decode_shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"heads", "kv_heads", "head_dim", "rows", "threads"});
  for (const std::int64_t threads : {1, 0}) {
    for (const std::int64_t rows : {8 << 10, 128 << 10, 1 << 20}) {
      bench->Args({8, 2, 64, rows, threads});
      bench->Args({32, 8, 128, rows, threads});
    }
  }
  bench->UseRealTime()->Unit(benchmark::kMillisecond);
}

// One KV head with groups of several sizes, on one thread.
void decode_groups(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"heads", "kv_heads", "head_dim", "rows", "threads"});
  for (const std::int64_t head_dim : {64, 80, 128}) {
    for (const std::int64_t group : {1, 2, 4, 8, 16}) {
      bench->Args({group, 1, head_dim, 1 << 20, 1});
    }
  }
  bench->UseRealTime()->Unit(benchmark::kMillisecond);
}

void prefill_shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"heads", "kv_heads", "head_dim", "tokens", "threads", "kernel"});
  for (const AttendKernel kernel :
       {AttendKernel::prefill, AttendKernel::amx, AttendKernel::avx512_bf16}) {
    for (const std::int64_t tokens : {2 << 10, 8 << 10}) {
      for (const std::int64_t threads : {1, 0}) {
        bench->Args({8, 2, 64, tokens, threads, static_cast<std::int64_t>(kernel)});
        bench->Args({32, 8, 128, tokens, threads, static_cast<std::int64_t>(kernel)});
      }
    }
  }
  bench->UseRealTime()->Unit(benchmark::kMillisecond);
}

BENCHMARK(streaming_read)->Apply(decode_shapes);
BENCHMARK(decode)->Apply(decode_shapes);
BENCHMARK(decode)->Name("decode_group")->Apply(decode_groups);
BENCHMARK(prefill)->Apply(prefill_shapes);

}  // namespace
}  // namespace sluice::cpu
