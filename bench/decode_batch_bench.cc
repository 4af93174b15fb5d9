// Decode steps of several sequences of ragged lengths on a GPU, beside the time of the same
// sequences one after the other and the least time to read their bytes.
#include <benchmark/benchmark.h>

#include <chrono>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "bench/made_up_model.h"
#include "offload/plan/planner.h"
#include "offload/step/kv_pool.h"
#include "sluice/errors.h"

namespace sluice::bench {
namespace {

constexpr std::int64_t kDecoded = 32;  // tokens per sequence that a benchmark adds
constexpr int kWarmUp = 2;
constexpr int kAlone = 3;                    // steps of each sequence by itself
constexpr double kBytesPerSecond = 4.17e12;  // a plain read of an H200's memory

// Lengths up to `longest` tokens, evenly spread; none is a multiple of a page.
std::vector<std::int64_t> ragged_lengths(std::int64_t sequences, std::int64_t longest) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t i = 0; i < sequences; ++i) {
    lengths.push_back(longest * (i + 1) / sequences - (37 * i + 64) % kPageTokens);
  }
  return lengths;
}

KvPlan plan_of(const MadeUpModel& model, const Policy& policy,
               const std::vector<std::int64_t>& lengths, bool resident) {
  const auto sequences = static_cast<std::int64_t>(lengths.size());
  KvRequest request;
  request.shape = model.kv();
  request.on = model.backend().info();
  request.context = lengths.back() + kDecoded;
  request.chunk = kChunk;
  request.sequences = sequences;
  request.tokens =
      std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}) + sequences * kDecoded;
  request.policies = {&policy, 1};
  KvPlan whole = plan_kv(request);
  if (resident) return whole;
  // Room for the newest pages, the window and streaming, little for resident rows.
  const std::uint64_t newest =
      static_cast<std::uint64_t>(sequences) * kPageTokens * request.shape.token_bytes();
  const std::uint64_t beside = newest + (std::uint64_t{512} << 20);
  request.device_cap = whole.index_bytes + whole.work_bytes + whole.table_bytes + beside;
  return plan_kv(request);
}

// The mean time of a decode step of one sequence by itself, in seconds.
double seconds_alone(MadeUpModel& model, KvSession& session) {
  model.decode(session);  // records the step if it has no recording yet
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kAlone; ++i) model.decode(session);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  return seconds.count() / kAlone;
}

// Sequences of one benchmark.
struct BatchCase {
  ModelShape shape;
  std::string policy;
  std::vector<std::int64_t> lengths;
  bool resident = true;
  bool alone = false;  // time each sequence by itself, too
};

void run(benchmark::State& state, const BatchCase& of) {
  MadeUpModel& model = made_up_model(of.shape);
  const std::vector<std::int64_t>& lengths = of.lengths;
  const Policy policy = parse_policy(of.policy);
  const auto pool =
      std::make_shared<KvPool>(model.queue(), plan_of(model, policy, lengths, of.resident),
                               std::span<const Policy>(&policy, 1));
  std::vector<KvSession> sessions;
  for (const std::int64_t length : lengths) {
    sessions.emplace_back(pool);
    model.fill(sessions.back(), length);
  }
  std::vector<KvSession*> all;
  for (KvSession& session : sessions) all.push_back(&session);

  const ReplayCounts counts_before = model.queue()->replay_counts();
  const DecodeBytes before = decode_bytes(all);
  model.decode(all);
  const DecodeBytes after = decode_bytes(all);
  for (int i = 0; i < kWarmUp; ++i) model.decode(all);
  double host_seconds = 0.0;
  for (auto _ : state) host_seconds += model.decode(all);
  const ReplayCounts counts_after = model.queue()->replay_counts();
  if (of.alone) {
    double alone = 0.0;
    for (KvSession& session : sessions) alone += seconds_alone(model, session);
    state.counters["single_steps_ms"] = alone * 1e3;
  }

  using benchmark::Counter;
  const auto read = static_cast<double>(after.read - before.read + model.matrix_bytes());
  state.counters["host_to_device_bytes"] = static_cast<double>(after.from_host - before.from_host);
  state.counters["host_us"] = Counter(host_seconds * 1e6, Counter::kAvgIterations);
  state.counters["recordings"] =
      static_cast<double>(counts_after.recordings - counts_before.recordings);
  state.counters["launches"] = static_cast<double>(counts_after.launches - counts_before.launches);
  state.counters["bytes_read"] = read;
  state.counters["floor_ms"] = read / kBytesPerSecond * 1e3;
  state.counters["device_KV_bytes"] = static_cast<double>(pool->plan().device_bytes);
}

void run_or_skip(benchmark::State& state, const BatchCase& of) {
  try {
    run(state, of);
  } catch (const Error& error) {
    state.SkipWithError(error.what());
  }
}

// Arguments: sequences, tokens of the longest, 1 if all rows stay on the device; the policy is
// captured.
void decode_batch(benchmark::State& state, const std::string& name) {
  run_or_skip(state, {ModelShape::llama_8b, name, ragged_lengths(state.range(0), state.range(1)),
                      state.range(2) != 0, true});
}

// Llama 2 7B's shape, on which Twilight was measured (Lin et al. 2025, section 5.3): sequences of
// one length, and a base selector that proposes a quarter of them. Made-up scores are so flat that
// top-p keeps what its cap allows, `kept` of a thousand tokens. Arguments: sequences, tokens, 1 if
// all rows stay on the device.
void decode_batch_mha(benchmark::State& state, const std::string& name, int kept) {
  const std::int64_t tokens = state.range(1);
  std::string policy = name;
  if (kept > 0) policy += " cap=" + std::to_string(tokens * kept / 1000);
  const std::vector<std::int64_t> lengths(static_cast<std::size_t>(state.range(0)), tokens - 37);
  run_or_skip(state, {ModelShape::llama_7b, policy, lengths, state.range(2) != 0});
}

void shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"sequences", "tokens", "resident"});
  for (const int resident : {1, 0}) {
    for (const std::int64_t sequences : {1, 4, 16}) bench->Args({sequences, 32768, resident});
    // The rows of 64 sequences of up to 32K would not fit on the device.
    bench->Args({64, 8192, resident});
  }
  bench->Iterations(10)->UseRealTime()->Unit(benchmark::kMillisecond);
}

// As many sequences as fit an H200 beside the largest index.
void mha_shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"sequences", "tokens", "resident"});
  bench->Args({18, 10240, 1})->Args({9, 20480, 1})->Args({6, 30720, 1})->Args({2, 30720, 0});
  bench->Iterations(10)->UseRealTime()->Unit(benchmark::kMillisecond);
}

BENCHMARK_CAPTURE(decode_batch, dense, std::string("dense"))->Apply(shapes);
BENCHMARK_CAPTURE(decode_batch, sparq, std::string("sparq"))->Apply(shapes);
BENCHMARK_CAPTURE(decode_batch, sluice, std::string("sluice"))->Apply(shapes);
BENCHMARK_CAPTURE(decode_batch, quest, std::string("quest"))->Apply(shapes);
BENCHMARK_CAPTURE(decode_batch, twilight, std::string("twilight"))->Apply(shapes);
BENCHMARK_CAPTURE(decode_batch, values, std::string("values"))->Apply(shapes);

BENCHMARK_CAPTURE(decode_batch_mha, dense, std::string("dense"), 0)->Apply(mha_shapes);
BENCHMARK_CAPTURE(decode_batch_mha, quest, std::string("quest prune=top_k(1/4)"), 0)
    ->Apply(mha_shapes);
BENCHMARK_CAPTURE(decode_batch_mha, twilight, std::string("twilight"), 20)->Apply(mha_shapes);
BENCHMARK_CAPTURE(decode_batch_mha, tidaldecode, std::string("tidaldecode anchors=2,13"), 0)
    ->Apply(mha_shapes);

}  // namespace
}  // namespace sluice::bench
