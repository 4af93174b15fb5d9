#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>

#include "engine/engine_impl.h"
#include "engine/session_step.h"
#include "lib/check.h"
#include "sluice/errors.h"
#include "sluice/logprobs.h"

namespace sluice {
void Turn::begin() {
  if (engine_->is_busy) {
    throw Error(ErrorCode::usage,
                "a callback may not compute: the call that it was called from is not over");
  }
  engine_->is_busy = true;
}

Turn::Turn(Engine::Impl& engine, std::span<Session::Impl* const> sessions)
    : engine_(&engine), lock_(engine.mutex) {
  const auto is_free = [](const Session::Impl* session) { return !session->in_call; };
  // Unlocking lets a paused call for one of them go on.
  while (!engine.is_busy && !std::all_of(sessions.begin(), sessions.end(), is_free)) {
    lock_.unlock();
    lock_.lock();
  }
  sessions_.assign(sessions.begin(), sessions.end());
  begin();
  for (Session::Impl* session : sessions_) session->in_call = true;
}

Turn::Turn(Engine::Impl& engine, Session::Impl& session) : Turn(engine, std::array{&session}) {}

Turn::~Turn() {
  for (Session::Impl* session : sessions_) session->in_call = false;
  engine_->is_busy = false;
}

// Synchronizes, so that other calls get an idle device and do not wait behind queued work.
void Turn::pause() {
  if (engine_->sessions > 1) engine_->queue->synchronize();
  engine_->is_busy = false;
  lock_.unlock();
  lock_.lock();
  engine_->is_busy = true;
}

Session::Impl::Impl(std::shared_ptr<Engine::Impl> owner, KvSession session,
                    std::shared_ptr<SessionGrant> granted)
    : engine(std::move(owner)), kv(std::move(session)), grant(std::move(granted)) {
  const std::lock_guard lock(engine->mutex);
  ++engine->sessions;
}

// The lock also covers the release of the pool's blocks and sequences.
Session::Impl::~Impl() {
  const std::lock_guard lock(engine->mutex);
  --engine->sessions;
  const KvSession ended = std::move(kv);
  grant.reset();
}

void Session::Impl::require(std::span<const TokenId> tokens) const {
  if (tokens.empty()) throw Error(ErrorCode::prompt, "the prompt is empty; give some text");
  const std::int64_t room = kv.plan().context - kv.length();
  if (static_cast<std::int64_t>(tokens.size()) > room) {
    throw Error(ErrorCode::prompt,
                std::to_string(tokens.size()) + " more tokens do not fit: " + std::to_string(room) +
                    " of the planned context of " + std::to_string(kv.plan().context) +
                    " are free; raise `context`");
  }
  for (const TokenId id : tokens) {
    if (id < 0 || id >= engine->info.vocabulary) {
      throw Error(ErrorCode::prompt, "token id " + std::to_string(id) +
                                         " is outside the model's vocabulary of " +
                                         std::to_string(engine->info.vocabulary));
    }
  }
}

void Session::Impl::correct() {
  kv.require_rewrite(static_cast<std::int64_t>(uncorrected.size()));
  const std::vector<TokenId> tokens = std::move(uncorrected);
  uncorrected.clear();
  const std::int64_t before = kv.length();
  const auto chunk = static_cast<std::size_t>(kv.plan().chunk);
  try {
    kv.truncate(before - static_cast<std::int64_t>(tokens.size()));
    for (std::size_t first = 0; first < tokens.size(); first += chunk) {
      engine->decoder->step(
          std::span(tokens).subspan(first, std::min(chunk, tokens.size() - first)),
          Phase::correction, kv);
    }
  } catch (...) {
    note_failure(before);
    throw;
  }
}

void Session::Impl::correct_if_due() {
  const std::int64_t interval = kv.policy().correct;
  if (interval > 0 && static_cast<std::int64_t>(uncorrected.size()) >= interval) correct();
}

void Session::Impl::note(std::span<const TokenId> tokens) {
  if (kv.policy().correct == 0) return;
  uncorrected.insert(uncorrected.end(), tokens.begin(), tokens.end());
}

// Tokens that wait for a correction are always the newest ones.
void Session::Impl::drop_uncorrected(std::int64_t cut) {
  uncorrected.resize(
      static_cast<std::size_t>(std::max<std::int64_t>(0, std::ssize(uncorrected) - cut)));
}

void Session::Impl::reject(std::size_t tokens) {
  kv.reject(static_cast<std::int64_t>(tokens));
  drop_uncorrected(static_cast<std::int64_t>(tokens));
}

std::int64_t Session::Impl::draft_room() const {
  if (kv.pool()->sparse() != nullptr && kv.plan().decode_batch == 1) {
    throw Error(ErrorCode::usage,
                "drafts: the session was planned for steps of one token; give `decode_batch` one "
                "more than the most drafts");
  }
  const std::int64_t tokens =
      std::min({decode_room(), engine->most_at_once(), kv.plan().context - kv.length()});
  return std::max<std::int64_t>(tokens - 1, 0);
}

std::span<const TokenId> Session::Impl::usable(std::span<const TokenId> drafts) const {
  if (drafts.empty()) return drafts;
  drafts = drafts.first(std::min(drafts.size(), static_cast<std::size_t>(draft_room())));
  const auto is_bad = [&](TokenId id) { return id < 0 || id >= engine->info.vocabulary; };
  const auto bad = std::find_if(drafts.begin(), drafts.end(), is_bad);
  return drafts.first(static_cast<std::size_t>(bad - drafts.begin()));
}

void Session::Impl::remember(std::span<const TokenId> tokens) {
  history.resize(static_cast<std::size_t>(kv.length()) - tokens.size());
  history.insert(history.end(), tokens.begin(), tokens.end());
}

void Session::Impl::decode_known(std::span<const TokenId> tokens) {
  correct_if_due();
  engine->decoder->step(tokens, Phase::decode, kv);
  remember(tokens);
  note(tokens);
}

std::span<const float> Session::Impl::keep(std::span<const float> row) {
  logits.assign(row.begin(), row.end());
  return logits;
}

std::int64_t Session::Impl::decode_room() const {
  const std::int64_t most = std::min(kv.decode_room(), std::int64_t{Decoder::kLogitRows});
  const std::int64_t interval = kv.policy().correct;
  if (interval == 0) return most;
  const std::int64_t left = interval - static_cast<std::int64_t>(uncorrected.size());
  return std::min(most, left > 0 ? left : interval);
}

std::span<const float> Session::Impl::sparse_prefill(std::span<const TokenId> tokens,
                                                     const Progress& progress, const Stop& stops) {
  const auto total = static_cast<std::int64_t>(tokens.size());
  const std::int64_t before = kv.length();
  const bool whole = engine->decoder->prompt(tokens, kv, grant->prompt(), [&](double share) {
    if (stops && stops()) return false;
    return !progress ||
           progress(static_cast<std::int64_t>(share * static_cast<double>(total)), total);
  });
  if (!whole) return {};
  remember(tokens);
  try {
    if (progress) progress(total, total);
  } catch (...) {
    kv.truncate(before);
    throw;
  }
  return keep(engine->decoder->logits(0, 1));
}

std::span<const float> Session::Impl::prefill(std::span<const TokenId> tokens,
                                              const Progress& progress, const Stop& stops) {
  Turn turn(*engine, *this);
  require(tokens);
  if (!uncorrected.empty()) correct();
  if (kv.policy().prefill.tau > 0.0) return sparse_prefill(tokens, progress, stops);
  std::int64_t last = 0;
  const auto remember = [&](std::int64_t, std::int64_t count) { last = count - 1; };
  if (!run(turn, tokens, progress, stops, remember)) return {};
  return keep(engine->decoder->logits(last, 1));
}

bool Session::Impl::run(Turn& turn, std::span<const TokenId> tokens, const Progress& progress,
                        const Stop& stops,
                        const std::function<void(std::int64_t, std::int64_t)>& each) {
  require(tokens);
  const std::int64_t before = kv.length();
  try {
    return run_pieces(turn, tokens, progress, stops, each);
  } catch (...) {
    // Another session may have taken the free blocks, or a callback threw.
    if (!kv.in_step()) kv.truncate(before);
    note_failure(before);
    throw;
  }
}

std::span<const float> Session::Impl::recompute(const Progress& progress, const Stop& stops) {
  std::vector<TokenId> tokens = history;
  {
    const Turn turn(*engine, *this);
    tokens.resize(static_cast<std::size_t>(restorable.value_or(kv.length())));
    kv.restart();
    uncorrected.clear();
    restorable.reset();
  }
  return tokens.empty() ? std::span<const float>() : prefill(tokens, progress, stops);
}

bool Session::Impl::run_pieces(Turn& turn, std::span<const TokenId> tokens,
                               const Progress& progress, const Stop& stops,
                               const std::function<void(std::int64_t, std::int64_t)>& each) {
  const auto total = static_cast<std::int64_t>(tokens.size());
  kv.expect(total);
  for (std::int64_t first = 0; first < total;) {
    if (first > 0) turn.pause();
    if ((stops && stops()) || (progress && !progress(first, total))) {
      engine->queue->synchronize();
      return false;
    }
    const std::int64_t count = std::min(kv.prompt_room(), total - first);
    const std::span<const TokenId> chunk =
        tokens.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
    if (!engine->decoder->step(chunk, Phase::prefill, kv, stops)) return false;
    remember(chunk);
    each(first, count);
    first += count;
  }
  if (progress) progress(total, total);
  return true;
}

Session::Session(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
Session::Session(Session&&) noexcept = default;
Session& Session::operator=(Session&&) noexcept = default;
Session::~Session() = default;

Session::Impl& Session::impl() const {
  if (impl_ == nullptr) throw Error(ErrorCode::usage, "a session that was moved from");
  return *impl_;
}

std::shared_ptr<Session::Impl> Session::share() const {
  impl();
  return impl_;
}

Session Session::fork() {
  const Turn turn(*impl().engine, impl());
  auto child = std::make_shared<Impl>(impl().engine, impl().kv.fork(), impl().grant);
  child->uncorrected = impl().uncorrected;
  child->logits = impl().logits;
  child->history = impl().history;
  return Session(std::move(child));
}

Session Session::sibling() {
  const Turn turn(*impl().engine, impl());
  return Session(std::make_shared<Impl>(impl().engine, KvSession(impl().kv.pool()), impl().grant));
}

std::span<const float> Session::prefill(std::span<const TokenId> tokens, const Progress& progress,
                                        const Stop& stops) {
  const std::shared_ptr<Impl> self = share();
  const std::span<const float> logits = self->prefill(tokens, progress, stops);
  // A callback may have ended the session, which owns the memory of the logits.
  return self.use_count() == 1 ? std::span<const float>() : logits;
}

std::span<const float> Session::recompute(const Progress& progress, const Stop& stops) {
  const std::shared_ptr<Impl> self = share();
  const std::span<const float> logits = self->recompute(progress, stops);
  return self.use_count() == 1 ? std::span<const float>() : logits;
}

std::span<const float> Session::decode(TokenId token) {
  const SessionToken one = {&impl(), token};
  const std::vector<StepResult> results = step_sessions(*impl().engine, {&one, 1});
  if (results[0].error) throw Error(*results[0].error);
  return results[0].logits;
}

TokenId Session::decode(TokenId token, const Sampler& sampler, std::span<const TokenId> history) {
  const SessionToken one = {&impl(), token, &sampler, history};
  const std::vector<StepResult> results = step_sessions(*impl().engine, {&one, 1});
  if (results[0].error) throw Error(*results[0].error);
  return results[0].next;
}

std::vector<TokenId> Session::decode(TokenId token, std::span<const TokenId> drafts,
                                     const Sampler& sampler, std::span<const TokenId> history,
                                     const std::function<bool(TokenId)>& goes_on) {
  const std::shared_ptr<Impl> self = share();
  const std::span<const TokenId> usable = self->usable(drafts);
  if (!usable.empty()) return step_drafts({self.get(), token, &sampler, history}, usable, goes_on);
  const TokenId next = decode(token, sampler, history);
  goes_on(next);
  return {next};
}

void Session::decode_known(std::span<const TokenId> tokens,
                           const std::function<void(std::size_t, std::span<const float>)>& each) {
  const std::shared_ptr<Impl> self = share();
  Turn turn(*self->engine, *self);
  self->require(tokens);
  const auto vocabulary = static_cast<std::size_t>(self->engine->info.vocabulary);
  for (std::size_t first = 0; first < tokens.size();) {
    if (first > 0) turn.pause();
    const std::size_t count =
        std::min(static_cast<std::size_t>(self->decode_room()), tokens.size() - first);
    self->decode_known(tokens.subspan(first, count));
    const std::span<const float> logits =
        self->engine->decoder->logits(0, static_cast<std::int64_t>(count));
    for (std::size_t i = 0; each && i < count; ++i) {
      each(first + i, logits.subspan(i * vocabulary, vocabulary));
    }
    first += count;
  }
}

void Session::use(const Policy& policy) {
  const Turn turn(*impl().engine, impl());
  impl().kv.use(policy);
  if (policy.correct == 0) impl().uncorrected.clear();
}

const Policy& Session::policy() const { return impl().kv.policy(); }

void Session::truncate(std::int64_t length) {
  const Turn turn(*impl().engine, impl());
  if (length < 0 || length > impl().kv.length()) {
    throw Error(ErrorCode::usage, "a session of " + std::to_string(impl().kv.length()) +
                                      " tokens cannot be cut to " + std::to_string(length));
  }
  const std::int64_t cut = impl().kv.length() - length;
  impl().kv.truncate(length);
  impl().drop_uncorrected(cut);
}

namespace {

// While it lives, chunks of the session's prompts attend to all pages.
class AllPages {
 public:
  explicit AllPages(KvSession& kv) : kv_(&kv) { kv_->list_pages(false); }
  ~AllPages() { kv_->list_pages(true); }
  AllPages(const AllPages&) = delete;
  AllPages& operator=(const AllPages&) = delete;

 private:
  KvSession* kv_;
};

}  // namespace

std::span<const float> Session::prefill_each(
    std::span<const TokenId> tokens,
    const std::function<void(std::size_t, std::span<const float>)>& each, const Progress& progress,
    const Stop& stops) {
  const std::shared_ptr<Impl> self = share();
  Turn turn(*self->engine, *self);
  self->require(tokens);
  if (!self->uncorrected.empty()) self->correct();
  const AllPages all(self->kv);
  const auto vocabulary = static_cast<std::size_t>(self->engine->info.vocabulary);
  const auto give = [&](std::int64_t first, std::int64_t count) {
    for (std::int64_t row = 0; row < count; row += Decoder::kLogitRows) {
      const std::int64_t rows = std::min(Decoder::kLogitRows, count - row);
      const std::span<const float> logits = self->engine->decoder->logits(row, rows);
      for (std::int64_t i = 0; i < rows; ++i) {
        each(static_cast<std::size_t>(first + row + i),
             logits.subspan(static_cast<std::size_t>(i) * vocabulary, vocabulary));
      }
      self->keep(logits.last(vocabulary));
    }
  };
  if (!self->run(turn, tokens, progress, stops, give)) return {};
  return self.use_count() == 1 ? std::span<const float>() : self->logits;
}

std::vector<float> Session::score(std::span<const TokenId> tokens, const Progress& progress) {
  const std::shared_ptr<Impl> self = share();
  Turn turn(*self->engine, *self);
  self->require(tokens);
  if (!self->uncorrected.empty()) self->correct();
  const AllPages all(self->kv);
  std::vector<float> scores;
  const auto vocabulary = static_cast<std::size_t>(self->engine->info.vocabulary);
  self->run(turn, tokens, progress, {}, [&](std::int64_t first, std::int64_t count) {
    const std::int64_t scored =
        std::min(count, static_cast<std::int64_t>(tokens.size()) - 1 - first);
    for (std::int64_t row = 0; row < scored; row += Decoder::kLogitRows) {
      const std::int64_t rows = std::min(Decoder::kLogitRows, scored - row);
      const std::span<const float> logits = self->engine->decoder->logits(row, rows);
      for (std::int64_t i = 0; i < rows; ++i) {
        scores.push_back(
            score_token(logits.subspan(static_cast<std::size_t>(i) * vocabulary, vocabulary),
                        tokens[static_cast<std::size_t>(first + row + i + 1)], 0)
                .logprob);
      }
    }
  });
  return scores;
}

std::int64_t Session::draft_room() const { return impl().draft_room(); }
std::int64_t Session::length() const { return impl().kv.length(); }
std::span<const TokenId> Session::tokens() const {
  return std::span(impl().history).first(static_cast<std::size_t>(impl().kv.length()));
}
SessionRoom Session::room() const {
  const Turn turn(*impl().engine, impl());
  return {impl().kv.free_tokens(), impl().kv.own_tokens()};
}

const KvPlan& Session::plan() const { return impl().kv.plan(); }
std::vector<std::string> Session::disk_modes() const {
  DiskPages* const disk = impl().kv.pool()->disk();
  return disk == nullptr ? std::vector<std::string>() : disk->store().descriptions();
}

const Ledger& Session::ledger() const { return impl().kv.ledger(); }
const StepSelection& Session::selection() const { return impl().kv.selection(); }
double Session::prefill_share() const { return impl().kv.prefill_share(); }

}  // namespace sluice
