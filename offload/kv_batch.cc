#include "offload/kv_batch.h"

#include <algorithm>
#include <set>
#include <string>

namespace sluice {
namespace {

void require(bool holds, const std::string& message) {
  if (!holds) throw Error(ErrorCode::usage, "a batch: " + message);
}

KvPool& pool_of(std::span<KvSession* const> sessions) {
  require(!sessions.empty(), "there must be a session");
  return *sessions.front()->pool();
}

}  // namespace

KvBatch::KvBatch(std::span<KvSession* const> sessions)
    : sessions_(sessions.begin(), sessions.end()), pool_(&pool_of(sessions)), step_(*pool_) {
  require_fit();
  std::vector<BatchToken> tokens;
  try {
    for (KvSession* session : sessions_) {
      session->begin_rows(Phase::decode, 1);
      session->is_run_ = false;
      tokens.push_back({session->sequence_, static_cast<std::int32_t>(session->length_)});
    }
  } catch (...) {
    // The one that failed stays as it is; those before it have written nothing yet.
    for (std::size_t i = 0; i < tokens.size(); ++i) sessions_[i]->cancel_rows();
    throw;
  }
  step_.begin(tokens, sessions_.front()->policy_);
}

void KvBatch::require_fit() const {
  const KvPlan& plan = pool_->plan();
  require(count() <= plan.decode_batch, "of " + std::to_string(count()) + " sessions; up to " +
                                            std::to_string(plan.decode_batch) +
                                            " were planned for");
  const std::set<KvSession*> different(sessions_.begin(), sessions_.end());
  require(different.size() == sessions_.size(), "a session stands in it twice");
  std::int64_t blocks = 0;
  for (const KvSession* session : sessions_) {
    require(session->pool_.get() == pool_, "its sessions must be of one pool");
    require(session->policy_ == sessions_.front()->policy_, "its sessions must have one policy");
    session->require_outside_step();
    session->require_room(1);
    blocks += pool_->tables().blocks_for_write(session->sequence_, session->length_,
                                               session->length_ + 1);
  }
  pool_->tables().require_blocks(blocks);
}

std::unique_ptr<Recording>& KvBatch::recording() { return pool_->recordings()[step_.kind()]; }

std::vector<std::optional<Error>> KvBatch::end() {
  pool_->backend().synchronize();
  std::vector<std::optional<Error>> outcomes;
  for (KvSession* session : sessions_) {
    try {
      session->selection_ = step_.finish(session->sequence_, true, session->ledger_);
      session->end_rows();
      outcomes.emplace_back();
    } catch (const Error& error) {
      outcomes.emplace_back(error);
    }
  }
  return outcomes;
}

}  // namespace sluice
