#include "offload/step/kv_batch.h"

#include <algorithm>
#include <set>
#include <string>

#include "lib/check.h"
#include "offload/tiers/disk_pages.h"

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
  require_fit(sessions);
  std::vector<std::int32_t> sequences;
  for (const KvSession* session : sessions) sequences.push_back(session->sequence());
  pool_->announce_step(sequences);
  std::vector<BatchToken> tokens;
  try {
    for (KvSession* session : sessions_) {
      session->begin_announced();
      tokens.push_back(session->token());
    }
  } catch (...) {
    // The session that failed has cleaned up; those before it have written nothing yet.
    for (std::size_t i = 0; i < tokens.size(); ++i) sessions_[i]->roll_back();
    throw;
  }
  step_.begin(tokens, sessions_.front()->policy());
}

// A session that ended stays in its step, and the constructor rolls the others back.
std::vector<std::optional<Error>> KvBatch::begin(std::optional<KvBatch>& batch,
                                                 std::span<KvSession* const> sessions) {
  std::vector<std::optional<Error>> ended(sessions.size());
  while (true) {
    std::vector<KvSession*> left;
    for (std::size_t i = 0; i < sessions.size(); ++i) {
      if (!ended[i]) left.push_back(sessions[i]);
    }
    if (left.empty()) return ended;
    try {
      batch.emplace(left);
      return ended;
    } catch (const Error& error) {
      const auto at = std::find_if(left.begin(), left.end(),
                                   [](const KvSession* session) { return session->in_step(); });
      if (!is_disk_failure(error) || at == left.end()) throw;
      ended[static_cast<std::size_t>(std::find(sessions.begin(), sessions.end(), *at) -
                                     sessions.begin())] = error;
    }
  }
}

KvBatch::KvBatch(KvSession& session, std::int64_t tokens)
    : sessions_{&session}, pool_(session.pool().get()), step_(*pool_) {
  check(takes(session, tokens), "several tokens that a layer attends to as a run");
  session.require_outside_step();
  require(tokens >= 1 && tokens <= session.decode_room(), "more tokens of a session than fit");
  session.begin(Phase::decode, tokens);
  step_.begin(session.next(tokens), session.policy());
}

bool KvBatch::takes(const KvSession& session, std::int64_t tokens) {
  const KvPlan& plan = session.plan();
  if (tokens > plan.decode_batch) return false;
  if (plan.all_resident()) return true;
  for (int layer = 0; layer < plan.shape.layers; ++layer) {
    if (session.policy().is_dense(layer)) return false;
  }
  return true;
}

void KvBatch::require_fit(std::span<KvSession* const> sessions) {
  const KvPool& pool = pool_of(sessions);
  const auto most = static_cast<std::size_t>(pool.plan().decode_batch);
  require(sessions.size() <= most, "of " + std::to_string(sessions.size()) + " sessions; up to " +
                                       std::to_string(most) + " were planned for");
  const std::set<KvSession*> different(sessions.begin(), sessions.end());
  require(different.size() == sessions.size(), "a session stands in it twice");
  std::vector<BatchToken> tokens;
  for (const KvSession* session : sessions) {
    require(session->pool().get() == &pool, "its sessions must be of one pool");
    require(session->policy() == sessions.front()->policy(), "its sessions must have one policy");
    session->require_step(1);
    tokens.push_back(session->token());
  }
  pool.tables().require_blocks(tokens);
  pool.tables().require_slots(tokens);
}

std::unique_ptr<Recording>& KvBatch::recording() { return pool_->recordings()[step_.kind()]; }

std::vector<std::optional<Error>> KvBatch::end() {
  pool_->queue().synchronize();
  std::vector<std::optional<Error>> outcomes;
  for (KvSession* session : sessions_) {
    try {
      session->commit(KvSession::Written::resident,
                      step_.finish(session->sequence(), true, session->ledger()));
      outcomes.emplace_back();
    } catch (const Error& error) {
      outcomes.emplace_back(error);
    }
  }
  return outcomes;
}

}  // namespace sluice
