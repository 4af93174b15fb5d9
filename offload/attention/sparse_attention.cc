#include "offload/attention/sparse_attention.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "lib/check.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

// The layer whose selection a layer attends to: its own, or that of the latest one that selected.
int source_of(const Policy& policy, int layer) {
  while (layer >= 0 && !policy.selects(layer)) --layer;
  check(layer >= 0, "a follower before any layer that selects");
  return layer;
}

}  // namespace

SparseAttention::SparseAttention(Queue& queue, const IndexLayout& layout, const Scorers& scorers,
                                 Tier tier, const SelectedRows& selected, const ValueBasis& basis)
    : queue_(&queue),
      layout_(layout),
      scorers_(scorers),
      index_(queue, layout, scorers, tier, basis),
      tier_(tier),
      cache_(selected.cache),
      disk_(selected.disk) {
  Backend& backend = queue.backend();
  const SelectionBytes bytes = layout.selection_bytes();
  work_.logits = backend.allocate(tier, bytes.logits);
  work_.digest = backend.allocate(tier, bytes.digest);
  page_weights_ = backend.allocate(tier, bytes.page_weights);
  work_.candidate_logits = backend.allocate(tier, bytes.candidate_logits);
  lse_ = backend.allocate(tier, bytes.lse);
  positions_ = backend.allocate(tier, bytes.positions);
  if (layout.reports_positions) seen_positions_ = backend.allocate(Tier::host, bytes.positions);
  work_.candidates = backend.allocate(tier, bytes.candidates);
  allocate_early();
  token_sums_ = backend.allocate(tier, bytes.token_sums);
  arena_ = backend.allocate(tier, bytes.arena);
  report_ = make_report(backend, layout, tier);
  seen_ = make_report(backend, layout, Tier::host);
}

void SparseAttention::allocate_early() {
  Backend& backend = queue_->backend();
  const EarlyBytes bytes = layout_.early_bytes();
  begun_.resize(static_cast<std::size_t>(layout_.shape.layers));
  early_lse_ = backend.allocate(tier_, bytes.lse);
  weighed_ = backend.allocate(tier_, bytes.weighed);
  weighed_alpha_ = backend.allocate(tier_, bytes.alpha);
  early_work_.logits = backend.allocate(tier_, bytes.logits);
  early_work_.digest = backend.allocate(tier_, bytes.digest);
  early_work_.candidate_logits = backend.allocate(tier_, bytes.candidate_logits);
  early_work_.candidates = backend.allocate(tier_, bytes.candidates);
}

SparseAttention::Report SparseAttention::make_report(Backend& backend, const IndexLayout& layout,
                                                     Tier tier) {
  const KvShape& shape = layout.shape;
  const auto heads = static_cast<std::size_t>(shape.layers * layout.batch * shape.kv_heads);
  const auto queries = static_cast<std::size_t>(shape.layers * layout.batch * shape.query_heads);
  Report report;
  report.all = backend.allocate(tier, layout.selection_bytes().report);
  report.candidate_heads = reinterpret_cast<HeadSelection*>(report.all.data());
  report.heads = report.candidate_heads + heads;
  HeadSelection* end = report.heads + heads;
  if (layout.early) {
    report.weighed_heads = end;
    end += heads;
  }
  report.share = reinterpret_cast<float*>(end);
  report.alpha = report.share + queries;
  report.rescored = reinterpret_cast<std::int32_t*>(report.alpha + queries);
  report.resident = report.rescored + heads;
  report.evicted = report.resident + heads;
  if (layout.keeps_values()) report.value_pages = report.evicted + heads;
  return report;
}

std::int64_t SparseAttention::head_entry(int layer, std::int64_t token) const {
  return (layer * layout_.batch + token) * layout_.shape.kv_heads;
}

std::int64_t SparseAttention::query_entry(int layer, std::int64_t token) const {
  return (layer * layout_.batch + token) * layout_.shape.query_heads;
}

SelectionView SparseAttention::selection(int layer, std::int64_t token) const {
  auto* const positions = reinterpret_cast<std::int32_t*>(positions_.data()) +
                          layout_.slot(layer, token) * layout_.shape.kv_heads * layout_.selected;
  return {positions, layout_.selected, report_.heads + head_entry(layer, token)};
}

SelectionView SparseAttention::candidates(const Wave& wave) const {
  return {reinterpret_cast<std::int32_t*>(work(wave).candidates.data()), layout_.candidates,
          report_.candidate_heads + head_entry(wave.layer, wave.first)};
}

float* SparseAttention::chosen_lse(const Wave& wave) const {
  if (!wave.is_early) return lse_.floats();
  return early_lse_.floats() +
         (wave.layer % 2 * layout_.batch + wave.first) * layout_.shape.query_heads;
}

float* SparseAttention::share(int layer, std::int64_t token) const {
  return report_.share + query_entry(layer, token);
}

float* SparseAttention::alpha(int layer, std::int64_t token) const {
  return report_.alpha + query_entry(layer, token);
}

// With one query head per KV head, top_k does not depend on the weight of the newest rows. They are
// not estimated then: attention reads them anyway and adds their share to alpha.
bool SparseAttention::newest_apart(const Policy& policy, int layer) const {
  const Scorer& scorer = scorer_of(policy);
  return policy.selects(layer) && !policy.is_dense(layer) && scorer.info().estimates() &&
         !scorer.reads_rows() && policy.prune == Pruner::top_k && !policy.candidates.limited() &&
         layout_.shape.group() == 1;
}

void SparseAttention::for_waves(const Policy& policy, int layer, const TokenBatch& batch,
                                const Queries& queries, const PagedRows& rows,
                                const std::function<void(const Wave&)>& body) {
  for (std::int64_t first = 0; first < batch.count; first += layout_.wave) {
    Wave wave;
    wave.layer = layer;
    wave.first = first;
    wave.total = batch.count;
    wave.batch = {batch.tokens + first, std::min(layout_.wave, batch.count - first),
                  batch.capacity};
    wave.q = queries.q + first * queries.stride;
    wave.q_stride = queries.stride;
    wave.rows = rows;
    wave.skip_newest = newest_apart(policy, layer);
    body(wave);
  }
}

void SparseAttention::begin_step() {
  for (int layer = 0; layer < layout_.shape.layers; ++layer) {
    if (is_begun(layer)) queue_->join(layer % 2);
  }
  begun_.assign(begun_.size(), false);
  counted_.assign(counted_.size(), {});
}

// The rows of the tokens' own pages take no part: the layer has yet to append the newest of them.
void SparseAttention::choose_early(const Policy& policy, int layer, const TokenBatch& batch,
                                   const float* q, std::int64_t q_stride, const PagedRows& rows) {
  check(begins_early(policy, layer) && !is_begun(layer), "rows that are not chosen early");
  begun_[static_cast<std::size_t>(layer)] = true;
  if (policy.selects(layer)) {
    const Queries queries = {q, q_stride, nullptr, nullptr};
    for_waves(policy, layer, batch, queries, rows, [&](const Wave& wave) {
      Wave early = wave;
      early.skip_newest = early.is_early = true;
      choose(policy, early);
    });
  }
  if (cache_ == nullptr) return;
  Wave all;
  all.layer = layer;
  all.batch = batch;
  all.rows = rows;
  find_rows(all, source_of(policy, layer));
}

void SparseAttention::attend(const Policy& policy, int layer, const TokenBatch& batch,
                             const Queries& queries, const PagedRows& rows) {
  const int source = source_of(policy, layer);
  const bool is_begun = this->is_begun(layer);
  check(is_begun == begins_early(policy, layer),
        "a layer's rows are chosen early if its policy says so");
  if (is_begun) queue_->join(layer % 2);
  for_waves(policy, layer, batch, queries, rows, [&](const Wave& wave) {
    if (is_begun) {
      if (weighs_values(policy, wave)) weigh_values(policy, wave);
    } else {
      if (source == layer) choose(policy, wave);
      if (cache_ != nullptr) find_rows(wave, source);
    }
    attend_wave(policy, wave, source, queries);
  });
  if (is_begun && cache_ != nullptr) cache_->end_filling();
  begun_[static_cast<std::size_t>(layer)] = false;
}

void SparseAttention::select(const Policy& policy, int layer, const TokenBatch& batch,
                             const Queries& queries, const PagedRows& rows) {
  for_waves(policy, layer, batch, queries, rows, [&](const Wave& wave) { choose(policy, wave); });
}

void SparseAttention::choose(const Policy& policy, const Wave& wave) {
  check(most_selected(policy, layout_.context, scorers_) <= layout_.selected,
        "a policy that selects more rows than were planned for");
  if (!scorer_of(policy).info().estimates()) return choose_fixed(policy, wave);
  propose(policy, wave);
  if (policy.candidates.limited()) rescore(policy, wave);
}

// Without estimates: the policy attends only to tokens that are always kept.
void SparseAttention::choose_fixed(const Policy& policy, const Wave& wave) {
  SelectParams select = select_params(policy, wave);
  select.selected = selection(wave.layer, wave.first);
  select.alpha = alpha(wave.layer, wave.first);
  queue_->run(select);
}

EstimateParams SparseAttention::estimate_params(const Wave& wave) const {
  EstimateParams params;
  params.q = wave.q;
  params.q_stride = wave.q_stride;
  params.shape = layout_.shape;
  params.batch = wave.batch;
  params.index = index_.view(wave.layer);
  params.rows = wave.rows;
  params.skip_newest = wave.skip_newest;
  return params;
}

// Estimates every token, then keeps the candidates or, if nothing re-scores them, the policy's
// final selection.
void SparseAttention::propose(const Policy& policy, const Wave& wave) {
  EstimateParams estimate = estimate_params(wave);
  // Value tiles are weighed later if rows are chosen early.
  estimate.logits = logit_view(policy, wave, !wave.is_early);
  score(policy, wave, estimate);

  SelectParams select = select_params(policy, wave);
  select.logits = estimate.logits;
  select.skip_newest = wave.skip_newest;
  if (wave.skip_newest || weighs_values(policy, wave)) select.lse = chosen_lse(wave);
  if (!wave.is_early) estimated_ = estimate.logits;
  if (!policy.candidates.limited()) {
    select.selected = selection(wave.layer, wave.first);
    return prune(policy, wave, select);
  }
  select.k = candidates_of(policy);
  select.selected = candidates(wave);
  select.alpha = share(wave.layer, wave.first);
  queue_->run(select);
}

// Where a wave's estimates go. `weighs`: value tiles are weighed by the selection that follows.
LogitView SparseAttention::logit_view(const Policy& policy, const Wave& wave, bool weighs) const {
  LogitView view = {work(wave).logits.data(), layout_.logit_stride()};
  const Scorer& scorer = scorer_of(policy);
  const std::int64_t tokens = wave.batch.capacity;
  weighs = weighs && weighs_pages(layout_.logits, policy, wave.layer, tokens);
  if (layout_.digested && scorer.digests() && scorer.by_backend() &&
      (weighs || tokens >= layout_.logits.digested_from)) {
    view.digest = LogitDigest::in(work(wave).digest.data(),
                                  layout_.wave * layout_.shape.query_heads, layout_.logit_stride());
    if (weighs) view.digest.weights = page_weights_.data();
  }
  return view;
}

bool SparseAttention::weighs_values(const Policy& policy, const Wave& wave) const {
  return policy.compensates(wave.layer, Compensation::values);
}

// Selects nothing, for the log-sum-exp; the page weights would include the rows that were chosen
// early, so attend_tiles() computes them.
void SparseAttention::weigh_values(const Policy& policy, const Wave& wave) {
  EstimateParams estimate = estimate_params(wave);
  estimate.logits = logit_view(policy, wave, false);
  score(policy, wave, estimate);
  SelectParams select;
  select.shape = layout_.shape;
  select.batch = wave.batch;
  select.logits = estimate.logits;
  select.skip_newest = wave.skip_newest;
  select.k = Quota::nothing();
  select.selected = {reinterpret_cast<std::int32_t*>(weighed_.data()), 1,
                     report_.weighed_heads + head_entry(wave.layer, wave.first)};
  select.alpha = weighed_alpha_.floats();
  select.lse = lse_.floats();
  queue_->run(select);
  estimated_ = estimate.logits;
}

// Runs the scorer. The backend estimates the newest rows for scorers that do not leave the work to
// it.
void SparseAttention::score(const Policy& policy, const Wave& wave,
                            const EstimateParams& estimate) {
  const Scorer& scorer = scorer_of(policy);
  if (!scorer.by_backend() && !wave.skip_newest) {
    EstimateParams newest = estimate;
    newest.method = Selector::newest;
    queue_->run(newest);
  }
  RunScorer call;
  static_cast<ScorerCall&>(call) = index_.call(policy, wave.layer);
  call.q = estimate.q;
  call.q_stride = estimate.q_stride;
  call.batch = estimate.batch;
  call.rows = estimate.rows;
  call.logits = {estimate.logits.data, layout_.logits.dtype, estimate.logits.stride};
  call.queue = queue_;
  call.estimate = &estimate;
  call.extent = extent_of(queue_->backend().info().reads, layout_.shape);
  if (!counts_reads(scorer)) return scorer.score(call);
  score_counted(scorer, wave, call);
}

bool SparseAttention::counts_reads(const Scorer& scorer) const {
  return !scorer.by_backend() && queue_->backend().info().processor == Processor::host;
}

// Rows and memory are reached through CountedReads only.
void SparseAttention::score_counted(const Scorer& scorer, const Wave& wave, RunScorer& call) {
  const CountedReads reads(call, tier_);
  call.rows = {};
  call.memory = {};
  call.reads = &reads;
  scorer.score(call);
  counted_.resize(
      static_cast<std::size_t>(layout_.shape.layers * layout_.batch * layout_.shape.kv_heads));
  for (std::int64_t i = 0; i < wave.batch.count; ++i) {
    for (int head = 0; head < layout_.shape.kv_heads; ++head) {
      const std::int64_t entry = head_entry(wave.layer, wave.first + i) + head;
      counted_[static_cast<std::size_t>(entry)] += reads.count(i, head);
    }
  }
}

// Estimates the candidates with every channel of the index and keeps the policy's final selection.
void SparseAttention::rescore(const Policy& policy, const Wave& wave) {
  const SelectionView candidates = this->candidates(wave);
  EstimateParams estimate = estimate_params(wave);
  estimate.candidates = &candidates;
  std::int32_t* const report = report_.rescored + head_entry(wave.layer, wave.first);
  if (scorer_of(policy).reads_rows()) {
    estimate.method = Selector::exact;
    estimate.resident = report;
  } else {
    estimate.method = Selector::int4;
    estimate.pages_read = report;
  }
  estimate.logits = {work(wave).candidate_logits.data(), layout_.candidate_stride()};
  queue_->run(estimate);

  SelectParams select = select_params(policy, wave);
  select.logits = estimate.logits;
  select.candidates = &candidates;
  select.skip_newest = wave.skip_newest;
  select.selected = selection(wave.layer, wave.first);
  // Bounds are not weights: the share that a base of bounds dropped stays unknown.
  if (scorer_of(policy).info().kind == ScorerInfo::Kind::logits)
    select.share = share(wave.layer, wave.first);
  prune(policy, wave, select);
}

SelectParams SparseAttention::select_params(const Policy& policy, const Wave& wave) const {
  SelectParams params;
  params.shape = layout_.shape;
  params.batch = wave.batch;
  params.sinks = policy.sinks;
  params.recent = policy.recent;
  return params;
}

void SparseAttention::prune(const Policy& policy, const Wave& wave, SelectParams params) {
  const bool is_any = policy.prune != Pruner::none;
  params.prune = is_any ? policy.prune : Pruner::top_k;
  params.k = is_any ? Quota{policy.k, {}, 0} : Quota::nothing();
  params.p = static_cast<float>(policy.p);
  params.cap = {policy.cap, {}, 0};
  params.alpha = alpha(wave.layer, wave.first);
  queue_->run(params);
}

void SparseAttention::attend_wave(const Policy& policy, const Wave& wave, int source,
                                  const Queries& queries) {
  const KvShape& shape = layout_.shape;
  AttendSelectedParams params;
  params.q = wave.q;
  params.q_stride = wave.q_stride;
  params.shape = shape;
  params.batch = wave.batch;
  params.selected = selection(source, wave.first);
  params.resident = report_.resident + head_entry(wave.layer, wave.first);
  params.rows = wave.rows;
  const bool compensates = policy.compensates(wave.layer, Compensation::mean_value);
  Wave chosen = wave;
  chosen.is_early = is_begun(wave.layer) && source == wave.layer;
  chosen.skip_newest = chosen.is_early || wave.skip_newest;
  if (chosen.skip_newest || compensates) params.alpha = alpha(wave.layer, wave.first);
  if (chosen.skip_newest) params.estimated_lse = chosen_lse(chosen);
  if (compensates) params.value_sums = value_sums(wave);
  params.arena = arena_.data();
  params.arena_rows = layout_.arena_rows;
  params.scale = attend_params(shape, {}, {}).scale;
  params.out = queries.out + wave.first * shape.query_heads * shape.head_dim;
  params.lse = queries.lse + wave.first * shape.query_heads;
  if (cache_ != nullptr) place_rows(wave, source, params);
  queue_->run(params);
  if (cache_ != nullptr && !is_begun(wave.layer)) cache_->end_filling();
  if (weighs_values(policy, wave)) attend_values(policy, wave, params);
}

// Rows that are chosen early have places for the whole batch, others for one wave.
PlacedRow* SparseAttention::places(const Wave& wave) const {
  const std::int64_t first = is_begun(wave.layer) ? wave.first : 0;
  return cache_->places(wave.layer) + first * layout_.shape.kv_heads * layout_.selected;
}

void SparseAttention::find_rows(const Wave& wave, int source) {
  FindRowsParams find;
  find.shape = layout_.shape;
  find.batch = wave.batch;
  find.selected = selection(source, wave.first);
  find.rows = wave.rows;
  find.layer = cache_->name_of(wave.layer);
  find.cache = cache_->view();
  find.places = places(wave);
  find.evicted = report_.evicted + head_entry(wave.layer, wave.first);
  cache_->begin_filling();
  queue_->run(find);
  if (disk_ != nullptr) disk_->begin_fetch(fetch_of(wave, source));
}

FetchWave SparseAttention::fetch_of(const Wave& wave, int source) const {
  const SelectionView selected = selection(source, wave.first);
  FetchWave fetch;
  fetch.layer = wave.layer;
  fetch.first = wave.first;
  fetch.tokens = wave.batch.count;
  fetch.places = places(wave);
  fetch.capacity = selected.capacity;
  fetch.heads = selected.heads;
  return fetch;
}

void SparseAttention::place_rows(const Wave& wave, int source, AttendSelectedParams& params) {
  params.places = places(wave);
  params.cache = cache_->view();
  if (disk_ == nullptr) return;
  if (!is_begun(wave.layer)) {
    disk_->end_fetch(fetch_of(wave, source));
  } else if (wave.first == 0) {
    Wave all = wave;
    all.batch.count = wave.total;
    disk_->end_fetch(fetch_of(all, source));
  }
  params.rows.host = disk_->rows();
  params.rows.host_stride = disk_->head_stride();
}

const float* SparseAttention::value_sums(const Wave& wave) const {
  return token_sums_.floats() + wave.first * layout_.shape.kv_heads * layout_.shape.head_dim;
}

void SparseAttention::attend_values(const Policy& policy, const Wave& wave,
                                    const AttendSelectedParams& attended) {
  AttendTilesParams params;
  params.shape = layout_.shape;
  params.batch = wave.batch;
  params.logits = estimated_;
  params.weighed = layout_.logits.weighed;
  params.estimated_lse = lse_.floats();
  params.selected = attended.selected;
  params.values = index_.values(wave.layer);
  params.share = static_cast<float>(policy.values.pages);
  params.value_sums = value_sums(wave);
  params.out = attended.out;
  params.lse = attended.lse;
  params.merge = true;
  params.pages_read = report_.value_pages + head_entry(wave.layer, wave.first);
  queue_->run(params);
}

void SparseAttention::require_number(bool is_number, int layer, int head) const {
  if (is_number) return;
  throw Error(ErrorCode::numeric,
              "a query or key of layer " + std::to_string(layer) + ", KV head " +
                  std::to_string(head) +
                  " is NaN or infinite, or what `select` made of them; check the weights" +
                  damage_of(layout_.shape));
}

// A row that could not be read is zero, in the cache, too, where forks would find it: the cache
// begins the next step empty.
void SparseAttention::require_rows_read(std::int64_t token) const {
  try {
    disk_->require_read(token);
  } catch (const Error&) {
    cache_->begin_filling();
    throw;
  }
}

// Followers attend to their anchor's positions, but their rows may be in other tiers.
void SparseAttention::count_rows(int layer, int source, std::int64_t number,
                                 const BatchToken& token, Count& count,
                                 LayerSelection& entry) const {
  for (int head = 0; head < layout_.shape.kv_heads; ++head) {
    const HeadSelection& chosen = seen_.heads[head_entry(source, number) + head];
    require_number(chosen.bad == 0, source, head);
    const std::int32_t resident = seen_.resident[head_entry(layer, number) + head];
    count.hits += static_cast<std::uint64_t>(resident + token.count() - token.page_first());
    count.misses += static_cast<std::uint64_t>(chosen.count - resident);
    if (cache_ != nullptr) {
      count.evicted += static_cast<std::uint64_t>(seen_.evicted[head_entry(layer, number) + head]);
    }
    entry.selected += static_cast<double>(chosen.count);
    entry.cut += chosen.cut;
  }
}

void SparseAttention::count_estimates(const Step& step, int layer, std::int64_t number,
                                      Count& count) const {
  const BatchToken& token = step.tokens[static_cast<std::size_t>(number)];
  const Policy& policy = *step.policy;
  const Scorer& scorer = scorer_of(policy);
  const EstimateReads reads(queue_->backend().info().reads, policy, layout_.shape, layout_.context,
                            scorer);
  const std::int64_t resident =
      tier_ == Tier::host || !scorer.reads_rows()
          ? token.page_first()
          : step.tables->resident_rows(token.sequence, token.page_first(), step.set);
  const bool is_early = policy.early_at(layer) != Early::none;
  const bool weighs_again = is_early && policy.compensates(layer, Compensation::values);
  const bool scored = !newest_apart(policy, layer);
  const bool counts = counts_reads(scorer);
  for (int head = 0; head < layout_.shape.kv_heads; ++head) {
    const auto at = static_cast<std::size_t>(head_entry(layer, number) + head);
    if (counts) count.estimates += reads.counted(token, counted_.at(at));
    count.estimates += reads.scan(token, resident, scored && !is_early, !counts);
    if (weighs_again) {
      count.estimates += reads.scan(token, resident, scored, !counts);
      require_number(seen_.weighed_heads[head_entry(layer, number) + head].bad == 0, layer, head);
    }
    if (!policy.candidates.limited()) continue;
    const std::int64_t entry = head_entry(layer, number) + head;
    const HeadSelection& proposed = seen_.candidate_heads[entry];
    require_number(proposed.bad == 0, layer, head);
    // The report has one of these; the other is not asked for.
    const std::int64_t read = seen_.rescored[entry];
    count.estimates += reads.rescore(token, proposed.count, read,
                                     tier_ == Tier::host ? proposed.count : read, !is_early);
  }
}

void SparseAttention::count_alpha(int source, std::int64_t number, LayerSelection& entry) const {
  for (int head = 0; head < layout_.shape.query_heads; ++head) {
    const auto value = static_cast<double>(seen_.alpha[query_entry(source, number) + head]);
    require_number(!std::isnan(value), source, head / layout_.shape.group());
    entry.alpha += value;
    entry.smallest_alpha = std::min(entry.smallest_alpha, value);
  }
}

void SparseAttention::report_positions(int source, std::int64_t number,
                                       LayerSelection& entry) const {
  const int heads = layout_.shape.kv_heads;
  const auto* from = reinterpret_cast<const std::int32_t*>(seen_positions_.data()) +
                     layout_.slot(source, number) * heads * layout_.selected;
  for (int head = 0; head < heads; ++head, from += layout_.selected) {
    std::vector<std::int32_t>& to = entry.positions.emplace_back(
        from, from + seen_.heads[head_entry(source, number) + head].count);
    std::sort(to.begin(), to.end());
  }
}

void SparseAttention::issue_report() {
  std::vector<CopyOp> ops = {{seen_.all.data(), report_.all.data(), report_.all.bytes()}};
  if (layout_.reports_positions) {
    ops.push_back({seen_positions_.data(), positions_.data(), positions_.bytes()});
  }
  queue_->copy(ops);
  index_.report_bad();
}

void SparseAttention::check_pages(std::int32_t sequence) const {
  const KeyIndex::BadPage bad = index_.bad_page(sequence);
  if (bad.layer < 0) return;
  const std::string what = bad.is_value ? "value" : "key";
  throw Error(ErrorCode::numeric, "a " + what + " of layer " + std::to_string(bad.layer) +
                                      ", KV head " + std::to_string(bad.head) +
                                      " is NaN or infinite; the checkpoint's weights or the "
                                      "caller's " +
                                      what + "s are damaged" + damage_of(layout_.shape));
}

void SparseAttention::finish(const Step& step, int layer, std::int32_t sequence, Ledger& ledger,
                             LayerSelection& entry) const {
  const int source = source_of(*step.policy, layer);
  // record_dense() counts the rows that dense layers attended to.
  const bool is_dense = step.policy->is_dense(layer);
  entry.follower = source != layer;
  entry.smallest_alpha = 1.0;
  Count count;
  for (std::size_t i = 0; i < step.tokens.size(); ++i) {
    const BatchToken& token = step.tokens[i];
    if (token.sequence != sequence) continue;
    const auto number = static_cast<std::int64_t>(i);
    ++count.tokens;
    if (is_dense) entry.attended += static_cast<double>(token.count() * layout_.shape.kv_heads);
    count_rows(layer, source, number, token, count, entry);
    if (disk_ != nullptr) {
      require_rows_read(number);
      count.from_disk += disk_->read(layer, number);
    }
    if (layout_.reports_positions) report_positions(source, number, entry);
    if (step.policy->selects(layer)) count_estimates(step, layer, number, count);
    if (step.policy->compensates(layer, Compensation::values)) {
      for (int head = 0; head < layout_.shape.kv_heads; ++head) {
        count.value_pages +=
            static_cast<std::uint64_t>(seen_.value_pages[head_entry(layer, number) + head]);
      }
    }
    count_alpha(source, number, entry);
  }
  if (!is_dense) {
    entry.attended = static_cast<double>(count.hits + count.misses);
    record_rows(layer, count, ledger);
  }
  record_index(layer, count, ledger);
  const auto pairs = static_cast<double>(count.tokens * layout_.shape.kv_heads);
  entry.tokens = count.tokens;
  entry.attended /= pairs;
  entry.selected /= pairs;
  entry.alpha /= static_cast<double>(count.tokens * layout_.shape.query_heads);
}

void SparseAttention::record_rows(int layer, const Count& count, Ledger& ledger) const {
  const KvShape& shape = layout_.shape;
  const auto parts = static_cast<std::uint64_t>(
      ReadPattern::parts(shape.group(), queue_->backend().info().reads.attend_queries));
  const std::uint64_t hits = count.hits * parts;
  const std::uint64_t misses = count.misses * parts;
  const bool in_place = tier_ == Tier::host;
  ledger.record(layer, tier_, tier_, Cause::hit, {hits, hits * shape.row_bytes()});
  ledger.record(layer, Tier::host, tier_, in_place ? Cause::hit : Cause::miss,
                {misses, misses * shape.row_bytes()});
  ledger.record(layer, Tier::disk, Tier::host, Cause::miss, count.from_disk);
  ledger.record(layer, tier_, tier_, Cause::evict, {count.evicted, 0});
}

void SparseAttention::record_index(int layer, const Count& count, Ledger& ledger) const {
  const std::size_t page = layout_.value_page_bytes(static_cast<std::size_t>(layer));
  ledger.record(layer, tier_, tier_, Cause::index_read, count.estimates.near);
  ledger.record(layer, Tier::host, tier_, Cause::index_read, count.estimates.far);
  ledger.record(layer, tier_, tier_, Cause::value_read,
                {count.value_pages * kPageTokens, count.value_pages * page});
}

}  // namespace sluice
