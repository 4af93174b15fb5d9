// Matrix products of a decoder's layers, for decode (one token) and prefill (512 tokens).
#include <benchmark/benchmark.h>

#include <utility>
#include <vector>

#include "cpu/cpu_backend.h"

namespace sluice::cpu {
namespace {

// Weights of 8 and 4 bits are coded.
WeightFormat format_of(std::int64_t bits) {
  if (bits == 8) return WeightCode::int8;
  if (bits == 4) return WeightCode::int4;
  return bits == 16 ? DType::bf16 : DType::f32;
}

// Arguments: tokens, inputs, outputs, bits of the computation's dtype and of weights.
void gemm(benchmark::State& state) {
  const std::int64_t tokens = state.range(0);
  const std::int64_t inputs = state.range(1);
  const std::int64_t outputs = state.range(2);
  const DType dtype = state.range(3) == 16 ? DType::bf16 : DType::f32;
  if (dtype == DType::bf16 && !Linear::bf16_is_fast()) {
    state.SkipWithError("this processor has no bf16 multiplication");
    return;
  }
  CpuOptions options;
  options.compute = dtype;
  const WeightFormat format = format_of(state.range(4));
  options.weight_dtype = format.is_coded() ? DType::f32 : format.element;
  CpuBackend backend(options);
  // Zeros, because the time of a product does not depend on its values.
  std::vector<float> weights(static_cast<std::size_t>(inputs * outputs));
  std::vector<std::byte> x(static_cast<std::size_t>(tokens * inputs) * size_of(dtype));
  std::vector<float> y(static_cast<std::size_t>(tokens * outputs));
  const auto weight =
      backend.prepare_weight({weights.data(), DType::f32, outputs, inputs, inputs}, format);
  const LinearParams params{{x.data(), dtype, tokens, inputs, inputs},
                            weight.get(),
                            nullptr,
                            {y.data(), DType::f32, tokens, outputs, outputs}};
  for (auto _ : state) backend.products().run(params);
  const auto products = static_cast<double>(2 * tokens * inputs * outputs);
  const auto weight_bytes = static_cast<double>(backend.weight_bytes({outputs, inputs, format}));
  using benchmark::Counter;
  state.counters["FLOP/s"] = Counter(products, Counter::kIsIterationInvariantRate);
  state.counters["weight_bytes/s"] = Counter(weight_bytes, Counter::kIsIterationInvariantRate);
}

void shapes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"tokens", "in", "out", "bits", "weight_bits"});
  for (const auto& [bits, weight_bits] :
       {std::pair{16, 16}, std::pair{32, 16}, std::pair{32, 32}, std::pair{16, 8}, std::pair{16, 4},
        std::pair{32, 8}, std::pair{32, 4}}) {
    for (const std::int64_t tokens : {1, 4, 8, 16, 64, 512}) {
      benchmark->Args({tokens, 384, 2048, bits, weight_bits});    // gate and up of sluice-22m
      benchmark->Args({tokens, 1024, 384, bits, weight_bits});    // down of sluice-22m
      benchmark->Args({tokens, 4096, 4096, bits, weight_bits});   // o of an 8B model
      benchmark->Args({tokens, 4096, 28672, bits, weight_bits});  // gate and up of an 8B model
    }
  }
}
BENCHMARK(gemm)->Apply(shapes)->UseRealTime()->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace sluice::cpu
