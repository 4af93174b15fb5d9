// The generate loop: prompt in, text out, with timings.
#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/engine.h"
#include "sluice/sampling.h"

namespace sluice {

enum class FinishReason : std::uint8_t { end_of_text, stop_string, max_tokens, interrupted };
std::string_view to_string(FinishReason reason);

struct Timings {
  double prefill_seconds = 0.0;
  std::int64_t prefill_tokens = 0;
  double first_token_seconds = 0.0;  // TTFT: from the start of prefill to the first token
  double decode_seconds = 0.0;       // of the tokens after the first
  std::int64_t decode_tokens = 0;

  double prefill_rate() const;              // tokens per second
  double decode_rate() const;               // tokens per second
  double seconds_per_output_token() const;  // TPOT
};

struct GenerateOptions {
  SamplingParams sampling;
  std::vector<TokenId> end_tokens;  // that end the text, besides the model's EOS tokens
  bool ignore_eos = false;          // nor do those
  // Before the prompt, as far as the repetition penalty is to be of them, too.
  std::vector<TokenId> history;
  Progress on_prefill;                                 // see Session::prefill
  std::function<void(std::string_view text)> on_text;  // whole characters, as they come
  std::function<void(const Session&)>
      on_decode;                                 // after every token of the answer that was decoded
  const std::atomic<bool>* interrupt = nullptr;  // set from elsewhere: ends cleanly
};

struct GenerateResult {
  std::string text;
  std::vector<TokenId> tokens;  // without the end-of-text token
  FinishReason reason = FinishReason::max_tokens;
  // The last token, if it was drawn but not appended to the session: what comes next in the same
  // conversation begins with it. As a prompt of its own it goes on as generate() would have; in
  // front of others it attends densely, as they do.
  std::optional<TokenId> pending;
  Timings timings;
};

// Generates after `prompt` in `session`, which must have room for the prompt and max_tokens. A
// prompt of one token behind others is decoded, so that it selects as the policy says. Throws
// Error{prompt} for an empty prompt or one that does not fit, Error{usage} for bad sampling
// parameters.
//
// A repetition penalty is of the tokens of `history`, of `prompt` and of what follows.
//
// on_text and on_decode may compute with other sessions, and may end this one, which ends the
// text; Error{usage} if they change its tokens.
GenerateResult generate(const Engine& engine, Session& session, std::span<const TokenId> prompt,
                        const GenerateOptions& options);

}  // namespace sluice
