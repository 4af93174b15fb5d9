// Notices a disk that stopped answering, which may be noticed by anyone who waits for it: its own
// thread may be the one that never comes back.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "sluice/errors.h"

namespace sluice {

// The clock of those who wait for a disk; tests have their own.
class DiskClock {
 public:
  DiskClock() = default;
  DiskClock(const DiskClock&) = delete;
  DiskClock& operator=(const DiskClock&) = delete;
  virtual ~DiskClock() = default;

  // Waits until `changed` is notified or `most` has passed; may return earlier without reason.
  // Returns true if the time has passed.
  virtual bool wait(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                    std::chrono::nanoseconds most) = 0;
};

// The steady clock of the machine.
std::shared_ptr<DiskClock> machine_clock();

struct DiskPatience {
  // Time for which none of a store's disks may answer anything while one of them is waited for.
  std::chrono::nanoseconds most = std::chrono::seconds(60);
  std::shared_ptr<DiskClock> clock = machine_clock();
};

// State that the disks of one store and those who wait for them share. Thread-safe.
class DiskWatch {
 public:
  // `name` stands in the error.
  DiskWatch(DiskPatience patience, std::string name)
      : patience_(std::move(patience)), name_(std::move(name)) {}

  // A disk has finished operations, well or not.
  void answered() { answers_.fetch_add(1, std::memory_order_relaxed); }
  std::uint64_t answers() const { return answers_.load(std::memory_order_relaxed); }

  // Once given up, a store takes no more requests: what it was asked for may still happen.
  void give_up() { is_given_up_.store(true, std::memory_order_release); }
  bool is_given_up() const { return is_given_up_.load(std::memory_order_acquire); }

  // Keeps memory as long as this object, which the threads of given-up disks do.
  void keep(std::shared_ptr<void> memory) {
    const std::lock_guard lock(mutex_);
    kept_.push_back(std::move(memory));
  }

  const DiskPatience& patience() const { return patience_; }
  Error error() const;

 private:
  DiskPatience patience_;
  std::string name_;
  std::atomic<std::uint64_t> answers_ = 0;
  std::atomic<bool> is_given_up_ = false;
  std::mutex mutex_;
  std::vector<std::shared_ptr<void>> kept_;
};

}  // namespace sluice
