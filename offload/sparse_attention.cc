#include "offload/sparse_attention.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "lib/check.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

std::size_t count_of(std::int64_t a, std::int64_t b, std::int64_t c = 1) {
  return static_cast<std::size_t>(a * b * c);
}

int channels_of(const Policy& policy, int head_dim) {
  return policy.channels > 0 ? policy.channels : std::max(1, head_dim / 4);
}

}  // namespace

SparseAttention::SparseAttention(Backend& backend, const IndexLayout& layout, Tier tier)
    : backend_(&backend),
      layout_(layout),
      index_(backend, layout, tier),
      tier_(tier),
      records_(static_cast<std::size_t>(layout.shape.layers)) {
  const KvShape& shape = layout.shape;
  const auto allocate = [&](Tier where, std::size_t count, std::size_t size) {
    return backend.allocate(where, count * size);
  };
  const std::size_t logit = size_of(layout.logits.dtype);
  logits_ = allocate(tier, count_of(shape.query_heads, layout.logit_stride()), logit);
  digest_ = allocate(tier, layout.digest_bytes(), 1);
  candidate_logits_ = allocate(tier, count_of(shape.query_heads, layout.candidate_stride()), logit);
  lse_ = allocate(tier, static_cast<std::size_t>(shape.query_heads), sizeof(float));
  positions_ =
      allocate(tier, count_of(layout.slots, shape.kv_heads, layout.selected), sizeof(std::int32_t));
  candidates_ = allocate(tier, count_of(shape.kv_heads, layout.candidates), sizeof(std::int32_t));
  arena_ = allocate(tier, count_of(shape.kv_heads, layout.arena_rows), shape.row_bytes());
  report_ = make_report(backend, layout, tier);
  seen_ = make_report(backend, layout, Tier::host);
}

SparseAttention::Report SparseAttention::make_report(Backend& backend, const IndexLayout& layout,
                                                     Tier tier) {
  const KvShape& shape = layout.shape;
  const std::size_t heads = count_of(shape.layers, layout.batch, shape.kv_heads);
  const std::size_t queries = count_of(shape.layers, layout.batch, shape.query_heads);
  Report report;
  report.all = backend.allocate(tier, layout.report_bytes());
  report.candidate_heads = reinterpret_cast<HeadSelection*>(report.all.data());
  report.heads = report.candidate_heads + heads;
  report.share = reinterpret_cast<float*>(report.heads + heads);
  report.alpha = report.share + queries;
  return report;
}

std::int64_t SparseAttention::head_entry(int layer, std::int64_t token) const {
  return (layer * layout_.batch + token) * layout_.shape.kv_heads;
}

std::int64_t SparseAttention::query_entry(int layer, std::int64_t token) const {
  return (layer * layout_.batch + token) * layout_.shape.query_heads;
}

void SparseAttention::begin(const StepRange& step) {
  check(step.tokens <= layout_.batch, "more tokens in a step than selections are planned for");
  latest_ = -1;
  std::fill(records_.begin(), records_.end(), LayerRecord());
}

SelectionView SparseAttention::selection(int layer, std::int64_t token) const {
  // Layers that follow another need its positions later; without them one slot does for all.
  const std::int64_t slot = layout_.slots > 1 ? token : 0;
  auto* const positions = reinterpret_cast<std::int32_t*>(positions_.data()) +
                          slot * layout_.shape.kv_heads * layout_.selected;
  return {positions, layout_.selected, report_.heads + head_entry(layer, token)};
}

SelectionView SparseAttention::candidates(int layer, std::int64_t token) const {
  return {reinterpret_cast<std::int32_t*>(candidates_.data()), layout_.candidates,
          report_.candidate_heads + head_entry(layer, token)};
}

float* SparseAttention::share(int layer, std::int64_t token) const {
  return report_.share + query_entry(layer, token);
}

float* SparseAttention::alpha(int layer, std::int64_t token) const {
  return report_.alpha + query_entry(layer, token);
}

// One query head per KV head keeps the same top_k whatever the newest rows weigh. They are then
// spared the estimate: attention, which reads them anyway, adds their share to alpha.
bool SparseAttention::newest_apart(const Policy& policy, const Token& token) const {
  const bool estimates = policy.select == Selector::sparq || policy.select == Selector::int4 ||
                         policy.select == Selector::quest;
  return policy.selects(token.layer) && estimates && policy.prune == Pruner::top_k &&
         !policy.candidates.limited() && layout_.shape.group() == 1 &&
         token.eligible.device == nullptr && token.pages() > 0;
}

std::vector<RowSpan> SparseAttention::tail_rows(const Token& token, KvStore& store) const {
  std::vector<RowSpan> rows;
  for (int head = 0; head < layout_.shape.kv_heads; ++head) {
    rows.push_back({store.newest(token.layer, head, token.tail_first()), token.tail()});
  }
  return rows;
}

std::vector<RowSpan> SparseAttention::all_rows(const Token& token, KvStore& store,
                                               std::int64_t count) const {
  std::vector<RowSpan> rows;
  for (int head = 0; head < layout_.shape.kv_heads; ++head) {
    const RowSource source = store.source(token.layer, head);
    rows.push_back({source.resident_count >= count ? source.resident : source.home, count});
  }
  return rows;
}

void SparseAttention::append(int layer, const StepRange& step, KvStore& store, bool dense) {
  const std::int64_t first_page = step.first / kPageTokens;
  const std::int64_t pages = step.end() / kPageTokens - first_page;
  std::vector<RowSpan> whole;
  std::vector<RowSpan> fresh;
  for (int head = 0; head < layout_.shape.kv_heads; ++head) {
    whole.push_back({store.newest(layer, head, first_page * kPageTokens), pages * kPageTokens});
    fresh.push_back({store.newest(layer, head, step.first), step.tokens});
  }
  index_.build(layer, first_page, pages, whole);
  if (dense) index_.add_values(layer, fresh, false);
}

void SparseAttention::forget(std::int64_t from, std::int64_t to, KvStore& store) {
  const auto row_bytes = static_cast<std::int64_t>(layout_.shape.row_bytes());
  for (int layer = 0; layer < layout_.shape.layers; ++layer) {
    std::vector<RowSpan> rows;
    for (int head = 0; head < layout_.shape.kv_heads; ++head) {
      rows.push_back({store.source(layer, head).home + from * row_bytes, to - from});
    }
    index_.add_values(layer, rows, true);
  }
}

void SparseAttention::attend(const Policy& policy, int layer, const StepRange& step,
                             const Queries& queries, KvStore& store, const Eligible& eligible) {
  const KvShape& shape = layout_.shape;
  // A dense layer is here because some tokens were evicted: it attends to what is left.
  const bool selects = policy.selects(layer) || policy.is_dense(layer);
  if (selects) latest_ = layer;
  check(latest_ >= 0, "a follower before any layer that selects");
  records_[static_cast<std::size_t>(layer)] = {latest_, &policy};
  for (std::int64_t i = 0; i < step.tokens; ++i) {
    Token token;
    token.layer = layer;
    token.index = i;
    token.position = step.first + i;
    token.q = queries.q + i * queries.stride;
    token.out = queries.out + i * shape.query_heads * shape.head_dim;
    token.lse = queries.lse + i * shape.query_heads;
    token.eligible = eligible;
    token.newest_apart = newest_apart(policy, token);
    std::vector<RowSpan> own;
    for (int head = 0; head < shape.kv_heads; ++head) {
      own.push_back({store.newest(layer, head, token.position), 1});
    }
    index_.add_values(layer, own, false);
    token.compensates = policy.selects(layer) && policy.compensate == Compensation::mean_value;
    if (selects) choose(policy, token, store);
    attend_token(token, latest_, store);
  }
}

void SparseAttention::choose(const Policy& policy, const Token& token, KvStore& store) {
  if (policy.select == Selector::streaming || policy.is_dense(token.layer)) {
    return choose_fixed(policy, token);
  }
  propose(policy, token, store);
  if (policy.candidates.limited()) rescore(policy, token, store);
}

// No estimate is needed; the positions are known to the host.
void SparseAttention::choose_fixed(const Policy& policy, const Token& token) {
  const SelectionView view = selection(token.layer, token.index);
  const std::int64_t end = token.tail_first();
  const bool all = policy.is_dense(token.layer);
  const std::int64_t sinks = all ? end : std::min(policy.sinks, end);
  const std::int64_t recent = std::max(sinks, std::min(end, token.count() - policy.recent));
  std::vector<std::int32_t> positions;
  const auto add = [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t at = from; at < to; ++at) {
      if (token.eligible.host != nullptr && token.eligible.host[at] == 0) continue;
      positions.push_back(static_cast<std::int32_t>(at));
    }
  };
  add(0, sinks);
  add(recent, end);
  HeadSelection found;
  found.count = static_cast<std::int32_t>(positions.size());
  const std::vector<HeadSelection> heads(static_cast<std::size_t>(layout_.shape.kv_heads), found);
  const std::vector<float> ones(static_cast<std::size_t>(layout_.shape.query_heads), 1.0f);
  std::vector<CopyOp> ops;
  const auto put = [&](auto* to, const auto& from) {
    ops.push_back({reinterpret_cast<std::byte*>(to),
                   reinterpret_cast<const std::byte*>(from.data()), sizeof(from[0]) * from.size()});
  };
  put(view.heads, heads);
  put(alpha(token.layer, token.index), ones);
  if (!positions.empty()) put(view.positions, positions);
  backend_->copy(ops, Stream::compute);
  // The same for the other heads, from the first one's: the host's list is read once.
  ops.clear();
  for (int head = 1; head < layout_.shape.kv_heads && !positions.empty(); ++head) {
    ops.push_back({reinterpret_cast<std::byte*>(view.positions + head * view.capacity),
                   reinterpret_cast<const std::byte*>(view.positions),
                   positions.size() * sizeof(positions[0])});
  }
  backend_->copy(ops, Stream::compute);
}

// Estimates every token, then keeps the candidates or, if nothing re-scores them, what the policy
// is after.
void SparseAttention::propose(const Policy& policy, const Token& token, KvStore& store) {
  const bool exact = policy.select == Selector::exact;
  EstimateParams estimate;
  estimate.q = token.q;
  estimate.shape = layout_.shape;
  estimate.method = policy.select;
  estimate.channels = channels_of(policy, layout_.shape.head_dim);
  estimate.index = index_.view(token.layer);
  estimate.pages = exact ? 0 : token.pages();
  std::vector<RowSpan> rows =
      exact ? all_rows(token, store, token.count()) : tail_rows(token, store);
  if (token.newest_apart) std::fill(rows.begin(), rows.end(), RowSpan());
  estimate.rows = rows;
  estimate.logits = {logits_.data(), layout_.logit_stride()};
  if (layout_.digested && scans_tiles(policy) && token.count() >= layout_.logits.digested_from) {
    estimate.logits.digest =
        LogitDigest::in(digest_.data(), layout_.shape.query_heads, layout_.logit_stride());
  }
  backend_->estimate(estimate);

  SelectParams select = select_params(policy, token);
  select.logits = estimate.logits;
  select.count = token.newest_apart ? token.tail_first() : token.count();
  if (token.newest_apart) select.lse = lse_.floats();
  if (!policy.candidates.limited()) {
    select.selected = selection(token.layer, token.index);
    return prune(policy, token, select);
  }
  select.k = candidates_of(policy, token.count());
  select.selected = candidates(token.layer, token.index);
  select.alpha = share(token.layer, token.index);
  backend_->select(select);
}

// Estimates the candidates with every channel of the index and keeps what the policy is after.
void SparseAttention::rescore(const Policy& policy, const Token& token, KvStore& store) {
  const SelectionView candidates = this->candidates(token.layer, token.index);
  EstimateParams estimate;
  estimate.q = token.q;
  estimate.shape = layout_.shape;
  estimate.method = policy.select == Selector::exact ? Selector::exact : Selector::int4;
  estimate.index = index_.view(token.layer);
  estimate.pages = token.pages();
  const std::vector<RowSpan> tail = tail_rows(token, store);
  const std::vector<RowSpan> all = all_rows(token, store, token.count());
  estimate.rows = tail;
  estimate.candidates = &candidates;
  estimate.candidate_rows = all;
  estimate.logits = {candidate_logits_.data(), layout_.candidate_stride()};
  backend_->estimate(estimate);

  SelectParams select = select_params(policy, token);
  select.logits = estimate.logits;
  select.candidates = &candidates;
  select.tail = token.tail();
  select.selected = selection(token.layer, token.index);
  // Bounds are no weights: what a base of bounds left out stays unknown.
  if (policy.select != Selector::quest) select.share = share(token.layer, token.index);
  prune(policy, token, select);
}

SelectParams SparseAttention::select_params(const Policy& policy, const Token& token) const {
  SelectParams params;
  params.shape = layout_.shape;
  params.end = token.tail_first();
  params.eligible = token.eligible.device;
  params.sinks = std::min(policy.sinks, token.tail_first());
  params.recent_first = token.count() - policy.recent;
  return params;
}

void SparseAttention::prune(const Policy& policy, const Token& token, SelectParams params) {
  params.prune = policy.prune;
  params.k = policy.k.of(token.count());
  params.p = static_cast<float>(policy.p);
  params.cap = policy.cap.of(token.count());
  params.alpha = alpha(token.layer, token.index);
  backend_->select(params);
}

void SparseAttention::attend_token(const Token& token, int source, KvStore& store) {
  const std::vector<RowSpan> tail = tail_rows(token, store);
  std::vector<RowSource> sources;
  for (int head = 0; head < layout_.shape.kv_heads; ++head) {
    sources.push_back(store.source(token.layer, head));
  }
  AttendSelectedParams selected;
  selected.q = token.q;
  selected.shape = layout_.shape;
  selected.selected = selection(source, token.index);
  selected.rows = sources;
  selected.newest = tail;
  selected.arena = arena_.data();
  selected.arena_rows = layout_.arena_rows;
  selected.scale =
      attend_params(layout_.shape, {token.position, 1}, {token.q, 0, token.out, token.lse}).scale;
  if (token.newest_apart || token.compensates) selected.alpha = alpha(token.layer, token.index);
  if (token.newest_apart) selected.estimated_lse = lse_.floats();
  if (token.compensates) selected.mean = {index_.value_sums(token.layer), token.count()};
  selected.out = token.out;
  selected.lse = token.lse;
  backend_->attend_selected(selected);
}

// What estimating every token before the unfinished page of `position` reads of the index, per KV
// head.
Traffic SparseAttention::scanned(const Policy& policy, std::int64_t position) const {
  const auto pages = static_cast<std::uint64_t>(position / kPageTokens);
  const int d = layout_.shape.head_dim;
  KeyTiles tiles;
  tiles.bits = policy.bits;
  switch (policy.select) {
    case Selector::int4:
      return {pages * kPageTokens, pages * tiles.page_bytes(d)};
    case Selector::sparq:
      return {pages * kPageTokens, pages * tiles.page_bytes(channels_of(policy, d))};
    case Selector::quest:
      return {pages * kPageTokens, pages * PageBounds().page_bytes(d)};
    case Selector::exact: {
      const auto tokens = static_cast<std::uint64_t>(position + 1);
      return {tokens, tokens * static_cast<std::uint64_t>(d) * size_of(layout_.shape.dtype)};
    }
    default:
      return {};
  }
}

void SparseAttention::require_number(bool is_number, int layer, int head) const {
  if (is_number) return;
  throw Error(ErrorCode::numeric, "a query or key of layer " + std::to_string(layer) +
                                      ", KV head " + std::to_string(head) +
                                      " is NaN or infinite; the checkpoint's weights are damaged");
}

SparseAttention::Count SparseAttention::count(const Policy& policy, int layer, int source,
                                              const StepRange& step, LayerSelection& entry) const {
  const KvShape& shape = layout_.shape;
  KeyTiles tiles;
  tiles.bits = policy.bits;
  Count count;
  for (std::int64_t i = 0; i < step.tokens; ++i) {
    const std::int64_t position = step.first + i;
    for (int head = 0; head < shape.kv_heads; ++head) {
      const HeadSelection& chosen = seen_.heads[head_entry(source, i) + head];
      require_number(chosen.bad == 0, source, head);
      count.hits += static_cast<std::uint64_t>(chosen.resident + position % kPageTokens + 1);
      count.misses += static_cast<std::uint64_t>(chosen.count - chosen.resident);
      entry.selected += static_cast<double>(chosen.count);
      entry.cut += chosen.cut;
      if (layer != source || policy.is_dense(layer)) continue;
      count.index += scanned(policy, position);
      if (!policy.candidates.limited()) continue;
      const HeadSelection& proposed = seen_.candidate_heads[head_entry(layer, i) + head];
      require_number(proposed.bad == 0, layer, head);
      const auto pages = static_cast<std::uint64_t>(proposed.pages);
      const auto rows = static_cast<std::uint64_t>(proposed.count);
      const bool exact = policy.select == Selector::exact;
      count.index +=
          {rows, exact ? rows * shape.row_bytes() / 2 : pages * tiles.page_bytes(shape.head_dim)};
    }
    for (int head = 0; head < shape.query_heads; ++head) {
      const auto value = static_cast<double>(seen_.alpha[query_entry(source, i) + head]);
      require_number(!std::isnan(value), source, head / shape.group());
      entry.alpha += value;
      entry.smallest_alpha = std::min(entry.smallest_alpha, value);
    }
  }
  return count;
}

StepSelection SparseAttention::finish(const StepRange& step, KvStore& store, Ledger& ledger) {
  const CopyOp op = {seen_.all.data(), report_.all.data(), report_.all.bytes()};
  backend_->copy({&op, 1}, Stream::compute);
  index_.check_keys();
  StepSelection result;
  const KvShape& shape = layout_.shape;
  const auto pairs = static_cast<double>(step.tokens * shape.kv_heads);
  for (int layer = 0; layer < shape.layers; ++layer) {
    const LayerRecord& record = records_[static_cast<std::size_t>(layer)];
    if (record.source < 0) continue;
    LayerSelection entry;
    entry.layer = layer;
    entry.follower = record.source != layer;
    entry.tokens = step.tokens;
    entry.smallest_alpha = 1.0;
    const Count count = this->count(*record.policy, layer, record.source, step, entry);
    entry.attended = static_cast<double>(count.hits + count.misses) / pairs;
    entry.selected /= pairs;
    entry.alpha /= static_cast<double>(step.tokens * shape.query_heads);
    result.push_back(entry);

    const std::uint64_t row = shape.row_bytes();
    const Tier home = store.home_tier();
    ledger.record(layer, tier_, tier_, Cause::index_read, count.index);
    ledger.record(layer, tier_, tier_, Cause::hit, {count.hits, count.hits * row});
    ledger.record(layer, home, tier_, home == tier_ ? Cause::hit : Cause::miss,
                  {count.misses, count.misses * row});
  }
  return result;
}

}  // namespace sluice
