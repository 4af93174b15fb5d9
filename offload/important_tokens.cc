#include "offload/important_tokens.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>

#include "lib/check.h"
#include "offload/gathered_attention.h"
#include "offload/kv_pool.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr std::int64_t kNewestProbes = 64;
constexpr std::int64_t kRandomProbes = 64;
constexpr std::int64_t kProbes = kNewestProbes + kRandomProbes;
// Keys per KV head attended at a time: enough for a block of queries to be worth the gather.
constexpr std::int64_t kArenaRows = 1024;
// Tokens that demoted prompts attend to at once, from positions that do not depend on the size of
// the pieces in which a prompt comes: so neither does the result.
constexpr std::int64_t kBlock = 512;
constexpr std::uint64_t kSeed = 20241011;

std::size_t bytes_of(std::int64_t count, std::size_t size) {
  return static_cast<std::size_t>(count) * size;
}

// As many of the heaviest as carry the share tau of the total.
std::int64_t count_for(const std::vector<float>& sums, double tau) {
  if (tau >= 1.0) return static_cast<std::int64_t>(sums.size());
  std::vector<float> sorted = sums;
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  const double total = std::accumulate(sorted.begin(), sorted.end(), 0.0);
  double carried = 0.0;
  std::int64_t count = 0;
  while (count < static_cast<std::int64_t>(sorted.size()) && carried < tau * total) {
    carried += static_cast<double>(sorted[static_cast<std::size_t>(count++)]);
  }
  return count;
}

}  // namespace

ImportantTokenBytes::ImportantTokenBytes(const KvShape& shape, std::int64_t context,
                                         std::int64_t sequences)
    : probe_queries(bytes_of(kProbes * shape.query_heads * shape.head_dim, sizeof(float))),
      positions(bytes_of(shape.kv_heads * context, sizeof(std::int32_t))),
      queries(bytes_of(kBlock * shape.query_heads * shape.head_dim, sizeof(float))),
      out(queries),
      lse(bytes_of(kBlock * shape.query_heads, sizeof(float))),
      arena(bytes_of(shape.kv_heads * kArenaRows, shape.row_bytes())),
      zeros(bytes_of(std::int64_t{shape.query_heads} * shape.head_dim, sizeof(float))),
      masks(bytes_of(shape.layers * sequences * context, 1)),
      sums(bytes_of(context, sizeof(float))) {}

std::uint64_t ImportantTokenBytes::work() const {
  return probe_queries + positions + queries + out + lse + arena + zeros + masks;
}

ImportantTokens::ImportantTokens(Queue& queue, const KvShape& shape, std::int64_t context,
                                 std::int64_t sequences, Tier tier)
    : queue_(&queue), shape_(shape), context_(context), sequences_(sequences) {
  Backend& backend = queue.backend();
  const ImportantTokenBytes bytes(shape, context, sequences);
  probe_queries_ = backend.allocate(tier, bytes.probe_queries);
  positions_ = backend.allocate(tier, bytes.positions);
  queries_ = backend.allocate(tier, bytes.queries);
  out_ = backend.allocate(tier, bytes.out);
  lse_ = backend.allocate(tier, bytes.lse);
  arena_ = backend.allocate(tier, bytes.arena);
  zeros_ = backend.allocate(tier, bytes.zeros);
  masks_ = backend.allocate(tier, bytes.masks);
  sums_ = backend.allocate(Tier::host, bytes.sums);
  eligible_ = backend.allocate(Tier::host, bytes.masks);
  std::fill_n(eligible(0, 0), bytes.masks, std::uint8_t{1});
}

void ImportantTokens::publish(int layer, std::int32_t sequence, std::int64_t first,
                              std::int64_t end) {
  if (first == end) return;
  const std::size_t offset = mask_offset(layer, sequence) + bytes_of(first, 1);
  const CopyOp op = {masks_.data() + offset, eligible_.data() + offset, bytes_of(end - first, 1)};
  queue_->copy({&op, 1});
}

Mask ImportantTokens::mask(int layer) const {
  return {reinterpret_cast<const std::uint8_t*>(masks_.data()) + mask_offset(layer, 0), context_};
}

void ImportantTokens::rewind(std::int32_t sequence, std::int64_t length) {
  for (int layer = 0; layer < shape_.layers; ++layer) {
    std::uint8_t* const own = eligible(layer, sequence);
    std::fill(own + length, own + context_, std::uint8_t{1});
    publish(layer, sequence, length, context_);
  }
  const std::uint8_t* const all = eligible(0, 0);
  evicted_ = std::find(all, all + eligible_.bytes(), std::uint8_t{0}) != all + eligible_.bytes();
}

void ImportantTokens::copy(std::int32_t from, std::int32_t to) {
  for (int layer = 0; layer < shape_.layers; ++layer) {
    std::copy_n(eligible(layer, from), context_, eligible(layer, to));
    publish(layer, to, 0, context_);
  }
}

void ImportantTokens::begin(std::int32_t sequence, const StepRange& prompt) {
  sequence_ = sequence;
  prompt_ = prompt;
  const std::int64_t newest = std::max(prompt.first, prompt.end() - kNewestProbes);
  std::vector<std::int64_t> others(static_cast<std::size_t>(newest - prompt.first));
  std::iota(others.begin(), others.end(), prompt.first);
  probes_.clear();
  std::mt19937_64 random(kSeed);
  // The first steps of a Fisher-Yates shuffle.
  const auto wanted = std::min<std::size_t>(others.size(), kRandomProbes);
  for (std::size_t i = 0; i < wanted; ++i) {
    std::swap(others[i], others[i + random() % (others.size() - i)]);
    probes_.push_back(others[i]);
  }
  std::sort(probes_.begin(), probes_.end());
  for (std::int64_t t = newest; t < prompt.end(); ++t) probes_.push_back(t);
}

void ImportantTokens::collect(const StepRange& piece, const Queries& queries) {
  const std::int64_t width = std::int64_t{shape_.query_heads} * shape_.head_dim;
  std::vector<CopyOp> ops;
  for (std::size_t i = 0; i < probes_.size(); ++i) {
    if (probes_[i] < piece.first || probes_[i] >= piece.end()) continue;
    float* const to = probe_queries_.floats() + static_cast<std::int64_t>(i) * width;
    const float* const from = queries.q + (probes_[i] - piece.first) * queries.stride;
    ops.push_back({reinterpret_cast<std::byte*>(to), reinterpret_cast<const std::byte*>(from),
                   bytes_of(width, sizeof(float))});
  }
  if (!ops.empty()) queue_->copy(ops);
}

// Softmax weights of every token of the prompt, summed over probes and query heads.
std::vector<float> ImportantTokens::column_sums(int layer, const KvPool& pool) {
  const RowRun run = whole_run(pool.tables(), sequence_, prompt_.end(), pool.plan().in_place);
  if (run.count == 0) {
    throw Error(ErrorCode::unsupported,
                "a sparse prefill needs rows that follow each other, and this sequence shares or "
                "interleaves its own with others; use a session of its own for it");
  }
  const std::vector<RowSpan> rows = pool.spans(layer, run);
  ColumnSumsParams params;
  params.q = probe_queries_.floats();
  params.positions = probes_;
  params.shape = shape_;
  params.rows = rows;
  if (evicted_) params.eligible = mask(layer).tokens + sequence_ * context_;
  params.sums = sums_.floats();
  queue_->column_sums(params);
  queue_->synchronize();
  std::vector<float> sums(sums_.floats() + prompt_.first, sums_.floats() + prompt_.end());
  if (!std::all_of(sums.begin(), sums.end(), [](float x) { return std::isfinite(x); })) {
    throw Error(ErrorCode::numeric, "a query or key of layer " + std::to_string(layer) +
                                        " is NaN or infinite; the checkpoint's weights are "
                                        "damaged");
  }
  return sums;
}

void ImportantTokens::choose(int layer, const SparsePrefill& how, const KvPool& pool) {
  std::vector<float> scores = column_sums(layer, pool);
  const auto tokens = static_cast<std::size_t>(prompt_.tokens);
  const std::int64_t count = count_for(scores, how.tau);
  // Mean over the probes that can see a token.
  for (std::size_t t = 0; t < tokens; ++t) {
    const std::int64_t position = prompt_.first + static_cast<std::int64_t>(t);
    const auto blind = std::lower_bound(probes_.begin(), probes_.end(), position);
    scores[t] /= static_cast<float>(probes_.end() - blind);
  }
  std::vector<std::size_t> order(tokens);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return scores[a] > scores[b]; });
  important_.assign(tokens, 0);
  for (std::int64_t i = 0; i < count; ++i) important_[order[static_cast<std::size_t>(i)]] = 1;
  const auto newest = static_cast<std::size_t>(std::min(prompt_.tokens, kNewestProbes));
  std::fill(important_.end() - static_cast<std::int64_t>(newest), important_.end(),
            std::uint8_t{1});

  keys_.clear();
  for (std::int64_t t = 0; t < prompt_.first; ++t) {
    if (eligible(layer, sequence_)[t] != 0) keys_.push_back(static_cast<std::int32_t>(t));
  }
  for (std::size_t t = 0; t < tokens; ++t) {
    if (important_[t] != 0)
      keys_.push_back(static_cast<std::int32_t>(prompt_.first) + static_cast<std::int32_t>(t));
  }
  if (!how.evict) return;
  evicted_ = true;
  std::copy(important_.begin(), important_.end(), eligible(layer, sequence_) + prompt_.first);
  publish(layer, sequence_, prompt_.first, prompt_.end());
}

// All tokens of a (part of a) block: attention to the important tokens before the block, and to the
// block.
ImportantTokens::Part ImportantTokens::whole_block(const StepRange& block) const {
  Part part;
  const std::int64_t begin = std::max(prompt_.first, block.first / kBlock * kBlock);
  const auto before = std::lower_bound(keys_.begin(), keys_.end(), begin);
  part.keys.assign(keys_.begin(), before);
  part.first_query = static_cast<std::int64_t>(part.keys.size()) + block.first - begin;
  for (std::int64_t t = begin; t < block.end(); ++t) {
    part.keys.push_back(static_cast<std::int32_t>(t));
    if (t >= block.first) part.queries.push_back(t - block.first);
  }
  return part;
}

// Attention among important tokens only: those of the block follow each other among the keys, as
// the causal mask wants.
ImportantTokens::Part ImportantTokens::important_part(const StepRange& block) const {
  Part part;
  const auto before = std::lower_bound(keys_.begin(), keys_.end(), block.first);
  const auto end = std::lower_bound(before, keys_.end(), block.end());
  part.keys.assign(keys_.begin(), end);
  part.first_query = before - keys_.begin();
  for (auto key = before; key != end; ++key) part.queries.push_back(*key - block.first);
  return part;
}

// The same keys for every KV head.
void ImportantTokens::put_keys(const std::vector<std::int32_t>& keys) {
  std::vector<CopyOp> ops;
  for (int head = 0; head < shape_.kv_heads; ++head) {
    ops.push_back({positions_.data() + bytes_of(head * context_, sizeof(std::int32_t)),
                   reinterpret_cast<const std::byte*>(keys.data()),
                   keys.size() * sizeof(std::int32_t)});
  }
  queue_->copy(ops);
}

// Queries of the part into one run, and its outputs back to their places; zero for the rest.
void ImportantTokens::copy_queries(const Part& part, const StepRange& block,
                                   const Queries& queries) {
  const std::int64_t width = std::int64_t{shape_.query_heads} * shape_.head_dim;
  const std::size_t bytes = bytes_of(width, sizeof(float));
  std::vector<CopyOp> in;
  out_ops_.clear();
  for (std::int64_t i = 0; i < block.tokens; ++i) {
    out_ops_.push_back(
        {reinterpret_cast<std::byte*>(queries.out + i * width), zeros_.data(), bytes});
  }
  for (std::size_t i = 0; i < part.queries.size(); ++i) {
    const std::int64_t token = part.queries[i];
    in.push_back({queries_.data() + i * bytes,
                  reinterpret_cast<const std::byte*>(queries.q + token * queries.stride), bytes});
    out_ops_[static_cast<std::size_t>(token)].from = out_.data() + i * bytes;
  }
  if (!in.empty()) queue_->copy(in);
}

void ImportantTokens::attend(int layer, const SparsePrefill& how, const StepRange& piece,
                             const Queries& queries, const KvPool& pool, Ledger& ledger) {
  const std::int64_t width = std::int64_t{shape_.query_heads} * shape_.head_dim;
  for (std::int64_t first = piece.first; first < piece.end();) {
    const std::int64_t end = std::min(piece.end(), (first / kBlock + 1) * kBlock);
    const StepRange block = {first, end - first};
    Queries own = queries;
    own.q += (first - piece.first) * queries.stride;
    own.out += (first - piece.first) * width;
    attend_block(layer, how.evict ? important_part(block) : whole_block(block), block, own, pool,
                 ledger);
    first = end;
  }
}

void ImportantTokens::attend_block(int layer, const Part& part, const StepRange& block,
                                   const Queries& queries, const KvPool& pool, Ledger& ledger) {
  copy_queries(part, block, queries);
  if (!part.queries.empty()) {
    put_keys(part.keys);
    GatheredAttention params;
    params.attend = attend_params(shape_, block, queries);
    params.attend.q = queries_.floats();
    params.attend.tokens = static_cast<std::int64_t>(part.queries.size());
    params.attend.q_stride = std::int64_t{shape_.query_heads} * shape_.head_dim;
    params.attend.first_query_position = part.first_query;
    params.attend.out = out_.floats();
    params.attend.lse = lse_.floats();
    params.keys.shape = shape_;
    params.keys.rows = pool.rows(layer);
    params.keys.sequence = sequence_;
    params.keys.positions = reinterpret_cast<const std::int32_t*>(positions_.data());
    params.keys.capacity = context_;
    params.count = static_cast<std::int64_t>(part.keys.size());
    params.arena = arena_.data();
    params.arena_rows = kArenaRows;
    attend_gathered(*queue_, params);
    // The host's list of keys may go.
    queue_->synchronize();
    record(layer, part.keys, pool, ledger);
  }
  queue_->copy(out_ops_);
}

void ImportantTokens::record(int layer, const std::vector<std::int32_t>& keys, const KvPool& pool,
                             Ledger& ledger) const {
  const Tier tier = pool.tier();
  const auto resident = std::count_if(keys.begin(), keys.end(), [&](std::int32_t key) {
    return pool.plan().in_place ||
           pool.tables().page(sequence_, key / kPageTokens).device != PageSlots::kNone;
  });
  ledger.record(layer, tier, tier, Cause::hit, traffic_of(shape_, resident));
  ledger.record(layer, Tier::host, tier, Cause::miss,
                traffic_of(shape_, static_cast<std::int64_t>(keys.size()) - resident));
}

}  // namespace sluice
