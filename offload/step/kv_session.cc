#include "offload/step/kv_session.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "lib/check.h"
#include "lib/text.h"
#include "sluice/errors.h"
#include "sluice/format_names.h"

namespace sluice {
namespace {

// "bf16, f16 or int8".
std::string formats_of(const BackendInfo& info) {
  std::vector<std::string> names = row_format_names();
  std::erase_if(names, [&](const std::string& name) {
    return !info.takes(parse_row_format(name, "kv_dtype"));
  });
  return alternatives(names);
}

}  // namespace

void require_supported(const BackendInfo& info, const KvShape& shape) {
  if (!info.takes(shape.rows)) {
    throw Error(ErrorCode::unsupported, "device " + info.name + " keeps rows in " +
                                            formats_of(info) + ", not " + to_string(shape.rows) +
                                            " (`kv_dtype`)");
  }
  if (!shape.rows.fits(shape.head_dim)) {
    throw Error(ErrorCode::unsupported,
                "rows in " + to_string(shape.rows) + " need a head_dim that is a multiple of 16" +
                    (shape.rows.least_head_dim() > kScaleCodes ? " from 32 on" : "") + ", not " +
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
      ends_(static_cast<std::size_t>(pool_->plan().shape.layers)) {}

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
  child.ends_ = ends_;
  return child;
}

void KvSession::restart() {
  if (in_step_) ledger_.drop_tokens();
  in_step_ = true;  // until there is a new sequence
  pool_->close(std::exchange(sequence_, kNone));
  KvSession fresh(pool_);
  fresh.policy_ = policy_;
  fresh.ledger_ = std::move(ledger_);
  *this = std::move(fresh);
}

void KvSession::require_outside_step() const {
  if (!in_step_) return;
  throw Error(ErrorCode::internal,
              "the session stopped inside a step and cannot go on; start a new one");
}

void KvSession::require_step(std::int64_t tokens) const {
  require_outside_step();
  const std::int64_t context = plan().context;
  if (tokens <= context - length_) return;
  throw Error(ErrorCode::prompt, "the session is planned for " + std::to_string(context) +
                                     " tokens and cannot take " + std::to_string(tokens) +
                                     " more after " + std::to_string(length_) +
                                     "; raise `context`");
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
  std::int64_t room = std::min(plan().chunk, plan().decode_batch);
  for (int layer = 0; layer < (plan().ragged ? plan().shape.layers : 1); ++layer) {
    room = std::min(room, kPageTokens - rows(layer) % kPageTokens);
  }
  return room;
}

auto KvSession::begin_with(Phase phase, std::int64_t tokens, const auto& write) {
  pool_->require_room(sequence_, length_, length_ + tokens);
  step_ = {length_, tokens};
  in_step_ = true;
  ledger_.begin_step(phase, static_cast<int>(tokens));
  try {
    pool_->ready_index(sequence_, step_.first, step_.end(), ledger_);
    return write();
  } catch (...) {
    if (pool_->kept_rows()) roll_back();
    throw;
  }
}

std::vector<std::int32_t> KvSession::write(Phase phase, std::int64_t tokens) {
  std::vector<std::int32_t> begun = pool_->write(sequence_, step_.first, step_.end(), ledger_);
  // Some of several decoded tokens may be rejected.
  if (phase == Phase::decode && tokens > 1) pool_->keep_sums(sequence_, length_);
  if (phase != Phase::decode) pool_->forget_sums(sequence_);
  return begun;
}

std::vector<std::int32_t> KvSession::begin(Phase phase, std::int64_t tokens) {
  require_step(tokens);
  pool_->announce_step({&sequence_, 1});
  return begin_with(phase, tokens, [&] { return write(phase, tokens); });
}

void KvSession::begin_announced() {
  require_step(1);
  begin_with(Phase::decode, 1, [&] { return write(Phase::decode, 1); });
}

std::int64_t KvSession::begin_by_layers(std::int64_t tokens) {
  require_step(tokens);
  pool_->announce_step({&sequence_, 1});
  return begin_with(Phase::prefill, tokens, [&] {
    pool_->forget_sums(sequence_);
    return pool_->write_by_layers(sequence_, step_.first, step_.end(), ledger_);
  });
}

void KvSession::begin_staged(std::int64_t tokens, std::int64_t least) {
  require_step(tokens);
  pool_->require_room(sequence_, length_, length_ + least);
  pool_->forget_sums(sequence_);
  step_ = {length_, tokens};
  in_step_ = true;
  ledger_.begin_step(Phase::prefill, static_cast<int>(tokens));
}

// Pages that go to disk are counted when they do.
void KvSession::record_rows(int layer, std::int64_t near, std::int64_t all) {
  ledger_.record(layer, pool_->tier(), pool_->tier(), Cause::append,
                 traffic_of(plan().shape, near));
  if (plan().in_place || plan().on_disk) return;
  ledger_.record(layer, Tier::device, Tier::host, Cause::write_back, traffic_of(plan().shape, all));
}

void KvSession::commit(Written written, StepSelection selection) {
  check(in_step_, "commit outside a step");
  const bool is_all = plan().in_place || written == Written::all;
  const BlockTables& tables = pool_->tables();
  for (int set = 0; set < plan().sets(); ++set) {
    const std::int64_t row = tables.rows(sequence_, step_.first, set);
    const std::int64_t near = is_all ? step_.tokens
                                     : tables.resident_rows(sequence_, row + step_.tokens, set) -
                                           tables.resident_rows(sequence_, row, set);
    for (int layer = 0; layer < plan().shape.layers; ++layer) {
      if (pool_->set_of(layer) == set) record_rows(layer, near, step_.tokens);
    }
  }
  end(std::move(selection));
}

void KvSession::commit_staged() {
  check(in_step_, "commit outside a step");
  for (int layer = 0; layer < plan().shape.layers; ++layer) {
    const std::int64_t written = has_rows_of(layer) - rows(layer);
    record_rows(layer, written, written);
  }
  pool_->end_staged(sequence_, step_.first, step_.end(), ends_);
  end({});
}

void KvSession::end(StepSelection selection) {
  length_ = step_.end();
  set_ends();
  selection_ = std::move(selection);
  in_step_ = false;
}

void KvSession::set_ends() {
  for (int layer = 0; layer < plan().shape.layers; ++layer) has_rows_of(layer) = rows(layer);
}

void KvSession::roll_back() {
  check(in_step_, "roll_back outside a step");
  ledger_.drop_tokens();
  bool has_more = false;
  for (int layer = 0; layer < plan().shape.layers; ++layer) {
    const std::int64_t written = has_rows_of(layer) - rows(layer);
    has_more = has_more || written > 0;
    if (written > 0) record_rows(layer, written, written);
  }
  if (has_more) {
    pool_->truncate(sequence_, ends_, length_, ledger_);
    set_ends();
  } else {
    pool_->forget_blocks(sequence_, length_);
  }
  in_step_ = false;
}

std::vector<BatchToken> KvSession::next(std::int64_t tokens) const {
  std::vector<BatchToken> next;
  for (std::int64_t i = 0; i < tokens; ++i) next.push_back(token(i));
  return next;
}

double KvSession::prefill_share() const {
  if (all_pages_ == 0) return 1.0;
  return static_cast<double>(listed_pages_) / static_cast<double>(all_pages_);
}

void KvSession::require_nothing_evicted(const std::string& why) const {
  if (!pool_->tables().has_evicted(sequence_)) return;
  throw Error(ErrorCode::usage, "a prefill of this session has evicted tokens" + why);
}

// Lists of pages are those of whole blocks of 128 tokens.
void KvSession::require_listed_pages() const {
  require_nothing_evicted(
      ", so its pages begin at other tokens in every layer, and prefill=pages cannot list them; "
      "give it more by another prefill");
}

void KvSession::require_whole() const {
  require_outside_step();
  require_nothing_evicted(
      " (`prefill=zipvl(TAU,evict)`), so it cannot be saved: only a session that has every row "
      "can");
}

std::vector<RowSpan> KvSession::page_rows(int layer, std::int64_t page) {
  require_outside_step();
  return pool_->page_rows(layer, sequence_, page, page_tokens(page));
}

void KvSession::attach(std::int64_t pages, const std::shared_ptr<PageFile>& file) {
  check(length_ == 0, "pages attached to a session that has tokens");
  require_step(pages * kPageTokens);
  step_ = {0, pages * kPageTokens};
  in_step_ = true;
  ledger_.begin_step(Phase::prefill, 0);
  pool_->forget_sums(sequence_);
  pool_->require_room(sequence_, 0, step_.end());
  pool_->announce_step({&sequence_, 1});
  pool_->ready_index(sequence_, 0, step_.end(), ledger_);
  pool_->attach(sequence_, pages, file, ledger_);
  length_ = step_.end();
  set_ends();
  in_step_ = false;
}

void KvSession::use(const Policy& policy) {
  require_outside_step();
  const std::vector<Policy>& planned = pool_->policies();
  Policy own = within_windows(policy, plan().windows);
  if (std::find(planned.begin(), planned.end(), own) == planned.end()) {
    throw Error(ErrorCode::usage,
                "the session was not planned for the policy '" + to_string(policy) + "'");
  }
  policy_ = std::move(own);
}

void KvSession::truncate(std::int64_t length) {
  require_outside_step();
  check(length >= 0 && length <= length_, "truncate to more than there is");
  if (length == length_) return;
  if (const std::optional<Eviction> prompt = pool_->tables().evicting_prompt(sequence_, length)) {
    throw Error(ErrorCode::usage,
                "tokens " + std::to_string(prompt->first) + " to " + std::to_string(prompt->end) +
                    " came in a prompt that evicted, so nobody knows what a part of it would have "
                    "kept: cut the session to " +
                    std::to_string(prompt->first) + " tokens, or to " +
                    std::to_string(prompt->end) + " or more, not to " + std::to_string(length));
  }
  pool_->ready_scorers(sequence_, ledger_);
  // Stays so if rows on disk cannot be read: their values are not off the sums then.
  in_step_ = true;
  pool_->truncate(sequence_, ends_, length, ledger_);
  in_step_ = false;
  length_ = length;
  set_ends();
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
