// One decode step of several sessions, or of one: what Engine::step() and Session::decode() do.
#pragma once

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

}  // namespace sluice
