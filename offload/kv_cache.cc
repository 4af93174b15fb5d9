#include "sluice/kv_cache.h"

#include "offload/backends.h"
#include "offload/kv_session.h"
#include "offload/planner.h"

namespace sluice {

struct KvCache::Impl {
  std::unique_ptr<Backend> backend;
  KvSession session;
  Buffer lse;  // [chunk, query_heads]

  static KvPlan plan(const KvConfig& config, const BackendInfo& info) {
    KvRequest request;
    request.shape = config.shape;
    request.context = config.context;
    request.chunk = config.chunk;
    request.policies = {&config.policy, 1};
    request.scorers = &config.scorers;
    request.processor = info.processor;
    request.device_cap = config.device_memory;
    request.attends_host_rows = info.attends_host_rows;
    request.logits = info.logits;
    return plan_kv(request);
  }

  Impl(const KvConfig& config, std::unique_ptr<Backend> owned)
      : backend(std::move(owned)),
        session(*backend, plan(config, backend->info()), std::span(&config.policy, 1),
                config.scorers),
        lse(backend->allocate(backend->info().compute_tier,
                              static_cast<std::size_t>(session.plan().chunk) *
                                  static_cast<std::size_t>(config.shape.query_heads) *
                                  sizeof(float))) {}
};

KvCache::KvCache(const KvConfig& config) {
  BackendOptions options;
  options.threads = config.threads;
  options.device_memory = config.device_memory;
  options.host_memory = config.host_memory;
  impl_ = std::make_unique<Impl>(config, make_backend(options));
}

KvCache::KvCache(KvCache&&) noexcept = default;
KvCache& KvCache::operator=(KvCache&&) noexcept = default;
KvCache::~KvCache() = default;

void KvCache::begin_step(Phase phase, std::int64_t tokens) {
  impl_->session.begin_step(phase, tokens);
}

void KvCache::append(int layer, const float* keys, const float* values) {
  const KvShape& shape = plan().shape;
  impl_->session.append(layer, {keys, values, std::int64_t{shape.kv_heads} * shape.head_dim});
}

void KvCache::attend(int layer, const float* queries, float* out) {
  const KvShape& shape = plan().shape;
  impl_->session.attend(
      layer, {queries, std::int64_t{shape.query_heads} * shape.head_dim, out, impl_->lse.floats()});
  impl_->backend->synchronize();
}

void KvCache::end_step() { impl_->session.end_step(); }

std::int64_t KvCache::length() const { return impl_->session.length(); }
const KvPlan& KvCache::plan() const { return impl_->session.plan(); }
const Ledger& KvCache::ledger() const { return impl_->session.ledger(); }
const StepSelection& KvCache::selection() const { return impl_->session.selection(); }
MemoryUse KvCache::memory() const { return memory_use(*impl_->backend); }

}  // namespace sluice
