// Value tiles on CUDA: building them, in bytes of rows per second, and attention over them, in
// bytes of tiles read. Calls are replayed from a graph, over several layers' tiles if one would fit
// the L2 cache; the logits are always the same buffer, because a layer's logits are still in the
// cache when it attends.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "bench/cuda_support.cuh"
#include "kernels/runtime/page_digest.h"
#include "kernels/values/values.h"
#include "lib/backend/kv_ops.h"

namespace sluice::cuda {
namespace {

constexpr std::size_t kBeyondCache = 256u << 20;
constexpr int kKvHeads = 8;
constexpr int kGroup = 4;
constexpr int kHeadDim = 128;
constexpr KvShape kShape = {1, kKvHeads* kGroup, kKvHeads, kHeadDim, DType::bf16};

// Deviations of a page's level and of its logits around it. With these, 0.28 of the pages carry 0.9
// of the weight, as in sluice-22m.
constexpr float kPageDeviation = 1.86f;
constexpr float kTokenDeviation = 2.0f;

// Logits [queries, stride]; query heads of a KV head share their pages' levels.
__global__ void fill_logits(__half* logits, std::int64_t stride, std::int64_t pages) {
  const std::int64_t page = blockIdx.x;
  const std::int64_t query = blockIdx.y;
  const auto head = static_cast<std::uint64_t>(query / kGroup);
  const float level = bench::normal_pair(head * 1000003 + static_cast<std::uint64_t>(page)).x;
  const std::int64_t at = query * stride + page * kPageTokens + threadIdx.x;
  const float own = bench::normal_pair((1ull << 41) + static_cast<std::uint64_t>(at)).x;
  logits[at] = __float2half_rn(kPageDeviation * level + kTokenDeviation * own);
}

// The digest that a scan makes of the logits; one thread per page of a query head.
__global__ void fill_digest(const __half* logits, std::int64_t stride, std::int64_t pages,
                            PageDigest digest) {
  const std::int64_t page = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (page >= pages) return;
  const std::int64_t query = blockIdx.y;
  const std::int64_t place = (query / kGroup * digest.pages + page) * kGroup + query % kGroup;
  const __half* const first = logits + query * stride + page * kPageTokens;
  float highest = -INFINITY;
  for (int part = 0; part < kBoundsPerPage; ++part) {
    __half most = first[part * kBoundTokens];
    for (int i = 1; i < kBoundTokens; ++i) most = __hmax(most, first[part * kBoundTokens + i]);
    reinterpret_cast<__half*>(digest.maxima)[place * kBoundsPerPage + part] = most;
    highest = fmaxf(highest, __half2float(most));
  }
  float sum = 0.0f;
  for (int i = 0; i < kPageTokens; ++i) sum += expf(__half2float(first[i]) - highest);
  digest.sums[place] = sum;
}

// Several layers' tiles, with scales of about 1.
class Layers {
 public:
  Layers(int bits, std::int64_t slots, bool has_basis = false) {
    tiles_ = {bits, nullptr, slots};
    if (has_basis) {
      basis_ = bench::normal_block<float>(
          static_cast<std::size_t>(kKvHeads * ValueTiles::basis_floats(kHeadDim)), 0.1f);
      tiles_.basis = static_cast<const float*>(basis_.get());
    }
    const std::size_t bytes = tiles_.bytes(kKvHeads, kHeadDim);
    const std::size_t layers = std::clamp<std::size_t>(kBeyondCache / bytes, 1, 16);
    for (std::size_t i = 0; i < layers; ++i) {
      // f16 numbers of about 1 fill codes and scales alike, because any codes will do.
      blocks_.push_back(bench::normal_block<__half>(bytes / 2, 1.0f, i + 1));
    }
    std::vector<std::int32_t> table(static_cast<std::size_t>(slots));
    std::iota(table.begin(), table.end(), 0);
    table_ = bench::device_copy(table);
  }
  std::size_t count() const { return blocks_.size(); }
  ValueTilesView view(std::size_t layer, std::int64_t table_stride) const {
    ValueTilesView view;
    view.tiles = tiles_;
    view.tiles.pages = static_cast<std::byte*>(blocks_[layer % count()].get());
    view.slots = static_cast<const std::int32_t*>(table_.get());
    view.table_stride = table_stride;
    return view;
  }

 private:
  DeviceBlock basis_;
  ValueTiles tiles_;
  std::vector<DeviceBlock> blocks_;
  DeviceBlock table_;
};

// A step's tokens, one per sequence.
class Step {
 public:
  // `selected`: rows per KV head, at equal distances.
  Step(std::int64_t count, std::int64_t context, bool with_digest, std::int64_t selected)
      : count_(count), context_(context), pages_(context / kPageTokens), selected_(selected) {
    const auto heads = static_cast<std::size_t>(count * kKvHeads);
    const std::size_t queries = heads * kGroup;
    std::vector<BatchToken> tokens;
    for (std::int64_t i = 0; i < count; ++i) {
      tokens.push_back({static_cast<std::int32_t>(i), static_cast<std::int32_t>(context)});
    }
    tokens_ = bench::device_copy(tokens);
    logits_ = make_device_block(queries * static_cast<std::size_t>(context) * 2);
    fill_logits<<<dim3(static_cast<unsigned>(pages_), static_cast<unsigned>(queries)),
                  kPageTokens>>>(static_cast<__half*>(logits_.get()), context, pages_);
    const auto rows = static_cast<std::int64_t>(queries);
    if (with_digest) {
      digest_block_ = make_device_block(PageDigest::bytes_of(rows, context));
      digest_ = LogitDigest::in(static_cast<std::byte*>(digest_block_.get()), rows, context);
      fill_digest<<<
          dim3(static_cast<unsigned>((pages_ + 127) / 128), static_cast<unsigned>(queries)), 128>>>(
          static_cast<const __half*>(logits_.get()), context, pages_, PageDigest::of(digest_));
    }
    require(cudaDeviceSynchronize(), "filling memory");
    const float variance = kPageDeviation * kPageDeviation + kTokenDeviation * kTokenDeviation;
    const float lse = std::log(static_cast<float>(context)) + variance / 2.0f;
    estimated_lse_ = bench::device_copy(std::vector<float>(queries, lse));
    std::vector<std::int32_t> positions;
    for (std::int64_t i = 0; i < std::ssize(tokens) * kKvHeads * selected; ++i) {
      positions.push_back(static_cast<std::int32_t>(i % selected * context / selected));
    }
    positions_ = bench::device_copy(positions);
    HeadSelection selection;
    selection.count = static_cast<std::int32_t>(selected);
    heads_ = bench::device_copy(std::vector<HeadSelection>(heads, selection));
    sums_ = bench::normal_block<float>(heads * kHeadDim);
    out_ = bench::normal_block<float>(queries * kHeadDim);
    lse_ = bench::normal_block<float>(queries);
    read_ = make_device_block(heads * sizeof(std::int32_t));
  }

  AttendTilesParams params() const {
    AttendTilesParams p;
    p.shape = kShape;
    p.batch = {static_cast<const BatchToken*>(tokens_.get()), count_, context_ + 1};
    p.logits = {static_cast<std::byte*>(logits_.get()), context_, digest_};
    p.estimated_lse = static_cast<const float*>(estimated_lse_.get());
    p.selected = {static_cast<std::int32_t*>(positions_.get()), selected_,
                  static_cast<HeadSelection*>(heads_.get())};
    p.value_sums = static_cast<const float*>(sums_.get());
    p.out = static_cast<float*>(out_.get());
    p.lse = static_cast<float*>(lse_.get());
    p.merge = true;
    p.pages_read = static_cast<std::int32_t*>(read_.get());
    return p;
  }
  std::int64_t pages_of_sequence() const { return pages_; }
  double pages() const { return static_cast<double>(pages_ * count_ * kKvHeads); }
  double pages_read() const {
    std::vector<std::int32_t> read(static_cast<std::size_t>(count_ * kKvHeads));
    require(cudaMemcpy(read.data(), read_.get(), read.size() * sizeof(std::int32_t),
                       cudaMemcpyDeviceToHost),
            "reading counts");
    return std::accumulate(read.begin(), read.end(), 0.0);
  }

 private:
  std::int64_t count_;
  std::int64_t context_;
  std::int64_t pages_;
  std::int64_t selected_;
  DeviceBlock tokens_;
  DeviceBlock logits_;
  DeviceBlock digest_block_;
  LogitDigest digest_;
  DeviceBlock estimated_lse_;
  DeviceBlock positions_;
  DeviceBlock heads_;
  DeviceBlock sums_;
  DeviceBlock out_;
  DeviceBlock lse_;
  DeviceBlock read_;
};

// Arguments: tokens, context of each, bits, share in hundredths, with a digest, selected rows, half
// of the components.
void attend_value_tiles(benchmark::State& state) {
  const Step step(state.range(0), state.range(1), state.range(4) != 0, state.range(5));
  const auto bits = static_cast<int>(state.range(2));
  const std::int64_t tiles = (step.pages_of_sequence() + kTilePages - 1) / kTilePages;
  const Layers layers(bits, tiles * state.range(0), state.range(6) != 0);
  AttendTilesParams p = step.params();
  p.share = static_cast<float>(state.range(3)) / 100.0f;
  p.values = layers.view(0, tiles);
  const Workspace probe(256);
  const Workspace workspace(attend_tiles_scratch_bytes(p, probe.device()));
  const int runs = static_cast<int>(layers.count());
  bench::Replay replay(workspace.launch().stream, [&] {
    for (int i = 0; i < runs; ++i) {
      p.values = layers.view(static_cast<std::size_t>(i), tiles);
      attend_tiles(p, workspace.launch());
    }
  });
  bench::time_replay(state, replay, runs);
  state.counters["pages"] = step.pages_read() / step.pages();
  bench::count_rate(state, "bytes",
                    step.pages_read() * static_cast<double>(p.values.tiles.page_bytes(kHeadDim)));
}

// Arguments: pages per KV head, bits.
void build_value_tiles(benchmark::State& state) {
  const std::int64_t pages = state.range(0);
  const auto bits = static_cast<int>(state.range(1));
  const std::int64_t tiles = (pages + kTilePages - 1) / kTilePages;
  const Layers layers(bits, tiles);
  const std::size_t head_bytes = static_cast<std::size_t>(pages) * kPageTokens * kShape.row_bytes();
  const DeviceBlock rows = bench::normal_block<__nv_bfloat16>(kKvHeads * head_bytes / 2);
  std::vector<RowSpan> spans;
  for (std::size_t head = 0; head < kKvHeads; ++head) {
    spans.push_back(
        {static_cast<const std::byte*>(rows.get()) + head * head_bytes, pages * kPageTokens});
  }
  const PinnedBlock bad = make_pinned_block(kKvHeads * sizeof(std::int32_t));
  const Workspace workspace(256);
  bench::Replay replay(workspace.launch().stream, [&] {
    build_values(
        {kShape, layers.view(0, tiles), 0, 0, pages, spans, static_cast<std::int32_t*>(bad.get())},
        workspace.launch());
  });
  bench::time_replay(state, replay, 1);
  bench::count_rate(state, "bytes", static_cast<double>(kKvHeads * head_bytes / 2));
}

void attend_shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"tokens", "context", "bits", "share", "digest", "selected", "half"});
  constexpr std::int64_t kMillion = 1 << 20;
  for (const std::int64_t context : {std::int64_t{32768}, std::int64_t{131072}, kMillion}) {
    for (const std::int64_t share : {90, 100}) {
      // Scans write a digest from 256K tokens on.
      bench->Args({1, context, 2, share, context >= kMillion / 4 ? 1 : 0, 32, 0});
    }
  }
  bench->Args({1, kMillion, 2, 90, 0, 32, 0});
  for (const std::int64_t bits : {1, 3, 4}) bench->Args({1, 131072, bits, 90, 0, 32, 0});
  bench->Args({1, kMillion, 1, 90, 1, 32, 0});
  for (const std::int64_t context : {std::int64_t{131072}, kMillion / 2, kMillion}) {
    bench->Args({1, context, 2, 95, context >= kMillion / 4 ? 1 : 0, 512, 1});
  }
  for (const std::int64_t tokens : {4, 16}) bench->Args({tokens, 32768, 2, 90, 0, 32, 0});
  bench->UseManualTime()->Unit(benchmark::kMicrosecond);
}

BENCHMARK(attend_value_tiles)->Apply(attend_shapes);
BENCHMARK(build_value_tiles)
    ->ArgNames({"pages", "bits"})
    ->Args({1, 2})
    ->Args({64, 2})
    ->Args({1024, 2})
    ->Args({1024, 1})
    ->Args({1024, 4})
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace sluice::cuda
