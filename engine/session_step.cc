#include "engine/session_step.h"

#include <optional>
#include <string>
#include <utility>

#include "offload/step/kv_batch.h"
#include "offload/tiers/disk_pages.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

// Penalties need the history in host memory; without them the draw runs on the device.
bool draws_on_device(const SessionToken& token) {
  return token.sampler != nullptr && !token.sampler->penalizes();
}

void settle(StepResult& result, const auto& next) {
  try {
    result.next = next();
  } catch (const Error& error) {
    result.error = error;
  }
}

void require_valid(std::span<const SessionToken> tokens, const Engine::Impl& engine) {
  if (static_cast<std::int64_t>(tokens.size()) > engine.most_at_once()) {
    throw Error(ErrorCode::usage, "a batch: of " + std::to_string(tokens.size()) +
                                      " sessions; this engine takes " +
                                      std::to_string(engine.most_at_once()) + " at a time");
  }
  const auto vocabulary = static_cast<std::size_t>(engine.info.vocabulary);
  for (const SessionToken& token : tokens) {
    token.session->require({&token.token, 1});
    if (token.sampler != nullptr) token.sampler->require_history(token.history, vocabulary);
  }
}

// Draws, or reads the logits, and waits. `positions`: of the tokens that are drawn. Failed
// sessions' results are dropped later.
std::vector<StepResult> read(std::span<const SessionToken> tokens,
                             std::span<const std::int64_t> positions, Engine::Impl& engine) {
  Decoder& decoder = *engine.decoder;
  std::vector<StepResult> results(tokens.size());
  std::vector<TokenDraw> params(tokens.size());
  bool any_drawn = false;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (draws_on_device(tokens[i])) {
      params[i] = tokens[i].sampler->draw(positions[i]);
      any_drawn = true;
      continue;
    }
    std::vector<float>& logits = tokens[i].session->logits;
    logits.resize(static_cast<std::size_t>(engine.info.vocabulary));
    decoder.read_logits(static_cast<std::int64_t>(i), logits);
    results[i].logits = logits;
  }
  if (!any_drawn) return results;
  std::vector<SampledToken> drawn(tokens.size());
  decoder.sample(params, drawn);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (draws_on_device(tokens[i])) settle(results[i], [&] { return token_of(drawn[i]); });
  }
  return results;
}

// Draws on the host from the logits that were read.
void draw(const SessionToken& token, std::int64_t position, StepResult& result) {
  if (token.sampler == nullptr || draws_on_device(token)) return;
  settle(result, [&] { return token.sampler->next(result.logits, token.history, position); });
  result.logits = {};
}

// Corrects the sessions that are due and begins a step of those whose pages could be read from
// disk. Returns their places; `results` has the errors of the others, which have ended.
std::vector<std::size_t> begin(std::span<const SessionToken> tokens, std::optional<KvBatch>& batch,
                               std::vector<StepResult>& results) {
  std::vector<std::size_t> corrected;
  std::vector<KvSession*> sessions;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    try {
      tokens[i].session->correct_if_due();
    } catch (const Error& error) {
      if (!is_disk_failure(error) || !tokens[i].session->kv.in_step()) throw;
      results[i].error = error;
      continue;
    }
    corrected.push_back(i);
    sessions.push_back(&tokens[i].session->kv);
  }
  const std::vector<std::optional<Error>> ended = KvBatch::begin(batch, sessions);
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < corrected.size(); ++i) {
    if (ended[i]) {
      results[corrected[i]].error = ended[i];
    } else {
      places.push_back(corrected[i]);
    }
  }
  return places;
}

}  // namespace

std::vector<StepResult> step_sessions(Engine::Impl& engine, std::span<const SessionToken> tokens) {
  std::vector<Session::Impl*> impls;
  std::vector<KvSession*> sessions;
  for (const SessionToken& token : tokens) {
    impls.push_back(token.session);
    sessions.push_back(&token.session->kv);
  }
  const Turn turn(engine, impls);
  require_valid(tokens, engine);
  KvBatch::require_fit(sessions);
  std::vector<StepResult> results(tokens.size());
  std::optional<KvBatch> batch;
  const std::vector<std::size_t> places = begin(tokens, batch, results);
  if (places.empty()) return results;
  std::vector<SessionToken> stepped;
  std::vector<TokenId> ids;
  std::vector<std::int64_t> positions;  // of the tokens that follow
  for (const std::size_t place : places) {
    stepped.push_back(tokens[place]);
    ids.push_back(tokens[place].token);
    positions.push_back(tokens[place].session->kv.length() + 1);
  }
  engine.decoder->decode(ids, *batch);
  std::vector<StepResult> stepped_results = read(stepped, positions, engine);
  const std::vector<std::optional<Error>> outcomes = batch->end();
  for (std::size_t i = 0; i < places.size(); ++i) {
    StepResult& result = results[places[i]];
    if (outcomes[i]) {
      result.error = outcomes[i];
      continue;
    }
    result = stepped_results[i];
    stepped[i].session->remember({&ids[i], 1});
    stepped[i].session->note({&ids[i], 1});
    draw(stepped[i], positions[i], result);
  }
  return results;
}

namespace {

// The tokens drawn behind each of a step's tokens.
class Draws {
 public:
  Draws(const SessionToken& token, std::size_t count)
      : sampler_(token.sampler),
        decoder_(&*token.session->engine->decoder),
        first_(token.session->kv.length() + 1),
        vocabulary_(static_cast<std::size_t>(token.session->engine->info.vocabulary)),
        drawn_(draws_on_device(token) ? count : 0),
        history_(token.history.begin(), token.history.end()),
        logits_(draws_on_device(token) ? 0 : count * vocabulary_) {}

  // Draws, or reads the logits, which are there once the queue has been waited for.
  void read() {
    for (std::size_t i = 0; i * vocabulary_ < logits_.size(); ++i) {
      decoder_->read_logits(static_cast<std::int64_t>(i),
                            std::span(logits_).subspan(i * vocabulary_, vocabulary_));
    }
    if (drawn_.empty()) return;
    std::vector<TokenDraw> params;
    for (std::size_t i = 0; i < drawn_.size(); ++i) params.push_back(sampler_->draw(position(i)));
    decoder_->sample(params, drawn_);
  }

  // Ask in order, as long as every draw was the token that comes next. Throws Error{numeric}.
  TokenId at(std::size_t i) {
    if (!drawn_.empty()) return token_of(drawn_[i]);
    const std::span logits = std::span(logits_).subspan(i * vocabulary_, vocabulary_);
    history_.push_back(sampler_->next(logits, history_, position(i)));
    return history_.back();
  }

 private:
  std::int64_t position(std::size_t i) const { return first_ + static_cast<std::int64_t>(i); }

  const Sampler* sampler_;
  Decoder* decoder_;
  std::int64_t first_;
  std::size_t vocabulary_;
  std::vector<SampledToken> drawn_;  // on the device; or
  std::vector<TokenId> history_;     // what penalties cover, and
  std::vector<float> logits_;        // [count, vocabulary]
};

// Appends tokens in one step and waits for it.
void append(Session::Impl& session, std::span<const TokenId> ids, Draws& draws) {
  Engine::Impl& engine = *session.engine;
  const auto count = static_cast<std::int64_t>(ids.size());
  if (KvBatch::takes(session.kv, count)) {
    KvBatch batch(session.kv, count);
    engine.decoder->decode(ids, batch);
    draws.read();
    const std::optional<Error> failure = batch.end().front();
    if (failure) throw Error(*failure);
  } else {
    engine.decoder->step(ids, Phase::decode, session.kv);
    engine.decoder->prepare_logits(count);
    draws.read();
    engine.queue->synchronize();
  }
  session.remember(ids);
  session.note(ids);
}

}  // namespace

std::vector<TokenId> step_drafts(const SessionToken& token, std::span<const TokenId> drafts,
                                 const std::function<bool(TokenId)>& goes_on) {
  Session::Impl& session = *token.session;
  const Turn turn(*session.engine, session);
  require_valid({&token, 1}, *session.engine);
  session.correct_if_due();
  std::vector<TokenId> ids = {token.token};
  ids.insert(ids.end(), drafts.begin(), drafts.end());
  Draws draws(token, ids.size());
  append(session, ids, draws);
  std::vector<TokenId> next;
  std::size_t kept = 0;
  try {
    do {
      next.push_back(draws.at(kept++));
    } while (goes_on(next.back()) && kept < ids.size() && ids[kept] == next.back());
  } catch (...) {
    session.reject(ids.size() - kept);
    throw;
  }
  session.reject(ids.size() - kept);
  return next;
}

}  // namespace sluice
