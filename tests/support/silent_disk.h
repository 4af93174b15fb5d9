// A disk that stops answering, and a clock whose time passes when a test lets it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <utility>

#include "io/disk_watch.h"
#include "tests/support/simulated_disk.h"

namespace sluice::testing {

// What a test does to its disks. They may outlive the test's other objects, so they share it.
struct Silence {
  std::atomic<bool> is_silent = false;
};

class SilentDisk : public SimulatedDisk {
 public:
  SilentDisk(std::size_t sectors, std::shared_ptr<const Silence> silence, double faults = 0.0)
      : SimulatedDisk(sectors, 1, faults), silence_(std::move(silence)) {}

  std::size_t retire(std::span<DiskResult> results, bool wait) override {
    if (!silence_->is_silent) return SimulatedDisk::retire(results, wait);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return 0;
  }

 private:
  std::shared_ptr<const Silence> silence_;
};

// Time passes in every wait, as much as is waited for, once `passes` is set.
class TestClock : public DiskClock {
 public:
  bool wait(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
            std::chrono::nanoseconds most) override {
    changed.wait_for(lock, std::chrono::milliseconds(1));
    if (!passes) return false;
    waited += most.count();
    return true;
  }

  std::atomic<bool> passes = false;
  std::atomic<std::int64_t> waited = 0;  // nanoseconds
};

}  // namespace sluice::testing
