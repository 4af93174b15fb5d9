#include <algorithm>
#include <string>
#include <utility>

#include "offload/kv_cache/kv_cache_impl.h"

namespace sluice {

KvSequence::Impl::Impl(std::shared_ptr<KvCache::Impl> owner, KvSession session)
    : cache(std::move(owner)), kv(std::move(session)) {}

KvSequence::Impl::~Impl() {
  const std::lock_guard lock(cache->mutex);
  if (kv && cache->stepping) cache->leaving.push_back(std::move(*kv));
  kv.reset();
}

const KvSession& KvSequence::Impl::session() const {
  if (!kv) throw Error(ErrorCode::internal, "a sequence that could not be reset");
  return *kv;
}

KvSession& KvSequence::Impl::usable() {
  session();
  if (!failure) return *kv;
  throw Error(ErrorCode::internal,
              std::string("the sequence has failed and can only be reset: ") + failure->what());
}

KvSequence::KvSequence(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
KvSequence::KvSequence(KvSequence&&) noexcept = default;
KvSequence& KvSequence::operator=(KvSequence&&) noexcept = default;
KvSequence::~KvSequence() = default;

KvSequence::Impl& KvSequence::impl() const {
  if (impl_ == nullptr) throw Error(ErrorCode::usage, "a sequence that was moved from");
  return *impl_;
}

KvStep KvSequence::begin_step(Phase phase, std::int64_t tokens) {
  if (phase != Phase::prefill && phase != Phase::decode && phase != Phase::correction) {
    throw Error(ErrorCode::usage, "a step's phase must be prefill, decode or correction");
  }
  return KvStep::Impl::begin(impl().cache, {impl_}, phase, tokens);
}

std::int64_t KvSequence::decode_room() const {
  const KvSession& session = impl().session();
  return std::min(session.decode_room(), session.plan().context - session.length());
}

KvSequence KvSequence::fork() {
  const auto lock = impl().cache->between_steps();
  return KvSequence(std::make_shared<Impl>(impl_->cache, impl_->usable().fork()));
}

void KvSequence::use(const Policy& policy) {
  const auto lock = impl().cache->between_steps();
  impl_->usable().use(policy);
}

void KvSequence::truncate(std::int64_t length) {
  const auto lock = impl().cache->between_steps();
  KvSession& session = impl_->usable();
  if (length < 0 || length > session.length()) {
    throw Error(ErrorCode::usage, "a sequence of " + std::to_string(session.length()) +
                                      " tokens cannot be cut to " + std::to_string(length));
  }
  session.truncate(length);
}

void KvSequence::reset() {
  const auto lock = impl().cache->between_steps();
  const std::shared_ptr<KvPool> pool = impl_->cache->pool;
  const Policy policy = impl_->kv ? impl_->kv->policy() : pool->policies().front();
  // Closed first, because the new sequence needs its place.
  impl_->kv.reset();
  impl_->kv.emplace(pool);
  impl_->kv->use(policy);
  impl_->failure.reset();
}

std::int64_t KvSequence::length() const { return impl().session().length(); }
const Policy& KvSequence::policy() const { return impl().session().policy(); }
const Ledger& KvSequence::ledger() const { return impl().session().ledger(); }
const StepSelection& KvSequence::selection() const { return impl().session().selection(); }
const std::optional<Error>& KvSequence::failure() const { return impl().failure; }

}  // namespace sluice
