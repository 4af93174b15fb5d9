// One choice of a request: its tokens, its session while it runs, and what it draws.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/answer_text.h"
#include "engine/batch/meter.h"
#include "engine/batch/prefix.h"
#include "engine/batch/stream_state.h"
#include "engine/speculation.h"
#include "sluice/batcher.h"
#include "sluice/engine.h"
#include "sluice/errors.h"
#include "sluice/sampler.h"

namespace sluice::batch {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// What ends requests where an allocation failed. Made once, because making it allocates.
const Error& no_memory();

// Tokens that each choice of a request may have in the KV cache: the last is only drawn.
inline std::int64_t most_tokens(const Request& request) {
  return std::ssize(request.prompt) + std::max(request.sampling.max_tokens, 1) - 1;
}

// A request that was accepted.
struct Job {
  std::uint64_t id = 0;
  Request request;
  Policy policy;
  PageHashes pages;  // of the prompt
  std::shared_ptr<Stream::State> out;
  Clock::time_point submitted;
  bool admitted = false;
};

class Sequence {
 public:
  // `tokenizer` may be null: then there is no text.
  Sequence(std::shared_ptr<Job> job, int choice, const Tokenizer* tokenizer, const ModelInfo& info);
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;
  // Ends its request with no_memory() if nothing else has, so that no reader waits forever.
  ~Sequence();

  Job& job() const { return *job_; }
  const Request& request() const { return job_->request; }
  int choice() const { return choice_; }
  std::span<const TokenId> tokens() const { return tokens_; }  // prompt and answer
  std::int64_t prompt_size() const { return prompt_size_; }
  std::span<const TokenId> answer() const {
    return tokens().subspan(static_cast<std::size_t>(prompt_size_));
  }

  // While it runs.
  std::optional<Session> session;
  // A disk has lost rows of it, maybe of a prefix that others have, too; its tokens are computed
  // again without them.
  bool has_lost_rows = false;

  bool needs_prompt() const { return session->length() < prompt_size_; }
  // Tokens of the answer that a preemption took out of the cache, except the last.
  bool needs_replay() const {
    return !needs_prompt() && session->length() + 1 < static_cast<std::int64_t>(tokens_.size());
  }
  bool decodes() const { return !needs_prompt() && !needs_replay(); }
  // Returns true if logits of the prompt's tokens are still wanted.
  bool scores_prompt() const;
  // Takes the logits after prompt token `position`.
  void score_prompt(std::int64_t position, std::span<const float> logits);

  // Its part of a step: appends the last token, and draws the next.
  StepToken step_token();

  // Returns true if its steps may have drafts, which are looked up in its tokens.
  bool takes_drafts() const { return !wants_logits(); }
  // Appends the last token and up to `most` drafts, and takes the draws. Returns as take()
  // does.
  std::optional<FinishReason> decode_drafts(int most, Meter& meter);

  // Takes the logits after the last token, or the token that was drawn from them. Returns the
  // reason if the choice ends now.
  std::optional<FinishReason> take(std::span<const float> logits, Meter& meter);
  std::optional<FinishReason> take(TokenId next, Meter& meter);

  // Hands out the last piece.
  void finish(FinishReason reason, Meter& meter);
  // Leaves it to others to end its request.
  void leave() { has_ended_ = true; }

  bool is_cancelled() const { return job_->out->cancelled; }
  bool is_late() const { return request().deadline && Clock::now() >= *request().deadline; }

  // The order of service: priority, then arrival, then choice.
  bool before(const Sequence& other) const;

 private:
  bool wants_logits() const;
  // The draw from logits under rules and constraint.
  TokenId draw(std::span<const float> logits);
  std::optional<FinishReason> append(ScoredToken token, Meter& meter);
  void note_token(Meter& meter);

  std::shared_ptr<Job> job_;
  int choice_;
  const ModelInfo* info_;
  Sampler sampler_;
  std::optional<AnswerText> text_;
  std::vector<TokenId> tokens_;
  std::int64_t prompt_size_;
  std::optional<ConstraintCursor> constraint_;
  std::vector<TokenId> ends_;  // tokens that end the answer
  std::vector<ScoredToken> prompt_scores_;
  bool prompt_scored_ = false;
  std::optional<Clock::time_point> last_token_;
  bool has_ended_ = false;
  std::unique_ptr<LookupDrafter> lookup_;  // from the first drafts on
  std::optional<Speculation> speculation_;
};

}  // namespace sluice::batch
