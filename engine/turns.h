// The order in which threads compute.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace sluice {

// A mutex that threads get in the order in which they asked: a thread that unlocks it and locks it
// again lets all waiting threads go first. Recursive.
class FairMutex {
 public:
  void lock() {
    std::unique_lock guard(mutex_);
    if (owner_ == std::this_thread::get_id()) {
      ++depth_;
      return;
    }
    const std::uint64_t ticket = next_++;
    changed_.wait(guard, [&] { return ticket == serving_; });
    owner_ = std::this_thread::get_id();
  }

  void unlock() {
    const std::lock_guard guard(mutex_);
    if (depth_ > 0) {
      --depth_;
      return;
    }
    owner_ = {};
    ++serving_;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread::id owner_;
  int depth_ = 0;  // locks of the owner beyond the first
  std::uint64_t next_ = 0;
  std::uint64_t serving_ = 0;
};

}  // namespace sluice
