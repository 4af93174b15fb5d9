#include "offload/step/solo_step.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "lib/check.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

// Checks a step before anything is begun.
KvSession& checked(KvSession& session, Phase phase, std::int64_t tokens) {
  session.require_outside_step();
  const std::int64_t most = phase == Phase::decode ? session.decode_room() : session.plan().chunk;
  if (tokens < 1 || tokens > most) {
    throw Error(ErrorCode::usage, "a step must have 1 to " + std::to_string(most) +
                                      " tokens, not " + std::to_string(tokens));
  }
  session.require_step(tokens);
  const bool lists = phase == Phase::prefill && session.lists_pages();
  if (lists && session.policy().prefill.pages > 0.0) session.require_listed_pages();
  return session;
}

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

SoloStep::SoloStep(KvSession& session, Phase phase, std::int64_t tokens)
    : session_(&checked(session, phase, tokens)),
      pool_(session.pool().get()),
      phase_(phase),
      range_{session.length(), tokens},
      is_run_(phase != Phase::decode || (tokens > 1 && pool_->sparse() == nullptr)),
      run_(*pool_),
      decode_(*pool_) {
  const std::vector<std::int32_t> begun = session.begin(phase, tokens);
  if (is_run_ || tokens > 1) run_.begin(session.sequence(), range_, begun);
  if (!is_run_) decode_.begin(session.next(tokens), session.policy());
}

void SoloStep::require_layer(int layer) const {
  if (is_over_) throw Error(ErrorCode::usage, "rows or queries after the end of their step");
  const int layers = pool_->plan().shape.layers;
  if (layer >= 0 && layer < layers) return;
  throw Error(ErrorCode::usage,
              "layer " + std::to_string(layer) + ": there are 0 to " + std::to_string(layers - 1));
}

void SoloStep::choose_early(int layer, const Queries& queries) {
  require_layer(layer);
  decode_.choose_early(layer, queries);
}

void SoloStep::append(int layer, const NewRows& rows) {
  require_layer(layer);
  if (session_->has_rows(layer)) {
    throw Error(ErrorCode::usage,
                "layer " + std::to_string(layer) + " has its rows of this step already");
  }
  if (is_run_) {
    run_.append(layer, rows, pool_->sparse() != nullptr);
    run_.record_appended(layer, session_->ledger());
  } else {
    check(rows.ready.empty(), "rows that are ready belong to a run");
    decode_.append(layer, rows);
  }
  session_->appended(layer, range_.end());
  appended_ = layer;
}

bool SoloStep::attends_run(int layer) const {
  return is_run_ || (range_.tokens > 1 && decode_.is_dense(layer));
}

void SoloStep::attend(int layer, const Queries& queries) {
  require_layer(layer);
  if (layer != appended_) {
    throw Error(ErrorCode::usage, "layer " + std::to_string(layer) +
                                      " is attended right after its rows were appended");
  }
  if (!attends_run(layer)) return decode_.attend(layer, queries);
  const double share = listed_share(layer);
  run_.attend(layer, queries, share);
  if (is_run_ && phase_ == Phase::prefill) show(layer, queries);
  if (!is_run_) decode_.select(layer, queries);
  const KvPlan& plan = pool_->plan();
  const Tier tier = pool_->tier();
  Ledger& ledger = session_->ledger();
  if (share == 1.0) {
    ledger.record(layer, tier, tier, Cause::hit, traffic_of(plan.shape, run_.hits(layer)));
  }
  const Traffic misses = traffic_of(plan.shape, run_.misses(layer));
  ledger.record(layer, Tier::host, tier, Cause::miss, misses);
  ledger.record(layer, Tier::disk, Tier::host, Cause::miss,
                traffic_of(plan.shape, run_.misses_on_disk(layer)));
}

void SoloStep::show(int layer, const Queries& queries) {
  if (pool_->sparse() == nullptr) return;
  const ScorerCount read = pool_->sparse()->index().observe(
      layer, session_->sequence(), range_.first, range_.tokens, queries, pool_->rows(layer));
  const std::uint64_t key = pool_->plan().shape.value_offset();
  Ledger& ledger = session_->ledger();
  const Tier tier = pool_->tier();
  ledger.record(layer, tier, tier, Cause::index_read,
                {read.near_keys, read.near_keys * key + read.bytes});
  ledger.record(layer, Tier::host, tier, Cause::index_read, {read.far_keys, read.far_keys * key});
}

double SoloStep::listed_share(int layer) const {
  const Policy& policy = session_->policy();
  const std::vector<int>& dense = policy.dense_layers;
  const bool lists = session_->lists_pages() && is_run_ && phase_ == Phase::prefill &&
                     policy.prefill.pages > 0.0 &&
                     std::find(dense.begin(), dense.end(), layer) == dense.end();
  return lists ? policy.prefill.pages : 1.0;
}

void SoloStep::record_listed_hits() {
  const KvShape& shape = pool_->plan().shape;
  bool is_here = false;
  for (int layer = 0; layer < shape.layers; ++layer) {
    if (listed_share(layer) == 1.0) continue;
    if (!is_here) {
      pool_->listed()->issue_report();
      // Grows host memory while the device computes, because pinning can take as long as a step.
      pool_->grow_ahead(std::min(pool_->plan().chunk, session_->expected() - range_.end()));
      pool_->queue().synchronize();
      is_here = true;
    }
    std::uint64_t rows = 0;
    for (int head = 0; head < shape.kv_heads; ++head) {
      const std::span<const std::uint32_t> listed = pool_->listed()->listed(layer, head);
      rows += static_cast<std::uint64_t>(run_.hits_among(layer, listed));
      session_->count_listed(std::accumulate(listed.begin(), listed.end(), std::uint64_t{0}),
                             pages_of_blocks(range_));
    }
    session_->ledger().record(layer, pool_->tier(), pool_->tier(), Cause::hit,
                              {rows, rows * shape.row_bytes()});
  }
}

void SoloStep::end() {
  if (is_over_) throw Error(ErrorCode::usage, "a step that is over");
  for (int layer = 0; layer < pool_->plan().shape.layers; ++layer) {
    if (session_->has_rows(layer)) continue;
    throw Error(ErrorCode::usage,
                "layer " + std::to_string(layer) + " has no rows of this step yet");
  }
  is_over_ = true;
  StepSelection selection;
  pool_->settle();
  if (!is_run_) {
    decode_.issue_report();
    if (decode_.reports()) pool_->queue().synchronize();
    selection = decode_.finish(session_->sequence(), range_.tokens == 1, session_->ledger());
  }
  record_listed_hits();
  session_->commit(is_run_ ? KvSession::Written::all : KvSession::Written::resident,
                   std::move(selection));
}

bool SoloStep::is_cancellable() const {
  const bool begins_page = range_.first % kPageTokens == 0;
  return is_run_ && (pool_->disk() == nullptr || begins_page);
}

void SoloStep::cancel() {
  check(is_cancellable() && !is_over_, "a step that cannot be cancelled");
  is_over_ = true;
  pool_->settle();
  pool_->queue().synchronize();
  session_->roll_back();
}

void SoloStep::end_restored() {
  end();
  session_->ledger().drop_tokens();
}

}  // namespace sluice
