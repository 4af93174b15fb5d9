// One session's KV cache: a sequence of a pool, its steps, length and ledger, and the policy in
// force.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "offload/step/decode_step.h"
#include "offload/step/kv_pool.h"
#include "offload/step/token_run.h"
#include "sluice/policy.h"
#include "sluice/selection.h"

namespace sluice {

class KvSession {
 public:
  // A new sequence. Throws Error{memory} if the pool has as many as were planned for. The first of
  // the pool's policies is in force.
  explicit KvSession(const std::shared_ptr<KvPool>& pool);
  KvSession(KvSession&&) noexcept = default;
  KvSession& operator=(KvSession&& other) noexcept;
  ~KvSession();

  // A session with the same tokens and policy, which shares what it does not write. Its ledger
  // begins anew. Throws Error{memory} as the constructor does.
  KvSession fork();

  // See KvCache for the protocol of a step. Calls that break it throw Error{usage} and change
  // nothing; an error in the work of a step leaves the session unusable, and later calls throw.
  void begin_step(Phase phase, std::int64_t tokens);
  // Announces the steps of a prompt of `tokens` tokens, so that room can be made in advance.
  void expect(std::int64_t tokens) { expected_ = length_ + tokens; }
  // In decode steps, see DecodeStep; none in others.
  Early early(int layer) const { return is_run_ ? Early::none : decode_->early(layer); }
  bool selects(int layer) const { return decode_->selects(layer); }
  void choose_early(int layer, const Queries& queries);
  void append(int layer, const NewRows& rows);
  void attend(int layer, const Queries& queries);
  // Throws Error{numeric} if a selection met a NaN or an infinity.
  void end_step();
  // Throws Error{memory} with nothing changed if there is no room to rewrite the newest `tokens`
  // tokens, which forks may share.
  void require_rewrite(std::int64_t tokens) const {
    pool_->require_room(sequence_, length_ - tokens, length_);
  }
  // Tokens of the next chunk of a longer prompt. If queries list pages, the chunk ends at the end
  // of a PageLists block, counted from position 0, so that blocks are the same for any chunk size.
  std::int64_t prompt_room() const;
  // Most tokens that begin_step(Phase::decode) takes next.
  std::int64_t decode_room() const;

  // A prompt of any length, layer by layer, for policies with sparse prefill: between begin_prompt
  // and end_prompt, every layer takes all chunks of up to plan().chunk tokens, in order and twice:
  // first take_piece, append and collect for each, then choose, then take_piece and attend for
  // each. begin_prompt throws Error{unsupported} with nothing changed if the rows of the sequence
  // are not contiguous.
  void begin_prompt(std::int64_t tokens);
  void take_piece(std::int64_t first,
                  std::int64_t tokens);  // `first` counts from the prompt's start
  // Commits host memory for a layer's rows, as its first append would do. Here Error{memory} leaves
  // the prompt between two layers.
  void ready_layer(int layer);
  void collect(const Queries& queries);
  void choose(int layer);
  void end_prompt();
  // Gives up a prompt: the session has the tokens that it had before.
  void cancel_prompt();

  // Throws Error{usage} if rows of some tokens are gone, so that the session cannot be saved.
  void require_whole() const;
  // The rows of a page's tokens, see KvPool::page_rows().
  std::vector<RowSpan> page_rows(int layer, std::int64_t page);
  // Tokens of a page that have rows.
  std::int64_t page_tokens(std::int64_t page) const {
    return std::min<std::int64_t>(kPageTokens, length_ - page * kPageTokens);
  }
  // Ends a step that appended rows which were computed before: the ledger counts what they moved,
  // but no tokens.
  void end_restored_step();

  // Sets the policy from the next step on. Throws Error{usage} for a policy that was not planned.
  void use(const Policy& policy);
  // Forgets all rows from `length` on. Sums of values are what they were at that length, to the bit
  // if it lies within the last 64 decoded tokens since a step of several began.
  void truncate(std::int64_t length);
  // Forgets the last `tokens` tokens, of the latest step. The ledger counts what they moved, but
  // not them.
  void reject(std::int64_t tokens);
  // True if KvBatch takes this many tokens, because each reads only rows that it selects or that
  // are near. Rows that are not would be fetched for every token: begin_step() fetches them once.
  bool takes_batch(std::int64_t tokens) const;

  // True between begin_step and end_step; stays true if an error came between.
  bool in_step() const { return in_step_; }
  std::int64_t length() const { return length_; }
  // Blocks of this sequence alone, which would be free if it ended; free blocks of the pool.
  std::int64_t own_blocks() const { return pool_->tables().own_blocks(sequence_); }
  std::int64_t free_blocks() const { return pool_->tables().block_slots().free(); }
  const KvPlan& plan() const { return pool_->plan(); }
  const Policy& policy() const { return policy_; }
  const Ledger& ledger() const { return ledger_; }
  // Selection of the last step; empty if every layer was dense.
  const StepSelection& selection() const { return selection_; }
  // Share of pages that prompts' queries attended to, in layers that list pages; 1 if there were no
  // such layers.
  double prefill_share() const;
  // True: chunks of prompts attend to listed pages only, if the policy says so. False: to all
  // pages.
  void list_pages(bool lists) { lists_pages_ = lists; }
  const std::shared_ptr<KvPool>& pool() const { return pool_; }

 private:
  friend class KvBatch;

  static constexpr std::int32_t kNone = -1;
  struct NoSequence {};

  // Without a sequence yet.
  KvSession(std::shared_ptr<KvPool> pool, NoSequence none);
  void require_room(std::int64_t tokens) const;
  void require_outside_step() const;
  void require_layer(int layer) const;
  void require_nothing_evicted() const;
  // The next `tokens` tokens, as a decode step has them.
  std::vector<BatchToken> batch_tokens(std::int64_t tokens) const;
  // Takes the rows of a step from `length_` on; KvPool::write()'s result.
  std::vector<std::int32_t> begin_rows(Phase phase, std::int64_t tokens);
  // Gives back the blocks of begin_rows(), before anything was written.
  void cancel_rows();
  void give_up_rows();
  // Counts the step's new rows and adds them to the session's length.
  void end_rows();
  double listed_share(int layer) const;  // 1: all pages
  void record_rows(int layer, const Traffic& near, const Traffic& all);
  void record_listed_hits();
  // True if a layer attends densely to several known tokens, which it then takes as a run.
  bool attends_run(int layer) const;

  std::shared_ptr<KvPool> pool_;
  std::int32_t sequence_ = kNone;
  Policy policy_;
  Ledger ledger_;
  StepRange step_;
  Phase phase_ = Phase::prefill;
  bool in_step_ = false;
  bool is_run_ = false;         // the step's tokens are appended by run_, else by decode_
  int appended_ = -1;           // the layer whose rows came last
  std::vector<bool> has_rows_;  // of the step, by layer
  StepRange prompt_;
  bool in_prompt_ = false;
  std::int64_t prompt_host_rows_ =
      0;  // rows of the prompt's host memory, see KvPool::write_by_layers()
  std::vector<std::int64_t> prompt_ends_;  // [layers], end of the prompt's rows that were appended
  std::int64_t length_ = 0;
  std::int64_t expected_ = 0;  // length after the announced prompt
  bool lists_pages_ = true;
  std::uint64_t listed_pages_ = 0;  // see prefill_share()
  std::uint64_t all_pages_ = 0;
  StepSelection selection_;
  std::unique_ptr<TokenRun> run_;
  std::unique_ptr<DecodeStep> decode_;
};

// Throws Error{unsupported} if the backend has no attention for rows of this shape.
void require_supported(const BackendInfo& info, const KvShape& shape);

// Memory use by a backend's accounts.
MemoryUse memory_use(Backend& backend);

}  // namespace sluice
