#include "engine/session_step.h"

#include <string>
#include <utility>

#include "offload/step/kv_batch.h"
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

}  // namespace

std::vector<StepResult> step_sessions(Engine::Impl& engine, std::span<const SessionToken> tokens) {
  std::vector<Session::Impl*> impls;
  std::vector<KvSession*> sessions;
  std::vector<TokenId> ids;
  for (const SessionToken& token : tokens) {
    impls.push_back(token.session);
    sessions.push_back(&token.session->kv);
    ids.push_back(token.token);
  }
  const Turn turn(engine, impls);
  require_valid(tokens, engine);
  KvBatch::require_fit(sessions);
  for (Session::Impl* session : impls) session->correct_if_due();
  std::vector<std::int64_t> positions;  // of the tokens that follow
  for (const KvSession* session : sessions) positions.push_back(session->length() + 1);
  KvBatch batch(sessions);
  engine.decoder->decode(ids, batch);
  std::vector<StepResult> results = read(tokens, positions, engine);
  const std::vector<std::optional<Error>> outcomes = batch.end();
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (outcomes[i]) {
      results[i] = {outcomes[i], -1, {}};
      continue;
    }
    impls[i]->remember({&tokens[i].token, 1});
    impls[i]->note({&tokens[i].token, 1});
    draw(tokens[i], positions[i], results[i]);
  }
  return results;
}

}  // namespace sluice
