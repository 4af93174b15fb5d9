#include "engine/batch/sequence.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

namespace sluice::batch {
namespace {

SamplingParams params_of(const Request& request, int choice) {
  SamplingParams params = request.sampling;
  params.seed += static_cast<std::uint64_t>(choice);
  params.max_tokens = std::max(params.max_tokens, 1);  // 0 draws nothing
  return params;
}

}  // namespace

const Error& no_memory() {
  static const Error error(ErrorCode::memory, "this machine is out of memory");
  return error;
}

Sequence::Sequence(std::shared_ptr<Job> job, int choice, const Tokenizer* tokenizer,
                   const ModelInfo& info)
    : job_(std::move(job)),
      choice_(choice),
      info_(&info),
      sampler_(params_of(job_->request, choice)),
      tokens_(job_->request.prompt),
      prompt_size_(std::ssize(job_->request.prompt)) {
  if (tokenizer != nullptr) text_.emplace(*tokenizer, request().sampling.stop);
  if (request().constraint) constraint_.emplace(*request().constraint);
  if (request().ignore_eos) return;
  ends_ = info.eos;
  ends_.insert(ends_.end(), request().end_tokens.begin(), request().end_tokens.end());
}

Sequence::~Sequence() {
  if (!has_ended_) job_->out->fail(no_memory());
}

bool Sequence::before(const Sequence& other) const {
  return std::tuple(-std::int64_t{request().priority}, job_->id, choice_) <
         std::tuple(-std::int64_t{other.request().priority}, other.job_->id, other.choice_);
}

bool Sequence::scores_prompt() const {
  return request().prompt_logprobs && choice_ == 0 && !prompt_scored_;
}

void Sequence::score_prompt(std::int64_t position, std::span<const float> logits) {
  const auto next = static_cast<std::size_t>(position) + 1;
  if (position == 0) {
    prompt_scores_ = {{tokens_[0], std::numeric_limits<float>::quiet_NaN(), {}}};
  }
  if (next < static_cast<std::size_t>(prompt_size_)) {
    prompt_scores_.resize(next);  // a piece that failed is computed again
    prompt_scores_.push_back(score_token(logits, tokens_[next], *request().prompt_logprobs));
    return;
  }
  prompt_scored_ = true;
  job_->out->set_prompt_scores(std::move(prompt_scores_));
}

bool Sequence::wants_logits() const {
  return request().logprobs || !request().rules.empty() || sampler_.penalizes() || constraint_;
}

StepToken Sequence::step_token() {
  return {&*session, tokens_.back(), wants_logits() ? nullptr : &sampler_, {}};
}

std::optional<FinishReason> Sequence::decode_drafts(int most, Meter& meter) {
  if (!speculation_) {
    lookup_ = std::make_unique<LookupDrafter>();
    speculation_.emplace(lookup_.get(), most, info_->weight_bytes);
  }
  const auto left = static_cast<int>(request().sampling.max_tokens - std::ssize(answer()));
  const Drafts drafts = speculation_->next(tokens_, left - 1, *session, sampler_);
  std::optional<FinishReason> reason;
  const std::vector<TokenId> drawn =
      session->decode(tokens_.back(), drafts.tokens, sampler_, {}, [&](TokenId id) {
        reason = take(id, meter);
        return !reason;
      });
  speculation_->note(drafts, drawn.size() - 1);
  meter.change([&](BatcherStats& stats) {
    stats.drafted += drafts.tokens.size();
    stats.accepted += drafts.tokens.empty() ? 0 : drawn.size() - 1;
  });
  return reason;
}

TokenId Sequence::draw(std::span<const float> logits) {
  const std::int64_t position = session->length();
  if (request().rules.empty() && !constraint_) return sampler_.next(logits, tokens_, position);
  std::vector<float> changed(logits.begin(), logits.end());
  request().rules.apply(answer(), changed);
  if (constraint_) constraint_->mask(ends_, changed);
  return sampler_.next(changed, tokens_, position);
}

std::optional<FinishReason> Sequence::take(std::span<const float> logits, Meter& meter) {
  if (request().sampling.max_tokens == 0) return FinishReason::max_tokens;
  ScoredToken token;
  token.token = draw(logits);
  token.logprob = std::numeric_limits<float>::quiet_NaN();
  if (request().logprobs) token = score_token(logits, token.token, *request().logprobs);
  return append(std::move(token), meter);
}

std::optional<FinishReason> Sequence::take(TokenId next, Meter& meter) {
  return append({next, std::numeric_limits<float>::quiet_NaN(), {}}, meter);
}

void Sequence::note_token(Meter& meter) {
  const Clock::time_point now = Clock::now();
  if (last_token_) {
    meter.note_token(std::chrono::duration<double>(now - *last_token_).count());
  } else {
    const double seconds = seconds_since(job_->submitted);
    meter.note_first_token(seconds);
    job_->out->change_usage([&](Usage& usage) {
      if (usage.first_token_seconds == 0.0) usage.first_token_seconds = seconds;
    });
  }
  last_token_ = now;
}

std::optional<FinishReason> Sequence::append(ScoredToken token, Meter& meter) {
  const TokenId id = token.token;
  note_token(meter);
  if (std::find(ends_.begin(), ends_.end(), id) != ends_.end()) {
    if (!text_) return FinishReason::end_of_text;
    std::string text = text_->push_end(id);
    if (!text.empty()) job_->out->put({choice_, std::move(text), {}, {}});
    return text_->stopped() ? FinishReason::stop_string : FinishReason::end_of_text;
  }
  if (constraint_) constraint_->take(id);
  tokens_.push_back(id);
  job_->out->change_usage([](Usage& usage) { ++usage.answer_tokens; });
  Piece piece = {choice_, text_ ? text_->push(id) : std::string(), {}, {}};
  piece.tokens.push_back(std::move(token));
  job_->out->put(std::move(piece));
  if (text_ && text_->stopped()) return FinishReason::stop_string;
  if (constraint_ && constraint_->is_final()) return FinishReason::end_of_text;
  if (std::ssize(answer()) == request().sampling.max_tokens) return FinishReason::max_tokens;
  return std::nullopt;
}

void Sequence::finish(FinishReason reason, Meter& meter) {
  Piece piece = {choice_, {}, {}, reason};
  if (text_ && !text_->stopped()) {
    piece.text = text_->finish();
    // An unfinished character may complete a stop string of U+FFFD.
    if (text_->stopped()) piece.finish = FinishReason::stop_string;
  }
  meter.note_finish(*piece.finish);
  job_->out->change_usage([&](Usage& usage) { usage.seconds = seconds_since(job_->submitted); });
  job_->out->put(std::move(piece));
  has_ended_ = true;
}

}  // namespace sluice::batch
