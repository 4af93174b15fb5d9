// A decode step through the cache: one token of each of several sequences, or a few known tokens of
// one. Its work depends on the number of tokens, their capacity and the policy, never on positions:
// see sluice/batch.h.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "offload/step/kv_pool.h"
#include "offload/step/token_run.h"
#include "offload/tiers/kv_rows.h"
#include "sluice/errors.h"
#include "sluice/selection.h"

namespace sluice {

class DecodeStep {
 public:
  explicit DecodeStep(KvPool& pool) : pool_(&pool) {}

  // Begins a step under one of the pool's policies; KvPool::write() has made room for the tokens.
  // Copies the tokens to where the backend reads them before any work of the step is issued,
  // because its first kernel may begin early and reads them.
  void begin(std::span<const BatchToken> tokens, const Policy& policy);

  // Steps of the same kind issue the same work.
  KvPool::StepKind kind() const;
  // How early `layer` begins; see choose_early().
  Early early(int layer) const;
  // For a layer that begins early: chooses its rows and begins to bring them, see
  // SparseAttention::choose_early(). Of the queries only q is used. Call before the layer's
  // append(): if Early::layer is in force, before that of the layer before, else after its
  // attend().
  void choose_early(int layer, const Queries& queries);
  // True if it chooses them by queries, false if an earlier layer's selection tells.
  bool selects(int layer) const { return policy_->selects(layer); }
  void append(int layer, const NewRows& rows);
  void attend(int layer, const Queries& queries);
  // Returns true if a layer attends to everything, so that its tokens can go through a TokenRun.
  bool is_dense(int layer) const;
  // Selects for the followers of such a dense layer, if it has any.
  void select(int layer, const Queries& queries);
  // Copies to the host what finish() reads; issued last.
  void issue_report();

  // Reports and counts the selections of one sequence's tokens; call after waiting for the backend.
  // Dense layers are counted with `counts_dense`: not if their tokens went through a TokenRun.
  // Throws what reading the sequence's rows from disk threw in attend().
  // Throws Error{numeric} naming layer and KV head if a key, a query or an estimate was NaN or
  // infinite.
  StepSelection finish(std::int32_t sequence, bool counts_dense, Ledger& ledger) const;
  // Returns true if finish() reads results of the backend, which must then be waited for.
  bool reports() const { return pool_->sparse() != nullptr || beside_ != nullptr; }

  // False if the host has to take part between the step's operations, so that it cannot be
  // recorded: a dense layer's rows stream from disk.
  bool is_recordable() const { return runs_.empty(); }

  // The tokens where the backend reads them: as their sequences have them, and as a layer does,
  // where positions are those of rows.
  TokenBatch batch() const;
  TokenBatch batch(int layer) const;

 private:
  void place_tokens();
  // The host's copy of batch(layer).
  std::span<const BatchToken> tokens(int layer) const;
  // Host attention, or null if the host does not attend in this step.
  HostAttention* find_beside() const;
  void record_dense(int layer, std::size_t number, Ledger& ledger) const;
  void record_streamed(int layer, std::size_t number, Ledger& ledger) const;
  // Runs of one token each, if dense layers have rows on disk.
  void begin_runs();
  void attend_runs(int layer, const Queries& queries);
  void require_runs(std::int32_t sequence) const;
  // The policy as this layer has it.
  const Policy& policy(int layer) const;

  KvPool* pool_;
  std::vector<BatchToken> tokens_;
  std::vector<BatchToken> layer_tokens_;  // [layers, decode_batch] if tables are ragged, else empty
  const Policy* policy_ = nullptr;
  std::vector<Policy> by_layer_;  // of *policy_, if layers differ
  std::int64_t capacity_ = 0;
  HostAttention* beside_ = nullptr;
  std::vector<TokenRun> runs_;                  // by token, see begin_runs()
  std::vector<std::optional<Error>> failures_;  // by token of runs_: rows that could not be read
};

}  // namespace sluice
