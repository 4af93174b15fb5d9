// Attention of decoded tokens over rows on the device: over all rows (bench/peers/sdpa.py runs
// torch's), or over selected rows and the newest page.
#include <algorithm>
#include <cmath>
#include <random>

#include "bench/cuda_support.cuh"
#include "kernels/attention/attention.h"

namespace sluice::cuda::bench {
namespace {

// Smaller problems cycle over copies, so that none is served from the L2 cache.
constexpr std::size_t kLeastBytes = std::size_t{512} << 20;

// The newest tokens of sequences of equal length, whose pages are contiguous on the device, and
// buffers for results.
class Problem {
 public:
  // All rows exist `copies` times.
  Problem(std::int64_t batch, std::int64_t tokens, const KvShape& shape, int copies)
      : shape_(shape),
        batch_(batch),
        tokens_(tokens),
        pages_((tokens + kPageTokens - 1) / kPageTokens),
        slots_(pages_ * batch * copies) {
    const auto queries = static_cast<std::size_t>(batch * shape.query_heads);
    const auto width = queries * static_cast<std::size_t>(shape.head_dim);
    rows_ = normal_block<__nv_bfloat16>(static_cast<std::size_t>(slots_ * shape.kv_heads) *
                                        kPageTokens * shape.row_bytes() / 2);
    q_ = normal_block<float>(width);
    out_ = make_device_block(width * sizeof(float));
    lse_ = make_device_block(queries * sizeof(float));
    std::vector<PageSlots> pages;
    for (std::int64_t slot = 0; slot < slots_; ++slot) {
      pages.push_back({static_cast<std::int32_t>(slot), PageSlots::kNone});
    }
    pages_block_ = device_copy(pages);
    std::vector<BatchToken> newest;
    for (std::int64_t sequence = 0; sequence < batch; ++sequence) {
      newest.push_back(
          {static_cast<std::int32_t>(sequence), static_cast<std::int32_t>(tokens - 1)});
    }
    newest_ = device_copy(newest);
  }

  // Fills AttendBatchParams or AttendSelectedParams.
  template <typename Params>
  void put(Params& p, int copy) const {
    p.q = static_cast<const float*>(q_.get());
    p.q_stride = std::int64_t{shape_.query_heads} * shape_.head_dim;
    p.shape = shape_;
    p.batch = {static_cast<const BatchToken*>(newest_.get()), batch_, tokens_};
    p.rows.device = static_cast<std::byte*>(rows_.get());
    p.rows.device_stride = slots_ * kPageTokens * static_cast<std::int64_t>(shape_.row_bytes());
    p.rows.pages = static_cast<const PageSlots*>(pages_block_.get()) + copy * batch_ * pages_;
    p.rows.table_stride = pages_;
    p.scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
    p.out = static_cast<float*>(out_.get());
    p.lse = static_cast<float*>(lse_.get());
  }

 private:
  KvShape shape_;
  std::int64_t batch_;
  std::int64_t tokens_;
  std::int64_t pages_;  // per sequence
  std::int64_t slots_;  // per KV head
  DeviceBlock rows_, q_, out_, lse_, pages_block_, newest_;
};

// Arguments: batch, tokens, query heads, KV heads, head_dim.
void dense_decode(benchmark::State& state) {
  const std::int64_t batch = state.range(0);
  const std::int64_t tokens = state.range(1);
  const KvShape shape{1, static_cast<int>(state.range(2)), static_cast<int>(state.range(3)),
                      static_cast<int>(state.range(4)), DType::bf16};
  const std::size_t bytes =
      static_cast<std::size_t>(batch * tokens * shape.kv_heads) * shape.row_bytes();
  const auto copies = static_cast<int>(std::max<std::size_t>(1, kLeastBytes / bytes));
  Workspace workspace(std::size_t{256} << 20);
  const Problem problem(batch, tokens, shape, copies);
  Replay replay(workspace.launch().stream, [&] {
    for (int copy = 0; copy < copies; ++copy) {
      AttendBatchParams p;
      problem.put(p, copy);
      attend_decode(p, workspace.launch());
    }
  });
  time_replay(state, replay, copies);
  count_rate(state, "bytes/s", static_cast<double>(bytes));
}

// `count` random positions below `end` for each head, ascending.
std::vector<std::int32_t> random_positions(std::int64_t heads, std::int64_t count,
                                           std::int64_t end) {
  std::mt19937 random(1);
  std::vector<std::int32_t> result;
  for (std::int64_t head = 0; head < heads; ++head) {
    // One position from each part of the range.
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t first = end * i / count;
      std::uniform_int_distribution<std::int64_t> within(first, end * (i + 1) / count - 1);
      result.push_back(static_cast<std::int32_t>(within(random)));
    }
  }
  return result;
}

// Arguments: batch, tokens, query heads, KV heads, selected tokens (before the newest page);
// head_dim is 128.
void selected_decode(benchmark::State& state) {
  const std::int64_t batch = state.range(0);
  const std::int64_t tokens = state.range(1);
  const KvShape shape{1, static_cast<int>(state.range(2)), static_cast<int>(state.range(3)), 128,
                      DType::bf16};
  const std::int64_t selected = state.range(4);
  const std::int64_t page_first = (tokens - 1) / kPageTokens * kPageTokens;
  const std::int64_t heads = batch * shape.kv_heads;
  Workspace workspace(std::size_t{256} << 20);
  const Problem problem(batch, tokens, shape, 1);
  const DeviceBlock positions = device_copy(random_positions(heads, selected, page_first));
  const DeviceBlock selections = device_copy(std::vector<HeadSelection>(
      static_cast<std::size_t>(heads), {static_cast<std::int32_t>(selected), 0}));
  AttendSelectedParams p;
  problem.put(p, 0);
  p.selected = {static_cast<std::int32_t*>(positions.get()), selected,
                static_cast<HeadSelection*>(selections.get())};
  Replay replay(workspace.launch().stream, [&] { attend_decode_selected(p, workspace.launch()); });
  time_replay(state, replay, 1);
  count_rate(state, "bytes/s",
             static_cast<double>(heads) * static_cast<double>(selected + tokens - page_first) *
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
    ->ArgNames({"batch", "tokens", "query_heads", "kv_heads", "selected"})
    ->Args({64, 4096, 32, 32, 128})
    ->Args({16, 30000, 32, 32, 256})
    ->Args({1, 131072, 32, 8, 256})
    ->Args({1, 1048576, 32, 8, 256})
    ->Args({1, 1048576, 32, 8, 8192})
    ->UseManualTime()
    ->MinTime(0.05)
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace sluice::cuda::bench
