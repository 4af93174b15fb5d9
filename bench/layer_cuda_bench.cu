// Selection and attention of one layer for one query token per sequence, which replace the dense
// attention of bench/decode_attention_cuda_bench.cu. Rows are on the device, or those of whole
// pages in host memory.
//
// Keys are normal and queries are scaled so that logits have a deviation of 4 unless a method says
// otherwise: about one per cent of the tokens then carry 95 % of the weight, as in text.
#include <cmath>
#include <numeric>

#include "bench/cuda_support.cuh"
#include "kernels/attention/attention.h"
#include "kernels/runtime/page_digest.h"
#include "kernels/runtime/page_weights.h"
#include "kernels/scan/scan.h"
#include "kernels/select/select.h"
#include "kernels/values/values.h"

namespace sluice::cuda::bench {
namespace {

struct Method {
  Selector base = Selector::int4;
  int channels = 0;             // for sparq
  std::int64_t candidates = 0;  // re-scored with all channels; 0: no re-scoring
  Pruner prune = Pruner::top_p;
  std::int64_t k = 0;
  float p = 0.0f;
  std::int64_t cap = 0;
  bool compensate = false;  // with the mean value
  int value_bits = 0;       // of value tiles for rows that are not selected; 0: none
  bool on_host = false;     // rows of whole pages are in host memory
  float deviation = 4.0f;   // of the logits

  std::int64_t most() const { return prune == Pruner::top_k ? k : cap; }
};

Quota quota(std::int64_t tokens) {
  Quota quota;
  quota.share.tokens = tokens;
  return quota;
}

// One layer of a batch of sequences of equal length, whose pages and tiles are contiguous.
class Layer {
 public:
  Layer(const Method& method, std::int64_t batch, int query_heads, int kv_heads,
        std::int64_t tokens, int head_dim)
      : method_(method),
        shape_{1, query_heads, kv_heads, head_dim, DType::bf16},
        batch_(batch),
        tokens_(tokens),
        pages_((tokens + kPageTokens - 1) / kPageTokens),
        tiles_((pages_ + kTilePages - 1) / kTilePages),
        stride_((tokens + 63) / 64 * 64) {
    const auto d = static_cast<std::size_t>(head_dim);
    rows_ = normal_block<__nv_bfloat16>(static_cast<std::size_t>(kv_heads * head_stride()) / 2);
    if (method.on_host) host_rows_ = to_host(rows_, kv_heads * head_stride());
    q_ = normal_block<float>(queries() * d, method.deviation, 2);
    const KeyTiles tiles = index().tiles;
    codes_ = make_device_block(tiles.codes_bytes(kv_heads, head_dim));
    scales_ = make_device_block(tiles.scales_bytes(kv_heads, head_dim));
    const std::size_t logit_bytes = queries() * static_cast<std::size_t>(stride_) * sizeof(__half);
    logits_ = make_device_block(logit_bytes);
    candidate_logits_ = make_device_block(logit_bytes);
    digest_ = make_device_block(digest_bytes());
    page_weights_ =
        make_device_block(heads() * static_cast<std::size_t>(LogitDigest::pages_of(stride_)) *
                          PageWeights::kPageBytes);
    const std::size_t list_bytes = heads() * static_cast<std::size_t>(stride_) * sizeof(int);
    positions_ = make_device_block(list_bytes);
    candidates_ = make_device_block(list_bytes);
    out_ = make_device_block(queries() * d * sizeof(float));
    lse_ = make_device_block(queries() * sizeof(float));
    estimated_lse_ = make_device_block(queries() * sizeof(float));
    sums_ = normal_block<float>(heads() * d);
    heads_ = make_device_block(2 * heads() * sizeof(HeadSelection));
    alpha_ = make_device_block(2 * queries() * sizeof(float));
    bad_ = make_device_block(heads() * sizeof(std::int32_t));
    if (method.value_bits > 0)
      values_ = make_device_block(values().tiles.bytes(kv_heads, head_dim));
    upload_tables();
    build();
  }

  // Runs a layer's work after its rows are appended.
  void run() {
    const Method& m = method_;
    const Launch launch = workspace_.launch();
    const SelectionView chosen = {static_cast<std::int32_t*>(positions_.get()), m.most(),
                                  static_cast<HeadSelection*>(heads_.get())};
    auto* const alpha = static_cast<float*>(alpha_.get());

    EstimateParams estimate = estimate_params(m.base, m.channels);
    estimate.skip_newest = leaves_newest_out(m);
    estimate.logits = {static_cast<std::byte*>(logits_.get()), stride_, digest()};
    cuda::estimate(estimate, launch);
    SelectParams select = select_params(estimate.logits);
    select.skip_newest = estimate.skip_newest;
    if (select.skip_newest || m.value_bits > 0) {
      select.lse = static_cast<float*>(estimated_lse_.get());
    }
    if (m.candidates > 0) {
      rescore(m, select, chosen, alpha, launch);
    } else {
      prune(m, select, chosen, alpha);
      cuda::select(select, launch);
    }

    AttendSelectedParams attend = attend_params(chosen);
    if (select.skip_newest || m.compensate) attend.alpha = alpha;
    if (select.skip_newest) attend.estimated_lse = select.lse;
    if (m.compensate) attend.value_sums = static_cast<const float*>(sums_.get());
    attend_decode_selected(attend, launch.half(false));
    if (m.value_bits > 0) attend_values(attend, select, launch);
  }

  cudaStream_t stream() const { return workspace_.launch().stream; }
  double mean_selected() const {
    std::vector<HeadSelection> all(heads());
    require(cudaMemcpy(all.data(), heads_.get(), all.size() * sizeof(HeadSelection),
                       cudaMemcpyDeviceToHost),
            "reading selections");
    double sum = 0.0;
    for (const HeadSelection& head : all) sum += head.count;
    return sum / static_cast<double>(all.size());
  }
  double row_bytes() const {
    return static_cast<double>(tokens_) * static_cast<double>(heads() * shape_.row_bytes());
  }

 private:
  // Counts over all sequences.
  std::size_t heads() const { return static_cast<std::size_t>(batch_ * shape_.kv_heads); }
  std::size_t queries() const { return static_cast<std::size_t>(batch_ * shape_.query_heads); }

  // Bytes between KV heads.
  std::int64_t head_stride() const {
    return batch_ * pages_ * kPageTokens * static_cast<std::int64_t>(shape_.row_bytes());
  }

  std::size_t digest_bytes() const {
    return PageDigest::bytes_of(static_cast<std::int64_t>(queries()), stride_);
  }
  LogitDigest digest() const {
    const bool weighs =
        method_.value_bits > 0 && tokens_ >= kWeighedFrom && tokens_ < kDigestedFrom;
    if (!weighs && tokens_ < kDigestedFrom) return {};
    LogitDigest digest = LogitDigest::in(static_cast<std::byte*>(digest_.get()),
                                         static_cast<std::int64_t>(queries()), stride_);
    if (weighs) digest.weights = static_cast<std::byte*>(page_weights_.get());
    return digest;
  }

  KeyIndexView index() const {
    KeyIndexView view;
    view.tiles.codes = static_cast<std::byte*>(codes_.get());
    view.tiles.scales = static_cast<std::uint16_t*>(scales_.get());
    view.tiles.slots = batch_ * tiles_;
    view.slots = static_cast<const std::int32_t*>(tile_table_.get());
    view.table_stride = tiles_;
    return view;
  }

  ValueTilesView values() const {
    ValueTilesView view;
    view.tiles = {method_.value_bits, static_cast<std::byte*>(values_.get()), batch_ * tiles_};
    view.slots = static_cast<const std::int32_t*>(tile_table_.get());
    view.table_stride = tiles_;
    return view;
  }

  static PinnedBlock to_host(const DeviceBlock& rows, std::int64_t bytes) {
    PinnedBlock block = make_pinned_block(static_cast<std::size_t>(bytes));
    require(cudaMemcpy(block.get(), rows.get(), static_cast<std::size_t>(bytes),
                       cudaMemcpyDeviceToHost),
            "copying rows to the host");
    return block;
  }

  PagedRows rows() const {
    PagedRows rows;
    rows.device = static_cast<std::byte*>(rows_.get());
    rows.device_stride = head_stride();
    rows.host = static_cast<std::byte*>(host_rows_.get());
    rows.host_stride = head_stride();
    rows.pages = static_cast<const PageSlots*>(page_table_.get());
    rows.table_stride = pages_;
    return rows;
  }

  TokenBatch newest() const {
    return {static_cast<const BatchToken*>(newest_.get()), batch_, tokens_};
  }

  void upload_tables() {
    std::vector<PageSlots> pages(static_cast<std::size_t>(batch_ * pages_));
    for (std::size_t i = 0; i < pages.size(); ++i) {
      const auto slot = static_cast<std::int32_t>(i);
      const bool is_newest = slot % pages_ == (tokens_ - 1) / kPageTokens;
      (method_.on_host && !is_newest ? pages[i].host : pages[i].device) = slot;
    }
    page_table_ = device_copy(pages);
    std::vector<std::int32_t> tiles(static_cast<std::size_t>(batch_ * tiles_));
    std::iota(tiles.begin(), tiles.end(), 0);
    tile_table_ = device_copy(tiles);
    std::vector<BatchToken> newest;
    for (std::int32_t sequence = 0; sequence < batch_; ++sequence) {
      newest.push_back({sequence, static_cast<std::int32_t>(tokens_ - 1)});
    }
    newest_ = device_copy(newest);
  }

  // Builds the tiles of the whole pages before each sequence's newest token.
  void build() {
    const PagedRows all = rows();
    for (std::int32_t sequence = 0; sequence < batch_; ++sequence) {
      std::vector<RowSpan> rows;
      for (int head = 0; head < shape_.kv_heads; ++head) {
        rows.push_back(
            {all.in_device(head, sequence * pages_, static_cast<std::int64_t>(shape_.row_bytes())),
             tokens_});
      }
      const std::int64_t pages = (tokens_ - 1) / kPageTokens;
      auto* const bad = static_cast<std::int32_t*>(bad_.get());
      build_index({shape_, index(), sequence, 0, pages, rows, bad}, workspace_.launch());
      if (method_.value_bits == 0) continue;
      build_values({shape_, values(), sequence, 0, pages, rows, bad}, workspace_.launch());
    }
    require(cudaStreamSynchronize(workspace_.launch().stream), "building the index");
  }

  // Keeps the candidates and estimates them again with all channels.
  void rescore(const Method& m, SelectParams select, const SelectionView& chosen, float* alpha,
               const Launch& launch) const {
    float* const share = alpha + queries();
    const SelectionView proposed = {static_cast<std::int32_t*>(candidates_.get()), m.candidates,
                                    chosen.heads + heads()};
    select.prune = Pruner::top_k;
    select.k = quota(m.candidates);
    select.selected = proposed;
    select.alpha = share;
    cuda::select(select, launch);
    EstimateParams again = estimate_params(Selector::int4, 0);
    again.candidates = &proposed;
    again.logits = {static_cast<std::byte*>(candidate_logits_.get()), stride_};
    cuda::estimate(again, launch);
    SelectParams rest = select_params(again.logits);
    rest.candidates = &proposed;
    rest.share = share;
    prune(m, rest, chosen, alpha);
    cuda::select(rest, launch);
  }

  EstimateParams estimate_params(Selector method, int channels) const {
    EstimateParams p;
    p.q = static_cast<const float*>(q_.get());
    p.q_stride = query_stride();
    p.shape = shape_;
    p.batch = newest();
    p.method = method;
    p.channels = channels;
    p.index = index();
    p.rows = rows();
    return p;
  }

  SelectParams select_params(const LogitView& logits) const {
    SelectParams p;
    p.shape = shape_;
    p.batch = newest();
    p.logits = logits;
    return p;
  }

  static void prune(const Method& m, SelectParams& p, const SelectionView& chosen, float* alpha) {
    p.prune = m.prune;
    p.k = quota(m.k);
    p.p = m.p;
    p.cap = quota(m.cap);
    p.selected = chosen;
    p.alpha = alpha;
  }

  // The same rule as a session's, see SparseAttention::newest_apart().
  bool leaves_newest_out(const Method& m) const {
    return m.prune == Pruner::top_k && m.candidates == 0 && shape_.group() == 1;
  }

  AttendSelectedParams attend_params(const SelectionView& chosen) const {
    AttendSelectedParams p;
    p.q = static_cast<const float*>(q_.get());
    p.q_stride = query_stride();
    p.shape = shape_;
    p.batch = newest();
    p.selected = chosen;
    p.rows = rows();
    p.scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
    p.out = static_cast<float*>(out_.get());
    p.lse = static_cast<float*>(lse_.get());
    return p;
  }

  void attend_values(const AttendSelectedParams& attended, const SelectParams& select,
                     const Launch& launch) const {
    AttendTilesParams p;
    p.shape = shape_;
    p.batch = attended.batch;
    p.logits = select.logits;
    p.estimated_lse = select.lse;
    p.selected = attended.selected;
    p.values = values();
    p.share = 0.9f;
    p.value_sums = static_cast<const float*>(sums_.get());
    p.out = attended.out;
    p.lse = attended.lse;
    p.merge = true;
    attend_tiles(p, launch.half(true), true);
  }
  std::int64_t query_stride() const { return std::int64_t{shape_.query_heads} * shape_.head_dim; }

  Method method_;
  KvShape shape_;
  std::int64_t batch_;
  std::int64_t tokens_;
  std::int64_t pages_;   // per sequence
  std::int64_t tiles_;   // per sequence
  std::int64_t stride_;  // of logits
  Workspace workspace_{std::size_t{512} << 20};
  DeviceBlock rows_, q_, codes_, scales_, values_, logits_, digest_, page_weights_,
      candidate_logits_;
  PinnedBlock host_rows_;
  DeviceBlock page_table_, tile_table_, newest_;
  DeviceBlock positions_, candidates_;
  DeviceBlock out_, lse_, estimated_lse_, sums_, heads_, alpha_, bad_;
};

void time(benchmark::State& state, Layer& layer) {
  Replay replay(layer.stream(), [&] { layer.run(); });
  time_replay(state, replay, 1);
  state.counters["selected"] = layer.mean_selected();
  count_rate(state, "dense_bytes/s", layer.row_bytes());
}

// Arguments: batch, query heads, KV heads, tokens; head_dim is 128.
void layer(benchmark::State& state, const Method& method) {
  Layer layer(method, state.range(0), static_cast<int>(state.range(1)),
              static_cast<int>(state.range(2)), state.range(3), 128);
  time(state, layer);
}

// A layer of sluice-22m behind War and Peace, 64 rows of 1,045,000 per KV head, with logits of a
// given deviation, because first layers attend to nearly all tokens alike. Argument: the deviation
// times 100.
void nearly_flat(benchmark::State& state) {
  const Method method = {.base = Selector::int4,
                         .prune = Pruner::top_k,
                         .k = 64,
                         .on_host = true,
                         .deviation = static_cast<float>(state.range(0)) / 100.0f};
  Layer layer(method, 1, 8, 2, 1045000, 64);
  time(state, layer);
}

const Method kSparq = {
    .base = Selector::sparq, .channels = 32, .prune = Pruner::top_k, .k = 128, .compensate = true};
// The base selector of Twilight's comparison keeps 8192 tokens; pruning leaves about 256 of them.
const Method kBase = {.base = Selector::sparq, .channels = 32, .prune = Pruner::top_k, .k = 8192};
const Method kTwilight = {
    .base = Selector::sparq, .channels = 32, .candidates = 8192, .p = 0.95f, .cap = 8192};
// A base that estimates with all channels, so Twilight prunes by the same estimates.
const Method kInt4Base = {.base = Selector::int4, .prune = Pruner::top_k, .k = 8192};
const Method kInt4Twilight = {.base = Selector::int4, .p = 0.95f, .cap = 8192};
const Method kInt4 = {.base = Selector::int4, .p = 0.95f, .cap = 256, .compensate = true};
const Method kSlices = {
    .base = Selector::sparq, .channels = 32, .p = 0.95f, .cap = 256, .compensate = true};
const Method kMeanOfSome = {
    .base = Selector::int4, .prune = Pruner::top_k, .k = 256, .compensate = true};
const Method kValues = {.base = Selector::int4, .prune = Pruner::top_k, .k = 16, .value_bits = 2};
const Method kValuesOnHost = {
    .base = Selector::int4, .prune = Pruner::top_k, .k = 32, .value_bits = 2, .on_host = true};
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
void long_contexts(benchmark::internal::Benchmark* bench) {
  for (const std::int64_t tokens : {1048576, 131072, 32768}) bench->Args({1, 32, 8, tokens});
  settle(bench);
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
BENCHMARK_CAPTURE(layer, int4_top_p, kInt4)->Apply(long_contexts);
BENCHMARK_CAPTURE(layer, slices_top_p, kSlices)->Apply(long_contexts);
BENCHMARK_CAPTURE(layer, int4_top_k_256, kMeanOfSome)->Apply(long_contexts);
BENCHMARK_CAPTURE(layer, values, kValues)->Apply(long_contexts);
BENCHMARK_CAPTURE(layer, values_32_on_host, kValuesOnHost)->Apply(long_contexts);
BENCHMARK_CAPTURE(layer, slices_int4_top_p, kSluice)->Args({1, 32, 8, 1048576})->Apply(settle);
BENCHMARK(nearly_flat)
    ->ArgName("deviation_percent")
    ->ArgsProduct({{400, 100, 50, 30, 10, 3}})
    ->UseManualTime()
    ->MinTime(0.05)
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace sluice::cuda::bench
