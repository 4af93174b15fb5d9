#include "engine/planning/times.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "io/disk.h"
#include "lib/backend/key_tiles.h"
#include "lib/value_tiles.h"
#include "offload/plan/disk_layout.h"
#include "offload/plan/index_layout.h"

namespace sluice::planning {
namespace {

// Shares of a data sheet's rates that kernels reach. Fitted to files in bench/results of an H100
// and an H200: weights_h200, disk_h200, decode_text_alone_h200 (and _h100),
// decode_text_million_layers_host_h100, prefill_chunks_h100 (and _h200), sparse_prefill_512k_h200.
constexpr double kWeightShare = 0.87;     // of the memory's rate, products with one token
constexpr double kIndexShare = 0.58;      // scans of tiles
constexpr double kRowShare = 0.85;        // attention to rows on the device
constexpr double kProductShare = 0.52;    // of flops, a prompt's products
constexpr double kAttentionShare = 0.72;  // of flops, a prompt's attention
constexpr double kCodedPrompt = 0.73;     // of kProductShare, with coded weights
// A prompt's attention and its fetches run beside each other; this share of the shorter is not
// hidden.
constexpr double kNotHidden = 0.25;

// Decoding codes limits products on GPUs whose memory is fast: weights per clock and
// multiprocessor.
constexpr double kInt8Weights = 14.4;
constexpr double kInt4Weights = 17.8;
// Tokens of a KV head that a scan multiplies per clock and multiprocessor, and the same without
// the instructions of Hopper (slow_bus_h200: `values` with the limits of an RTX 4090).
constexpr double kScannedTokens = 0.128;
constexpr double kOlderScan = 0.5;
constexpr double kOlderLatency = 1.2;
constexpr int kHopper = 90;

// Launches of a layer, and selecting N rows: seconds.
constexpr double kLayerSeconds = 42e-6;
constexpr double kDenseLayerSeconds = 18e-6;
constexpr double kRowSeconds = 1.4e-6;  // times the root of N

// Rows that a row cache of several steps' selections does not have (row_cache_32k, of
// decode_text_16_sequences_h100 6 %). In the first steps behind a prompt the cache in host memory
// has none of these (disk_384k_h200).
constexpr double kCacheMisses = 0.1;
// Reads of a disk per row, because some rows are neighbours (0.8 in disk_384k_h200, 0.54 in
// disk_1m_h200, whose units are longer).
constexpr double kReadsOfRow = 0.7;

// Share of value tiles that are read to carry a share of the weight, and share of pairs of queries
// and keys among the pages that carry it (sluice-22m at 128K; pages(0.1) at a million tokens).
using Share = std::array<double, 2>;
constexpr std::array<Share, 6> kValueShares = {Share{0.0, 0.0}, {0.5, 0.06},  {0.8, 0.17},
                                               {0.9, 0.28},     {0.95, 0.39}, {1.0, 1.0}};
constexpr std::array<Share, 6> kPageShares = {Share{0.0, 0.0}, {0.1, 0.01},  {0.8, 0.15},
                                              {0.9, 0.24},     {0.95, 0.33}, {1.0, 1.0}};

double between(const std::array<Share, 6>& shares, double at) {
  for (std::size_t i = 1; i < shares.size(); ++i) {
    if (at > shares[i][0]) continue;
    const double part = (at - shares[i - 1][0]) / (shares[i][0] - shares[i - 1][0]);
    return shares[i - 1][1] + part * (shares[i][1] - shares[i - 1][1]);
  }
  return 1.0;
}

double misses(const KvPlan& kv, std::int64_t rows) {
  const double resident =
      std::min(1.0, static_cast<double>(kv.resident_tokens) / static_cast<double>(kv.context));
  const bool cached = rows > 0 && kv.cache_rows >= 2 * rows * kv.shape.layers;
  return cached ? std::min(kCacheMisses, 1.0 - resident) : 1.0 - resident;
}

std::uint64_t bytes_of(double bytes) { return static_cast<std::uint64_t>(std::llround(bytes)); }

// Layers by how they attend, and the rows that they select.
struct Layers {
  std::int64_t selecting = 0;
  std::int64_t dense = 0;
  double rows = 0.0;  // selected per KV head, of all selecting layers
};

Layers layers_of(const Policy& policy, const KvPlan& kv) {
  Layers sum;
  for (int layer = 0; layer < kv.shape.layers; ++layer) {
    if (policy.is_dense(layer)) {
      ++sum.dense;
      continue;
    }
    ++sum.selecting;
    sum.rows += static_cast<double>(
        std::min(most_selected(policy.at(layer), kv.context, own_scorers()), kv.context));
  }
  return sum;
}

// Bytes of rows on disk that dense layers read in a step.
double dense_on_disk(const Policy& policy, const KvPlan& kv) {
  const auto heads = static_cast<double>(kv.shape.kv_heads);
  return static_cast<double>(layers_of(policy, kv).dense * tokens_on_disk(kv)) * heads *
         static_cast<double>(kv.shape.row_bytes());
}

double product_weights(const ModelInfo& info) {
  const double head = static_cast<double>(info.vocabulary) * info.hidden;
  return static_cast<double>(info.parameters) - (info.tied_embeddings ? 0.0 : head);
}

double weights_seconds(const Machine& m, const StepBytes& bytes, const ModelInfo& info,
                       const std::optional<WeightFormat>& weights) {
  const double read = static_cast<double>(bytes.weights) / (kWeightShare * m.memory_rate);
  if (!weights || !weights->is_coded()) return read;
  const double per_clock = weights->code == WeightCode::int8 ? kInt8Weights : kInt4Weights;
  return std::max(read, product_weights(info) / (per_clock * m.multiprocessors * m.clock));
}

}  // namespace

StepBytes step_bytes(const Plan& plan, const Policy& policy, const ModelInfo& info,
                     const std::optional<WeightFormat>& weights) {
  const KvPlan& kv = plan.kv;
  const KvShape& shape = kv.shape;
  const double tokens = static_cast<double>(kv.context);
  const double heads = shape.kv_heads;
  StepBytes bytes;
  // Files that have codes have them in most matrices, about as many bits of each.
  const double per_weight =
      !weights && info.has_codes
          ? static_cast<double>(plan.weight_bytes) / static_cast<double>(info.parameters)
          : static_cast<double>(weights.value_or(info.weight_dtype).row_bytes(kWeightGroup)) /
                static_cast<double>(kWeightGroup);
  const double table =
      info.tied_embeddings ? 0.0 : per_weight * static_cast<double>(info.vocabulary) * info.hidden;
  bytes.weights =
      plan.weight_bytes - std::min(plan.weight_bytes, static_cast<std::uint64_t>(table));
  double keys = 0.0;
  double values = 0.0;
  for (int layer = 0; layer < shape.layers; ++layer) {
    const Policy own = policy.at(layer);
    if (!policy.selects(layer) || own.select.name == "dense") continue;
    // Codes, and two numbers per channel and page.
    const double of_key =
        shape.head_dim * (own.bits / 8.0 + 4.0 / static_cast<double>(kPageTokens));
    if (own.select.name == "int4" || own.candidates.limited()) keys += of_key;
    if (own.select.name == "sparq") {
      const auto given = own.select.parameters.find("r");
      const double channels =
          given != own.select.parameters.end() ? given->second : shape.head_dim / 4.0;
      keys += of_key * channels / shape.head_dim;
    }
    if (policy.compensates(layer, Compensation::values)) {
      const double channels = ValueTiles::channels(shape.head_dim, own.values.half);
      values += channels * (own.values.bits / 8.0 + 4.0 / static_cast<double>(kPageTokens)) *
                between(kValueShares, own.values.pages);
    }
  }
  bytes.keys = bytes_of(keys * heads * tokens);
  bytes.values = bytes_of(values * heads * tokens);
  const Layers layers = layers_of(policy, kv);
  const double row = heads * static_cast<double>(shape.row_bytes());
  const double selected = layers.rows * row;
  const double dense = static_cast<double>(layers.dense) * tokens * row;
  bytes.rows = bytes_of(selected + dense);
  const std::int64_t each =
      layers.selecting > 0 ? static_cast<std::int64_t>(layers.rows) / layers.selecting : 0;
  const double missed = selected * misses(kv, each);
  double bus = missed;
  if (dense > 0.0) {
    const std::int64_t resident =
        kv.dense_layers.empty() ? kv.resident_tokens : kv.dense_resident_tokens;
    bus += dense * (1.0 - std::min(1.0, static_cast<double>(resident) / tokens));
  }
  if (kv.in_place) bus = 0.0;
  bytes.bus = bytes_of(bus);
  if (kv.on_disk) {
    const DiskLayout disk(kv);
    const auto away =
        static_cast<double>(std::max<std::int64_t>(1, kv.context - kv.resident_tokens));
    const double reads = missed / static_cast<double>(shape.row_bytes()) * kReadsOfRow *
                         static_cast<double>(tokens_on_disk(kv)) / away;
    bytes.disk = bytes_of(reads * static_cast<double>(disk.unit_bytes)) +
                 bytes_of(dense_on_disk(policy, kv));
  }
  return bytes;
}

StepTimes predict(const Machine& m, const Plan& plan, const StepBytes& bytes, const Policy& policy,
                  const ModelInfo& info, const std::optional<WeightFormat>& weights, int chunk) {
  const KvPlan& kv = plan.kv;
  const double tokens = static_cast<double>(kv.context);
  const bool is_older = m.capability < kHopper || m.capability >= 120;
  const double latency = is_older ? kOlderLatency : 1.0;
  const Layers layers = layers_of(policy, kv);
  StepTimes times;
  times.step = weights_seconds(m, bytes, info, weights);
  times.step += static_cast<double>(layers.dense) * kDenseLayerSeconds * latency;
  if (layers.selecting > 0) {
    const auto count = static_cast<double>(layers.selecting);
    times.step += count * latency * (kLayerSeconds + kRowSeconds * std::sqrt(layers.rows / count));
    const double index_rate = kIndexShare * m.memory_rate;
    const double scanned = bytes.keys > 0 ? tokens * kv.shape.kv_heads * count : 0.0;
    const double scan_rate =
        kScannedTokens * m.multiprocessors * m.clock * (is_older ? kOlderScan : 1.0);
    times.step += std::max(static_cast<double>(bytes.keys) / index_rate, scanned / scan_rate);
    times.step += static_cast<double>(bytes.values) / index_rate;
  }
  times.step += static_cast<double>(bytes.rows - std::min(bytes.rows, bytes.bus)) /
                (kRowShare * m.memory_rate);
  times.step += static_cast<double>(bytes.bus) / m.bus_rate;
  if (kv.on_disk) {
    // The rate is that of reads of a sector; a unit of a few costs about as much.
    const double streamed = dense_on_disk(policy, kv);
    const double reads = (static_cast<double>(bytes.disk) - streamed) /
                         static_cast<double>(DiskLayout(kv).unit_bytes);
    times.step += kv.shape.layers * m.disk_latency + reads * kSectorBytes / m.disk_row_rate +
                  streamed / m.disk_rate;
  }

  // Two operations per weight; four per channel for every pair of a query and a key.
  const bool is_coded = weights ? weights->is_coded() : info.has_codes;
  const double coded = is_coded ? kCodedPrompt : 1.0;
  const double products = 2.0 * product_weights(info) * tokens / (m.flops * kProductShare * coded);
  const double pairs = policy.prefill.pages > 0.0 ? between(kPageShares, policy.prefill.pages)
                       : policy.prefill.tau > 0.0 ? 0.7
                                                  : 1.0;
  const double attention = 2.0 * tokens * tokens * kv.shape.query_heads * kv.shape.head_dim *
                           kv.shape.layers * pairs / (m.flops * kAttentionShare);
  const double away = std::max(0.0, tokens - static_cast<double>(kv.resident_tokens));
  const double fetched = away * away / (2.0 * chunk) * static_cast<double>(kv.shape.token_bytes());
  const auto on_disk = static_cast<double>(tokens_on_disk(kv));
  const double written = on_disk * static_cast<double>(kv.shape.token_bytes());
  const double read = written * on_disk / (2.0 * chunk);
  const double of_disk = kv.on_disk ? 1.0 / m.disk_rate : 0.0;
  const double fetching = kv.in_place ? 0.0 : (fetched - read) / m.copy_rate + read * of_disk;
  times.prefill = products + std::max(attention, fetching) +
                  kNotHidden * std::min(attention, fetching) + written * of_disk;
  return times;
}

}  // namespace sluice::planning
