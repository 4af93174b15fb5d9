// Products of weights and one token's activations on the GPU, in bytes of weights per second, by
// our kernel and by cuBLAS. Matrices take turns and together exceed the cache; products follow each
// other as in a decode step.
#include "bench/cuda_support.cuh"
#include "kernels/dense/dense.h"

namespace sluice::cuda::bench {
namespace {

constexpr std::size_t kCacheBytes = std::size_t{128} << 20;

// Arguments: outputs, inputs. `multiply` takes the product and its weights.
template <typename Multiply>
void products(benchmark::State& state, const Workspace& workspace, const Multiply& multiply) {
  const auto outputs = static_cast<std::size_t>(state.range(0));
  const auto inputs = static_cast<std::size_t>(state.range(1));
  const std::size_t bytes = outputs * inputs * sizeof(__nv_bfloat16);
  const auto matrices = std::max<std::size_t>(2, kCacheBytes / bytes + 1);
  const DeviceBlock weights = normal_block<__nv_bfloat16>(matrices * outputs * inputs);
  const DeviceBlock x = normal_block<__nv_bfloat16>(inputs);
  const DeviceBlock y = make_device_block(outputs * sizeof(float));
  LinearParams p;
  p.x = {x.get(), DType::bf16, 1, state.range(1), state.range(1)};
  p.y = {y.get(), DType::f32, 1, state.range(0), state.range(0)};
  Replay replay(workspace.launch().stream, [&] {
    for (std::size_t i = 0; i < matrices; ++i) {
      multiply(p, static_cast<const std::byte*>(weights.get()) + i * bytes);
    }
  });
  time_replay(state, replay, static_cast<int>(matrices));
  count_rate(state, "bytes/s", static_cast<double>(bytes));
}

void own(benchmark::State& state) {
  const Workspace workspace(256);
  products(state, workspace, [&](const LinearParams& p, const void* weight) {
    LinearChain chain;
    chain.linear = p;
    gemv(chain, weight, workspace.launch());
  });
}

void cublas(benchmark::State& state) {
  const Workspace workspace(std::size_t{64} << 20);
  Gemm gemm(workspace.launch());
  products(state, workspace,
           [&](const LinearParams& p, const void* weight) { gemm.run(p, weight); });
}

// RMSNorm, product and SwiGLU, in one kernel or in three.
template <bool kAtOnce>
void gated(benchmark::State& state) {
  const Workspace workspace(256);
  const auto inputs = static_cast<std::size_t>(state.range(1));
  const DeviceBlock stream = normal_block<float>(inputs);
  const DeviceBlock norm = normal_block<float>(inputs);
  const DeviceBlock product = make_device_block(static_cast<std::size_t>(state.range(0)));
  products(state, workspace, [&](const LinearParams& p, const void* weight) {
    LinearChain chain;
    chain.norm = {{stream.get(), DType::f32, 1, p.x.columns, p.x.columns},
                  static_cast<const float*>(norm.get()),
                  1e-5f,
                  p.x};
    chain.linear = p;
    chain.swiglu = {p.y, {product.get(), DType::bf16, 1, p.y.columns / 2, p.y.columns / 2}};
    if (kAtOnce) return gemv(chain, weight, workspace.launch());
    LinearChain alone;
    alone.linear = p;
    rms_norm(*chain.norm, workspace.launch());
    gemv(alone, weight, workspace.launch());
    swiglu(*chain.swiglu, workspace.launch());
  });
}

void settle(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"outputs", "inputs"})
      ->UseManualTime()
      ->Iterations(20)
      ->Unit(benchmark::kMicrosecond);
}

void shapes(benchmark::internal::Benchmark* bench) {
  // Shapes of Llama 3 8B, then of sluice-22m.
  for (const auto& [outputs, inputs] :
       {std::pair{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}, {128256, 4096}}) {
    bench->Args({outputs, inputs});
  }
  bench->Args({768, 384})->Args({2048, 384})->Args({384, 1024});
  settle(bench);
}
BENCHMARK(own)->Apply(shapes);
BENCHMARK(cublas)->Apply(shapes);
BENCHMARK(gated<true>)->Args({28672, 4096})->Args({2048, 384})->Apply(settle);
BENCHMARK(gated<false>)->Args({28672, 4096})->Args({2048, 384})->Apply(settle);

}  // namespace
}  // namespace sluice::cuda::bench
