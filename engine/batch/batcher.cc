#include "sluice/batcher.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "engine/batch/scheduler.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr int kMostSequences = 1024;
constexpr int kMostTop = 20;

void require(bool holds, const std::string& message) {
  if (!holds) throw Error(ErrorCode::usage, message);
}

void require_within(std::int64_t value, std::int64_t least, std::int64_t most,
                    const std::string& name) {
  require(value >= least && value <= most, "`" + name + "` " + std::to_string(value) + ": give " +
                                               std::to_string(least) + " to " +
                                               std::to_string(most));
}

SessionOptions session_options(const BatcherOptions& options) {
  require(options.context >= 1, "`context` " + std::to_string(options.context) +
                                    ": give the most tokens of a sequence, prompt and answer");
  require_within(options.running, 1, kMostSequences, "running");
  require_within(options.cached, 0, kMostSequences, "cached");
  require_within(options.drafts, 0, kMostDrafts, "drafts");
  require(options.prefill_ms >= 0.0 && options.prefill_ms < 1e6,
          "`prefill_ms`: give 0 to a million milliseconds");
  SessionOptions session;
  session.decode_batch = options.drafts + 1;
  session.context = options.context;
  session.policies = options.policies;
  // The root, and a fork that is being made while all others are taken.
  session.sequences = options.running + options.cached + 2;
  session.tokens = options.tokens > 0 ? options.tokens : options.running * options.context;
  session.indexed_tokens = options.indexed_tokens;
  session.device_memory = options.device_memory;
  session.host_memory = options.host_memory;
  session.loads = options.loads_prefixes;
  return session;
}

std::int64_t pages_of(std::int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

}  // namespace

struct Batcher::Impl {
  Impl(Engine& served, const BatcherOptions& chosen, Session root)
      : engine(&served),
        options(chosen),
        plan(root.plan()),
        pool_tokens(root.room().free),
        scheduler(served, options, std::move(root), wake, meter) {
    if (options.policies.empty()) options.policies = {Policy()};
    meter.change([&](BatcherStats& stats) { stats.planned_tokens = pool_tokens; });
    thread = std::jthread([this] { scheduler.run(); });
  }
  ~Impl() {
    is_closed = true;
    scheduler.stop();
  }

  void validate(const Request& request) const;
  std::size_t policy_of(const Request& request) const;
  // Throws Error{memory} if the request cannot be queued.
  void require_room(const Request& request) const;

  Engine* engine;
  BatcherOptions options;
  KvPlan plan;
  std::int64_t pool_tokens;
  std::shared_ptr<batch::Wake> wake = std::make_shared<batch::Wake>();
  batch::Meter meter;
  batch::Scheduler scheduler;
  std::atomic<bool> is_closed = false;
  std::atomic<std::uint64_t> next_id = 0;
  std::mutex submits;
  std::jthread thread;  // last: joined before what it uses ends
};

void Batcher::Impl::validate(const Request& request) const {
  SamplingParams params = request.sampling;
  require(params.max_tokens >= 0,
          "`max_tokens` " + std::to_string(params.max_tokens) + ": give 0 or more");
  params.max_tokens = std::max(params.max_tokens, 1);
  params.validate();
  const int vocabulary = engine->info().vocabulary;
  request.rules.validate(vocabulary);
  require(!request.constraint || !request.ignore_eos,
          "`ignore_eos` cannot be used beside a constraint, which ends the text");
  require_within(request.choices, 1, options.running, "choices");
  if (request.logprobs) require_within(*request.logprobs, 0, kMostTop, "logprobs");
  if (request.prompt_logprobs) {
    require_within(*request.prompt_logprobs, 0, kMostTop, "prompt_logprobs");
  }
  if (!request.sampling.stop.empty()) engine->tokenizer();  // throws if there is no text
  if (request.prompt.empty()) {
    throw Error(ErrorCode::prompt, "the prompt is empty; give some text");
  }
  for (const TokenId id : request.prompt) {
    if (id >= 0 && id < vocabulary) continue;
    throw Error(ErrorCode::prompt, "token id " + std::to_string(id) +
                                       " is outside the model's vocabulary of " +
                                       std::to_string(vocabulary));
  }
  const std::int64_t needed = std::ssize(request.prompt) + params.max_tokens - 1;
  if (needed > options.context) {
    throw Error(ErrorCode::prompt,
                "the prompt of " + std::to_string(request.prompt.size()) +
                    " tokens and `max_tokens` " + std::to_string(params.max_tokens) +
                    " do not fit the context of " + std::to_string(options.context) + " tokens");
  }
}

std::size_t Batcher::Impl::policy_of(const Request& request) const {
  if (!request.policy) return 0;
  const auto found = std::find(options.policies.begin(), options.policies.end(), *request.policy);
  require(found != options.policies.end(),
          "the batcher was not planned for the policy '" + to_string(*request.policy) + "'");
  return static_cast<std::size_t>(found - options.policies.begin());
}

void Batcher::Impl::require_room(const Request& request) const {
  const BatcherStats now = meter.stats();
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorCode::memory, why + "; " + std::to_string(now.free_tokens) + " of " +
                                       std::to_string(pool_tokens) + " tokens are free");
  };
  if (is_closed) refuse("the batcher takes no more requests");
  const std::int64_t needed = batch::most_tokens(request);
  const std::int64_t pages = pages_of(needed);
  if (pages * kPageTokens > pool_tokens) {
    refuse("the request takes " + std::to_string(needed) + " tokens");
  }
  const std::int64_t left = scheduler.left();
  if (left + request.choices > options.running + static_cast<std::int64_t>(options.queued)) {
    refuse(std::to_string(left) + " answers run or wait already");
  }
  if (request.waits) return;
  const bool runs = left == now.running && left + request.choices <= options.running;
  if (!runs || request.choices * pages * kPageTokens > meter.unclaimed()) {
    refuse("there is no room now for " + std::to_string(request.choices) + " times " +
           std::to_string(needed) + " tokens");
  }
}

Batcher::Batcher(Engine& engine, const BatcherOptions& options)
    : impl_(std::make_unique<Impl>(engine, options, engine.new_session(session_options(options)))) {
}

Batcher::~Batcher() = default;

Stream Batcher::submit(Request request) {
  auto job = std::make_shared<batch::Job>();
  try {
    impl_->validate(request);
    const std::size_t policy = impl_->policy_of(request);
    job->policy = impl_->options.policies[policy];
    // Rows of a dense prompt are the same whatever decoding selects.
    job->pages = batch::PageHashes(request.prompt,
                                   job->policy.prefill.dense() ? 0 : std::uint64_t{policy} + 1);
    job->out = std::make_shared<Stream::State>(request.choices, impl_->wake);
    job->out->usage.prompt_tokens = std::ssize(request.prompt);
    job->request = std::move(request);
    // One at a time, so that those that are counted as waiting stay below the limit.
    const std::lock_guard lock(impl_->submits);
    impl_->require_room(job->request);
    job->id = impl_->next_id++;
    job->submitted = batch::Clock::now();
    impl_->scheduler.submit(job);
    impl_->meter.change([](BatcherStats& stats) { ++stats.submitted; });
  } catch (const Error&) {
    impl_->meter.change([](BatcherStats& stats) { ++stats.refused; });
    throw;
  }
  return Stream(job->out);
}

void Batcher::drain(std::chrono::milliseconds patience) {
  {
    const std::lock_guard lock(impl_->submits);
    impl_->is_closed = true;
  }
  const auto until = batch::Clock::now() + patience;
  while (impl_->scheduler.left() > 0) {
    if (batch::Clock::now() >= until) impl_->scheduler.cancel_all();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

SavedPrefixes Batcher::load_prefixes(const std::filesystem::path& directory) {
  require(impl_->options.loads_prefixes, "`loads_prefixes` was not set, so no prefixes are loaded");
  return impl_->scheduler.load_prefixes(directory);
}

SavedPrefixes Batcher::save_prefixes(const std::filesystem::path& directory) {
  return impl_->scheduler.save_prefixes(directory);
}

BatcherStats Batcher::stats() const { return impl_->meter.stats(); }
const KvPlan& Batcher::plan() const { return impl_->plan; }

}  // namespace sluice
