// Whole decode steps of one sequence on a GPU: each launches a recorded step and reads its logits.
#include <benchmark/benchmark.h>

#include <optional>
#include <string>

#include "bench/made_up_model.h"
#include "offload/plan/planner.h"
#include "sluice/errors.h"

namespace sluice::bench {
namespace {

constexpr int kDecoded = 64;  // tokens that a benchmark adds
constexpr int kWarmUp = 3;

KvPlan plan_of(const MadeUpModel& model, const RowFormat& rows, const Policy& policy,
               std::int64_t tokens, bool resident) {
  KvRequest request;
  request.shape = model.kv(rows);
  request.on = model.backend().info();
  request.context = tokens + kDecoded;
  request.chunk = kChunk;
  request.policies = {&policy, 1};
  KvPlan whole = plan_kv(request);
  if (resident) return whole;
  // Room for the window and for streaming, little for resident rows.
  const std::uint64_t beside = std::uint64_t{model.kv().layers == 32 ? 512u : 12u} << 20;
  request.device_cap = whole.index_bytes + whole.work_bytes + whole.table_bytes + beside;
  return plan_kv(request);
}

void run(benchmark::State& state, const std::string& name, ModelShape shape, std::int64_t tokens,
         bool resident, const WeightFormat& weights = DType::bf16,
         const RowFormat& rows = DType::bf16) {
  try {
    MadeUpModel& model = made_up_model(shape, weights);
    const Policy policy = parse_policy(name);
    KvSession session(std::make_shared<KvPool>(model.queue(),
                                               plan_of(model, rows, policy, tokens, resident),
                                               std::span<const Policy>(&policy, 1)));
    model.fill(session, tokens);
    const ReplayCounts before = model.queue()->replay_counts();
    const std::uint64_t crossed = session.ledger().crossed(Tier::host, Tier::device).bytes;
    model.decode(session);
    state.counters["host_to_device_bytes"] =
        static_cast<double>(session.ledger().crossed(Tier::host, Tier::device).bytes - crossed);
    for (int i = 0; i < kWarmUp; ++i) model.decode(session);
    double host_seconds = 0.0;
    for (auto _ : state) host_seconds += model.decode(session);
    const ReplayCounts after = model.queue()->replay_counts();
    using benchmark::Counter;
    state.counters["host_us"] = Counter(host_seconds * 1e6, Counter::kAvgIterations);
    state.counters["recordings"] = static_cast<double>(after.recordings - before.recordings);
    state.counters["launches"] = static_cast<double>(after.launches - before.launches);
    state.counters["resident_tokens"] = static_cast<double>(session.plan().resident_tokens);
    state.counters["device_KV_bytes"] = static_cast<double>(session.plan().device_bytes);
  } catch (const Error& error) {
    state.SkipWithError(error.what());
  }
}

// Arguments: 1 for the large model, tokens, 1 if all rows stay on the device; the policy is
// captured.
void decode_step(benchmark::State& state, const std::string& name) {
  run(state, name, state.range(0) != 0 ? ModelShape::llama_8b : ModelShape::sluice_22m,
      state.range(1), state.range(2) != 0);
}

// Llama 3 8B's shape with coded weights. Arguments: bits of a weight, tokens, 1 if all rows stay on
// the device.
void decode_step_coded(benchmark::State& state, const std::string& name) {
  const WeightFormat weights = state.range(0) == 8 ? WeightCode::int8 : WeightCode::int4;
  run(state, name, ModelShape::llama_8b, state.range(1), state.range(2) != 0, weights);
}

// The same with bf16 weights and rows of int8.
void decode_step_int8_rows(benchmark::State& state, const std::string& name) {
  run(state, name, state.range(0) != 0 ? ModelShape::llama_8b : ModelShape::sluice_22m,
      state.range(1), state.range(2) != 0, DType::bf16, RowCode::int8);
}

// The shape of Llama 2 7B, on which TidalDecode was measured (Yang et al. 2024, section 4.2), with
// every row on the device. Argument: tokens.
void decode_step_mha(benchmark::State& state, const std::string& name) {
  run(state, name, ModelShape::llama_7b, state.range(0), true);
}

template <int kLarge>
void shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"large", "tokens", "resident"});
  for (const std::int64_t tokens : {32768, 131072}) {
    for (const int resident : {1, 0}) bench->Args({kLarge, tokens, resident});
  }
  bench->Iterations(20)->UseRealTime()->Unit(benchmark::kMillisecond);
}

void contexts(benchmark::internal::Benchmark* bench) {
  bench->ArgName("tokens")->Arg(32768)->Arg(65536)->Arg(102400);
  bench->Iterations(20)->UseRealTime()->Unit(benchmark::kMillisecond);
}

BENCHMARK_CAPTURE(decode_step, dense, std::string("dense"))->Apply(shapes<1>);
BENCHMARK_CAPTURE(decode_step, sparq, std::string("sparq"))->Apply(shapes<1>);
BENCHMARK_CAPTURE(decode_step, twilight, std::string("twilight cap=2048"))->Apply(shapes<1>);
BENCHMARK_CAPTURE(decode_step, tidaldecode, std::string("tidaldecode anchors=2,13"))
    ->Apply(shapes<1>);
BENCHMARK_CAPTURE(decode_step, sparse_anchors,
                  std::string("tidaldecode select=int4 anchors=2,13 anchors_attend=selected"))
    ->Apply(shapes<1>);
BENCHMARK_CAPTURE(decode_step, sluice, std::string("sluice"))->Apply(shapes<1>);
BENCHMARK_CAPTURE(decode_step, values, std::string("values"))->Apply(shapes<1>);
BENCHMARK_CAPTURE(decode_step, dense, std::string("dense"))->Apply(shapes<0>);
BENCHMARK_CAPTURE(decode_step, sparq, std::string("sparq"))->Apply(shapes<0>);
BENCHMARK_CAPTURE(decode_step, twilight, std::string("twilight cap=2048"))->Apply(shapes<0>);
BENCHMARK_CAPTURE(decode_step, tidaldecode, std::string("tidaldecode"))->Apply(shapes<0>);
BENCHMARK_CAPTURE(decode_step, sparse_anchors,
                  std::string("tidaldecode select=int4 anchors_attend=selected"))
    ->Apply(shapes<0>);
BENCHMARK_CAPTURE(decode_step, sluice, std::string("sluice"))->Apply(shapes<0>);
BENCHMARK_CAPTURE(decode_step, values, std::string("values"))->Apply(shapes<0>);

BENCHMARK_CAPTURE(decode_step_int8_rows, dense, std::string("dense"))->Apply(shapes<1>);
BENCHMARK_CAPTURE(decode_step_int8_rows, twilight, std::string("twilight cap=2048"))
    ->Apply(shapes<1>);
BENCHMARK_CAPTURE(decode_step_int8_rows, values, std::string("values"))->Apply(shapes<1>);
BENCHMARK_CAPTURE(decode_step_int8_rows, dense, std::string("dense"))->Apply(shapes<0>);
BENCHMARK_CAPTURE(decode_step_int8_rows, values, std::string("values"))->Apply(shapes<0>);

void coded_shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"bits", "tokens", "resident"});
  for (const int bits : {8, 4}) {
    for (const std::int64_t tokens : {32768, 131072}) {
      for (const int resident : {1, 0}) bench->Args({bits, tokens, resident});
    }
  }
  bench->Iterations(20)->UseRealTime()->Unit(benchmark::kMillisecond);
}
BENCHMARK_CAPTURE(decode_step_coded, values, std::string("values"))->Apply(coded_shapes);

BENCHMARK_CAPTURE(decode_step_mha, dense, std::string("dense"))->Apply(contexts);
BENCHMARK_CAPTURE(decode_step_mha, tidaldecode, std::string("tidaldecode anchors=2,13"))
    ->Apply(contexts);

}  // namespace
}  // namespace sluice::bench
