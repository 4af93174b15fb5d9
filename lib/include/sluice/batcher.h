// Serves many requests with one engine: continuous batching in one pool of KV blocks.
//
// A request becomes one sequence per choice. Sequences that have their prompt take a step together,
// one token each; a prompt is computed in chunks between those steps, short enough that the other
// sequences keep their pace. When blocks run out, finished sequences in the prefix cache are
// evicted first, then the running sequence of the lowest priority, the newest of several, is
// preempted: it is computed again later and continues. A sequence whose rows a disk has lost is
// computed again, too, once. Text is what the sequence would get alone, except for rounding.
//
// All functions may be called from any thread. One thread of the batcher computes.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sluice/constraint.h"
#include "sluice/engine.h"
#include "sluice/errors.h"
#include "sluice/generate.h"
#include "sluice/logit_rules.h"
#include "sluice/logprobs.h"
#include "sluice/policy.h"
#include "sluice/sampling.h"

namespace sluice {

using Deadline = std::chrono::steady_clock::time_point;

struct BatcherOptions {
  std::int64_t context = 0;      // most tokens of a sequence, prompt and answer; required
  std::vector<Policy> policies;  // for Request::policy; the first is the default. None: dense
  int running = 16;              // most sequences at a time, 1 to 1024
  // Of all sequences, shared ones once; 0: `running` times `context`. The pool has two more blocks
  // for each further sequence that may run or be kept, for what sequences do not share of theirs.
  std::int64_t tokens = 0;
  // Most tokens of all of them whose key index is on the device at a time, see SessionOptions; 0:
  // all. Sequences run together while their index fits; kept ones give way.
  std::int64_t indexed_tokens = 0;
  int cached = 16;              // most finished sequences kept for their prefixes; 0: none
  bool loads_prefixes = false;  // load_prefixes() may be called: plans its buffer
  std::size_t queued = 1024;    // most choices of requests that wait
  // Most milliseconds of a prompt's chunk while other sequences decode; 0: twice the time of a
  // decode step.
  double prefill_ms = 0.0;
  // Most tokens that a step of one sequence alone guesses from its context (sluice/drafter.h), 0
  // (none) to 63. Sequences that take a step together get no drafts, because their step reads the
  // weights once for all of them; neither do requests with log probabilities, rules, penalties or a
  // constraint.
  int drafts = 0;
  std::optional<std::uint64_t> device_memory;  // caps on the pool, see SessionOptions
  std::optional<std::uint64_t> host_memory;
};

struct Request {
  std::vector<TokenId> prompt;
  // Choice i draws with seed + i. max_tokens may be 0, to compute only the prompt.
  SamplingParams sampling;
  LogitRules rules;
  // The text that every answer has to be; applied after `rules`, of the engine's tokenizer. The
  // answer ends with FinishReason::end_of_text where the text is whole and the model ends it, or
  // nothing can follow. Not with `ignore_eos`.
  std::optional<Constraint> constraint;
  std::vector<TokenId> end_tokens;  // end the text, besides the model's EOS tokens
  bool ignore_eos = false;
  int choices = 1;                   // answers to the prompt, 1 to `running`
  std::optional<Policy> policy;      // one of BatcherOptions::policies; none: the first
  int priority = 0;                  // higher ones go first, and may preempt lower ones
  std::optional<Deadline> deadline;  // ends the answer there with FinishReason::deadline
  bool waits = true;                 // false: submit() throws if there is no room at the moment
  // The likeliest tokens to give beside each token of the answer, 0 to 20 besides the token's own
  // log probability; none: no log probabilities. They are the model's, before rules and sampling.
  std::optional<int> logprobs;
  // The same for the tokens of the prompt. Such a prompt is computed anew, and attends to all of
  // itself even if the policy's prefill is sparse.
  std::optional<int> prompt_logprobs;
};

// A part of an answer.
struct Piece {
  int choice = 0;
  std::string text;                 // whole characters; held back while it may become a stop string
  std::vector<ScoredToken> tokens;  // drawn since the last piece; their text may follow later
  std::optional<FinishReason> finish;  // the choice ends with this piece
};

struct Usage {
  std::int64_t prompt_tokens = 0;
  std::int64_t reused_tokens = 0;  // of all choices' prompts, found in other sequences
  std::int64_t answer_tokens = 0;  // of all choices
  int preemptions = 0;
  double queue_seconds = 0.0;        // until the first choice was admitted
  double first_token_seconds = 0.0;  // TTFT, from submit(); 0: there is none
  double seconds = 0.0;              // until the end
};

// The answers to a request. Pieces wait here until they are read: a slow reader delays nobody, and
// holds at most the tokens that the request asked for. Destroying a stream cancels its request.
class Stream {
 public:
  struct State;  // opaque

  explicit Stream(std::shared_ptr<State> state);
  Stream(Stream&&) noexcept;
  Stream& operator=(Stream&&) noexcept;
  ~Stream();

  // Waits for the next piece; none: all choices have ended. Throws the Error that ended the
  // request, once the pieces before it have been read.
  std::optional<Piece> next();
  // The same, but also none when `timeout` has passed; ended() tells which it was.
  std::optional<Piece> next_within(std::chrono::milliseconds timeout);
  // Returns true once all pieces have been read and no more will come.
  bool ended() const;
  // Ends the request's choices with FinishReason::interrupted, after the step or, in a prompt, the
  // layer that is being computed.
  void cancel();

  Usage usage() const;
  // Scores of the prompt's tokens, if asked for; complete when the first piece comes. The first
  // token's is NaN, because nothing stands before it.
  std::vector<ScoredToken> prompt_scores() const;

 private:
  State& state() const;
  std::shared_ptr<State> state_;
};

// Counts of values by size.
struct Histogram {
  std::vector<double> bounds;         // ascending; inclusive
  std::vector<std::uint64_t> counts;  // [bounds + 1]; the last of values above all bounds
  double sum = 0.0;
  std::uint64_t count = 0;

  static Histogram of_seconds();  // 1 ms to 10 minutes
  void add(double value);
};

// Rows and bytes that moved or were read, over all sequences since the start.
struct TierTraffic {
  Tier from = Tier::host;
  Tier to = Tier::host;
  Cause cause = Cause::hit;
  Phase phase = Phase::prefill;
  Traffic traffic;
};

struct SequenceInfo {
  std::uint64_t request = 0;
  int choice = 0;
  std::int64_t prompt_tokens = 0;
  std::int64_t tokens = 0;  // in the KV cache
  std::int64_t answer_tokens = 0;
  bool decodes = false;
  int priority = 0;
};

// State of a batcher. Read without waiting for the step that runs.
struct BatcherStats {
  std::uint64_t submitted = 0;              // requests
  std::uint64_t refused = 0;                // by submit()
  std::uint64_t failed = 0;                 // ended by an error
  std::array<std::uint64_t, 5> finished{};  // choices, by FinishReason
  std::uint64_t prompt_tokens = 0;          // computed; replayed ones again
  std::uint64_t reused_tokens = 0;
  std::uint64_t answer_tokens = 0;
  std::uint64_t preemptions = 0;
  std::uint64_t steps = 0;
  std::uint64_t drafted = 0;   // tokens guessed and verified
  std::uint64_t accepted = 0;  // of these

  std::int64_t queued = 0;  // sequences
  std::int64_t running = 0;
  std::int64_t cached = 0;
  std::int64_t free_tokens = 0;  // in free blocks and, at least, in cached sequences to evict
  std::int64_t planned_tokens = 0;
  std::vector<SequenceInfo> sequences;  // that run
  std::vector<TierTraffic> traffic;     // non-zero ones; of running sequences up to 0.1 s late

  Histogram queue_seconds = Histogram::of_seconds();
  Histogram first_token_seconds = Histogram::of_seconds();   // TTFT
  Histogram output_token_seconds = Histogram::of_seconds();  // between tokens of a choice (TPOT)
  Histogram step_seconds = Histogram::of_seconds();
};

// Sessions that were loaded from a directory of prefixes, or that it has after saving.
struct SavedPrefixes {
  int sessions = 0;
  std::int64_t tokens = 0;           // of them
  std::vector<std::string> skipped;  // why others were not, a line each
};

class Batcher {
 public:
  // Plans and allocates the pool, and loads the weights unless they are loaded. `engine` must
  // outlive it. Throws Error{usage} for options out of range and what Engine::new_session throws.
  Batcher(Engine& engine, const BatcherOptions& options);
  Batcher(const Batcher&) = delete;
  Batcher& operator=(const Batcher&) = delete;
  // Cancels everything.
  ~Batcher();

  // Throws Error{prompt} for a prompt that is empty, has unknown tokens or does not fit the context
  // with max_tokens; Error{usage} for parameters out of range; Error{memory}, which says how many
  // tokens are free, if the pool could never hold the request, if the queue is full, after close(),
  // or without `waits` if there is no room now beside what the running ones may still take.
  Stream submit(Request request);

  // Refuses further requests and waits for the running and queued ones; after `patience` cancels
  // those that have not ended.
  void drain(std::chrono::milliseconds patience);

  // Makes saved sessions known as prefixes: the newest in `directory`, up to `cached` and as many
  // as there is room for. They are those of save_prefixes(), and any that Session::save() has put
  // there, whose prompts count as dense. Prompts that begin with their tokens go on from there.
  // Sessions of other models are skipped. Creates the directory if its parent exists. Requests wait
  // meanwhile. Throws Error{usage} without BatcherOptions::loads_prefixes, and Error{io} if the
  // directory cannot be used.
  SavedPrefixes load_prefixes(const std::filesystem::path& directory);
  // Saves the finished sequences that are kept for their prefixes, each whole or not at all, in a
  // directory `prefix-NUMBER` of its own, and removes the oldest such of this model beyond
  // `cached`. Requests wait meanwhile. Throws Error{io} if the directory cannot be used.
  SavedPrefixes save_prefixes(const std::filesystem::path& directory);

  BatcherStats stats() const;
  const KvPlan& plan() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice
