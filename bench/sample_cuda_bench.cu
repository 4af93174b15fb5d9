// Sampling tokens on the GPU against copying the logits over and sampling on the host. Logits are
// normal with a deviation of 2.5.
#include <span>
#include <vector>

#include "bench/cuda_support.cuh"
#include "kernels/dense/dense.h"
#include "lib/sample_token.h"

namespace sluice::cuda::bench {
namespace {

constexpr int kDraws = 16;

// Arguments: rows, vocabulary, temperature in hundredths, top_k, top_p in hundredths.
TokenDraw params_of(const benchmark::State& state) {
  TokenDraw p;
  p.temperature = static_cast<double>(state.range(2)) / 100.0;
  p.top_k = static_cast<int>(state.range(3));
  p.top_p = static_cast<double>(state.range(4)) / 100.0;
  p.seed = 1;
  return p;
}

std::size_t logits_of(const benchmark::State& state) {
  return static_cast<std::size_t>(state.range(0) * state.range(1));
}

void device(benchmark::State& state) {
  const Workspace workspace(256);
  const DeviceBlock logits = normal_block<float>(logits_of(state), 2.5f);
  const PinnedBlock results = make_pinned_block(kSampleRows * sizeof(SampledToken));
  const Matrix matrix = {logits.get(), DType::f32, state.range(0), state.range(1), state.range(1)};
  const std::vector<TokenDraw> params(static_cast<std::size_t>(matrix.rows), params_of(state));
  Replay replay(workspace.launch().stream, [&] {
    for (int i = 0; i < kDraws; ++i) {
      sample(matrix, params, static_cast<SampledToken*>(results.get()), workspace.launch());
    }
  });
  time_replay(state, replay, kDraws);
  count_rate(state, "logits", static_cast<double>(logits_of(state)));
}

void host(benchmark::State& state) {
  const std::size_t bytes = logits_of(state) * sizeof(float);
  const DeviceBlock logits = normal_block<float>(logits_of(state), 2.5f);
  const PinnedBlock copied = make_pinned_block(bytes);
  const std::span all(static_cast<const float*>(copied.get()), logits_of(state));
  const auto vocabulary = static_cast<std::size_t>(state.range(1));
  for (auto _ : state) {
    require(cudaMemcpy(copied.get(), logits.get(), bytes, cudaMemcpyDefault), "logits");
    for (std::size_t first = 0; first < all.size(); first += vocabulary) {
      benchmark::DoNotOptimize(draw_token(all.subspan(first, vocabulary), params_of(state)));
    }
  }
  count_rate(state, "logits", static_cast<double>(logits_of(state)));
}

void shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"rows", "vocabulary", "temperature", "top_k", "top_p"});
  for (const std::int64_t rows : {1, 16, 64}) {
    for (const std::int64_t vocabulary : {4096, 128256}) {
      bench->Args({rows, vocabulary, 0, 0, 100})->Args({rows, vocabulary, 80, 0, 100});
      bench->Args({rows, vocabulary, 80, 0, 95})->Args({rows, vocabulary, 80, 40, 95});
    }
  }
  bench->Iterations(20)->Unit(benchmark::kMicrosecond);
}
BENCHMARK(device)->Apply(shapes)->UseManualTime();
BENCHMARK(host)->Apply(shapes)->UseRealTime();

}  // namespace
}  // namespace sluice::cuda::bench
