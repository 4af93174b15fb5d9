#include "offload/step/kv_session.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "lib/check.h"
#include "sluice/errors.h"

namespace sluice {

void require_supported(const BackendInfo& info, const KvShape& shape) {
  const bool supported =
      shape.rows.is_coded() ? info.coded_rows : shape.rows != DType::f32 || info.f32_rows;
  if (!supported) {
    throw Error(ErrorCode::unsupported,
                "device " + info.name + " keeps rows in " +
                    (info.coded_rows ? "bf16, f16 or int8" : "bf16 or f16") + ", not " +
                    to_string(shape.rows) + " (`kv_dtype`)");
  }
  if (!shape.rows.fits(shape.head_dim)) {
    throw Error(ErrorCode::unsupported, "rows in " + to_string(shape.rows) +
                                            " need a head_dim that is a multiple of 16, not " +
                                            std::to_string(shape.head_dim) + " (`kv_dtype`)");
  }
  if (shape.query_heads > info.most_query_heads) {
    throw Error(ErrorCode::unsupported,
                "device " + info.name + " takes up to " + std::to_string(info.most_query_heads) +
                    " query heads, not " + std::to_string(shape.query_heads));
  }
  const std::vector<int>& dims = info.head_dims;
  if (dims.empty() || std::find(dims.begin(), dims.end(), shape.head_dim) != dims.end()) return;
  std::string known;
  for (const int d : dims) known += (known.empty() ? "" : ", ") + std::to_string(d);
  throw Error(ErrorCode::unsupported, "device " + info.name + " has no attention for head_dim " +
                                          std::to_string(shape.head_dim) + "; it has " + known);
}

KvSession::KvSession(std::shared_ptr<KvPool> pool, NoSequence /*none*/)
    : pool_(std::move(pool)),
      policy_(pool_->policies().front()),
      ledger_(pool_->plan().shape.layers),
      has_rows_(static_cast<std::size_t>(pool_->plan().shape.layers)),
      run_(std::make_unique<TokenRun>(*pool_)),
      decode_(std::make_unique<DecodeStep>(*pool_)) {}

// Code after the delegating constructor may throw: then the destructor runs.
KvSession::KvSession(const std::shared_ptr<KvPool>& pool) : KvSession(pool, NoSequence()) {
  sequence_ = pool_->open();
}

KvSession& KvSession::operator=(KvSession&& other) noexcept {
  if (this == &other) return *this;
  std::destroy_at(this);
  return *std::construct_at(this, std::move(other));
}

KvSession::~KvSession() {
  if (pool_ != nullptr && sequence_ != kNone) pool_->close(sequence_);
}

KvSession KvSession::fork() {
  require_outside_step();
  KvSession child(pool_, NoSequence{});
  child.sequence_ = pool_->fork(sequence_);
  child.policy_ = policy_;
  child.length_ = length_;
  return child;
}

void KvSession::require_outside_step() const {
  if (!in_step_) return;
  throw Error(ErrorCode::internal,
              "the session stopped inside a step and cannot go on; start a new one");
}

void KvSession::require_room(std::int64_t tokens) const {
  const std::int64_t context = plan().context;
  if (tokens <= context - length_) return;
  throw Error(ErrorCode::prompt, "the session is planned for " + std::to_string(context) +
                                     " tokens and cannot take " + std::to_string(tokens) +
                                     " more after " + std::to_string(length_) +
                                     "; raise `context`");
}

void KvSession::require_layer(int layer) const {
  if (!in_step_) throw Error(ErrorCode::usage, "rows or queries outside a step; call begin_step");
  if (layer >= 0 && layer < plan().shape.layers) return;
  throw Error(ErrorCode::usage, "layer " + std::to_string(layer) + ": there are 0 to " +
                                    std::to_string(plan().shape.layers - 1));
}

std::int64_t KvSession::prompt_room() const {
  constexpr std::int64_t kBlock = PageLists::kBlock;
  const std::int64_t chunk = plan().chunk;
  if (policy_.prefill.pages == 0.0 || chunk < kBlock) return chunk;
  const std::int64_t begun = length_ % kBlock;
  return begun > 0 ? kBlock - begun : chunk / kBlock * kBlock;
}

std::int64_t KvSession::decode_room() const {
  if (pool_->sparse() == nullptr) return plan().chunk;
  // Up to the end of the page, because its index serves only later steps.
  return std::min({plan().chunk, plan().decode_batch, kPageTokens - length_ % kPageTokens});
}

std::vector<std::int32_t> KvSession::begin_rows(Phase phase, std::int64_t tokens) {
  pool_->require_room(sequence_, length_, length_ + tokens);
  step_ = {length_, tokens};
  phase_ = phase;
  in_step_ = true;
  appended_ = -1;
  std::fill(has_rows_.begin(), has_rows_.end(), false);
  ledger_.begin_step(phase, static_cast<int>(tokens));
  try {
    std::vector<std::int32_t> begun = pool_->write(sequence_, step_.first, step_.end(), ledger_);
    // Some of several decoded tokens may be rejected.
    if (phase == Phase::decode && tokens > 1) pool_->keep_sums(sequence_, length_);
    if (phase != Phase::decode) pool_->forget_sums(sequence_);
    return begun;
  } catch (...) {
    give_up_rows();
    throw;
  }
}

// Call after a write() that threw: the session goes on if its earlier rows are intact.
void KvSession::give_up_rows() {
  in_step_ = true;
  if (pool_->kept_rows()) cancel_rows();
}

void KvSession::cancel_rows() {
  ledger_.drop_tokens();
  pool_->forget_blocks(sequence_, length_);
  in_step_ = false;
}

// Prefill steps attend to runs of rows, so no row may have been evicted.
void KvSession::require_nothing_evicted() const {
  const ImportantTokens* const tokens = pool_->important();
  if (tokens == nullptr || !tokens->has_evicted_of(sequence_)) return;
  throw Error(ErrorCode::usage,
              "a prefill of this session has evicted tokens, and this would attend to them, too: "
              "give it more by decoding, or by another prefill that evicts");
}

void KvSession::begin_step(Phase phase, std::int64_t tokens) {
  require_outside_step();
  const std::int64_t most = phase == Phase::decode ? decode_room() : plan().chunk;
  if (tokens < 1 || tokens > most) {
    throw Error(ErrorCode::usage, "a step must have 1 to " + std::to_string(most) +
                                      " tokens, not " + std::to_string(tokens));
  }
  require_room(tokens);
  if (phase != Phase::decode) require_nothing_evicted();
  const std::vector<std::int32_t> begun = begin_rows(phase, tokens);
  const bool decodes = phase == Phase::decode;
  is_run_ = !decodes || (tokens > 1 && pool_->sparse() == nullptr);
  if (is_run_ || tokens > 1) run_->begin(sequence_, step_, begun);
  if (is_run_) return;
  decode_->begin(batch_tokens(tokens), policy_);
}

std::vector<BatchToken> KvSession::batch_tokens(std::int64_t tokens) const {
  std::vector<BatchToken> batch;
  for (std::int64_t i = 0; i < tokens; ++i) {
    batch.push_back({sequence_, static_cast<std::int32_t>(length_ + i)});
  }
  return batch;
}

bool KvSession::takes_batch(std::int64_t tokens) const {
  if (tokens > plan().decode_batch) return false;
  if (plan().in_place || plan().resident_tokens >= plan().host_rows()) return true;
  for (int layer = 0; layer < plan().shape.layers; ++layer) {
    if (policy_.is_dense(layer)) return false;
  }
  return true;
}

void KvSession::choose_early(int layer, const Queries& queries) {
  require_layer(layer);
  decode_->choose_early(layer, queries);
}

void KvSession::append(int layer, const NewRows& rows) {
  require_layer(layer);
  if (has_rows_[static_cast<std::size_t>(layer)]) {
    throw Error(ErrorCode::usage,
                "layer " + std::to_string(layer) + " has its rows of this step already");
  }
  if (is_run_) {
    if (in_prompt_) ready_layer(layer);
    run_->append(layer, rows, pool_->sparse() != nullptr);
    // A sparse prefill attends to a layer once all of its rows are written.
    if (in_prompt_) pool_->settle();
    ledger_.record(layer, Tier::host, Tier::device, Cause::miss,
                   traffic_of(plan().shape, run_->fetched_front(layer)));
    pool_->record_written(layer, run_->written(layer), ledger_);
  } else {
    check(rows.ready.empty(), "rows that are ready belong to a run");
    decode_->append(layer, rows);
  }
  has_rows_[static_cast<std::size_t>(layer)] = true;
  if (in_prompt_) prompt_ends_[static_cast<std::size_t>(layer)] = step_.end();
  appended_ = layer;
}

bool KvSession::attends_run(int layer) const {
  return is_run_ || (step_.tokens > 1 && decode_->is_dense(layer));
}

void KvSession::attend(int layer, const Queries& queries) {
  require_layer(layer);
  if (in_prompt_) {
    return pool_->important()->attend(layer, policy_.prefill, step_, queries, *pool_, ledger_);
  }
  if (layer != appended_) {
    throw Error(ErrorCode::usage, "layer " + std::to_string(layer) +
                                      " is attended right after its rows were appended");
  }
  if (!attends_run(layer)) return decode_->attend(layer, queries);
  const double share = listed_share(layer);
  run_->attend(layer, queries, share);
  if (!is_run_) decode_->select(layer, queries);
  const Tier tier = pool_->tier();
  if (share == 1.0) {
    ledger_.record(layer, tier, tier, Cause::hit, traffic_of(plan().shape, run_->hits(layer)));
  }
  const Traffic misses = traffic_of(plan().shape, run_->misses(layer));
  ledger_.record(layer, Tier::host, tier, Cause::miss, misses);
  if (plan().on_disk) ledger_.record(layer, Tier::disk, Tier::host, Cause::miss, misses);
}

namespace {

// Sum over the step's blocks of queries: pages up to the block's last token.
std::uint64_t pages_of_blocks(const StepRange& step) {
  std::int64_t pages = 0;
  for (std::int64_t first = step.first; first < step.end(); first += PageLists::kBlock) {
    const std::int64_t last = std::min(first + PageLists::kBlock, step.end()) - 1;
    pages += last / kPageTokens + 1;
  }
  return static_cast<std::uint64_t>(pages);
}

}  // namespace

double KvSession::prefill_share() const {
  if (all_pages_ == 0) return 1.0;
  return static_cast<double>(listed_pages_) / static_cast<double>(all_pages_);
}

// The share of the weight whose pages a prompt's chunk attends to; 1 in dense layers.
double KvSession::listed_share(int layer) const {
  const std::vector<int>& dense = policy_.dense_layers;
  const bool lists = lists_pages_ && is_run_ && phase_ == Phase::prefill &&
                     policy_.prefill.pages > 0.0 &&
                     std::find(dense.begin(), dense.end(), layer) == dense.end();
  return lists ? policy_.prefill.pages : 1.0;
}

// Counts resident rows of listed pages; only the backend knew the lists.
void KvSession::record_listed_hits() {
  bool is_here = false;
  for (int layer = 0; layer < plan().shape.layers; ++layer) {
    if (listed_share(layer) == 1.0) continue;
    if (!is_here) {
      pool_->listed()->issue_report();
      // Grows host memory while the device computes, because pinning can take as long as a step.
      pool_->grow_ahead(std::min(plan().chunk, expected_ - step_.end()));
      pool_->queue().synchronize();
      is_here = true;
    }
    std::uint64_t rows = 0;
    for (int head = 0; head < plan().shape.kv_heads; ++head) {
      const std::span<const std::uint32_t> listed = pool_->listed()->listed(layer, head);
      rows += static_cast<std::uint64_t>(run_->hits_among(layer, listed));
      listed_pages_ += std::accumulate(listed.begin(), listed.end(), std::uint64_t{0});
      all_pages_ += pages_of_blocks(step_);
    }
    ledger_.record(layer, pool_->tier(), pool_->tier(), Cause::hit,
                   {rows, rows * plan().shape.row_bytes()});
  }
}

// Counts a layer's new rows: `near` where attention reads, `all` written to host memory. Pages that
// go to disk are counted when they do.
void KvSession::record_rows(int layer, const Traffic& near, const Traffic& all) {
  ledger_.record(layer, pool_->tier(), pool_->tier(), Cause::append, near);
  if (plan().in_place || plan().on_disk) return;
  ledger_.record(layer, Tier::device, Tier::host, Cause::write_back, all);
}

void KvSession::end_rows() {
  const KvShape& shape = plan().shape;
  const Traffic all = traffic_of(shape, step_.tokens);
  const auto resident = [&](std::int64_t tokens, int set) {
    return pool_->tables().resident_rows(sequence_, tokens, set);
  };
  std::vector<Traffic> near;  // by set of layers
  for (int set = 0; set < plan().sets(); ++set) {
    const bool is_all = plan().in_place || is_run_;
    near.push_back(
        is_all ? all : traffic_of(shape, resident(step_.end(), set) - resident(step_.first, set)));
  }
  for (int layer = 0; layer < shape.layers; ++layer) {
    record_rows(layer, near[static_cast<std::size_t>(pool_->set_of(layer))], all);
  }
  length_ = step_.end();
  in_step_ = false;
}

void KvSession::end_step() {
  if (!in_step_) throw Error(ErrorCode::usage, "end_step outside a step; call begin_step");
  const auto missing = std::find(has_rows_.begin(), has_rows_.end(), false);
  if (missing != has_rows_.end()) {
    throw Error(ErrorCode::usage, "layer " + std::to_string(missing - has_rows_.begin()) +
                                      " has no rows of this step yet");
  }
  selection_.clear();
  pool_->settle();
  if (!is_run_) {
    decode_->issue_report();
    if (decode_->reports()) pool_->queue().synchronize();
    selection_ = decode_->finish(sequence_, step_.tokens == 1, ledger_);
  }
  record_listed_hits();
  end_rows();
}

void KvSession::require_whole() const {
  require_outside_step();
  const ImportantTokens* const tokens = pool_->important();
  if (tokens == nullptr || !tokens->has_evicted_of(sequence_)) return;
  throw Error(ErrorCode::usage,
              "a prefill of this session has evicted tokens (`prefill=zipvl(TAU,evict)`), so "
              "it cannot be saved: only a session that has every row can");
}

std::vector<RowSpan> KvSession::page_rows(int layer, std::int64_t page) {
  require_outside_step();
  return pool_->page_rows(layer, sequence_, page, page_tokens(page));
}

void KvSession::end_restored_step() {
  end_step();
  ledger_.drop_tokens();
}

void KvSession::begin_prompt(std::int64_t tokens) {
  require_outside_step();
  check(pool_->important() != nullptr && policy_.prefill.tau > 0.0,
        "this policy's prefill is dense");
  require_room(tokens);
  pool_->require_room(sequence_, length_, length_ + tokens);
  pool_->forget_sums(sequence_);
  prompt_ = {length_, tokens};
  phase_ = Phase::prefill;
  ledger_.begin_step(phase_, static_cast<int>(tokens));
  try {
    prompt_host_rows_ = pool_->write_by_layers(sequence_, prompt_.first, prompt_.end(), ledger_);
  } catch (...) {
    give_up_rows();
    throw;
  }
  try {
    pool_->important()->begin(sequence_, prompt_, *pool_);
  } catch (const Error&) {
    cancel_rows();
    pool_->forget_host_rows();
    throw;
  }
  prompt_ends_.assign(static_cast<std::size_t>(plan().shape.layers), length_);
  in_step_ = in_prompt_ = is_run_ = true;
}

void KvSession::cancel_prompt() {
  check(in_prompt_, "cancel_prompt outside a prompt");
  pool_->settle();
  pool_->queue().synchronize();
  ledger_.drop_tokens();
  for (int layer = 0; layer < plan().shape.layers; ++layer) {
    const Traffic rows =
        traffic_of(plan().shape, prompt_ends_[static_cast<std::size_t>(layer)] - length_);
    record_rows(layer, rows, rows);
  }
  pool_->truncate(sequence_, prompt_ends_, length_);
  pool_->forget_host_rows();
  in_step_ = in_prompt_ = false;
}

void KvSession::ready_layer(int layer) { pool_->ready_host_rows(layer, prompt_host_rows_); }

void KvSession::take_piece(std::int64_t first, std::int64_t tokens) {
  check(in_prompt_ && first + tokens <= prompt_.tokens && tokens <= plan().chunk, "bad piece");
  step_ = {prompt_.first + first, tokens};
  std::fill(has_rows_.begin(), has_rows_.end(), false);
  run_->begin(sequence_, step_, {});
}

void KvSession::collect(const Queries& queries) { pool_->important()->collect(step_, queries); }

void KvSession::choose(int layer) {
  SparsePrefill how = policy_.prefill;
  const std::vector<int>& dense = policy_.dense_layers;
  if (std::find(dense.begin(), dense.end(), layer) != dense.end()) how.tau = 1.0;
  pool_->important()->choose(layer, how, *pool_);
}

void KvSession::end_prompt() {
  check(in_prompt_, "end_prompt outside a prompt");
  pool_->queue().synchronize();
  selection_.clear();
  step_ = prompt_;
  end_rows();
  in_prompt_ = false;
}

void KvSession::use(const Policy& policy) {
  require_outside_step();
  const std::vector<Policy>& planned = pool_->policies();
  if (std::find(planned.begin(), planned.end(), policy) == planned.end()) {
    throw Error(ErrorCode::usage,
                "the session was not planned for the policy '" + to_string(policy) + "'");
  }
  policy_ = policy;
}

void KvSession::truncate(std::int64_t length) {
  require_outside_step();
  check(length >= 0 && length <= length_, "truncate to more than there is");
  if (length == length_) return;
  const std::vector<std::int64_t> ends(static_cast<std::size_t>(plan().shape.layers), length_);
  in_step_ =
      true;  // stays so if rows on disk cannot be read: their values are not off the sums then
  pool_->truncate(sequence_, ends, length);
  in_step_ = false;
  length_ = length;
}

void KvSession::reject(std::int64_t tokens) {
  ledger_.drop_tokens(static_cast<int>(tokens));
  truncate(length_ - tokens);
}

MemoryUse memory_use(Backend& backend) {
  const MemoryAccount& device = backend.account(Tier::device);
  const MemoryAccount& host = backend.account(Tier::host);
  return {device.used(), device.peak(), host.used(), host.peak()};
}

}  // namespace sluice
