#include <utility>

#include "engine/batch/stream_state.h"
#include "sluice/errors.h"

namespace sluice {

void Stream::State::put(Piece piece) {
  {
    const std::lock_guard lock(mutex);
    if (error) return;
    const bool is_last = piece.finish.has_value();
    pieces.push_back(std::move(piece));
    if (is_last) --open_choices;
  }
  changed.notify_all();
}

void Stream::State::fail(const Error& why) {
  {
    const std::lock_guard lock(mutex);
    if (error || open_choices == 0) return;
    error = why;
  }
  changed.notify_all();
}

void Stream::State::set_prompt_scores(std::vector<ScoredToken> scores) {
  const std::lock_guard lock(mutex);
  prompt_scores = std::move(scores);
}

Stream::Stream(std::shared_ptr<State> state) : state_(std::move(state)) {}
Stream::Stream(Stream&&) noexcept = default;

Stream& Stream::operator=(Stream&& other) noexcept {
  if (this == &other) return *this;
  if (state_ != nullptr) cancel();
  state_ = std::move(other.state_);
  return *this;
}

Stream::~Stream() {
  if (state_ != nullptr) cancel();
}

Stream::State& Stream::state() const {
  if (state_ == nullptr) throw Error(ErrorCode::usage, "a stream that was moved from");
  return *state_;
}

namespace {

// The next piece of those that wait; throws the error behind them.
std::optional<Piece> take(Stream::State& state) {
  if (!state.pieces.empty()) {
    Piece piece = std::move(state.pieces.front());
    state.pieces.pop_front();
    return piece;
  }
  if (state.error) throw Error(*state.error);
  return std::nullopt;
}

bool has_news(const Stream::State& state) {
  return !state.pieces.empty() || state.error || state.open_choices == 0;
}

}  // namespace

std::optional<Piece> Stream::next() {
  State& own = state();
  std::unique_lock lock(own.mutex);
  own.changed.wait(lock, [&] { return has_news(own); });
  return take(own);
}

std::optional<Piece> Stream::next_within(std::chrono::milliseconds timeout) {
  State& own = state();
  std::unique_lock lock(own.mutex);
  own.changed.wait_for(lock, timeout, [&] { return has_news(own); });
  return take(own);
}

bool Stream::ended() const {
  const std::lock_guard lock(state().mutex);
  return state_->pieces.empty() && (state_->error || state_->open_choices == 0);
}

void Stream::cancel() {
  if (!state().cancelled.exchange(true)) state_->wake->call();
}

Usage Stream::usage() const {
  const std::lock_guard lock(state().mutex);
  return state_->usage;
}

std::vector<ScoredToken> Stream::prompt_scores() const {
  const std::lock_guard lock(state().mutex);
  return state_->prompt_scores;
}

}  // namespace sluice
