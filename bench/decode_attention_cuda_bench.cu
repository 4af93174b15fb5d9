// Dense attention of one query token over rows on the device; bench/peers/sdpa.py has torch's.
#include <cmath>

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

}  // namespace
}  // namespace sluice::cuda::bench
