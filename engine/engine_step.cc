// A step of several sessions.
#include <string>
#include <utility>

#include "engine/engine_impl.h"
#include "offload/step/kv_batch.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

// Penalties need the history in host memory; without them the draw runs on the device.
bool draws_on_device(const StepToken& token) {
  return token.sampler != nullptr && !token.sampler->penalizes();
}

}  // namespace

// The parts of a step of several sessions besides the computation.
struct SessionStep {
  static Session::Impl& impl(const StepToken& token) { return token.session->impl(); }

  static std::vector<Session::Impl*> impls(std::span<const StepToken> tokens,
                                           const Engine::Impl& engine) {
    std::vector<Session::Impl*> all;
    for (const StepToken& token : tokens) {
      if (token.session == nullptr || impl(token).engine.get() != &engine) {
        throw Error(ErrorCode::usage, "a batch: its sessions must be of this engine");
      }
      all.push_back(&impl(token));
    }
    return all;
  }

  // Position of the token that follows each of `tokens` once they are appended.
  static std::vector<std::int64_t> next_positions(std::span<const StepToken> tokens) {
    std::vector<std::int64_t> positions;
    for (const StepToken& token : tokens) positions.push_back(impl(token).kv.length() + 1);
    return positions;
  }

  // Draws, or reads the logits, and waits. Failed sessions' results are dropped later.
  static std::vector<StepResult> read(std::span<const StepToken> tokens,
                                      std::span<const std::int64_t> positions, Decoder& decoder,
                                      std::int64_t vocabulary) {
    std::vector<StepResult> results(tokens.size());
    std::vector<TokenDraw> params(tokens.size());
    bool any_drawn = false;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      if (tokens[i].sampler != nullptr && draws_on_device(tokens[i])) {
        params[i] = tokens[i].sampler->draw(positions[i]);
        any_drawn = true;
        continue;
      }
      std::vector<float>& logits = impl(tokens[i]).logits;
      logits.resize(static_cast<std::size_t>(vocabulary));
      decoder.read_logits(static_cast<std::int64_t>(i), logits);
      results[i].logits = logits;
    }
    if (!any_drawn) return results;
    std::vector<SampledToken> drawn(tokens.size());
    decoder.sample(params, drawn);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      if (!draws_on_device(tokens[i])) continue;
      settle(results[i], [&] { return token_of(drawn[i]); });
    }
    return results;
  }

  // Draws on the host from the logits that were read.
  static void draw(const StepToken& token, std::int64_t position, StepResult& result) {
    if (token.sampler == nullptr || draws_on_device(token)) return;
    settle(result, [&] { return token.sampler->next(result.logits, token.history, position); });
    result.logits = {};
  }

  static void settle(StepResult& result, const auto& next) {
    try {
      result.next = next();
    } catch (const Error& error) {
      result.error = error;
    }
  }
};

std::vector<StepResult> Engine::step(std::span<const StepToken> tokens) {
  const Turn turn(impl(), SessionStep::impls(tokens, impl()));
  if (static_cast<std::int64_t>(tokens.size()) > impl().most_at_once()) {
    throw Error(ErrorCode::usage, "a batch: of " + std::to_string(tokens.size()) +
                                      " sessions; this engine takes " +
                                      std::to_string(impl().most_at_once()) + " at a time");
  }
  const auto vocabulary = static_cast<std::size_t>(impl().info.vocabulary);
  for (const StepToken& token : tokens) {
    SessionStep::impl(token).require({&token.token, 1});
    if (token.sampler != nullptr) token.sampler->require_history(token.history, vocabulary);
  }
  std::vector<KvSession*> sessions;
  std::vector<TokenId> ids;
  for (const StepToken& token : tokens) {
    sessions.push_back(&SessionStep::impl(token).kv);
    ids.push_back(token.token);
  }
  KvBatch::require_fit(sessions);
  for (const StepToken& token : tokens) SessionStep::impl(token).correct_if_due();
  const std::vector<std::int64_t> positions = SessionStep::next_positions(tokens);
  KvBatch batch(sessions);
  impl().decoder->decode(ids, batch);
  std::vector<StepResult> results =
      SessionStep::read(tokens, positions, *impl().decoder, impl().info.vocabulary);
  const std::vector<std::optional<Error>> outcomes = batch.end();
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (outcomes[i]) {
      results[i] = {outcomes[i], -1, {}};
      continue;
    }
    SessionStep::impl(tokens[i]).note({&tokens[i].token, 1});
    SessionStep::draw(tokens[i], positions[i], results[i]);
  }
  return results;
}

}  // namespace sluice
