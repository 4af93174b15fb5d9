#include "offload/step/kv_prompt.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "lib/check.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

KvSession& checked(KvSession& session) {
  check(session.pool()->important() != nullptr && session.policy().prefill.tau > 0.0,
        "this policy's prefill is dense");
  return session;
}

}  // namespace

KvPrompt::KvPrompt(KvSession& session, std::int64_t tokens)
    : session_(&checked(session)),
      pool_(session.pool().get()),
      prompt_{session.length(), tokens},
      host_rows_(begin(tokens)),
      run_(*pool_) {
  try {
    pool_->important()->begin(session.sequence(), prompt_, *pool_);
  } catch (const Error&) {
    session.roll_back();
    pool_->forget_host_rows();
    throw;
  }
}

// What an evicting prompt keeps is known layer by layer, but the newest tokens always stay.
std::int64_t KvPrompt::begin(std::int64_t tokens) {
  if (!stages()) return session_->begin_by_layers(tokens);
  const bool evicts = session_->policy().prefill.evict;
  session_->begin_staged(tokens, evicts ? std::min(tokens, kNewestProbes) : tokens);
  return 0;
}

void KvPrompt::take(std::int64_t first, std::int64_t tokens) {
  check(first + tokens <= prompt_.tokens && tokens <= pool_->plan().chunk, "bad chunk");
  chunk_ = {prompt_.first + first, tokens};
  if (!stages()) run_.begin(session_->sequence(), chunk_, {});
}

// A layer is attended to only once all of its rows are written.
void KvPrompt::append(int layer, const NewRows& rows) {
  if (std::exchange(layer_, layer) != layer) {
    pool_->important()->begin_layer(layer, *pool_, session_->ledger());
  }
  if (stages()) return pool_->important()->stage(chunk_, rows);
  ready(layer);
  run_.append(layer, rows, pool_->sparse() != nullptr);
  pool_->settle();
  run_.record_appended(layer, session_->ledger());
  session_->appended(layer, chunk_.end());
}

void KvPrompt::collect(const Queries& queries) { pool_->important()->collect(chunk_, queries); }

void KvPrompt::choose(int layer) {
  SparsePrefill how = session_->policy().prefill;
  const std::vector<int>& dense = session_->policy().dense_layers;
  if (std::find(dense.begin(), dense.end(), layer) != dense.end()) how.tau = 1.0;
  check(layer == layer_, "a sparse prefill goes layer by layer");
  pool_->important()->choose(how, *pool_);
  if (stages()) write_staged(layer, how);
}

// Writes the rows of a layer that stay.
void KvPrompt::write_staged(int layer, const SparsePrefill& how) {
  ImportantTokens& important = *pool_->important();
  const std::int32_t sequence = session_->sequence();
  Ledger& ledger = session_->ledger();
  for (std::int64_t end = important.rows_before(); end < important.rows_in_all(how);) {
    const std::vector<RowSpan> rows =
        important.rows_to_write(how, end, pool_->plan().chunk, *pool_, ledger);
    const StepRange range = {end, rows.front().count};
    const std::vector<std::int32_t> begun =
        pool_->write_rows(sequence, layer, range.first, range.end(), ledger);
    run_.begin_rows(sequence, layer, range, begun);
    run_.append(layer, {.ready = rows}, pool_->sparse() != nullptr);
    pool_->settle();
    run_.record_appended(layer, ledger);
    end = range.end();
    session_->kept(layer, end);
  }
}

void KvPrompt::attend(int layer, const Queries& queries) {
  check(layer == layer_, "a sparse prefill goes layer by layer");
  pool_->important()->attend(session_->policy().prefill, chunk_, queries, *pool_,
                             session_->ledger());
}

void KvPrompt::end() {
  pool_->queue().synchronize();
  stages() ? session_->commit_staged() : session_->commit(KvSession::Written::all, {});
}

void KvPrompt::cancel() {
  pool_->settle();
  pool_->queue().synchronize();
  // A shared page that could not be copied is not where the tables say.
  if (stages() && !pool_->kept_rows()) return;
  session_->roll_back();
  if (!stages()) pool_->forget_host_rows();
}

}  // namespace sluice
