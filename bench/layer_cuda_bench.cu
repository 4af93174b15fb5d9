// Selection and attention of one layer for one query token of every sequence, rows on the device:
// what replaces the dense attention of bench/decode_attention_cuda_bench.cu.
//
// Keys are normal and queries are scaled so that logits have a deviation of 4: about one per cent
// of the tokens then carry 95 % of the weight, as in text.
#include <cmath>

#include "bench/cuda_support.cuh"
#include "kernels/decode_attention.h"
#include "kernels/estimate.h"
#include "kernels/key_index.h"
#include "kernels/select.h"

namespace sluice::cuda::bench {
namespace {

constexpr float kDeviation = 4.0f;

struct Method {
  Selector base = Selector::int4;
  int channels = 0;             // of sparq
  std::int64_t candidates = 0;  // re-scored by all channels; 0: none are
  Pruner prune = Pruner::top_p;
  std::int64_t k = 0;
  float p = 0.0f;
  std::int64_t cap = 0;
  bool compensate = false;
};

// One layer of a batch: sequences of equal length are KV heads side by side.
class Layer {
 public:
  Layer(std::int64_t batch, int query_heads, int kv_heads, std::int64_t tokens, int head_dim)
      : shape_{1, static_cast<int>(batch) * query_heads, static_cast<int>(batch) * kv_heads,
               head_dim, DType::bf16},
        tokens_(tokens),
        pages_((tokens - 1) / kPageTokens),
        stride_((tokens + 63) / 64 * 64) {
    const auto heads = static_cast<std::size_t>(shape_.kv_heads);
    const auto queries = static_cast<std::size_t>(shape_.query_heads);
    const auto d = static_cast<std::size_t>(head_dim);
    rows_ = normal_block<__nv_bfloat16>(heads * static_cast<std::size_t>(tokens) *
                                        shape_.row_bytes() / 2);
    q_ = normal_block<float>(queries * d, kDeviation, 2);
    KeyTiles tiles;
    const std::size_t units = heads * static_cast<std::size_t>(pages_);
    tiles.capacity = pages_;
    codes_ = make_device_block(tiles.codes_bytes(shape_.kv_heads, head_dim));
    scales_ = make_device_block(units * d * 2 * sizeof(std::uint16_t));
    logits_ = make_device_block(queries * static_cast<std::size_t>(stride_) * sizeof(__half));
    digest_ = make_device_block(LogitDigest::bytes_of(shape_.query_heads, stride_));
    candidate_logits_ =
        make_device_block(queries * static_cast<std::size_t>(stride_) * sizeof(__half));
    positions_ =
        make_device_block(heads * static_cast<std::size_t>(stride_) * sizeof(std::int32_t));
    candidates_ =
        make_device_block(heads * static_cast<std::size_t>(stride_) * sizeof(std::int32_t));
    out_ = make_device_block(queries * d * sizeof(float));
    lse_ = make_device_block(queries * sizeof(float));
    estimated_lse_ = make_device_block(queries * sizeof(float));
    sums_ = normal_block<float>(heads * d);
    heads_ = make_device_block(2 * heads * sizeof(HeadSelection));
    alpha_ = make_device_block(2 * queries * sizeof(float));
    bad_ = make_device_block(heads * sizeof(std::int32_t));
    build();
  }

  // Everything that one layer does after its rows are appended.
  void run(const Method& m) {
    const Launch launch = workspace_.launch();
    const SelectionView chosen = {static_cast<std::int32_t*>(positions_.get()), stride_,
                                  static_cast<HeadSelection*>(heads_.get())};
    const SelectionView proposed = {static_cast<std::int32_t*>(candidates_.get()), stride_,
                                    static_cast<HeadSelection*>(heads_.get()) + shape_.kv_heads};
    auto* const alpha = static_cast<float*>(alpha_.get());
    auto* const share = alpha + shape_.query_heads;
    const std::vector<RowSpan> tail = spans(pages_ * kPageTokens);
    const std::vector<RowSpan> nothing(tail.size());

    const bool newest_apart = leaves_newest_out(m);
    EstimateParams estimate = estimate_params(m.base, m.channels, newest_apart ? nothing : tail);
    estimate.logits = {static_cast<std::byte*>(logits_.get()), stride_, digest()};
    cuda::estimate(estimate, launch);
    SelectParams select = select_params(estimate.logits);
    if (newest_apart) {
      select.count = select.end;
      select.lse = static_cast<float*>(estimated_lse_.get());
    }
    if (m.candidates > 0) {
      select.prune = Pruner::top_k;
      select.k = m.candidates;
      select.selected = proposed;
      select.selected.capacity = m.candidates;
      select.alpha = share;
      cuda::select(select, launch);
      EstimateParams again = estimate_params(Selector::int4, 0, tail);
      again.candidates = &select.selected;
      again.logits = {static_cast<std::byte*>(candidate_logits_.get()), stride_};
      cuda::estimate(again, launch);
      SelectParams rest = select_params(again.logits);
      rest.candidates = &select.selected;
      rest.tail = tokens_ - pages_ * kPageTokens;
      rest.share = share;
      prune(m, rest, chosen, alpha);
      cuda::select(rest, launch);
    } else {
      prune(m, select, chosen, alpha);
      cuda::select(select, launch);
    }
    AttendSelectedParams attend = attend_params(select_capacity(m, chosen));
    attend.newest = tail;
    attend.alpha = newest_apart || m.compensate ? alpha : nullptr;
    if (newest_apart) attend.estimated_lse = static_cast<const float*>(estimated_lse_.get());
    if (m.compensate) attend.mean = {static_cast<const float*>(sums_.get()), tokens_};
    std::vector<RowSource> sources;
    for (const RowSpan& rows : spans(0)) sources.push_back({rows.rows, tokens_, rows.rows});
    attend.rows = sources;
    attend_decode_selected(attend, launch);
  }

  cudaStream_t stream() const { return workspace_.launch().stream; }
  double mean_selected() const {
    std::vector<HeadSelection> heads(static_cast<std::size_t>(shape_.kv_heads));
    require(cudaMemcpy(heads.data(), heads_.get(), heads.size() * sizeof(HeadSelection),
                       cudaMemcpyDeviceToHost),
            "reading selections");
    double sum = 0.0;
    for (const HeadSelection& head : heads) sum += head.count;
    return sum / shape_.kv_heads;
  }
  double row_bytes() const {
    return static_cast<double>(tokens_) * shape_.kv_heads * static_cast<double>(shape_.row_bytes());
  }

 private:
  std::vector<RowSpan> spans(std::int64_t first) const {
    std::vector<RowSpan> result;
    for (int head = 0; head < shape_.kv_heads; ++head) {
      const auto at = static_cast<std::size_t>(head * tokens_ + first) * shape_.row_bytes();
      result.push_back({static_cast<const std::byte*>(rows_.get()) + at, tokens_ - first});
    }
    return result;
  }

  LogitDigest digest() const {
    if (tokens_ < kDigestedFrom) return {};
    return LogitDigest::in(static_cast<std::byte*>(digest_.get()), shape_.query_heads, stride_);
  }

  KeyIndexView index() const {
    KeyIndexView view;
    view.tiles.codes = static_cast<std::byte*>(codes_.get());
    view.tiles.scales = static_cast<std::uint16_t*>(scales_.get());
    view.tiles.capacity = pages_;
    return view;
  }

  void build() {
    const std::vector<RowSpan> rows = spans(0);
    build_index({shape_, index(), 0, pages_, rows, static_cast<std::int32_t*>(bad_.get())},
                workspace_.launch());
    require(cudaStreamSynchronize(workspace_.launch().stream), "building the index");
  }

  EstimateParams estimate_params(Selector method, int channels,
                                 const std::vector<RowSpan>& tail) const {
    EstimateParams p;
    p.q = static_cast<const float*>(q_.get());
    p.shape = shape_;
    p.method = method;
    p.channels = channels;
    p.index = index();
    p.pages = pages_;
    p.rows = tail;
    return p;
  }

  SelectParams select_params(const LogitView& logits) const {
    SelectParams p;
    p.shape = shape_;
    p.logits = logits;
    p.count = tokens_;
    p.end = pages_ * kPageTokens;
    p.recent_first = tokens_;
    return p;
  }

  static SelectionView select_capacity(const Method& m, SelectionView chosen) {
    chosen.capacity = m.prune == Pruner::top_k ? m.k : m.cap;
    return chosen;
  }

  static void prune(const Method& m, SelectParams& p, const SelectionView& chosen, float* alpha) {
    p.prune = m.prune;
    p.k = m.k;
    p.p = m.p;
    p.cap = m.cap;
    p.selected = select_capacity(m, chosen);
    p.alpha = alpha;
  }

  // As a session does, see SparseAttention::newest_apart().
  bool leaves_newest_out(const Method& m) const {
    return m.prune == Pruner::top_k && m.candidates == 0 && shape_.group() == 1;
  }

  AttendSelectedParams attend_params(const SelectionView& chosen) const {
    AttendSelectedParams p;
    p.q = static_cast<const float*>(q_.get());
    p.shape = shape_;
    p.selected = chosen;
    p.scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
    p.out = static_cast<float*>(out_.get());
    p.lse = static_cast<float*>(lse_.get());
    return p;
  }

  KvShape shape_;
  std::int64_t tokens_;
  std::int64_t pages_;
  std::int64_t stride_;
  Workspace workspace_{std::size_t{512} << 20};
  DeviceBlock rows_, q_, codes_, scales_, logits_, digest_, candidate_logits_;
  DeviceBlock positions_, candidates_;
  DeviceBlock out_, lse_, estimated_lse_, sums_, heads_, alpha_, bad_;
};

// Arguments: batch, query heads, KV heads, tokens; head_dim is 128.
void layer(benchmark::State& state, Method method) {
  Layer layer(state.range(0), static_cast<int>(state.range(1)), static_cast<int>(state.range(2)),
              state.range(3), 128);
  Replay replay(layer.stream(), [&] { layer.run(method); });
  time_replay(state, replay, 1);
  state.counters["selected"] = layer.mean_selected();
  count_rate(state, "dense_bytes/s", layer.row_bytes());
}

const Method kSparq = {
    .base = Selector::sparq, .channels = 32, .prune = Pruner::top_k, .k = 128, .compensate = true};
// The base selector of Twilight's comparison keeps 8192 tokens; pruning leaves about 256 of them.
const Method kBase = {.base = Selector::sparq, .channels = 32, .prune = Pruner::top_k, .k = 8192};
const Method kTwilight = {
    .base = Selector::sparq, .channels = 32, .candidates = 8192, .p = 0.95f, .cap = 8192};
// A base that estimates with all channels: its estimates are what Twilight prunes by.
const Method kInt4Base = {.base = Selector::int4, .prune = Pruner::top_k, .k = 8192};
const Method kInt4Twilight = {.base = Selector::int4, .p = 0.95f, .cap = 8192};
const Method kInt4 = {.base = Selector::int4, .p = 0.95f, .cap = 256, .compensate = true};
const Method kSlices = {
    .base = Selector::sparq, .channels = 32, .p = 0.95f, .cap = 256, .compensate = true};
const Method kSluice = {.base = Selector::sparq,
                        .channels = 32,
                        .candidates = 65536,
                        .p = 0.95f,
                        .cap = 256,
                        .compensate = true};

void settle(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"batch", "query_heads", "kv_heads", "tokens"})
      ->UseManualTime()
      ->MinTime(0.05)
      ->Unit(benchmark::kMicrosecond);
}
BENCHMARK_CAPTURE(layer, sparq, kSparq)
    ->Args({64, 32, 32, 4096})
    ->Args({64, 32, 32, 16384})
    ->Args({1, 32, 32, 131072})
    ->Args({1, 32, 8, 131072})
    ->Apply(settle);
BENCHMARK_CAPTURE(layer, base_8192, kBase)
    ->Args({16, 32, 32, 30000})
    ->Args({64, 32, 32, 30000})
    ->Apply(settle);
BENCHMARK_CAPTURE(layer, twilight, kTwilight)
    ->Args({16, 32, 32, 30000})
    ->Args({64, 32, 32, 30000})
    ->Apply(settle);
BENCHMARK_CAPTURE(layer, int4_base_8192, kInt4Base)
    ->Args({16, 32, 32, 30000})
    ->Args({64, 32, 32, 30000})
    ->Apply(settle);
BENCHMARK_CAPTURE(layer, int4_twilight, kInt4Twilight)
    ->Args({16, 32, 32, 30000})
    ->Args({64, 32, 32, 30000})
    ->Apply(settle);
BENCHMARK_CAPTURE(layer, int4_top_p, kInt4)
    ->Args({1, 32, 8, 1048576})
    ->Args({1, 32, 8, 131072})
    ->Args({1, 32, 8, 32768})
    ->Apply(settle);
BENCHMARK_CAPTURE(layer, slices_top_p, kSlices)
    ->Args({1, 32, 8, 1048576})
    ->Args({1, 32, 8, 131072})
    ->Args({1, 32, 8, 32768})
    ->Apply(settle);
BENCHMARK_CAPTURE(layer, slices_int4_top_p, kSluice)->Args({1, 32, 8, 1048576})->Apply(settle);

}  // namespace
}  // namespace sluice::cuda::bench
