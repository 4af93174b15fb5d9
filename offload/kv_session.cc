#include "offload/kv_session.h"

#include <algorithm>
#include <string>

#include "lib/check.h"
#include "sluice/errors.h"

namespace sluice {

void require_supported(const BackendInfo& info, const KvShape& shape) {
  if (shape.dtype == DType::f32 && !info.f32_rows) {
    throw Error(ErrorCode::unsupported,
                "device " + info.name + " keeps rows in bf16 or f16, not f32; choose --kv-dtype");
  }
  const std::vector<int>& dims = info.head_dims;
  if (dims.empty() || std::find(dims.begin(), dims.end(), shape.head_dim) != dims.end()) return;
  std::string known;
  for (const int d : dims) known += (known.empty() ? "" : ", ") + std::to_string(d);
  throw Error(ErrorCode::unsupported, "device " + info.name + " has no attention for head_dim " +
                                          std::to_string(shape.head_dim) + "; it has " + known);
}

KvSession::KvSession(Backend& backend, const KvPlan& plan, std::span<const Policy> policies)
    : backend_(&backend),
      plan_(plan),
      planned_(policies.begin(), policies.end()),
      store_(plan.in_place ? make_in_place_store(backend, plan) : make_tiered_store(backend, plan)),
      ledger_(plan.shape.layers) {
  if (planned_.empty()) planned_.emplace_back();
  policy_ = planned_.front();
  const IndexLayout layout =
      plan_index(plan.shape, plan.context, plan.decode_batch, planned_, backend.info().logits);
  const Tier tier = plan.in_place ? Tier::host : Tier::device;
  if (layout.selects()) sparse_ = std::make_unique<SparseAttention>(backend, layout, tier);
  if (layout.zipvl) {
    important_ = std::make_unique<ImportantTokens>(backend, plan.shape, plan.context, tier);
  }
}

void KvSession::require_outside_step() const {
  if (!in_step_) return;
  throw Error(ErrorCode::internal,
              "the session stopped inside a step and cannot go on; start a new one");
}

void KvSession::require_room(std::int64_t tokens) const {
  if (tokens <= plan_.context - length_) return;
  throw Error(ErrorCode::prompt, "the session is planned for " + std::to_string(plan_.context) +
                                     " tokens and cannot take " + std::to_string(tokens) +
                                     " more after " + std::to_string(length_) +
                                     "; raise --context");
}

void KvSession::begin_step(Phase phase, std::int64_t tokens) {
  require_outside_step();
  const std::int64_t most = phase == Phase::decode && sparse_ != nullptr
                                ? std::min(plan_.chunk, plan_.decode_batch)
                                : plan_.chunk;
  if (tokens < 1 || tokens > most) {
    throw Error(ErrorCode::usage, "a step must have 1 to " + std::to_string(most) +
                                      " tokens, not " + std::to_string(tokens));
  }
  require_room(tokens);
  step_ = {length_, tokens};
  phase_ = phase;
  in_step_ = true;
  store_->begin(step_);
  ledger_.begin_step(phase, static_cast<int>(tokens));
  if (rewound_) store_->rewind(length_, ledger_);
  rewound_ = false;
  if (sparse_ != nullptr && phase == Phase::decode) sparse_->begin(step_);
}

void KvSession::append(int layer, const NewRows& rows) {
  check(in_step_ && layer >= 0 && layer < plan_.shape.layers, "append outside a step");
  store_->append(layer, step_, rows, ledger_);
  if (sparse_ != nullptr) sparse_->append(layer, step_, *store_, attends_densely(layer));
}

void KvSession::attend(int layer, const Queries& queries) {
  check(in_step_ && layer >= 0 && layer < plan_.shape.layers, "attend outside a step");
  if (in_prompt_) {
    important_->attend(layer, policy_.prefill, step_, queries, *store_, ledger_);
  } else if (attends_densely(layer)) {
    store_->attend(layer, step_, queries, ledger_);
  } else {
    sparse_->attend(policy_, layer, step_, queries, *store_, eligible(layer));
  }
}

void KvSession::end_step() {
  check(in_step_, "end_step outside a step");
  selection_.clear();
  if (sparse_ != nullptr && phase_ == Phase::decode) {
    selection_ = sparse_->finish(step_, *store_, ledger_);
  }
  length_ = step_.end();
  in_step_ = false;
}

void KvSession::begin_prompt(std::int64_t tokens) {
  require_outside_step();
  check(important_ != nullptr && policy_.prefill.tau > 0.0, "this policy's prefill is dense");
  require_room(tokens);
  prompt_ = {length_, tokens};
  phase_ = Phase::prefill;
  in_step_ = in_prompt_ = true;
  ledger_.begin_step(phase_, static_cast<int>(tokens));
  if (rewound_) store_->rewind(length_, ledger_);
  rewound_ = false;
  important_->begin(prompt_);
}

void KvSession::take_piece(std::int64_t first, std::int64_t tokens) {
  check(in_prompt_ && first + tokens <= prompt_.tokens && tokens <= plan_.chunk, "bad piece");
  step_ = {prompt_.first + first, tokens};
  store_->begin(step_);
}

void KvSession::collect(const Queries& queries) { important_->collect(step_, queries); }

void KvSession::choose(int layer) {
  SparsePrefill how = policy_.prefill;
  const std::vector<int>& dense = policy_.dense_layers;
  if (std::find(dense.begin(), dense.end(), layer) != dense.end()) how.tau = 1.0;
  important_->choose(layer, how, *store_);
}

void KvSession::end_prompt() {
  check(in_prompt_, "end_prompt outside a prompt");
  backend_->synchronize();
  selection_.clear();
  length_ = prompt_.end();
  in_step_ = in_prompt_ = false;
}

void KvSession::use(const Policy& policy) {
  require_outside_step();
  if (std::find(planned_.begin(), planned_.end(), policy) == planned_.end()) {
    throw Error(ErrorCode::usage,
                "the session was not planned for the policy '" + to_string(policy) + "'");
  }
  policy_ = policy;
}

void KvSession::truncate(std::int64_t length) {
  require_outside_step();
  check(length >= 0 && length <= length_, "truncate to more than there is");
  if (length == length_) return;
  if (sparse_ != nullptr) sparse_->forget(length, length_, *store_);
  if (important_ != nullptr) important_->rewind(length);
  length_ = length;
  rewound_ = true;
}

MemoryUse memory_use(Backend& backend) {
  const MemoryAccount& device = backend.account(Tier::device);
  const MemoryAccount& host = backend.account(Tier::host);
  return {device.used(), device.peak(), host.used(), host.peak()};
}

}  // namespace sluice
