#include "offload/step/decode_step.h"

#include <algorithm>
#include <bit>

#include "lib/check.h"
#include "offload/tiers/disk_pages.h"

namespace sluice {
namespace {

// Smallest capacity; steps are recorded for capacities that are powers of two.
constexpr std::int64_t kLeastCapacity = 1024;

}  // namespace

void DecodeStep::begin(std::span<const BatchToken> tokens, const Policy& policy) {
  check(!tokens.empty() && static_cast<std::int64_t>(tokens.size()) <= pool_->plan().decode_batch,
        "more tokens in a step than were planned for");
  tokens_.assign(tokens.begin(), tokens.end());
  policy_ = &policy;
  by_layer_.clear();
  for (int layer = 0; !policy.layers.empty() && layer < pool_->plan().shape.layers; ++layer) {
    by_layer_.push_back(policy.at(layer));
  }
  place_tokens();
  beside_ = find_beside();
  if (pool_->cache() != nullptr) pool_->cache()->advance();
  if (pool_->disk_rows() != nullptr) pool_->disk_rows()->begin_step();
  if (pool_->sparse() != nullptr) pool_->sparse()->begin_step();
  begin_runs();
}

// Rows decide the capacity, because only work on rows is sized by it.
void DecodeStep::place_tokens() {
  const KvPlan& plan = pool_->plan();
  layer_tokens_.assign(plan.ragged ? plan.shape.layers * plan.decode_batch : 0, {});
  std::int64_t longest = kLeastCapacity;
  for (int layer = 0; layer < (plan.ragged ? plan.shape.layers : 1); ++layer) {
    for (std::size_t i = 0; i < tokens_.size(); ++i) {
      BatchToken token = tokens_[i];
      token.position = static_cast<std::int32_t>(
          pool_->tables().rows(token.sequence, token.position, pool_->set_of(layer)));
      longest = std::max(longest, token.count());
      if (plan.ragged)
        layer_tokens_[static_cast<std::size_t>(layer * plan.decode_batch) + i] = token;
    }
  }
  capacity_ = std::min(
      static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(longest))), plan.context);
  const auto copy = [&](BatchToken* to, const std::vector<BatchToken>& from) {
    const CopyOp op = {reinterpret_cast<std::byte*>(to),
                       reinterpret_cast<const std::byte*>(from.data()),
                       from.size() * sizeof(BatchToken)};
    if (op.bytes > 0) pool_->queue().copy({&op, 1});
  };
  copy(pool_->tokens(), tokens_);
  copy(pool_->tokens(0), layer_tokens_);
}

// Not for several tokens of one sequence, which are one run of the session's.
void DecodeStep::begin_runs() {
  runs_.clear();
  failures_.clear();
  const KvPlan& plan = pool_->plan();
  const bool is_run = tokens_.size() > 1 && tokens_[0].sequence == tokens_[1].sequence;
  if (!plan.on_disk || is_run) return;
  bool streams = false;
  for (int layer = 0; layer < plan.shape.layers; ++layer) streams = streams || is_dense(layer);
  if (!streams) return;
  for (const BatchToken& token : tokens_) {
    runs_.emplace_back(*pool_).begin(token.sequence, {token.position, 1}, {});
  }
  failures_.resize(runs_.size());
}

// A token whose rows cannot be read ends its own session only, so the others are attended to.
void DecodeStep::attend_runs(int layer, const Queries& queries) {
  const KvShape& shape = pool_->plan().shape;
  for (std::size_t i = 0; i < runs_.size(); ++i) {
    const auto token = static_cast<std::int64_t>(i);
    Queries own = queries;
    own.q += token * queries.stride;
    own.out += token * shape.query_heads * shape.head_dim;
    own.lse += token * shape.query_heads;
    if (failures_[i]) continue;
    try {
      runs_[i].attend(layer, own);
    } catch (const Error& error) {
      if (!is_disk_failure(error)) throw;
      failures_[i] = error;
    }
  }
}

void DecodeStep::require_runs(std::int32_t sequence) const {
  for (std::size_t i = 0; i < failures_.size(); ++i) {
    if (tokens_[i].sequence == sequence && failures_[i]) throw Error(*failures_[i]);
  }
}

// Null for several tokens of one sequence, because they go through a TokenRun in dense layers.
HostAttention* DecodeStep::find_beside() const {
  HostAttention* const host = pool_->host_attention();
  const bool is_run = tokens_.size() > 1 && tokens_[0].sequence == tokens_[1].sequence;
  if (host == nullptr || is_run) return nullptr;
  std::vector<int> layers;
  for (int layer = 0; layer < pool_->plan().shape.layers; ++layer) {
    if (is_dense(layer)) layers.push_back(layer);
  }
  return host->begin(tokens_, std::move(layers), pool_->tables()) ? host : nullptr;
}

KvPool::StepKind DecodeStep::kind() const {
  const std::vector<Policy>& policies = pool_->policies();
  const auto number = std::find(policies.begin(), policies.end(), *policy_) - policies.begin();
  return {static_cast<std::size_t>(number), static_cast<std::int64_t>(tokens_.size()), capacity_,
          beside_ != nullptr};
}

TokenBatch DecodeStep::batch() const {
  return {pool_->tokens(), static_cast<std::int64_t>(tokens_.size()), capacity_};
}

TokenBatch DecodeStep::batch(int layer) const {
  TokenBatch batch = this->batch();
  if (pool_->plan().ragged) batch.tokens = pool_->tokens(layer);
  return batch;
}

std::span<const BatchToken> DecodeStep::tokens(int layer) const {
  const KvPlan& plan = pool_->plan();
  if (!plan.ragged) return tokens_;
  return std::span(layer_tokens_)
      .subspan(static_cast<std::size_t>(layer * plan.decode_batch), tokens_.size());
}

const Policy& DecodeStep::policy(int layer) const {
  return by_layer_.empty() ? *policy_ : by_layer_[static_cast<std::size_t>(layer)];
}

bool DecodeStep::is_dense(int layer) const { return policy_->is_dense(layer); }

void DecodeStep::append(int layer, const NewRows& rows) {
  AppendBatchParams params;
  params.k = rows.k;
  params.v = rows.v;
  params.stride = rows.stride;
  params.shape = pool_->plan().shape;
  params.batch = batch(layer);
  params.rows = pool_->rows(layer);
  SparseAttention* const sparse = pool_->sparse();
  if (sparse != nullptr && sparse->index().value_sums(layer) != nullptr) {
    params.sums = sparse->index().value_sums(layer);
    params.token_sums = sparse->token_sums();
  }
  pool_->queue().run(params);
  if (sparse != nullptr) sparse->index().build(layer, params.batch, params.rows);
  if (pool_->listed() == nullptr) return;
  pool_->listed()->build(
      layer, {.count = params.batch.count, .batch = params.batch, .paged = params.rows});
}

Early DecodeStep::early(int layer) const {
  const SparseAttention* const sparse = pool_->sparse();
  const bool begins = sparse != nullptr && sparse->begins_early(policy(layer), layer);
  return begins ? policy(layer).early_at(layer) : Early::none;
}

void DecodeStep::choose_early(int layer, const Queries& queries) {
  check(early(layer) != Early::none, "a layer that does not begin early");
  pool_->sparse()->choose_early(policy(layer), layer, batch(layer), queries.q, queries.stride,
                                pool_->rows(layer));
}

void DecodeStep::attend(int layer, const Queries& queries) {
  if (!is_dense(layer)) {
    return pool_->sparse()->attend(policy(layer), layer, batch(layer), queries, pool_->rows(layer));
  }
  if (!runs_.empty()) {
    attend_runs(layer, queries);
    return select(layer, queries);
  }
  AttendBatchParams params;
  params.q = queries.q;
  params.q_stride = queries.stride;
  params.shape = pool_->plan().shape;
  params.batch = batch(layer);
  params.rows = pool_->rows(layer);
  params.window = pool_->plan().window(layer);
  params.scale = attend_params(params.shape, {}, {}).scale;
  params.out = queries.out;
  params.lse = queries.lse;
  params.arena = pool_->arena();
  params.arena_rows = 2 * pool_->plan().stream_tokens;
  if (beside_ != nullptr) {
    beside_->attend(layer, params);
  } else {
    pool_->queue().run(params);
  }
  select(layer, queries);
}

void DecodeStep::select(int layer, const Queries& queries) {
  if (!policy_->selects(layer)) return;
  pool_->sparse()->select(policy(layer), layer, batch(layer), queries, pool_->rows(layer));
}

void DecodeStep::issue_report() {
  if (pool_->sparse() != nullptr) pool_->sparse()->issue_report();
}

// Counts a dense layer's rows by the tables. Rows in a gap of host attention are attended in host
// memory, rows before a window by nobody.
void DecodeStep::record_dense(int layer, std::size_t number, Ledger& ledger) const {
  if (!runs_.empty()) return record_streamed(layer, number, ledger);
  const KvShape& shape = pool_->plan().shape;
  const Tier tier = pool_->tier();
  const BatchToken& token = tokens(layer)[number];
  const int set = pool_->set_of(layer);
  const auto resident_below = [&](std::int64_t tokens) {
    return pool_->plan().in_place ? tokens
                                  : pool_->tables().resident_rows(token.sequence, tokens, set);
  };
  const std::int64_t first = first_in(pool_->plan().window(layer), token.position);
  const PositionGap gap = beside_ != nullptr ? beside_->gap(set, number)
                                             : PositionGap{0, static_cast<std::int32_t>(first)};
  const std::int64_t resident =
      resident_below(token.count()) - (resident_below(gap.end) - resident_below(gap.first));
  const int parts = ReadPattern::parts(shape.group(), pool_->backend().info().reads.attend_queries);
  ledger.record(layer, tier, tier, Cause::hit, traffic_of(shape, parts * resident));
  ledger.record(layer, Tier::host, tier, Cause::miss,
                traffic_of(shape, parts * (token.count() - gap.count() - resident)));
  if (beside_ == nullptr || gap.count() == 0) return;
  ledger.record(layer, Tier::host, Tier::host, Cause::hit,
                traffic_of(shape, beside_->reads(shape.group()) * gap.count()));
}

void DecodeStep::record_streamed(int layer, std::size_t number, Ledger& ledger) const {
  const KvShape& shape = pool_->plan().shape;
  const BatchToken& token = tokens_[number];
  const auto resident_from = [&](std::int64_t first) {
    const BlockTables& tables = pool_->tables();
    const int set = pool_->set_of(layer);
    return tables.resident_rows(token.sequence, token.count(), set) -
           tables.resident_rows(token.sequence, first, set);
  };
  // A disk reads whole pages, see TokenRun.
  const std::int64_t first = first_in(pool_->plan().window(layer), token.position);
  const std::int64_t page_first = first / kPageTokens * kPageTokens;
  const std::int64_t resident = resident_from(first);
  const Traffic misses = traffic_of(shape, token.count() - page_first - resident_from(page_first));
  ledger.record(layer, Tier::device, Tier::device, Cause::hit, traffic_of(shape, resident));
  ledger.record(layer, Tier::host, Tier::device, Cause::miss, misses);
  ledger.record(
      layer, Tier::disk, Tier::host, Cause::miss,
      traffic_of(shape, pool_->rows_on_disk(layer, token.sequence, page_first, token.count())));
}

StepSelection DecodeStep::finish(std::int32_t sequence, bool counts_dense, Ledger& ledger) const {
  StepSelection result;
  require_runs(sequence);
  if (beside_ != nullptr) beside_->finish();
  SparseAttention* const sparse = pool_->sparse();
  for (int layer = 0; layer < pool_->plan().shape.layers; ++layer) {
    if (is_dense(layer)) {
      for (std::size_t i = 0; i < tokens_.size(); ++i) {
        if (counts_dense && tokens_[i].sequence == sequence) record_dense(layer, i, ledger);
      }
      if (!policy_->selects(layer)) continue;
    }
    LayerSelection& entry = result.emplace_back();
    entry.layer = layer;
    sparse->finish({&policy(layer), tokens(layer), &pool_->tables(), pool_->set_of(layer)}, layer,
                   sequence, ledger, entry);
  }
  if (sparse != nullptr) sparse->check_pages(sequence);
  return result;
}

}  // namespace sluice
