// The generate loop: prompt in, text out, with timings.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/constraint.h"
#include "sluice/drafter.h"
#include "sluice/engine.h"
#include "sluice/sampling.h"

namespace sluice {

enum class FinishReason : std::uint8_t {
  end_of_text,
  stop_string,
  max_tokens,
  interrupted,
  deadline  // of a Request, see sluice/batcher.h
};
std::string_view to_string(FinishReason reason);

struct Timings {
  double prefill_seconds = 0.0;
  std::int64_t prefill_tokens = 0;
  double first_token_seconds = 0.0;  // TTFT: from the start of prefill to the first token
  double decode_seconds = 0.0;       // for the tokens after the first
  std::int64_t decode_tokens = 0;

  double prefill_rate() const;              // tokens per second
  double decode_rate() const;               // tokens per second
  double seconds_per_output_token() const;  // TPOT
};

inline constexpr int kMostDrafts = 63;

struct GenerateOptions {
  SamplingParams sampling;
  std::vector<TokenId> end_tokens;  // end the text, besides the model's EOS tokens
  bool ignore_eos = false;          // neither EOS nor `end_tokens` end the text
  // The text that the answer has to be, for the engine's tokenizer. It ends with
  // FinishReason::end_of_text where the text is whole and the model ends it, or nothing can follow.
  // Neither with `ignore_eos` nor with a drafter.
  std::optional<Constraint> constraint;
  // Tokens before the prompt that the repetition penalty also covers.
  std::vector<TokenId> history;
  Progress on_prefill;                                 // see Session::prefill
  Progress on_recompute;                               // see Session::recompute
  std::function<void(std::string_view text)> on_text;  // whole characters, as generated
  std::function<void(const Session&)> on_decode;       // after every decode step of the answer
  // Ends cleanly once it returns true: after the token, or the layer of the prompt's chunk, that is
  // being computed.
  Stop interrupt;
  // Guesses tokens, up to `drafts` a step, which are verified together; null: a token per step.
  // Fewer are verified while few are accepted. The session needs a decode_batch of drafts + 1.
  Drafter* drafter = nullptr;
  int drafts = 8;
};

struct GenerateResult {
  std::string text;
  std::vector<TokenId> tokens;  // without the end-of-text token
  FinishReason reason = FinishReason::max_tokens;
  // The last token, if it was drawn but not appended to the session: the next prompt of the same
  // conversation must begin with it. As the only token of that prompt it is decoded, as generate()
  // would have done; before other tokens it attends densely, as they do.
  std::optional<TokenId> pending;
  Timings timings;
  DraftCounts drafts;
  std::int64_t recomputed_tokens = 0;  // whose rows a disk had lost
};

// Generates after `prompt` in `session`, which must have room for the prompt and max_tokens. A
// prompt of one token after earlier tokens is decoded, so that it selects as the policy says.
// Throws Error{prompt} for an empty prompt or one that does not fit, Error{usage} for bad sampling
// parameters, `drafts` not 1 to 63, a drafter where Session::draft_room() throws, or a constraint
// beside a drafter or `ignore_eos`.
//
// Where a disk loses rows of the session, they are computed again (Session::recompute()) and the
// text goes on; the second time in one text, its Error{io} or Error{corrupt} is thrown. An
// interrupt meanwhile leaves the session with the first of its tokens, and none pending.
//
// A repetition penalty covers the tokens of `history`, of `prompt` and of the answer.
//
// on_text and on_decode may compute with other sessions, and may destroy this one, which ends the
// text. Throws Error{usage} if they change this session's tokens.
GenerateResult generate(const Engine& engine, Session& session, std::span<const TokenId> prompt,
                        const GenerateOptions& options);

}  // namespace sluice
