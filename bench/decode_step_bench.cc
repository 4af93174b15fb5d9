// Whole decode steps on a GPU: models of the shapes of Llama 3 8B and of sluice-22m with made-up
// weights and rows, which take the time that real ones take. Selections of made-up rows hit their
// caps: more rows than real text needs, never fewer.
#include <benchmark/benchmark.h>

#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "lib/half.h"
#include "model/decoder.h"
#include "offload/backends.h"
#include "offload/planner.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr std::int64_t kChunk = 2048;
constexpr int kDecoded = 64;  // room for the tokens that a benchmark adds
constexpr int kWarmUp = 3;

ModelConfig llama_8b() {
  ModelConfig c;
  c.architecture = "llama";
  c.hidden_size = 4096;
  c.intermediate_size = 14336;
  c.num_hidden_layers = 32;
  c.num_attention_heads = 32;
  c.num_key_value_heads = 8;
  c.head_dim = 128;
  c.vocab_size = 128256;
  c.max_position_embeddings = 1 << 20;
  c.rms_norm_eps = 1e-5f;
  c.rope.theta = 500000.0;
  return c;
}

ModelConfig sluice_22m() {
  ModelConfig c = llama_8b();
  c.hidden_size = 384;
  c.intermediate_size = 1024;
  c.num_hidden_layers = 12;
  c.num_attention_heads = 8;
  c.num_key_value_heads = 2;
  c.head_dim = 64;
  c.vocab_size = 4096;
  return c;
}

KvShape shape_of(const ModelConfig& c) {
  return {c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads, c.head_dim,
          DType::bf16};
}

// bf16 numbers of deviation 0.02, as transformers' initialisation has them.
std::vector<std::uint16_t> made_up(std::size_t count) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  std::vector<std::uint16_t> some(1 << 20);
  for (std::uint16_t& value : some) value = float_to_bf16(normal(random));
  std::vector<std::uint16_t> all(count);
  for (std::size_t i = 0; i < count; ++i) all[i] = some[(i + i / some.size() * 7919) % some.size()];
  return all;
}

ModelWeights made_up_weights(const ModelConfig& c, Backend& backend) {
  const std::int64_t hidden = c.hidden_size;
  const std::vector<std::uint16_t> values =
      made_up(static_cast<std::size_t>(c.vocab_size) * static_cast<std::size_t>(hidden));
  const auto upload = [&](const void* data, std::size_t bytes) {
    Buffer buffer = backend.allocate(backend.info().compute_tier, bytes);
    const CopyOp op = {buffer.data(), static_cast<const std::byte*>(data), bytes};
    backend.copy({&op, 1}, Stream::compute);
    backend.synchronize();
    return buffer;
  };
  const auto matrix = [&](std::int64_t outputs, std::int64_t inputs) {
    return backend.prepare_weight(
        {const_cast<std::uint16_t*>(values.data()), DType::bf16, outputs, inputs, inputs});
  };
  const std::vector<float> ones(static_cast<std::size_t>(hidden), 1.0f);
  const auto norm = [&] { return upload(ones.data(), ones.size() * sizeof(float)); };
  const std::int64_t query = std::int64_t{c.num_attention_heads} * c.head_dim;
  const std::int64_t key = std::int64_t{c.num_key_value_heads} * c.head_dim;
  ModelWeights weights;
  weights.embedding = upload(values.data(), values.size() * sizeof(std::uint16_t));
  for (int layer = 0; layer < c.num_hidden_layers; ++layer) {
    LayerWeights& w = weights.layers.emplace_back();
    w.input_norm = norm();
    w.qkv = matrix(query + 2 * key, hidden);
    w.o = matrix(hidden, query);
    w.post_norm = norm();
    w.gate_up = matrix(2 * std::int64_t{c.intermediate_size}, hidden);
    w.down = matrix(hidden, c.intermediate_size);
  }
  weights.final_norm = norm();
  weights.lm_head = matrix(c.vocab_size, hidden);
  return weights;
}

struct Model {
  ModelConfig config;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Decoder> decoder;

  explicit Model(const ModelConfig& shape) : config(shape) {
    BackendOptions options;
    options.device = "cuda";
    backend = make_backend(options);
    decoder =
        std::make_unique<Decoder>(config, made_up_weights(config, *backend), *backend, kChunk);
  }
};

// Made once, and one at a time.
Model& model(bool large) {
  static std::unique_ptr<Model> one;
  static bool is_large = false;
  if (one == nullptr || is_large != large) {
    one.reset();
    one = std::make_unique<Model>(large ? llama_8b() : sluice_22m());
    is_large = large;
  }
  return *one;
}

void fill(Backend& backend, KvSession& session, std::int64_t length) {
  const KvShape& shape = session.plan().shape;
  const std::int64_t width = std::int64_t{shape.kv_heads} * shape.head_dim;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> rows(static_cast<std::size_t>(session.plan().chunk * width));
  for (float& value : rows) value = normal(random);
  const Buffer device = backend.allocate(Tier::device, rows.size() * sizeof(float));
  const CopyOp op = {device.data(), reinterpret_cast<const std::byte*>(rows.data()),
                     rows.size() * sizeof(float)};
  backend.copy({&op, 1}, Stream::compute);
  while (session.length() < length) {
    session.begin_step(Phase::prefill, std::min(session.plan().chunk, length - session.length()));
    for (int layer = 0; layer < shape.layers; ++layer) {
      session.append(layer, {device.floats(), device.floats(), width});
    }
    session.end_step();
  }
  backend.synchronize();
}

// Arguments: 1 for the large model, tokens, 1 if all rows stay on the device; the policy is
// captured.
void decode_step(benchmark::State& state, const std::string& name) {
  Model& m = model(state.range(0) != 0);
  const std::int64_t tokens = state.range(1);
  const Policy policy = parse_policy(name);
  std::optional<std::uint64_t> cap;
  const auto plan = [&] {
    return plan_kv(shape_of(m.config), tokens + kDecoded, kChunk, cap, false, {&policy, 1}, 1,
                   m.backend->info().logits);
  };
  if (state.range(2) == 0) {
    const KvPlan whole = plan();
    // Room for the window and for streaming, little for resident rows.
    const std::uint64_t beside = std::uint64_t{state.range(0) != 0 ? 512u : 12u} << 20;
    cap = whole.index_bytes + whole.work_bytes + beside;
  }
  try {
    KvSession session(*m.backend, plan(), {&policy, 1});
    fill(*m.backend, session, tokens);
    const TokenId token = 267;
    const auto step = [&] {
      m.decoder->step({&token, 1}, Phase::decode, session);
      benchmark::DoNotOptimize(m.decoder->logits(0, 1));
    };
    const Ledger& ledger = session.ledger();
    const std::uint64_t before = ledger.crossed(Tier::host, Tier::device).bytes;
    step();
    state.counters["host_to_device_bytes"] =
        static_cast<double>(ledger.crossed(Tier::host, Tier::device).bytes - before);
    // The step that indexes a full page has other launches than those after it.
    for (int i = 0; i < kWarmUp; ++i) step();
    for (auto _ : state) step();
    state.counters["resident_tokens"] = static_cast<double>(session.plan().resident_tokens);
    state.counters["device_KV_bytes"] = static_cast<double>(session.plan().device_bytes);
  } catch (const Error& error) {
    state.SkipWithError(error.what());
  }
}

template <int kLarge>
void shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"large", "tokens", "resident"});
  for (const std::int64_t tokens : {32768, 131072}) {
    for (const int resident : {1, 0}) bench->Args({kLarge, tokens, resident});
  }
  bench->Iterations(20)->UseRealTime()->Unit(benchmark::kMillisecond);
}

BENCHMARK_CAPTURE(decode_step, dense, std::string("dense"))->Apply(shapes<1>);
BENCHMARK_CAPTURE(decode_step, sparq, std::string("sparq"))->Apply(shapes<1>);
BENCHMARK_CAPTURE(decode_step, twilight, std::string("twilight cap=2048"))->Apply(shapes<1>);
BENCHMARK_CAPTURE(decode_step, tidaldecode, std::string("tidaldecode anchors=2,13"))
    ->Apply(shapes<1>);
BENCHMARK_CAPTURE(decode_step, sluice, std::string("sluice"))->Apply(shapes<1>);
BENCHMARK_CAPTURE(decode_step, dense, std::string("dense"))->Apply(shapes<0>);
BENCHMARK_CAPTURE(decode_step, sparq, std::string("sparq"))->Apply(shapes<0>);
BENCHMARK_CAPTURE(decode_step, twilight, std::string("twilight cap=2048"))->Apply(shapes<0>);
BENCHMARK_CAPTURE(decode_step, tidaldecode, std::string("tidaldecode"))->Apply(shapes<0>);
BENCHMARK_CAPTURE(decode_step, sluice, std::string("sluice"))->Apply(shapes<0>);

}  // namespace
}  // namespace sluice
