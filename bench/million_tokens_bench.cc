// Decoding sluice-22m against 1,046,018 tokens (War and Peace): 6.4 GB of rows in host memory.
//
// The first rows come from a real prefill, the rest are made up, because a prefill of a million
// tokens is quadratic and the time of a decode step does not depend on the rows' values.
#include <benchmark/benchmark.h>

#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "engine/checkpoint.h"
#include "engine/decoder.h"
#include "offload/backends.h"
#include "offload/plan/planner.h"
#include "offload/step/solo_step.h"
#include "sluice/topology.h"

namespace sluice {
namespace {

constexpr std::int64_t kContext = 1'046'018;
constexpr std::int64_t kPrefill = 2048;
constexpr std::int64_t kChunk = 512;

// A session filled up to kContext except the tokens that the benchmark will decode.
struct Book {
  std::unique_ptr<Backend> backend;
  std::shared_ptr<Queue> queue;
  std::unique_ptr<Decoder> decoder;
  std::unique_ptr<KvSession> session;
};

void fill_with_made_up_rows(KvSession& session, std::int64_t length) {
  const KvShape& shape = session.plan().shape;
  const std::int64_t width = std::int64_t{shape.kv_heads} * shape.head_dim;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> rows(static_cast<std::size_t>(kChunk * width));
  for (float& value : rows) value = normal(random);
  while (session.length() < length) {
    SoloStep step(session, Phase::prefill, std::min(kChunk, length - session.length()));
    for (int layer = 0; layer < shape.layers; ++layer) {
      step.append(layer, {rows.data(), rows.data(), width});
    }
    step.end();
  }
}

Book open_book(std::int64_t decoded, std::int64_t device_memory) {
  const Checkpoint checkpoint = Checkpoint::open(SLUICE_SOURCE_DIR "/models/sluice-22m");
  const ModelConfig& config = checkpoint.config();
  BackendOptions options;
  std::optional<std::uint64_t> cap;
  if (device_memory > 0) cap = static_cast<std::uint64_t>(device_memory);
  options.device_memory = cap;
  Book book;
  book.backend = make_backend(options);
  book.queue = book.backend->make_queue();
  book.decoder = std::make_unique<Decoder>(
      config, load_weights(checkpoint, *book.backend, book.backend->weight_format(), 1, {}),
      *book.queue);
  book.decoder->allocate(kChunk);
  const KvShape shape{config.num_hidden_layers, config.num_attention_heads,
                      config.num_key_value_heads, config.head_dim, DType::bf16};
  const KvRequest request = {.shape = shape,
                             .on = book.backend->info(),
                             .context = kContext,
                             .chunk = kChunk,
                             .device_cap = cap};
  book.session =
      std::make_unique<KvSession>(std::make_shared<KvPool>(book.queue, plan_kv(request)));
  const std::vector<TokenId> tokens(static_cast<std::size_t>(kChunk), 267);
  while (book.session->length() < kPrefill) {
    book.decoder->step(tokens, Phase::prefill, *book.session);
  }
  fill_with_made_up_rows(*book.session, kContext - decoded);
  return book;
}

// One decode step; its logits are computed but not copied.
void decode(Book& book) {
  constexpr TokenId kToken = 267;
  KvSession* const session = book.session.get();
  KvBatch batch({&session, 1});
  book.decoder->decode({&kToken, 1}, batch);
  for (const std::optional<Error>& error : batch.end()) {
    if (error) throw Error(*error);
  }
}

// Argument: MiB of device tier; 0 attends rows in host memory.
void decode_at_a_million_tokens(benchmark::State& state) {
  constexpr std::int64_t kDecoded = 9;
  static const Bandwidth bandwidth = measure_bandwidth(0, std::uint64_t{1} << 30);
  Book book = open_book(kDecoded, state.range(0) << 20);
  for (auto _ : state) decode(book);
  const auto bytes = static_cast<double>(book.session->plan().shape.token_bytes() *
                                         static_cast<std::uint64_t>(kContext));
  using benchmark::Counter;
  state.counters["KV_bytes/s"] = Counter(bytes, Counter::kIsIterationInvariantRate);
  state.counters["machine_read_bytes/s"] = bandwidth.read_bytes_per_second;
  state.counters["machine_copy_bytes/s"] = bandwidth.copy_bytes_per_second;
  state.counters["device_peak_bytes"] =
      static_cast<double>(book.backend->account(Tier::device).peak());
  state.counters["host_peak_bytes"] = static_cast<double>(book.backend->account(Tier::host).peak());
}
BENCHMARK(decode_at_a_million_tokens)
    ->ArgName("device_MiB")
    ->Arg(0)
    ->Arg(2)
    ->Arg(1024)
    ->Iterations(8)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace sluice
