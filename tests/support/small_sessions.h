// Sessions of a RandomCheckpoint, and the smallest caps under which they have a plan.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "sluice/engine.h"
#include "sluice/errors.h"
#include "tests/support/model_sessions.h"
#include "tests/support/random.h"
#include "tests/support/random_checkpoint.h"

namespace sluice::testing {

inline constexpr std::int64_t kSmallContext = 1200;

inline std::vector<TokenId> random_tokens(std::size_t count, std::uint64_t seed) {
  Random random(seed);
  std::vector<TokenId> tokens;
  for (std::size_t i = 0; i < count; ++i) {
    tokens.push_back(static_cast<TokenId>(random.integer(0, RandomCheckpoint::kVocabulary - 1)));
  }
  return tokens;
}

inline SessionOptions options_for(const Engine& engine, const std::string& policy,
                                  int sequences = 1) {
  SessionOptions options;
  options.context = kSmallContext;
  options.policies = {engine.policy(policy)};
  options.sequences = sequences;
  return options;
}

inline EngineConfig config_of(const RandomCheckpoint& model) {
  EngineConfig config;
  config.model = model.path();
  config.chunk = 128;
  config.threads = 1;
  return config;
}

inline bool has_plan(const Engine& engine, const SessionOptions& options, bool on_disk) {
  try {
    return engine.plan(options).kv.on_disk == on_disk;
  } catch (const Error&) {
    return false;
  }
}

// Caps close to the smallest under which there is a plan, with rows on disk or without.
inline SessionOptions tightly(const Engine& engine, SessionOptions options, bool on_disk) {
  constexpr std::uint64_t kLeast = 256 << 10;
  constexpr std::uint64_t kMost = 128 << 20;
  // On disk: enough rows that the read buffers take less memory than the rows would.
  if (on_disk) options.context = 20 * kSmallContext;
  for (std::uint64_t host = on_disk ? kLeast : kMost; host <= kMost; host += host / 4) {
    for (std::uint64_t device = kLeast; device <= kMost; device += device / 4) {
      if (on_disk) options.host_memory = host;
      options.device_memory = device;
      if (!has_plan(engine, options, on_disk)) continue;
      for (std::uint64_t step = device / 8; step > 4096; step /= 2) {
        options.device_memory = *options.device_memory - step;
        if (!has_plan(engine, options, on_disk)) *options.device_memory += step;
      }
      return options;
    }
  }
  ADD_FAILURE() << "no plan under any cap";
  return options;
}

// Logits after every token, prompt part and decoded part.
inline std::vector<std::vector<float>> go_on(Session& session, std::span<const TokenId> tokens) {
  std::vector<std::vector<float>> logits;
  logits.push_back(copy_of(session.prefill(tokens.first(tokens.size() / 2))));
  for (const TokenId token : tokens.subspan(tokens.size() / 2)) {
    logits.push_back(copy_of(session.decode(token)));
  }
  return logits;
}

}  // namespace sluice::testing
