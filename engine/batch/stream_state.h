// State shared by a Stream and the batcher's thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/batch/wake.h"
#include "sluice/batcher.h"

namespace sluice {

struct Stream::State {
  State(int choices, std::shared_ptr<batch::Wake> waker)
      : open_choices(choices), wake(std::move(waker)) {}

  // The batcher's side. put() drops what comes after an error.
  void put(Piece piece);
  void fail(const Error& error);
  void set_prompt_scores(std::vector<ScoredToken> scores);
  void change_usage(const auto& change) {
    const std::lock_guard lock(mutex);
    change(usage);
  }

  std::atomic<bool> cancelled = false;

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::deque<Piece> pieces;
  std::optional<Error> error;
  int open_choices;
  Usage usage;
  std::vector<ScoredToken> prompt_scores;
  std::shared_ptr<batch::Wake> wake;
};

}  // namespace sluice
