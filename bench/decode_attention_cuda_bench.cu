// Attention of one query token over rows on the device, over all of them (bench/peers/sdpa.py has
// torch's) or over selected and the newest.
#include <algorithm>
#include <cmath>
#include <random>

#include "bench/cuda_support.cuh"
#include "kernels/decode_attention.h"

namespace sluice::cuda::bench {
namespace {

// Smaller problems are repeated over copies, so that none is served from the L2 cache.
constexpr std::size_t kLeastBytes = std::size_t{512} << 20;

// Arguments: batch, tokens, query heads, KV heads, head_dim.
void dense_decode(benchmark::State& state) {
  const std::int64_t batch = state.range(0);
  const std::int64_t tokens = state.range(1);
  const auto query_heads = static_cast<int>(batch * state.range(2));
  const auto kv_heads = static_cast<int>(batch * state.range(3));
  const KvShape shape{1, query_heads, kv_heads, static_cast<int>(state.range(4)), DType::bf16};
  const std::size_t head_bytes = static_cast<std::size_t>(tokens) * shape.row_bytes();
  const std::size_t bytes = head_bytes * static_cast<std::size_t>(kv_heads);
  const auto copies = static_cast<int>(std::max<std::size_t>(1, kLeastBytes / bytes));
  const auto width = static_cast<std::size_t>(query_heads * shape.head_dim);
  Workspace workspace(std::size_t{256} << 20);
  const DeviceBlock rows =
      normal_block<__nv_bfloat16>(bytes * static_cast<std::size_t>(copies) / 2);
  const DeviceBlock q = normal_block<float>(width);
  const DeviceBlock out = make_device_block(width * sizeof(float));
  const DeviceBlock lse = make_device_block(static_cast<std::size_t>(query_heads) * sizeof(float));
  const auto issue = [&] {
    for (int copy = 0; copy < copies; ++copy) {
      std::vector<RowSpan> spans;
      for (int head = 0; head < kv_heads; ++head) {
        const std::size_t index =
            static_cast<std::size_t>(copy) * static_cast<std::size_t>(kv_heads) +
            static_cast<std::size_t>(head);
        spans.push_back({static_cast<const std::byte*>(rows.get()) + index * head_bytes, tokens});
      }
      AttendParams p;
      p.q = static_cast<const float*>(q.get());
      p.tokens = 1;
      p.first_query_position = tokens;
      p.shape = shape;
      p.rows = spans;
      p.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
      p.out = static_cast<float*>(out.get());
      p.lse = static_cast<float*>(lse.get());
      attend_decode(p, workspace.launch());
    }
  };
  Replay replay(workspace.launch().stream, issue);
  time_replay(state, replay, copies);
  count_rate(state, "bytes/s", static_cast<double>(bytes));
}

// `count` random positions below `end` for each head, ascending.
std::vector<std::int32_t> random_positions(int heads, std::int64_t count, std::int64_t end) {
  std::mt19937 random(1);
  std::vector<std::int32_t> result;
  for (int head = 0; head < heads; ++head) {
    // One of each part of the range.
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t first = end * i / count;
      std::uniform_int_distribution<std::int64_t> within(first, end * (i + 1) / count - 1);
      result.push_back(static_cast<std::int32_t>(within(random)));
    }
  }
  return result;
}

template <typename T>
DeviceBlock device_copy(const std::vector<T>& values) {
  DeviceBlock block = make_device_block(values.size() * sizeof(T));
  require(cudaMemcpy(block.get(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
          "copying to the device");
  return block;
}

// Arguments: batch, tokens, query heads, KV heads, and how many tokens are selected and newest;
// head_dim is 128.
void selected_decode(benchmark::State& state) {
  const std::int64_t batch = state.range(0);
  const std::int64_t tokens = state.range(1);
  const auto query_heads = static_cast<int>(batch * state.range(2));
  const auto kv_heads = static_cast<int>(batch * state.range(3));
  const std::int64_t selected = state.range(4);
  const std::int64_t newest = state.range(5);
  const KvShape shape{1, query_heads, kv_heads, 128, DType::bf16};
  const std::size_t head_bytes = static_cast<std::size_t>(tokens) * shape.row_bytes();
  const auto width = static_cast<std::size_t>(query_heads * shape.head_dim);
  Workspace workspace(std::size_t{256} << 20);
  const DeviceBlock rows =
      normal_block<__nv_bfloat16>(static_cast<std::size_t>(kv_heads) * head_bytes / 2);
  const DeviceBlock q = normal_block<float>(width);
  const DeviceBlock out = make_device_block(width * sizeof(float));
  const DeviceBlock lse = make_device_block(static_cast<std::size_t>(query_heads) * sizeof(float));
  const DeviceBlock positions = device_copy(random_positions(kv_heads, selected, tokens - newest));
  const DeviceBlock heads = device_copy(std::vector<HeadSelection>(
      static_cast<std::size_t>(kv_heads), {static_cast<std::int32_t>(selected), 0}));
  std::vector<RowSource> sources;
  std::vector<RowSpan> tail;
  for (int head = 0; head < kv_heads; ++head) {
    const std::byte* const own =
        static_cast<const std::byte*>(rows.get()) + static_cast<std::size_t>(head) * head_bytes;
    sources.push_back({own, tokens, own});
    tail.push_back({own + static_cast<std::size_t>(tokens - newest) * shape.row_bytes(), newest});
  }
  AttendSelectedParams p;
  p.q = static_cast<const float*>(q.get());
  p.shape = shape;
  p.selected = {static_cast<std::int32_t*>(positions.get()), selected,
                static_cast<HeadSelection*>(heads.get())};
  p.rows = sources;
  p.newest = tail;
  p.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  p.out = static_cast<float*>(out.get());
  p.lse = static_cast<float*>(lse.get());
  Replay replay(workspace.launch().stream, [&] { attend_decode_selected(p, workspace.launch()); });
  time_replay(state, replay, 1);
  count_rate(state, "bytes/s",
             static_cast<double>(kv_heads) * static_cast<double>(selected + newest) *
                 static_cast<double>(shape.row_bytes()));
}

BENCHMARK(dense_decode)
    ->ArgNames({"batch", "tokens", "query_heads", "kv_heads", "head_dim"})
    ->Args({1, 8192, 32, 8, 128})
    ->Args({1, 32768, 32, 8, 128})
    ->Args({1, 131072, 32, 8, 128})
    ->Args({1, 1048576, 32, 8, 128})
    ->Args({1, 1047552, 32, 8, 128})
    ->Args({16, 8192, 32, 8, 128})
    ->Args({16, 32768, 32, 8, 128})
    ->Args({16, 131072, 32, 8, 128})
    ->Args({16, 1048576, 32, 8, 128})
    ->Args({64, 4096, 32, 32, 128})
    ->Args({64, 16384, 32, 32, 128})
    ->Args({1, 131072, 32, 32, 128})
    ->Args({16, 30000, 32, 32, 128})
    ->Args({1, 131072, 8, 2, 64})
    ->Args({1, 131072, 16, 8, 256})
    ->UseManualTime()
    ->MinTime(0.05)
    ->Unit(benchmark::kMicrosecond);

BENCHMARK(selected_decode)
    ->ArgNames({"batch", "tokens", "query_heads", "kv_heads", "selected", "newest"})
    ->Args({64, 4096, 32, 32, 128, 128})
    ->Args({16, 30000, 32, 32, 256, 48})
    ->Args({1, 1048576, 32, 8, 256, 128})
    ->Args({1, 1048576, 32, 8, 8192, 128})
    ->UseManualTime()
    ->MinTime(0.05)
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace sluice::cuda::bench
