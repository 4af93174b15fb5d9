// Drawing a token on the GPU against bringing the logits over and drawing on the host, which is
// what Session::decode() spares. Logits are normal with a deviation of 2.5.
#include <vector>

#include "bench/cuda_support.cuh"
#include "kernels/sample.h"
#include "lib/sample_token.h"

namespace sluice::cuda::bench {
namespace {

constexpr int kDraws = 16;

// Arguments: vocabulary, temperature in hundredths, top_k, top_p in hundredths.
SampleParams params_of(const benchmark::State& state) {
  SampleParams p;
  p.temperature = static_cast<double>(state.range(1)) / 100.0;
  p.top_k = static_cast<int>(state.range(2));
  p.top_p = static_cast<double>(state.range(3)) / 100.0;
  p.random = 0.5;
  return p;
}

void device(benchmark::State& state) {
  const Workspace workspace(256);
  const auto count = static_cast<std::size_t>(state.range(0));
  const DeviceBlock logits = normal_block<float>(count, 2.5f);
  const PinnedBlock result = make_pinned_block(sizeof(SampledToken));
  const Matrix matrix = {logits.get(), DType::f32, 1, state.range(0), state.range(0)};
  Replay replay(workspace.launch().stream, [&] {
    for (int i = 0; i < kDraws; ++i) {
      sample(matrix, params_of(state), static_cast<SampledToken*>(result.get()),
             workspace.launch());
    }
  });
  time_replay(state, replay, kDraws);
  count_rate(state, "logits", static_cast<double>(count));
}

void host(benchmark::State& state) {
  const auto count = static_cast<std::size_t>(state.range(0));
  const DeviceBlock logits = normal_block<float>(count, 2.5f);
  const PinnedBlock copied = make_pinned_block(count * sizeof(float));
  const auto* const values = static_cast<const float*>(copied.get());
  for (auto _ : state) {
    require(cudaMemcpy(copied.get(), logits.get(), count * sizeof(float), cudaMemcpyDefault),
            "logits");
    benchmark::DoNotOptimize(sample_token({values, count}, params_of(state)));
  }
  count_rate(state, "logits", static_cast<double>(count));
}

void shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"vocabulary", "temperature", "top_k", "top_p"});
  for (const std::int64_t vocabulary : {4096, 128256}) {
    bench->Args({vocabulary, 0, 0, 100})->Args({vocabulary, 80, 0, 100});
    bench->Args({vocabulary, 80, 0, 95})->Args({vocabulary, 80, 40, 95});
  }
  bench->Iterations(20)->Unit(benchmark::kMicrosecond);
}
BENCHMARK(device)->Apply(shapes)->UseManualTime();
BENCHMARK(host)->Apply(shapes)->UseRealTime();

}  // namespace
}  // namespace sluice::cuda::bench
