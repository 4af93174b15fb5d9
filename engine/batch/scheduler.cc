#include "engine/batch/scheduler.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <new>
#include <string>
#include <utility>

#include "engine/batch/saved_prefixes.h"
#include "lib/current_error.h"
#include "sluice/errors.h"

namespace sluice::batch {
namespace {

// A shorter prefix is not worth a copy of its page.
constexpr std::int64_t kLeastReuse = 16;
constexpr std::int64_t kMostInStep = 64;
constexpr double kPublishSeconds = 0.1;

std::int64_t whole_pages(std::int64_t tokens) {
  return (tokens + kPageTokens - 1) / kPageTokens * kPageTokens;
}

bool is_dense(const Policy& policy) { return policy.select.name == "dense"; }

const Tokenizer* tokenizer_of(const Engine& engine) {
  try {
    return &engine.tokenizer();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::tokenizer) throw;
    return nullptr;
  }
}

std::unique_ptr<Sequence> take_out(std::vector<std::unique_ptr<Sequence>>& list,
                                   const Sequence* sequence) {
  const auto found = std::find_if(list.begin(), list.end(),
                                  [&](const auto& each) { return each.get() == sequence; });
  if (found == list.end()) return nullptr;
  std::unique_ptr<Sequence> taken = std::move(*found);
  list.erase(found);
  return taken;
}

void insert_in_order(std::vector<std::unique_ptr<Sequence>>& list,
                     std::unique_ptr<Sequence> sequence) {
  const auto place = std::upper_bound(list.begin(), list.end(), sequence,
                                      [](const auto& a, const auto& b) { return a->before(*b); });
  list.insert(place, std::move(sequence));
}

}  // namespace

Scheduler::Scheduler(Engine& engine, const BatcherOptions& options, Session root,
                     std::shared_ptr<Wake> wake, Meter& meter)
    : engine_(&engine),
      options_(options),
      tokenizer_(tokenizer_of(engine)),
      root_(std::move(root)),
      wake_(std::move(wake)),
      meter_(&meter),
      most_at_once_(static_cast<std::size_t>(
          std::min({root_.plan().chunk, std::int64_t{root_.plan().decode_batch}, kMostInStep}))),
      cache_(static_cast<std::size_t>(options.cached)) {
  no_memory();  // makes it while there is memory
  publish(true);
}

void Scheduler::submit(const std::shared_ptr<Job>& job) {
  Sequences sequences;
  for (int choice = 0; choice < job->request.choices; ++choice) {
    sequences.push_back(std::make_unique<Sequence>(job, choice, tokenizer_, engine_->info()));
  }
  {
    const std::lock_guard lock(arrivals_mutex_);
    arrivals_.reserve(arrivals_.size() + sequences.size());
    std::move(sequences.begin(), sequences.end(), std::back_inserter(arrivals_));
    left_ += job->request.choices;
  }
  has_arrivals_ = true;
  wake_->call();
}

void Scheduler::call(const std::function<void()>& work) {
  std::packaged_task<void()> task(work);
  std::future<void> done = task.get_future();
  {
    const std::lock_guard lock(arrivals_mutex_);
    calls_.push_back(std::move(task));
  }
  has_arrivals_ = true;
  wake_->call();
  done.get();
}

void Scheduler::run_calls() {
  std::vector<std::packaged_task<void()>> calls;
  {
    const std::lock_guard lock(arrivals_mutex_);
    calls.swap(calls_);
  }
  for (std::packaged_task<void()>& each : calls) each();
}

SavedPrefixes Scheduler::load_prefixes(const std::filesystem::path& directory) {
  SavedPrefixes report;
  call([&] {
    report = batch::load_prefixes(directory, *engine_, root_, options_.policies,
                                  static_cast<std::size_t>(options_.cached), cache_);
    publish(true);
  });
  return report;
}

SavedPrefixes Scheduler::save_prefixes(const std::filesystem::path& directory) {
  SavedPrefixes report;
  call([&] {
    report = batch::save_prefixes(directory, *engine_, options_.policies,
                                  static_cast<std::size_t>(options_.cached), cache_);
  });
  return report;
}

void Scheduler::stop() {
  stops_ = true;
  cancels_all_ = true;
  wake_->call();
}

void Scheduler::run() {
  for (bool goes_on = true; goes_on;) {
    try {
      goes_on = serve();
    } catch (const std::bad_alloc&) {
      end_all();
    }
  }
}

bool Scheduler::serve() {
  take_arrivals();
  end_cancelled();
  admit();
  const bool prompted = run_prompt();
  const bool stepped = run_steps();
  publish(false);
  if (prompted || stepped || has_arrivals_) return true;
  publish(true);
  if (stops_ && left_ == 0) return false;
  wake_->wait(next_deadline());
  return true;
}

// Ends all requests where memory ran out between their own work: what a round had in hand is in no
// list any more, and ~Sequence has ended it. Requests that came meanwhile are served.
void Scheduler::end_all() noexcept {
  running_.clear();
  waiting_.clear();
  const std::lock_guard lock(arrivals_mutex_);
  left_ = std::ssize(arrivals_);
}

void Scheduler::take_arrivals() {
  if (!has_arrivals_.exchange(false)) return;
  run_calls();
  Sequences arrived;
  {
    const std::lock_guard lock(arrivals_mutex_);
    arrived.swap(arrivals_);
  }
  for (std::unique_ptr<Sequence>& sequence : arrived) {
    insert_in_order(waiting_, std::move(sequence));
  }
}

void Scheduler::end_cancelled() {
  std::vector<std::pair<Sequence*, FinishReason>> ended;
  for (const Sequences* list : {&waiting_, &running_}) {
    for (const auto& sequence : *list) {
      if (sequence->is_cancelled() || cancels_all_) {
        ended.emplace_back(sequence.get(), FinishReason::interrupted);
      } else if (sequence->is_late()) {
        ended.emplace_back(sequence.get(), FinishReason::deadline);
      }
    }
  }
  for (const auto& [sequence, reason] : ended) finish(*sequence, reason);
}

std::optional<Clock::time_point> Scheduler::next_deadline() const {
  std::optional<Clock::time_point> next;
  for (const auto& sequence : waiting_) {
    const std::optional<Deadline>& deadline = sequence->request().deadline;
    if (deadline && (!next || *deadline < *next)) next = deadline;
  }
  return next;
}

// ---- Admission

namespace {

// Notes that a disk has lost rows of a sequence; false for other errors, and at the second time.
bool loses_rows_first(Sequence& sequence, const Error& error) {
  const bool is_lost = error.code() == ErrorCode::io || error.code() == ErrorCode::corrupt;
  return is_lost && !std::exchange(sequence.has_lost_rows, true);
}

}  // namespace

void Scheduler::admit() {
  for (std::size_t i = 0; i < waiting_.size();) {
    Sequence& sequence = *waiting_[i];
    Admission admission = Admission::later;
    try {
      admission = admit(sequence);
    } catch (...) {
      const Error error = current_error();
      close_session(sequence);
      if (!loses_rows_first(sequence, error)) fail(sequence, error);
      i = 0;
      continue;
    }
    if (admission == Admission::full) return;
    if (admission == Admission::later) {
      ++i;
      continue;
    }
    std::unique_ptr<Sequence> taken = take_out(waiting_, &sequence);
    if (!std::exchange(taken->job().admitted, true)) {
      const double waited = seconds_since(taken->job().submitted);
      taken->job().out->change_usage([&](Usage& usage) { usage.queue_seconds = waited; });
      meter_->change([&](BatcherStats& stats) { stats.queue_seconds.add(waited); });
    }
    insert_in_order(running_, std::move(taken));
    publish(true);
    i = 0;  // preemption may have changed the list
  }
}

Scheduler::Admission Scheduler::admit(Sequence& sequence) {
  // Those that come last in the order of service and have a lower priority give way.
  const auto lower_gives_way = [&] {
    if (running_.empty()) return false;
    Sequence& last = *running_.back();
    if (last.request().priority >= sequence.request().priority) return false;
    preempt(last);
    return true;
  };
  // Before another gives way for nothing, and once more because that one may be the source.
  if (find_source(sequence).later) return Admission::later;
  while (running_.size() >= static_cast<std::size_t>(options_.running)) {
    if (!lower_gives_way()) return Admission::full;
  }
  const Source source = find_source(sequence);
  if (source.later) return Admission::later;
  sequence.session.emplace(begin(sequence, source));
  const std::int64_t needed = std::ssize(sequence.tokens()) - source.tokens;
  // Counts the rest of the others' prompts and a block for each, so that none is preempted at once.
  const auto is_room = [&] {
    std::int64_t least = whole_pages(needed);
    for (const auto& other : running_) {
      const std::int64_t length = other->session->length();
      least += whole_pages(std::ssize(other->tokens())) - whole_pages(length) + kPageTokens;
    }
    return running_.empty() || free_tokens() >= least;
  };
  const auto refuse = [&] {
    sequence.session.reset();
    return Admission::full;
  };
  while (!is_room()) {
    if (!cache_.evict() && !lower_gives_way()) return refuse();
  }
  while (!is_indexed_beside_others(sequence)) {
    if (!lower_gives_way()) return refuse();
  }
  if (source.tokens > 0) {
    sequence.job().out->change_usage([&](Usage& usage) { usage.reused_tokens += source.tokens; });
    meter_->change([&](BatcherStats& stats) {
      stats.reused_tokens += static_cast<std::uint64_t>(source.tokens);
    });
  }
  return Admission::admitted;
}

bool Scheduler::is_indexed_beside_others(const Sequence& sequence) const {
  if (options_.indexed_tokens == 0 || running_.empty()) return true;
  std::vector<const Session*> sessions;
  std::int64_t more = 0;
  const auto add = [&](const Sequence& each) {
    sessions.push_back(&*each.session);
    more += whole_pages(std::ssize(each.tokens())) - whole_pages(each.session->length());
  };
  for (const auto& each : running_) add(*each);
  add(sequence);
  return engine_->index_fits(sessions, more);
}

std::int64_t Scheduler::reusable(const Sequence& sequence, std::int64_t length) const {
  const Policy& policy = sequence.job().policy;
  if (policy.prefill.tau > 0.0) return 0;  // rows depend on the whole prompt
  // A scored prompt attended to all pages.
  if (policy.prefill.pages > 0.0 && sequence.request().prompt_logprobs) return 0;
  // Rows of tokens that were decoded sparsely are not those that a prompt would have.
  return is_dense(policy) ? length : std::min(length, sequence.prompt_size());
}

Scheduler::Source Scheduler::find_source(const Sequence& sequence) {
  const Policy& policy = sequence.job().policy;
  if (policy.prefill.tau > 0.0 || sequence.scores_prompt() || sequence.has_lost_rows) return {};
  const PageHashes& pages = sequence.job().pages;
  // The last token is computed in any case, for its logits.
  const auto prompt = sequence.tokens().first(static_cast<std::size_t>(sequence.prompt_size() - 1));
  // Lists of pages are those of whole blocks of queries.
  const auto aligned = [&](std::int64_t tokens) {
    return policy.prefill.pages > 0.0 ? tokens / kPageTokens * kPageTokens : tokens;
  };
  Source best;
  std::int64_t coming = 0;
  for (const auto& other : running_) {
    const auto others = other->tokens().first(static_cast<std::size_t>(other->prompt_size()));
    const std::int64_t common = std::min(common_prefix(others, other->job().pages, prompt, pages),
                                         reusable(*other, other->prompt_size()));
    const std::int64_t present = aligned(std::min(common, other->session->length()));
    if (present > best.tokens) best = {&*other->session, present, false};
    if (other->needs_prompt()) coming = std::max(coming, aligned(common));
  }
  std::int64_t cached = 0;
  CachedPrefix* const entry = cache_.find(prompt, pages, cached);
  if (entry != nullptr && aligned(cached) > best.tokens) {
    best = {&entry->session, aligned(cached), false};
  }
  if (coming >= best.tokens + kLeastReuse) return {nullptr, 0, true};
  if (best.tokens < kLeastReuse) return {};
  return best;
}

Session Scheduler::begin(const Sequence& sequence, const Source& source) {
  // The pool has one sequence more than may run or be kept, so a fork never lacks one.
  Session session = source.session != nullptr ? source.session->fork() : root_.sibling();
  session.truncate(source.tokens);
  session.use(sequence.job().policy);
  return session;
}

// ---- Prompts

bool Scheduler::run_prompt() {
  const auto found = std::find_if(running_.begin(), running_.end(),
                                  [](const auto& each) { return !each->decodes(); });
  if (found == running_.end()) return false;
  const bool others_decode = std::any_of(running_.begin(), running_.end(),
                                         [](const auto& each) { return each->decodes(); });
  run_prompt(**found, others_decode);
  return true;
}

bool Scheduler::goes_on(const Sequence& sequence) const {
  return !sequence.is_cancelled() && !sequence.is_late() && !cancels_all_;
}

void Scheduler::run_prompt(Sequence& sequence, bool others_decode) {
  const Policy& policy = sequence.job().policy;
  const bool is_whole = policy.prefill.tau > 0.0 && !sequence.scores_prompt();
  std::int64_t most = sequence.prompt_size();
  if (others_decode && !is_whole) {
    most = pace_.tokens(pace_.seconds(options_.prefill_ms));
    if (policy.prefill.pages > 0.0) most = whole_pages(most);
  }
  if (!sequence.needs_prompt()) return replay(sequence, most);
  const std::int64_t begun = sequence.session->length();
  const std::int64_t count = std::min(most, sequence.prompt_size() - begun);
  const auto piece =
      sequence.tokens().subspan(static_cast<std::size_t>(begun), static_cast<std::size_t>(count));
  const Clock::time_point start = Clock::now();
  // Between chunks, newly arrived requests are looked at; a prompt that goes by layers would lose
  // its work.
  const Progress progress = [&](std::int64_t done, std::int64_t) {
    return goes_on(sequence) && (done == 0 || is_whole || !has_arrivals_);
  };
  const Stop stops = [&] { return !goes_on(sequence); };  // within a chunk, too
  std::span<const float> logits;
  const bool runs = guarded(sequence, [&] {
    if (sequence.scores_prompt()) {
      const auto each = [&](std::size_t i, std::span<const float> after) {
        sequence.score_prompt(begun + static_cast<std::int64_t>(i), after);
      };
      logits = sequence.session->prefill_each(piece, each, progress, stops);
    } else {
      logits = sequence.session->prefill(piece, progress, stops);
    }
  });
  if (!runs) return;
  const std::int64_t done = sequence.session->length() - begun;
  pace_.note_piece(done, seconds_since(start));
  meter_->change(
      [&](BatcherStats& stats) { stats.prompt_tokens += static_cast<std::uint64_t>(done); });
  // After a preemption the first token is known already.
  if (sequence.needs_prompt() || logits.empty() || !sequence.answer().empty()) return;
  std::optional<FinishReason> reason;
  if (guarded(sequence, [&] { reason = sequence.take(logits, *meter_); })) {
    settle(sequence, reason);
  }
}

void Scheduler::replay(Sequence& sequence, std::int64_t most) {
  const std::int64_t length = sequence.session->length();
  const std::int64_t left = std::ssize(sequence.tokens()) - 1 - length;
  const auto known = sequence.tokens().subspan(static_cast<std::size_t>(length),
                                               static_cast<std::size_t>(std::min(most, left)));
  guarded(sequence, [&] { sequence.session->decode_known(known, {}); });
}

// ---- Steps

bool Scheduler::run_steps() {
  std::vector<Sequence*> ready;
  for (const auto& sequence : running_) {
    if (sequence->decodes()) ready.push_back(sequence.get());
  }
  const bool any = !ready.empty();
  leave_out_unindexed(ready);
  while (!ready.empty()) {
    const Policy& policy = ready.front()->job().policy;
    std::vector<Sequence*> batch;
    std::vector<Sequence*> rest;
    for (Sequence* sequence : ready) {
      const bool fits = batch.size() < most_at_once_ && sequence->job().policy == policy;
      (fits ? batch : rest).push_back(sequence);
    }
    step(batch);
    std::erase_if(rest, [&](Sequence* sequence) { return !is_running(sequence); });
    ready = std::move(rest);
  }
  return any;
}

void Scheduler::leave_out_unindexed(std::vector<Sequence*>& sequences) const {
  if (options_.indexed_tokens == 0) return;
  std::vector<const Session*> sessions;
  for (const Sequence* sequence : sequences) sessions.push_back(&*sequence->session);
  while (sessions.size() > 1 && !engine_->index_fits(sessions, std::ssize(sessions))) {
    sessions.pop_back();
  }
  sequences.resize(sessions.size());
}

// A step by itself, because other sequences' tokens fill a step better than guesses.
void Scheduler::step_with_drafts(Sequence& sequence) {
  const Clock::time_point start = Clock::now();
  std::optional<FinishReason> reason;
  const bool runs =
      guarded(sequence, [&] { reason = sequence.decode_drafts(options_.drafts, *meter_); });
  if (!runs) return;
  note_step(start);
  settle(sequence, reason);
}

void Scheduler::note_step(Clock::time_point start) {
  const double seconds = seconds_since(start);
  pace_.note_step(seconds);
  meter_->change([&](BatcherStats& stats) {
    ++stats.steps;
    stats.step_seconds.add(seconds);
  });
}

void Scheduler::step(std::vector<Sequence*>& batch) {
  if (options_.drafts > 0 && batch.size() == 1 && batch.front()->takes_drafts()) {
    return step_with_drafts(*batch.front());
  }
  const Clock::time_point start = Clock::now();
  std::vector<StepResult> results;
  while (results.empty() && !batch.empty()) {
    std::vector<StepToken> tokens;
    for (Sequence* sequence : batch) tokens.push_back(sequence->step_token());
    try {
      results = engine_->step(tokens);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::memory || !make_room()) {
        const std::vector<Sequence*> failed = std::exchange(batch, {});
        for (Sequence* sequence : failed) {
          if (is_running(sequence)) repeat_or_fail(*sequence, error);
        }
        return;
      }
      std::erase_if(batch, [&](Sequence* sequence) { return !is_running(sequence); });
    }
  }
  if (batch.empty()) return;
  note_step(start);
  for (std::size_t i = 0; i < batch.size(); ++i) {
    if (!is_running(batch[i])) continue;  // another choice of its request failed
    if (results[i].error) {
      repeat_or_fail(*batch[i], *results[i].error);
      continue;
    }
    std::optional<FinishReason> reason;
    const bool runs = guarded(*batch[i], [&] {
      reason = results[i].logits.empty() ? batch[i]->take(results[i].next, *meter_)
                                         : batch[i]->take(results[i].logits, *meter_);
    });
    if (runs) settle(*batch[i], reason);
  }
}

// ---- Giving way

bool Scheduler::make_room() {
  if (cache_.evict()) return true;
  if (running_.size() < 2) return false;
  preempt(*running_.back());
  return true;
}

void Scheduler::preempt(Sequence& sequence) {
  std::unique_ptr<Sequence> taken = take_out(running_, &sequence);
  close_session(*taken);
  taken->job().out->change_usage([](Usage& usage) { ++usage.preemptions; });
  meter_->change([](BatcherStats& stats) { ++stats.preemptions; });
  insert_in_order(waiting_, std::move(taken));
}

bool Scheduler::is_running(const Sequence* sequence) const {
  return std::any_of(running_.begin(), running_.end(),
                     [&](const auto& each) { return each.get() == sequence; });
}

bool Scheduler::guarded(Sequence& sequence, const std::function<void()>& work) {
  while (true) {
    try {
      work();
      return true;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::memory || !make_room()) {
        repeat_or_fail(sequence, error);
        return false;
      }
      if (!is_running(&sequence)) return false;
    } catch (const std::bad_alloc&) {
      fail(sequence, no_memory());
      return false;
    } catch (const std::exception& error) {
      fail(sequence, Error(ErrorCode::usage, std::string("a callback threw: ") + error.what()));
      return false;
    }
  }
}

// ---- Ends

void Scheduler::settle(Sequence& sequence, std::optional<FinishReason> reason) {
  if (reason) finish(sequence, *reason);
}

void Scheduler::close_session(Sequence& sequence) {
  if (!sequence.session) return;
  ended_traffic_.add(sequence.session->ledger());
  sequence.session.reset();
}

void Scheduler::finish(Sequence& sequence, FinishReason reason) {
  std::unique_ptr<Sequence> taken = take_out(running_, &sequence);
  if (taken == nullptr) taken = take_out(waiting_, &sequence);
  if (taken->session) {
    ended_traffic_.add(taken->session->ledger());
    const std::int64_t kept = reusable(*taken, taken->session->length());
    try {
      if (kept >= kLeastReuse) {
        taken->session->truncate(kept);
        const auto tokens = taken->tokens().first(static_cast<std::size_t>(kept));
        cache_.keep({std::move(*taken->session),
                     {tokens.begin(), tokens.end()},
                     PageHashes(tokens, taken->job().pages.kind())});
      }
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): nothing is kept then
    }
    taken->session.reset();
  }
  --left_;
  publish(true);
  taken->finish(reason, *meter_);
}

void Scheduler::repeat_or_fail(Sequence& sequence, const Error& error) {
  if (loses_rows_first(sequence, error)) {
    preempt(sequence);
  } else {
    fail(sequence, error);
  }
}

void Scheduler::fail(Sequence& sequence, const Error& error) {
  const Job* const job = &sequence.job();
  const std::shared_ptr<Stream::State> out = job->out;
  for (Sequences* list : {&waiting_, &running_}) {
    for (std::size_t i = 0; i < list->size();) {
      if (&(*list)[i]->job() != job) {
        ++i;
        continue;
      }
      const std::unique_ptr<Sequence> ended = take_out(*list, (*list)[i].get());
      close_session(*ended);
      ended->leave();
      --left_;
    }
  }
  meter_->change([](BatcherStats& stats) { ++stats.failed; });
  publish(true);
  out->fail(error);
}

// ---- Counters

void Scheduler::publish(bool now) {
  if (!now && seconds_since(published_) < kPublishSeconds) return;
  try {
    publish();
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): the next time, then
  }
}

void Scheduler::publish() {
  published_ = Clock::now();
  TrafficSum traffic = ended_traffic_;
  std::vector<SequenceInfo> sequences;
  std::int64_t claimed = 0;
  for (const auto& each : running_) {
    traffic.add(each->session->ledger());
    claimed += whole_pages(most_tokens(each->request())) - whole_pages(each->session->length());
    sequences.push_back({each->job().id, each->choice(), each->prompt_size(),
                         each->session->length(), std::ssize(each->answer()), each->decodes(),
                         each->request().priority});
  }
  const std::int64_t free = free_tokens() + cache_.own_tokens();
  meter_->set_claimed(claimed);
  meter_->change([&](BatcherStats& stats) {
    stats.queued = left_ - std::ssize(running_);
    stats.running = std::ssize(running_);
    stats.cached = static_cast<std::int64_t>(cache_.size());
    stats.free_tokens = free;
    stats.sequences = std::move(sequences);
    stats.traffic = traffic.list();
  });
}

}  // namespace sluice::batch
