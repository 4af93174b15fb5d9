// One session's KV cache: steps, length, and the ledger around a KvStore.
#pragma once

#include <memory>

#include "offload/kv_store.h"

namespace sluice {

class KvSession {
 public:
  KvSession(Backend& backend, const KvPlan& plan);

  // See KvCache for the protocol of a step.
  void begin_step(Phase phase, std::int64_t tokens);
  void append(int layer, const NewRows& rows);
  void attend(int layer, const Queries& queries);
  void end_step();

  std::int64_t length() const { return length_; }
  const KvPlan& plan() const { return plan_; }
  const Ledger& ledger() const { return ledger_; }

 private:
  KvPlan plan_;
  std::unique_ptr<KvStore> store_;
  Ledger ledger_;
  StepRange step_;
  bool in_step_ = false;
  std::int64_t length_ = 0;
};

// What a backend's accounts say.
MemoryUse memory_use(Backend& backend);

}  // namespace sluice
