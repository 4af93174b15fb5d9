// A decode step: one token of each of several sequences, or a few known tokens of one, through the
// cache. What it issues depends on the number of tokens, on their capacity and on the policy, never
// on positions: see lib/batch.h.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "offload/step/kv_pool.h"
#include "offload/tiers/kv_rows.h"
#include "sluice/selection.h"

namespace sluice {

class DecodeStep {
 public:
  explicit DecodeStep(KvPool& pool) : pool_(&pool) {}

  // Under one of the pool's policies. Room was made for the tokens by KvPool::write(). Brings the
  // tokens where the backend reads them, ahead of what the step issues: its first kernel may begin
  // early, and reads them.
  void begin(std::span<const BatchToken> tokens, const Policy& policy);

  // Steps of the same kind issue the same work.
  KvPool::StepKind kind() const;
  void append(int layer, const NewRows& rows);
  void attend(int layer, const Queries& queries);
  // Whether a layer attends to everything, and its tokens can go through a TokenRun instead.
  bool is_dense(int layer) const;
  // What such a layer has to do besides, if others follow it.
  void select(int layer, const Queries& queries);
  // Issued last: asks for what finish() reads.
  void issue_report();

  // What the tokens of one sequence did; once the step is done and the backend was waited for.
  // Layers that attended densely are counted unless their tokens went through a TokenRun. Throws
  // Error{numeric} naming layer and KV head if a key, a query or an estimate was NaN or infinite.
  StepSelection finish(std::int32_t sequence, bool counts_dense, Ledger& ledger) const;
  // Whether finish() reads what only the backend knows, so that it must be waited for.
  bool reports() const { return pool_->sparse() != nullptr || beside_ != nullptr; }

  // The tokens where the backend reads them.
  TokenBatch batch() const;

 private:
  // Some prompt's tokens were dropped for good: nothing attends to them again, dense layers either.
  bool evicts() const;
  // The host's attention, if it is to attend in this step.
  HostAttention* find_beside() const;
  void record_dense(int layer, std::size_t number, Ledger& ledger) const;
  // As this layer has it.
  const Policy& policy(int layer) const;

  KvPool* pool_;
  std::vector<BatchToken> tokens_;
  const Policy* policy_ = nullptr;
  std::vector<Policy> by_layer_;  // of *policy_, if layers differ
  std::int64_t capacity_ = 0;
  HostAttention* beside_ = nullptr;
};

}  // namespace sluice
