// One session's KV cache: a sequence of a pool, its length, its ledger and the policy in force.
//
// Tokens come in steps, by one of three protocols:
//
//   SoloStep   tokens of this session alone: a chunk of a prompt, a correction, known tokens
//   KvPrompt   a whole prompt, layer by layer, under a policy whose prefill chooses tokens
//   KvBatch    a decode step with tokens of several sessions
//
// All three change the session by the same calls:
//
//            begin()            appended()             commit()
//   idle ──────────► in a step ────────────► in a step ─────────► idle, with more tokens
//                        └──────────── roll_back() ─────────────► idle, as before begin()
//
// A session whose step ends in neither way cannot go on: every later call throws.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "offload/step/kv_pool.h"
#include "sluice/batch.h"
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

  // Announces the steps of a prompt of `tokens` tokens, so that room can be made in advance.
  void expect(std::int64_t tokens) { expected_ = length_ + tokens; }
  std::int64_t expected() const { return expected_; }  // length after the announced prompt
  // Throws Error{memory} with nothing changed if there is no room to rewrite the newest `tokens`
  // tokens, which forks may share.
  void require_rewrite(std::int64_t tokens) const {
    pool_->require_room(sequence_, length_ - tokens, length_);
  }
  // Tokens of the next chunk of a longer prompt. If queries list pages, the chunk ends at the end
  // of a PageLists block, counted from position 0, so that blocks are the same for any chunk size.
  std::int64_t prompt_room() const;
  // Most tokens that a decode step takes next.
  std::int64_t decode_room() const;

  // Throws Error{usage} if rows of some tokens are gone, so that the session cannot be saved.
  void require_whole() const;
  // The rows of a page's tokens, see KvPool::page_rows().
  std::vector<RowSpan> page_rows(int layer, std::int64_t page);
  // Tokens of a page that have rows.
  std::int64_t page_tokens(std::int64_t page) const {
    return std::min<std::int64_t>(kPageTokens, length_ - page * kPageTokens);
  }

  // Forgets all tokens, and a step that failed, so that the session goes on empty. Policy and
  // ledger stay. Pages that forks share are not touched.
  void restart();

  // Gives an empty session tokens whose rows are whole pages of a file; see KvPool::attach(). The
  // ledger counts what is read, but no tokens. After an error the session cannot go on.
  void attach(std::int64_t pages, const std::shared_ptr<PageFile>& file);

  // Sets the policy from the next step on. Throws Error{usage} for a policy that was not planned.
  void use(const Policy& policy);
  // Forgets all rows from `length` on. Sums of values are what they were at that length, to the bit
  // if it lies within the last 64 decoded tokens since a step of several began.
  void truncate(std::int64_t length);
  // Forgets the last `tokens` tokens, of the latest step. The ledger counts what they moved, but
  // not them.
  void reject(std::int64_t tokens);

  // The protocols above call the following. Throws Error{internal} inside a step.
  void require_outside_step() const;
  // The same, and throws Error{prompt} if the plan has no room for `tokens` more.
  void require_step(std::int64_t tokens) const;
  // Throws Error{usage} if rows of some tokens are gone, so that pages cannot be listed.
  void require_listed_pages() const;
  // Makes room for the rows of the next `tokens` tokens; KvPool::write()'s result. Throws what
  // require_step() throws, and Error{memory} with nothing changed, unless the pool lost rows of the
  // session while it made room: then the session cannot go on.
  std::vector<std::int32_t> begin(Phase phase, std::int64_t tokens);
  // The same for a token of a step of several sessions, which KvPool::announce_step() was told.
  void begin_announced();
  // The same for a prompt whose layers get their host memory one by one;
  // KvPool::write_by_layers()'s result.
  std::int64_t begin_by_layers(std::int64_t tokens);
  // The same for a prompt whose rows are staged: it takes room layer by layer, for those that stay.
  void begin_staged(std::int64_t tokens, std::int64_t least);
  // Notes that a layer has the rows of all tokens up to `end`.
  void appended(int layer, std::int64_t end) { has_rows_of(layer) = rows(layer) + end - length_; }
  // Notes that a layer of a staged prompt has `rows` rows.
  void kept(int layer, std::int64_t rows) { has_rows_of(layer) = rows; }
  bool has_rows(int layer) const {
    return ends_[static_cast<std::size_t>(layer)] == rows(layer) + step_.tokens;
  }
  // Rows of the step that were written where attention reads: all of them, by a TokenRun, or those
  // of resident pages, by a DecodeStep.
  enum class Written { all, resident };
  // Adds the step's tokens to the session and counts their rows.
  void commit(Written written, StepSelection selection);
  // The same for a prompt whose rows were staged.
  void commit_staged();
  // Gives up the step; the ledger counts what moved, but no tokens. Wait for work that writes rows.
  void roll_back();

  // The tokens of the latest step.
  const StepRange& step() const { return step_; }
  // The next token, or one of those behind it, as a decode step has it; and the next `tokens`.
  BatchToken token(std::int64_t ahead = 0) const {
    return {sequence_, static_cast<std::int32_t>(length_ + ahead)};
  }
  std::vector<BatchToken> next(std::int64_t tokens) const;
  std::int32_t sequence() const { return sequence_; }
  // Stays true if a step ended neither by commit() nor by roll_back().
  bool in_step() const { return in_step_; }
  std::int64_t length() const { return length_; }
  // Tokens of whole blocks: of this sequence alone, which would be free if it ended; and those that
  // are free in the pool.
  std::int64_t own_tokens() const {
    return pool_->tokens_of(pool_->tables().own_blocks(sequence_));
  }
  std::int64_t free_tokens() const {
    return pool_->tokens_of(pool_->tables().block_slots().free());
  }
  // Rows per KV head that a layer has of the session's tokens; fewer than tokens after an eviction.
  std::int64_t rows(int layer) const {
    return pool_->tables().rows(sequence_, length_, pool_->set_of(layer));
  }
  const KvPlan& plan() const { return pool_->plan(); }
  const Policy& policy() const { return policy_; }
  const Ledger& ledger() const { return ledger_; }
  Ledger& ledger() { return ledger_; }  // for a step, which counts what it moves
  // Selection of the last step; empty if every layer was dense.
  const StepSelection& selection() const { return selection_; }
  // Share of pages that prompts' queries attended to, in layers that list pages; 1 if there were no
  // such layers.
  double prefill_share() const;
  void count_listed(std::uint64_t listed, std::uint64_t all) {
    listed_pages_ += listed;
    all_pages_ += all;
  }
  // True: chunks of prompts attend to listed pages only, if the policy says so. False: to all
  // pages.
  void list_pages(bool lists) { lists_pages_ = lists; }
  bool lists_pages() const { return lists_pages_; }
  const std::shared_ptr<KvPool>& pool() const { return pool_; }

 private:
  static constexpr std::int32_t kNone = -1;
  struct NoSequence {};

  // Without a sequence yet.
  KvSession(std::shared_ptr<KvPool> pool, NoSequence none);
  void require_nothing_evicted(const std::string& why) const;
  // Ends a step whose rows are counted.
  void end(StepSelection selection);
  void set_ends();
  std::int64_t& has_rows_of(int layer) { return ends_[static_cast<std::size_t>(layer)]; }
  // Begins a step that require_step() has allowed, for whose rows `write` makes room.
  auto begin_with(Phase phase, std::int64_t tokens, const auto& write);
  std::vector<std::int32_t> write(Phase phase, std::int64_t tokens);
  // Counts a layer's new rows: `near` where attention reads, `all` written to host memory.
  void record_rows(int layer, std::int64_t near, std::int64_t all);

  std::shared_ptr<KvPool> pool_;
  std::int32_t sequence_ = kNone;
  Policy policy_;
  Ledger ledger_;
  std::int64_t length_ = 0;
  StepRange step_;
  bool in_step_ = false;
  std::vector<std::int64_t> ends_;  // by layer: rows that were written, those of the step included
  std::int64_t expected_ = 0;
  bool lists_pages_ = true;
  std::uint64_t listed_pages_ = 0;  // see prefill_share()
  std::uint64_t all_pages_ = 0;
  StepSelection selection_;
};

// Throws Error{unsupported} if the backend has no attention for rows of this shape.
void require_supported(const BackendInfo& info, const KvShape& shape);

// Memory use by a backend's accounts.
MemoryUse memory_use(Backend& backend);

}  // namespace sluice
