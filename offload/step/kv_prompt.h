// A whole prompt of one session, layer by layer, under a policy whose prefill chooses tokens: a
// layer's choice needs the queries and keys of all of them.
//
//   for each layer:  ready
//                    for each chunk:  take, append, collect
//                    choose
//                    for each chunk:  take, attend
//   end, or cancel
#pragma once

#include <cstdint>

#include "offload/step/kv_session.h"
#include "offload/step/token_run.h"

namespace sluice {

class KvPrompt {
 public:
  // Throws Error{unsupported} if the rows of the sequence are not contiguous, unless they are
  // staged, and what KvSession::begin_by_layers() throws; nothing has changed then.
  KvPrompt(KvSession& session, std::int64_t tokens);

  // Commits host memory for a layer's rows, as its first append() would do. Here Error{memory}
  // leaves the prompt between two layers.
  void ready(int layer) {
    if (!stages()) pool_->ready_host_rows(layer, host_rows_);
  }
  // The chunk that the next calls are for: up to plan().chunk tokens, the first of them `first`
  // tokens after the prompt's start.
  void take(std::int64_t first, std::int64_t tokens);
  void append(int layer, const NewRows& rows);
  void collect(const Queries& queries);
  // Staged rows that stay are written then. Throws Error{memory} if there is no room for them.
  void choose(int layer);
  void attend(int layer, const Queries& queries);
  void end();
  // The session has the tokens that it had before.
  void cancel();

 private:
  bool stages() const { return pool_->plan().ragged; }
  std::int64_t begin(std::int64_t tokens);
  void write_staged(int layer, const SparsePrefill& how);

  KvSession* session_;
  KvPool* pool_;
  StepRange prompt_;
  StepRange chunk_;
  int layer_ = -1;          // that the prompt is at
  std::int64_t host_rows_;  // see KvPool::write_by_layers(); 0 if rows are staged
  TokenRun run_;
};

}  // namespace sluice
