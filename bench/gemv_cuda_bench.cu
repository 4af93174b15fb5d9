// Products of weights and one token's activations on the GPU, in bytes of weights per second, by
// our kernel and by cuBLAS. Matrices take turns and together exceed the cache; products follow each
// other as in a decode step.
#include "bench/cuda_support.cuh"
#include "kernels/gemm.h"
#include "kernels/gemv.h"

namespace sluice::cuda::bench {
namespace {

constexpr std::size_t kCacheBytes = std::size_t{128} << 20;

// Arguments: outputs, inputs.
template <typename Multiply>
void products(benchmark::State& state, const Workspace& workspace, const Multiply& multiply) {
  const auto outputs = static_cast<std::size_t>(state.range(0));
  const auto inputs = static_cast<std::size_t>(state.range(1));
  const std::size_t bytes = outputs * inputs * sizeof(__nv_bfloat16);
  const auto matrices = std::max<std::size_t>(2, kCacheBytes / bytes + 1);
  const DeviceBlock weights = normal_block<__nv_bfloat16>(matrices * outputs * inputs);
  const DeviceBlock x = normal_block<__nv_bfloat16>(inputs);
  const DeviceBlock y = make_device_block(outputs * sizeof(float));
  GemvParams p;
  p.x = {x.get(), DType::bf16, 1, state.range(1), state.range(1)};
  p.y = {y.get(), DType::f32, 1, state.range(0), state.range(0)};
  Replay replay(workspace.launch().stream, [&] {
    for (std::size_t i = 0; i < matrices; ++i) {
      p.weight = static_cast<const std::byte*>(weights.get()) + i * bytes;
      multiply(p);
    }
  });
  time_replay(state, replay, static_cast<int>(matrices));
  count_rate(state, "bytes/s", static_cast<double>(bytes));
}

void own(benchmark::State& state) {
  const Workspace workspace(256);
  products(state, workspace, [&](const GemvParams& p) { gemv(p, workspace.launch()); });
}

void cublas(benchmark::State& state) {
  const Workspace workspace(std::size_t{64} << 20);
  Gemm gemm(workspace.launch());
  products(state, workspace, [&](const GemvParams& p) { gemm.run(p); });
}

void shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"outputs", "inputs"});
  // Llama 3 8B's, then sluice-22m's.
  for (const auto& [outputs, inputs] :
       {std::pair{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}, {128256, 4096}}) {
    bench->Args({outputs, inputs});
  }
  bench->Args({768, 384})->Args({2048, 384})->Args({384, 1024});
  bench->UseManualTime()->Iterations(20)->Unit(benchmark::kMicrosecond);
}
BENCHMARK(own)->Apply(shapes);
BENCHMARK(cublas)->Apply(shapes);

}  // namespace
}  // namespace sluice::cuda::bench
