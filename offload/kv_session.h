// One session's KV cache: steps, length, the ledger around a KvStore, and the policy in force.
#pragma once

#include <memory>
#include <span>

#include "offload/important_tokens.h"
#include "offload/kv_store.h"
#include "offload/sparse_attention.h"
#include "sluice/policy.h"
#include "sluice/selection.h"

namespace sluice {

class KvSession {
 public:
  // The shape must be supported. `policies`: those that use() may be called with; the first is in
  // force. None: dense.
  KvSession(Backend& backend, const KvPlan& plan, std::span<const Policy> policies = {});

  // See KvCache for the protocol of a step.
  void begin_step(Phase phase, std::int64_t tokens);
  void append(int layer, const NewRows& rows);
  void attend(int layer, const Queries& queries);
  // Throws Error{numeric} if a selection met a NaN or an infinity.
  void end_step();

  // A prompt of any length, layer by layer: between begin_prompt and end_prompt, every layer takes
  // all pieces of up to plan().chunk tokens, in order and twice. First take_piece, append and
  // collect for each, then choose, then take_piece and attend for each. For policies whose prefill
  // is sparse.
  void begin_prompt(std::int64_t tokens);
  void take_piece(std::int64_t first,
                  std::int64_t tokens);  // `first` counts from the prompt's start
  void collect(const Queries& queries);
  void choose(int layer);
  void end_prompt();

  // From the next step on. Throws Error{usage} for a policy that was not planned for.
  void use(const Policy& policy);
  // Forgets all rows from `length` on.
  void truncate(std::int64_t length);

  std::int64_t length() const { return length_; }
  const KvPlan& plan() const { return plan_; }
  const Policy& policy() const { return policy_; }
  const Ledger& ledger() const { return ledger_; }
  // Of the last step; empty if every layer was dense.
  const StepSelection& selection() const { return selection_; }

 private:
  bool attends_densely(int layer) const {
    return phase_ != Phase::decode || (policy_.is_dense(layer) && eligible(layer).host == nullptr);
  }
  Eligible eligible(int layer) const {
    return important_ != nullptr ? important_->eligible(layer) : Eligible();
  }
  void require_room(std::int64_t tokens) const;
  void require_outside_step() const;

  Backend* backend_;
  KvPlan plan_;
  std::vector<Policy> planned_;
  Policy policy_;
  std::unique_ptr<KvStore> store_;
  std::unique_ptr<SparseAttention> sparse_;     // null if every policy is dense
  std::unique_ptr<ImportantTokens> important_;  // null if every prefill is
  StepRange prompt_;
  bool in_prompt_ = false;
  Ledger ledger_;
  StepRange step_;
  Phase phase_ = Phase::prefill;
  bool in_step_ = false;
  bool rewound_ = false;
  std::int64_t length_ = 0;
  StepSelection selection_;
};

// Throws Error{unsupported} if the backend has no attention for such rows.
void require_supported(const BackendInfo& info, const KvShape& shape);

// What a backend's accounts say.
MemoryUse memory_use(Backend& backend);

}  // namespace sluice
