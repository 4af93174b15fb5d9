#include "offload/kv_session.h"

#include <string>

#include "lib/check.h"
#include "sluice/errors.h"

namespace sluice {

KvSession::KvSession(Backend& backend, const KvPlan& plan)
    : plan_(plan),
      store_(plan.in_place ? make_in_place_store(backend, plan) : make_tiered_store(backend, plan)),
      ledger_(plan.shape.layers) {}

void KvSession::begin_step(Phase phase, std::int64_t tokens) {
  if (in_step_) {
    throw Error(ErrorCode::internal,
                "the session stopped inside a step and cannot go on; start a new one");
  }
  if (tokens < 1 || tokens > plan_.chunk) {
    throw Error(ErrorCode::usage, "a step must have 1 to " + std::to_string(plan_.chunk) +
                                      " tokens, not " + std::to_string(tokens));
  }
  if (tokens > plan_.context - length_) {
    throw Error(ErrorCode::prompt, "the session is planned for " + std::to_string(plan_.context) +
                                       " tokens and cannot take " + std::to_string(tokens) +
                                       " more after " + std::to_string(length_) +
                                       "; raise --context");
  }
  step_ = {length_, tokens};
  in_step_ = true;
  store_->begin(step_);
  ledger_.begin_step(phase, static_cast<int>(tokens));
}

void KvSession::append(int layer, const NewRows& rows) {
  check(in_step_ && layer >= 0 && layer < plan_.shape.layers, "append outside a step");
  store_->append(layer, step_, rows, ledger_);
}

void KvSession::attend(int layer, const Queries& queries) {
  check(in_step_ && layer >= 0 && layer < plan_.shape.layers, "attend outside a step");
  store_->attend(layer, step_, queries, ledger_);
}

void KvSession::end_step() {
  check(in_step_, "end_step outside a step");
  length_ = step_.end();
  in_step_ = false;
}

MemoryUse memory_use(Backend& backend) {
  const MemoryAccount& device = backend.account(Tier::device);
  const MemoryAccount& host = backend.account(Tier::host);
  return {device.used(), device.peak(), host.used(), host.peak()};
}

}  // namespace sluice
