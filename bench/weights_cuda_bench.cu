// Products with weights in 8 and 4 bits on the GPU, beside bf16, over all matrices of a step of
// Llama 3 8B's shape. Every layer has its own weights, so that each step reads all of them from
// memory. `share` is the part of the rate at which a plain kernel reads memory, measured here.
//
//   step      few tokens, as multiply_coded() computes them
//   way       the two ways of multiply_coded() around the number of tokens where it changes them
//   prompt    many tokens
//   coding    bf16 in host memory or on the device into codes, as while loading
#include "bench/cuda_support.cuh"
#include "kernels/dense/coded.h"
#include "kernels/dense/dense.h"

namespace sluice::cuda::bench {
namespace {

constexpr std::size_t kScratch = std::size_t{64} << 20;
constexpr int kLayers = 32;
constexpr int kPromptLayers = 2;

struct Shape {
  std::int64_t outputs, inputs;
};
constexpr Shape kQkv = {6144, 4096};
constexpr Shape kOfLayer[] = {kQkv, {4096, 4096}, {28672, 4096}, {4096, 14336}};
constexpr Shape kHead = {128256, 4096};
constexpr std::int64_t kMostInputs = 14336;

// Reads `count` words of 16 bytes.
__global__ void read_kernel(const uint4* from, std::size_t count, std::uint32_t* to) {
  constexpr int kAhead = 8;
  std::uint32_t sum = 0;
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
       i + (kAhead - 1) * stride < count; i += kAhead * stride) {
    uint4 words[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) words[a] = __ldcs(from + i + a * stride);
#pragma unroll
    for (int a = 0; a < kAhead; ++a) sum ^= words[a].x ^ words[a].y ^ words[a].z ^ words[a].w;
  }
  if (sum == 0x12345678u) *to = sum;
}

// Bytes per second, the best of ten.
double memory_rate() {
  static const double rate = [] {
    constexpr std::size_t kBytes = std::size_t{4} << 30;
    const Workspace workspace(256);
    const DeviceBlock from = normal_block<float>(kBytes / sizeof(float));
    const DeviceBlock to = make_device_block(sizeof(std::uint32_t));
    const auto blocks = static_cast<unsigned>(workspace.device().multiprocessors * 4);
    Replay replay(workspace.launch().stream, [&] {
      read_kernel<<<blocks, 512, 0, workspace.launch().stream>>>(
          static_cast<const uint4*>(from.get()), kBytes / sizeof(uint4),
          static_cast<std::uint32_t*>(to.get()));
      require(cudaGetLastError(), "reading");
    });
    double best = 0.0;
    for (int i = 0; i < 10; ++i) best = std::max(best, kBytes / replay.seconds());
    return best;
  }();
  return rate;
}

// Tiles with random codes and scales of 2^-8.
__global__ void tiles_kernel(std::uint32_t* words, std::size_t count, int tile_words,
                             int first_code) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    std::uint64_t x = i * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    const bool is_code = static_cast<int>(i % static_cast<std::size_t>(tile_words)) >= first_code;
    words[i] = is_code ? static_cast<std::uint32_t>(x >> 16) : 0x1c001c00u;
  }
}

// A matrix in bf16 or in codes.
struct Product {
  DeviceBlock memory;
  Shape shape;
  WeightFormat format;
  std::uint64_t bytes;

  Product(const Shape& of, const WeightFormat& in) : shape(of), format(in) {
    if (!format.is_coded()) {
      bytes = static_cast<std::uint64_t>(shape.outputs) * format.row_bytes(shape.inputs);
      memory = normal_block<__nv_bfloat16>(bytes / 2, 0.02f);
      return;
    }
    bytes = coded().bytes();
    memory = make_device_block(bytes);
    const bool is_int8 = format.code == WeightCode::int8;
    using Int8 = CodedTile<WeightCode::int8>;
    using Int4 = CodedTile<WeightCode::int4>;
    tiles_kernel<<<4096, 256>>>(static_cast<std::uint32_t*>(memory.get()), bytes / 4,
                                is_int8 ? Int8::kWords : Int4::kWords,
                                is_int8 ? Int8::kFirstCode : Int4::kFirstCode);
    require(cudaDeviceSynchronize(), "filling tiles");
  }
  CodedMatrix coded() const {
    return {static_cast<std::byte*>(memory.get()), format.code, shape.outputs, shape.inputs};
  }
  double operations(std::int64_t tokens) const {
    return 2.0 * static_cast<double>(tokens * shape.outputs * shape.inputs);
  }
};

// Q, K and V of int4 are in int8, as engine/weights.cc stores them.
WeightFormat format_of(std::int64_t bits, const Shape& shape) {
  if (bits == 16) return DType::bf16;
  return bits == 8 || shape.outputs == kQkv.outputs ? WeightCode::int8 : WeightCode::int4;
}

// The matrices of a model, or of some of its layers without the head.
std::vector<Product> matrices(std::int64_t bits, int layers, bool has_head) {
  std::vector<Product> all;
  for (int layer = 0; layer < layers; ++layer) {
    for (const Shape& shape : kOfLayer) all.emplace_back(shape, format_of(bits, shape));
  }
  if (has_head) all.emplace_back(kHead, format_of(bits, kHead));
  return all;
}

enum class Way { chosen, tiles, unpacked };

void multiply(const LinearParams& p, const Product& product, Way way, Gemm& gemm,
              const Launch& launch) {
  if (product.format.is_coded()) {
    if (way == Way::tiles) return multiply_tiles(p, product.coded(), launch);
    if (way == Way::unpacked) return multiply_unpacked(p, product.coded(), gemm, launch);
    return multiply_coded(p, product.coded(), gemm, launch);
  }
  LinearChain chain;
  chain.linear = p;
  if (gemv_supported(chain, *launch.device)) return gemv(chain, product.memory.get(), launch);
  gemm.run(p, product.memory.get());
}

void products(benchmark::State& state, int layers, bool has_head, Way way) {
  const std::int64_t tokens = state.range(1);
  const std::vector<Product> all = matrices(state.range(0), layers, has_head);
  const Workspace workspace(kScratch);
  Gemm gemm(workspace.launch());
  const std::int64_t most_outputs = has_head ? kHead.outputs : 28672;
  const DeviceBlock x = normal_block<__nv_bfloat16>(static_cast<std::size_t>(tokens * kMostInputs));
  const DeviceBlock y =
      make_device_block(static_cast<std::size_t>(tokens * most_outputs) * sizeof(float));
  double bytes = 0.0;
  double operations = 0.0;
  for (const Product& product : all) {
    bytes += static_cast<double>(product.bytes);
    operations += product.operations(tokens);
  }
  Replay replay(workspace.launch().stream, [&] {
    for (const Product& product : all) {
      const auto [outputs, inputs] = product.shape;
      LinearParams p;
      p.x = {x.get(), DType::bf16, tokens, inputs, inputs};
      p.y = {y.get(), DType::f32, tokens, outputs, outputs};
      multiply(p, product, way, gemm, workspace.launch());
    }
  });
  for (int i = 0; i < 3; ++i) replay.seconds();
  double seconds = 0.0;
  for (auto _ : state) {
    const double took = replay.seconds();
    seconds += took;
    state.SetIterationTime(took);
  }
  const double rate = bytes * static_cast<double>(state.iterations()) / seconds;
  count_rate(state, "bytes/s", bytes);
  count_rate(state, "FLOP/s", operations);
  state.counters["share"] = rate / memory_rate();
  state.counters["bytes"] = bytes;
}

void step(benchmark::State& state) { products(state, kLayers, true, Way::chosen); }
void tiles_way(benchmark::State& state) { products(state, kPromptLayers, false, Way::tiles); }
void unpacked_way(benchmark::State& state) { products(state, kPromptLayers, false, Way::unpacked); }
void prompt(benchmark::State& state) { products(state, kPromptLayers, false, Way::chosen); }

void coding(benchmark::State& state) {
  const Shape shape = {28672, 4096};
  const Workspace workspace(kScratch);
  const Product to(shape, format_of(state.range(0), shape));
  const std::size_t bytes = static_cast<std::size_t>(shape.outputs * shape.inputs) * 2;
  const DeviceBlock on_device = normal_block<__nv_bfloat16>(bytes / 2, 0.02f);
  const PinnedBlock on_host = make_pinned_block(bytes);
  require(cudaMemcpy(on_host.get(), on_device.get(), bytes, cudaMemcpyDeviceToHost), "copying");
  void* const from = state.range(1) == 0 ? on_device.get() : on_host.get();
  Replay replay(workspace.launch().stream, [&] {
    code_rows(to.coded(), 0, {from, DType::bf16, shape.outputs, shape.inputs}, workspace.launch());
  });
  time_replay(state, replay, 1);
  count_rate(state, "bytes/s", static_cast<double>(bytes));
}

// One matrix by itself: enough copies of it to exceed the cache, in one replay.
void matrix(benchmark::State& state) {
  const std::int64_t tokens = state.range(1);
  const Shape shape = {state.range(2), state.range(3)};
  const WeightFormat format =
      state.range(0) == 16
          ? WeightFormat(DType::bf16)
          : WeightFormat(state.range(0) == 8 ? WeightCode::int8 : WeightCode::int4);
  const Workspace workspace(kScratch);
  Gemm gemm(workspace.launch());
  std::vector<Product> all;
  std::uint64_t bytes = 0;
  while (bytes < std::uint64_t{512} << 20 || all.size() < 2) {
    all.emplace_back(shape, format);
    bytes += all.back().bytes;
  }
  const DeviceBlock x = normal_block<__nv_bfloat16>(static_cast<std::size_t>(tokens * kMostInputs));
  const DeviceBlock y =
      make_device_block(static_cast<std::size_t>(tokens * shape.outputs) * sizeof(float));
  Replay replay(workspace.launch().stream, [&] {
    for (const Product& product : all) {
      LinearParams p;
      p.x = {x.get(), DType::bf16, tokens, shape.inputs, shape.inputs};
      p.y = {y.get(), DType::f32, tokens, shape.outputs, shape.outputs};
      multiply(p, product, Way::chosen, gemm, workspace.launch());
    }
  });
  for (int i = 0; i < 3; ++i) replay.seconds();
  double seconds = 0.0;
  for (auto _ : state) {
    const double took = replay.seconds();
    seconds += took;
    state.SetIterationTime(took / static_cast<double>(all.size()));
  }
  const auto each = static_cast<double>(all.front().bytes);
  count_rate(state, "bytes/s", each);
  const double passes = static_cast<double>(state.iterations()) * static_cast<double>(all.size());
  state.counters["share"] = each * passes / seconds / memory_rate();
}

void settle(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"bits", "tokens"})
      ->UseManualTime()
      ->Iterations(20)
      ->Unit(benchmark::kMicrosecond);
}

void few(benchmark::internal::Benchmark* bench) {
  for (const std::int64_t bits : {16, 8, 4}) {
    for (const std::int64_t tokens : {1, 2, 4, 8, 16, 32, 64}) bench->Args({bits, tokens});
  }
  settle(bench);
}
void around(benchmark::internal::Benchmark* bench) {
  for (const std::int64_t bits : {8, 4}) {
    for (const std::int64_t tokens : {64, 128, 192, 256, 512}) bench->Args({bits, tokens});
  }
  settle(bench);
}
void many(benchmark::internal::Benchmark* bench) {
  for (const std::int64_t tokens : {512, 1024, 2048, 4096}) {
    for (const std::int64_t bits : {16, 8, 4}) bench->Args({bits, tokens});
  }
  settle(bench);
}
void single(benchmark::internal::Benchmark* bench) {
  for (const std::int64_t bits : {16, 8, 4}) {
    for (const std::int64_t tokens : {1, 8}) {
      for (const Shape& shape : kOfLayer) bench->Args({bits, tokens, shape.outputs, shape.inputs});
      bench->Args({bits, tokens, kHead.outputs, kHead.inputs});
    }
  }
  bench->ArgNames({"bits", "tokens", "outputs", "inputs"})
      ->UseManualTime()
      ->Iterations(20)
      ->Unit(benchmark::kMicrosecond);
}
void to_code(benchmark::internal::Benchmark* bench) {
  for (const std::int64_t bits : {8, 4}) {
    for (const std::int64_t host : {0, 1}) bench->Args({bits, host});
  }
  bench->ArgNames({"bits", "host"})->UseManualTime()->Iterations(5)->Unit(benchmark::kMicrosecond);
}
BENCHMARK(coding)->Apply(to_code);
BENCHMARK(step)->Apply(few);
BENCHMARK(matrix)->Apply(single);
BENCHMARK(tiles_way)->Apply(around);
BENCHMARK(unpacked_way)->Apply(around);
BENCHMARK(prompt)->Apply(many);

}  // namespace
}  // namespace sluice::cuda::bench
