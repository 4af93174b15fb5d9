// One decode step of several sessions, or of one: what Engine::step() and Session::decode() do.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "engine/engine_impl.h"

namespace sluice {

// A StepToken with the inside of its session.
struct SessionToken {
  Session::Impl* session = nullptr;
  TokenId token = 0;
  const Sampler* sampler = nullptr;
  std::span<const TokenId> history = {};
};

// Takes the sessions' turn and appends a token to each. Throws what Engine::step() throws.
std::vector<StepResult> step_sessions(Engine::Impl& engine, std::span<const SessionToken> tokens);

// Appends a token and those drafts behind it that the sampler draws; see Session::decode().
std::vector<TokenId> step_drafts(const SessionToken& token, std::span<const TokenId> drafts,
                                 const std::function<bool(TokenId)>& goes_on);

}  // namespace sluice
