// What a request to a batcher gave, and what it gives alone.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sluice/batcher.h"
#include "sluice/engine.h"
#include "sluice/sampler.h"

namespace sluice::testing {

struct Served {
  std::string text;
  std::vector<TokenId> tokens;
  std::vector<ScoredToken> scored;
  std::optional<FinishReason> reason;

  friend bool operator==(const Served& a, const Served& b) {
    return a.text == b.text && a.tokens == b.tokens && a.reason == b.reason;
  }
};

// Reads a stream to its end: [choices]. Throws the error that ended it.
inline std::vector<Served> read_all(Stream& stream, int choices = 1) {
  std::vector<Served> all(static_cast<std::size_t>(choices));
  while (std::optional<Piece> piece = stream.next()) {
    Served& one = all.at(static_cast<std::size_t>(piece->choice));
    EXPECT_FALSE(one.reason) << "a piece after the last";
    one.text += piece->text;
    for (const ScoredToken& token : piece->tokens) {
      one.tokens.push_back(token.token);
      one.scored.push_back(token);
    }
    one.reason = piece->finish;
  }
  EXPECT_TRUE(stream.ended());
  return all;
}

// The tokens of choice 0 in a session of its own. Stops early, with the tokens so far, where the
// two largest logits are so close that rounding decides.
struct Alone {
  std::vector<TokenId> tokens;
  bool is_close_call = false;
};
inline Alone tokens_alone(Engine& engine, const Request& request, std::int64_t context,
                          const Policy& policy, float close = 1e-3f) {
  SessionOptions options;
  options.context = context;
  options.policies = {policy};
  Session session = engine.new_session(options);
  SamplingParams params = request.sampling;
  const Sampler sampler(params);
  Alone alone;
  std::vector<TokenId> history = request.prompt;
  std::span<const float> logits = session.prefill(request.prompt);
  while (true) {
    std::vector<float> changed(logits.begin(), logits.end());
    request.rules.apply(alone.tokens, changed);
    const TokenId id = sampler.next(changed, history, session.length());
    std::nth_element(changed.begin(), changed.begin() + 1, changed.end(), std::greater<>());
    if (changed[0] - changed[1] < close) {
      alone.is_close_call = true;
      return alone;
    }
    alone.tokens.push_back(id);
    history.push_back(id);
    if (static_cast<int>(alone.tokens.size()) == params.max_tokens) return alone;
    logits = session.decode(id);
  }
}

// Expects the answer that a request has alone.
inline void expect_alone(const Alone& alone, const Served& served) {
  if (!alone.is_close_call) {
    EXPECT_EQ(served.tokens, alone.tokens);
    return;
  }
  ASSERT_GE(served.tokens.size(), alone.tokens.size());
  EXPECT_TRUE(std::equal(alone.tokens.begin(), alone.tokens.end(), served.tokens.begin()));
}

}  // namespace sluice::testing
