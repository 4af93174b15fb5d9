#include "sluice/generate.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "engine/answer_text.h"
#include "engine/engine_impl.h"
#include "engine/speculation.h"
#include "offload/tiers/disk_pages.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Collects the answer's text, and hands it out as it becomes certain.
class TextStream {
 public:
  TextStream(const Tokenizer& tokenizer, const GenerateOptions& options, std::string& text)
      : answer_(tokenizer, options.sampling.stop), on_text_(&options.on_text), text_(&text) {}

  // Each returns true if it completed a stop string.
  bool push(TokenId id) { return take(answer_.push(id)); }
  bool push_end(TokenId id) { return take(answer_.push_end(id)); }
  bool finish() { return !answer_.stopped() && take(answer_.finish()); }

  // Calls on_text with what was taken since.
  void hand_out() {
    if (ready_.empty()) return;
    const std::string piece = std::exchange(ready_, {});
    if (*on_text_) (*on_text_)(piece);
  }

 private:
  bool take(const std::string& piece) {
    *text_ += piece;
    ready_ += piece;
    return answer_.stopped();
  }

  AnswerText answer_;
  const std::function<void(std::string_view)>* on_text_;
  std::string* text_;
  std::string ready_;  // not handed out yet
};

}  // namespace

// The session of a generation. It lives as long as the generation, even if a callback ends it.
class GeneratingSession {
 public:
  explicit GeneratingSession(const Session& session) : own_(session.share()) {}

  Session* operator->() { return &own_; }
  Session& operator*() { return own_; }

  // Call at the start and after every decoded token.
  void note_length() { length_ = own_.length(); }
  // After a callback: false if it ended the session. Throws Error{usage} if it changed the tokens.
  bool goes_on() const {
    if (own_.impl_.use_count() == 1) return false;
    if (own_.length() == length_) return true;
    throw Error(ErrorCode::usage, "a callback changed the session whose text it was given");
  }

  // Runs `call`. If a disk loses rows, for the first time, computes them again and repeats the
  // call. Returns false if that was stopped.
  bool run(const std::function<void()>& call, const GenerateOptions& options) {
    try {
      call();
      return true;
    } catch (const Error& error) {
      const bool is_lost = is_disk_failure(error) && own_.impl_->kv.in_step();
      if (!is_lost || recomputed_) throw;
    }
    recomputed_ = own_.impl_->kv.length();
    own_.recompute(options.on_recompute, options.interrupt);
    if (own_.length() < length_ || !goes_on()) return false;
    call();
    return true;
  }
  std::int64_t recomputed() const { return recomputed_.value_or(0); }

 private:
  Session own_;
  std::int64_t length_ = 0;
  std::optional<std::int64_t> recomputed_;  // tokens
};

namespace {

void require_room(const Session& session, std::size_t prompt, int max_tokens) {
  const std::int64_t context = session.plan().context;
  // The last token is never fed back, so it needs no room.
  const std::int64_t needed = session.length() + static_cast<std::int64_t>(prompt) + max_tokens - 1;
  if (needed <= context) return;
  throw Error(ErrorCode::prompt, "the prompt of " + std::to_string(prompt) +
                                     " tokens and `max_tokens` " + std::to_string(max_tokens) +
                                     " do not fit the planned context of " +
                                     std::to_string(context) + " tokens; raise `context` to " +
                                     std::to_string(needed) + " or shorten the prompt");
}

// Tokens under the repetition penalty, each once because the count does not matter. Empty if there
// is no penalty.
std::vector<TokenId> penalized_tokens(const GenerateOptions& options,
                                      std::span<const TokenId> prompt) {
  if (options.sampling.repetition_penalty == 1.0) return {};
  std::vector<TokenId> tokens = options.history;
  tokens.insert(tokens.end(), prompt.begin(), prompt.end());
  std::sort(tokens.begin(), tokens.end());
  tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
  return tokens;
}

// Draws tokens, under the constraint if there is one.
class Draw {
 public:
  Draw(const Engine& engine, const GenerateOptions& options, const Sampler& sampler)
      : sampler_(&sampler) {
    if (options.constraint) cursor_.emplace(*options.constraint);
    if (options.ignore_eos) return;
    ends_ = engine.info().eos;
    ends_.insert(ends_.end(), options.end_tokens.begin(), options.end_tokens.end());
  }

  TokenId from(std::span<const float> logits, std::span<const TokenId> history,
               std::int64_t position) {
    if (!cursor_) return sampler_->next(logits, history, position);
    allowed_.assign(logits.begin(), logits.end());
    cursor_->mask(ends_, allowed_);
    return sampler_->next(allowed_, history, position);
  }
  // Appends a token and draws the next.
  TokenId decode(Session& session, TokenId token, std::span<const TokenId> history) {
    if (!cursor_) return session.decode(token, *sampler_, history);
    const std::span<const float> logits = session.decode(token);
    return from(logits, history, session.length());
  }

  // Goes on behind a token that ends nothing. Returns true if only the end can follow.
  bool is_last(TokenId id) {
    if (!cursor_) return false;
    cursor_->take(id);
    return cursor_->is_final();
  }
  bool is_end(TokenId id) const { return std::find(ends_.begin(), ends_.end(), id) != ends_.end(); }
  bool is_free() const { return !cursor_; }

 private:
  const Sampler* sampler_;
  std::vector<TokenId> ends_;  // that end the answer
  std::optional<ConstraintCursor> cursor_;
  std::vector<float> allowed_;
};

// Decodes a prompt of one token behind others, so that the result equals that of an answer that was
// not cut off there. `progress` is called as for a prefill.
std::optional<TokenId> decode_prompt(GeneratingSession& own, TokenId token, Draw& draw,
                                     std::span<const TokenId> history, const Progress& progress) {
  const std::int64_t before = own->length();
  if (!progress(0, 1) || !own.goes_on()) return {};
  const TokenId next = draw.decode(*own, token, history);
  own.note_length();
  try {
    if (!progress(1, 1) || !own.goes_on()) return {};
  } catch (...) {
    if (own->length() > before) own->truncate(before);
    throw;
  }
  return next;
}

// Appends the prompt and draws the token after it; none if a callback stopped that.
std::optional<TokenId> first_token(GeneratingSession& own, std::span<const TokenId> prompt,
                                   Draw& draw, std::span<const TokenId> history,
                                   const Progress& progress, const Stop& stops) {
  if (prompt.size() == 1 && own->length() > 0) {
    return decode_prompt(own, prompt[0], draw, history, progress);
  }
  bool goes_on = true;
  const std::span<const float> logits = own->prefill(
      prompt,
      [&](std::int64_t done, std::int64_t of) {
        goes_on = progress(done, of);
        return goes_on;
      },
      stops);
  own.note_length();
  if (!goes_on || logits.empty() || !own.goes_on()) return {};
  return draw.from(logits, history, own->length());
}

}  // namespace

std::string_view to_string(FinishReason reason) {
  switch (reason) {
    case FinishReason::end_of_text:
      return "end_of_text";
    case FinishReason::stop_string:
      return "stop_string";
    case FinishReason::max_tokens:
      return "max_tokens";
    case FinishReason::interrupted:
      return "interrupted";
    case FinishReason::deadline:
      return "deadline";
  }
  return "unknown";
}

double Timings::prefill_rate() const {
  return prefill_seconds > 0.0 ? static_cast<double>(prefill_tokens) / prefill_seconds : 0.0;
}

double Timings::decode_rate() const {
  return decode_seconds > 0.0 ? static_cast<double>(decode_tokens) / decode_seconds : 0.0;
}

double Timings::seconds_per_output_token() const {
  return decode_tokens > 0 ? decode_seconds / static_cast<double>(decode_tokens) : 0.0;
}

namespace {

// The answer as it grows, and why it ends.
class Answer {
 public:
  Answer(const Engine& engine, const GenerateOptions& options, const Sampler& sampler, Draw& draw,
         std::vector<TokenId> penalized, GenerateResult& result)
      : options_(&options),
        result_(&result),
        draw_(&draw),
        stream_(engine.tokenizer(), options, result.text),
        penalizes_(sampler.penalizes()),
        penalized_(std::move(penalized)) {}

  // Takes a token that was drawn. Returns false if it ends the answer.
  bool take(TokenId id) {
    result_->pending = id;
    if (draw_->is_end(id)) {
      return end(stream_.push_end(id) ? FinishReason::stop_string : FinishReason::end_of_text);
    }
    result_->tokens.push_back(id);
    if (penalizes_) penalized_.push_back(id);
    const bool is_last = draw_->is_last(id);
    if (stream_.push(id)) return end(FinishReason::stop_string);
    if (is_last) return end(FinishReason::end_of_text);
    return left() > 0 || end(FinishReason::max_tokens);
  }
  bool end(FinishReason reason) {
    result_->reason = reason;
    has_ended_ = true;
    return false;
  }
  void finish() {
    if (stream_.finish()) result_->reason = FinishReason::stop_string;
    stream_.hand_out();
  }

  void hand_out() { stream_.hand_out(); }
  bool has_ended() const { return has_ended_; }
  // Tokens that may follow.
  int left() const {
    return options_->sampling.max_tokens - static_cast<int>(result_->tokens.size());
  }
  std::span<const TokenId> penalized() const { return penalized_; }

 private:
  const GenerateOptions* options_;
  GenerateResult* result_;
  Draw* draw_;
  TextStream stream_;
  bool penalizes_;
  std::vector<TokenId> penalized_;
  bool has_ended_ = false;
};

}  // namespace

GenerateResult generate(const Engine& engine, Session& session, std::span<const TokenId> prompt,
                        const GenerateOptions& options) {
  options.sampling.validate();
  if (options.drafts < 1 || options.drafts > kMostDrafts) {
    throw Error(ErrorCode::usage, "`drafts` " + std::to_string(options.drafts) + ": give 1 to " +
                                      std::to_string(kMostDrafts));
  }
  if (options.constraint && (options.ignore_eos || options.drafter != nullptr)) {
    throw Error(ErrorCode::usage, "`constraint` takes neither `ignore_eos` nor a `drafter`");
  }
  if (prompt.empty()) throw Error(ErrorCode::prompt, "the prompt is empty; give some text");
  require_room(session, prompt.size(), options.sampling.max_tokens);
  if (options.drafter != nullptr) session.draft_room();  // throws if drafts were not planned for
  const auto interrupted = [&] { return options.interrupt && options.interrupt(); };

  GenerateResult result;
  const Sampler sampler(options.sampling);
  Draw draw(engine, options, sampler);
  Answer answer(engine, options, sampler, draw, penalized_tokens(options, prompt), result);
  Speculation speculation(options.drafter, options.drafts, engine.info().weight_bytes);
  std::vector<TokenId> tokens;  // of the session, and the latest
  Timings& timings = result.timings;
  const Stopwatch total;
  GeneratingSession own(session);
  sampler.require_history(options.history, static_cast<std::size_t>(engine.info().vocabulary));
  const Progress progress = [&](std::int64_t done, std::int64_t of) {
    timings.prefill_tokens = done;
    return (!options.on_prefill || options.on_prefill(done, of)) && !interrupted();
  };
  std::optional<TokenId> first;
  own.note_length();
  own.run(
      [&] {
        first = first_token(own, prompt, draw, answer.penalized(), progress, options.interrupt);
      },
      options);
  result.recomputed_tokens = own.recomputed();
  timings.prefill_seconds = total.seconds();
  if (!first) {
    result.reason = FinishReason::interrupted;
    return result;
  }
  if (options.drafter != nullptr) {
    tokens.assign(own->tokens().begin(), own->tokens().end());
    options.drafter->begin(tokens);
  }
  timings.first_token_seconds = total.seconds();
  const auto take = [&](TokenId id) {
    if (options.drafter != nullptr) tokens.push_back(id);
    return answer.take(id);
  };
  take(*first);
  while (true) {
    answer.hand_out();
    if (answer.has_ended()) break;
    if (!own.goes_on() || interrupted()) {
      answer.end(FinishReason::interrupted);
      break;
    }
    const auto step = [&] {
      if (draw.is_free()) {
        const Drafts drafts = speculation.next(tokens, answer.left() - 1, *own, sampler);
        const std::vector<TokenId> drawn =
            own->decode(*result.pending, drafts.tokens, sampler, answer.penalized(), take);
        timings.decode_tokens += std::ssize(drawn);
        speculation.note(drafts, drawn.size() - 1);
      } else {
        take(draw.decode(*own, *result.pending, answer.penalized()));
        ++timings.decode_tokens;
      }
    };
    if (!own.run(step, options)) {
      result.pending.reset();
      answer.end(FinishReason::interrupted);
      break;
    }
    own.note_length();
    if (options.on_decode) options.on_decode(*own);
  }
  answer.finish();
  result.drafts = speculation.counts();
  result.recomputed_tokens = own.recomputed();
  timings.decode_seconds = total.seconds() - timings.first_token_seconds;
  return result;
}

}  // namespace sluice
