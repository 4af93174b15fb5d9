#include "offload/step/kv_prompt.h"

#include <algorithm>

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
      host_rows_(session.begin_by_layers(tokens)),
      run_(*pool_) {
  try {
    pool_->important()->begin(session.sequence(), prompt_, *pool_);
  } catch (const Error&) {
    session.roll_back();
    pool_->forget_host_rows();
    throw;
  }
}

void KvPrompt::take(std::int64_t first, std::int64_t tokens) {
  check(first + tokens <= prompt_.tokens && tokens <= pool_->plan().chunk, "bad chunk");
  chunk_ = {prompt_.first + first, tokens};
  run_.begin(session_->sequence(), chunk_, {});
}

// A layer is attended to only once all of its rows are written.
void KvPrompt::append(int layer, const NewRows& rows) {
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
  pool_->important()->choose(layer, how, *pool_);
}

void KvPrompt::attend(int layer, const Queries& queries) {
  pool_->important()->attend(layer, session_->policy().prefill, chunk_, queries, *pool_,
                             session_->ledger());
}

void KvPrompt::end() {
  pool_->queue().synchronize();
  session_->commit(KvSession::Written::all, {});
}

void KvPrompt::cancel() {
  pool_->settle();
  pool_->queue().synchronize();
  session_->roll_back();
  pool_->forget_host_rows();
}

}  // namespace sluice
