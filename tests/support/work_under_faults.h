// What sweeps of faults repeat: work with an engine whose answers do not change.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "sluice/batcher.h"
#include "sluice/engine.h"
#include "sluice/errors.h"
#include "tests/support/model_sessions.h"
#include "tests/support/served.h"
#include "tests/support/small_sessions.h"

namespace sluice::testing {

using Logits = std::vector<std::vector<float>>;

// A prompt, decoded tokens, a fork, a step of both, a cut and one more token, in the memory of
// `root`.
inline Logits answers_of(Engine& engine, Session& root) {
  Session session = root.sibling();
  Logits logits = go_on(session, random_tokens(300, 1));
  Session fork = session.fork();
  const StepToken tokens[] = {{&session, 3}, {&fork, 4}};
  for (const StepResult& result : engine.step(tokens)) {
    if (result.error) throw Error(*result.error);
    logits.push_back(copy_of(result.logits));
  }
  session.truncate(200);
  logits.push_back(copy_of(session.decode(5)));
  return logits;
}

// Expects that a session goes on with the same answers.
inline std::function<void()> goes_on_with(Session& session) {
  const std::int64_t length = session.length() - 1;
  const auto answer = [&session, length] {
    session.truncate(length);
    return copy_of(session.decode(7));
  };
  return [answer, expected = answer()] { EXPECT_EQ(answer(), expected); };
}

// The answers of a batcher to two requests at once.
inline std::vector<std::vector<TokenId>> batched_answers(Engine& engine) {
  BatcherOptions options;
  options.context = kSmallContext;
  options.running = 2;
  options.policies = {engine.policy("values")};
  Batcher batcher(engine, options);
  std::vector<Stream> streams;
  for (const std::uint64_t seed : {1, 2}) {
    Request request;
    request.prompt = random_tokens(200, seed);
    request.sampling.max_tokens = 8;
    streams.push_back(batcher.submit(std::move(request)));
  }
  std::vector<std::vector<TokenId>> answers;
  for (Stream& stream : streams) answers.push_back(read_all(stream).front().tokens);
  return answers;
}

}  // namespace sluice::testing
