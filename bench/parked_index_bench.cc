// Eight conversations of sluice-22m with 32,768 tokens each under `values`, with room on the device
// for the key index of two: the least device memory with and without that, and decode steps whose
// index is there, or is in host memory and changes places with another conversation's.
//
// Rows are made up, because neither the bytes nor the time of a copy depends on them.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "engine/checkpoint.h"
#include "engine/decoder.h"
#include "offload/backends.h"
#include "offload/plan/planner.h"
#include "offload/step/kv_batch.h"
#include "offload/step/solo_step.h"

namespace sluice {
namespace {

constexpr std::int64_t kContext = 32768;
constexpr std::int64_t kConversations = 8;
constexpr std::int64_t kIndexed = 2;
constexpr std::int64_t kChunk = 512;
constexpr std::int64_t kDecoded = 256;  // at most, of each

const std::vector<Policy>& policies() {
  static const std::vector<Policy> all = {parse_policy("values")};
  return all;
}

KvShape shape_of(const ModelConfig& config) {
  return {config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads,
          config.head_dim, DType::bf16};
}

KvRequest request_for(const KvShape& shape, const BackendInfo& on, std::int64_t sequences,
                      std::int64_t indexed) {
  KvRequest request;
  request.shape = shape;
  request.on = on;
  request.context = kContext;
  request.chunk = kChunk;
  request.sequences = sequences;
  request.indexed_tokens = indexed * kContext;
  request.policies = policies();
  return request;
}

// The smallest cap under which there is a plan.
std::uint64_t least_cap(KvRequest request) {
  std::uint64_t low = 0;
  std::uint64_t high = std::uint64_t{1} << 36;
  while (low + 1 < high) {
    const std::uint64_t middle = (low + high) / 2;
    try {
      request.device_cap = middle;
      plan_kv(request);
      high = middle;
    } catch (const Error&) {
      low = middle;
    }
  }
  return high;
}

void fill_with_made_up_rows(KvSession& session, std::int64_t length, std::mt19937& random) {
  const KvShape& shape = session.plan().shape;
  const std::int64_t width = std::int64_t{shape.kv_heads} * shape.head_dim;
  std::normal_distribution<float> normal;
  std::vector<float> rows(static_cast<std::size_t>(kChunk * width));
  for (float& value : rows) value = normal(random);
  while (session.length() < length) {
    const std::int64_t tokens = std::min(session.plan().chunk, length - session.length());
    SoloStep step(session, Phase::prefill, tokens);
    for (int layer = 0; layer < shape.layers; ++layer) {
      step.append(layer, {rows.data(), rows.data(), width});
    }
    step.end();
  }
}

// Conversations in one pool, under the smallest cap for its plan.
struct Conversations {
  std::unique_ptr<Backend> backend;
  std::shared_ptr<Queue> queue;
  std::unique_ptr<Decoder> decoder;
  std::uint64_t whole_cap = 0;  // the least cap with the whole index on the device
  std::uint64_t two_cap = 0;    // the same of two conversations
  std::vector<KvSession> sessions;

  void decode(std::size_t number) {
    constexpr TokenId kToken = 267;
    KvSession* const session = &sessions[number];
    KvBatch batch({&session, 1});
    decoder->decode({&kToken, 1}, batch);
    for (const std::optional<Error>& error : batch.end()) {
      if (error) throw Error(*error);
    }
  }
};

Conversations open_conversations() {
  const Checkpoint checkpoint = Checkpoint::open(SLUICE_SOURCE_DIR "/models/sluice-22m");
  const ModelConfig& config = checkpoint.config();
  Conversations all;
  all.backend = make_backend({});
  all.queue = all.backend->make_queue();
  all.decoder = std::make_unique<Decoder>(
      config, load_weights(checkpoint, *all.backend, all.backend->weight_format(), 1, {}),
      *all.queue);
  all.decoder->allocate(kChunk);
  const KvShape shape = shape_of(config);
  const BackendInfo& on = all.backend->info();
  all.whole_cap = least_cap(request_for(shape, on, kConversations, 0));
  all.two_cap = least_cap(request_for(shape, on, kIndexed, 0));
  KvRequest request = request_for(shape, on, kConversations, kIndexed);
  request.device_cap = least_cap(request);
  const auto pool = std::make_shared<KvPool>(all.queue, plan_kv(request), policies());
  std::mt19937 random(1);
  for (std::int64_t i = 0; i < kConversations; ++i) {
    fill_with_made_up_rows(all.sessions.emplace_back(pool), kContext - kDecoded, random);
  }
  return all;
}

void count(benchmark::State& state, const Conversations& all) {
  const KvPlan& plan = all.sessions.front().plan();
  const auto set = [&](const char* name, std::uint64_t bytes) {
    state.counters[name] = static_cast<double>(bytes);
  };
  set("device_bytes", plan.device_bytes);
  set("device_bytes_whole_index", all.whole_cap);
  set("device_bytes_of_two_whole", all.two_cap);
  set("index_bytes", plan.index_bytes);
  set("parked_bytes", plan.parked_bytes);
  set("device_peak_bytes", all.backend->account(Tier::device).peak());
  set("host_peak_bytes", all.backend->account(Tier::host).peak());
}

// Argument: conversations that take their steps by turns. With one its index stays; with all, every
// step brings its index back and parks as much of another's.
void step_by_turns(benchmark::State& state) {
  Conversations all = open_conversations();
  const auto turns = static_cast<std::size_t>(state.range(0));
  for (std::size_t i = 0; i < turns; ++i) all.decode(i);
  std::size_t next = 0;
  for (auto _ : state) all.decode(next++ % turns);
  std::uint64_t returned = 0;
  std::uint64_t tokens = 0;
  for (const KvSession& session : all.sessions) {
    returned +=
        session.ledger().total(Phase::decode, Tier::host, Tier::device, Cause::index_swap).bytes;
    tokens += session.ledger().tokens(Phase::decode);
  }
  count(state, all);
  state.counters["returned_bytes_per_step"] =
      static_cast<double>(returned) / static_cast<double>(tokens);
}
BENCHMARK(step_by_turns)
    ->ArgName("conversations")
    ->Arg(1)
    ->Arg(2)
    ->Arg(8)
    ->Iterations(64)
    ->Repetitions(3)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace sluice
