// Wakes the batcher's thread from others.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>

namespace sluice::batch {

class Wake {
 public:
  void call() {
    {
      const std::lock_guard lock(mutex_);
      called_ = true;
    }
    changed_.notify_one();
  }
  // Returns once call() has been called since the last wait, or at `until`.
  void wait(std::optional<std::chrono::steady_clock::time_point> until) {
    std::unique_lock lock(mutex_);
    const auto is_called = [&] { return called_; };
    if (until) {
      changed_.wait_until(lock, *until, is_called);
    } else {
      changed_.wait(lock, is_called);
    }
    called_ = false;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool called_ = false;
};

}  // namespace sluice::batch
