// Whose turn it is to compute.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace sluice {

// A mutex that threads get in the order in which they asked, so that one that gives it up and asks
// again lets all who wait go first. The thread that has it may lock it again.
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
