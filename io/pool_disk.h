#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "io/disk.h"

namespace sluice {

// A disk by preadv and pwritev on threads of its own, for kernels and containers that refuse
// io_uring, and for files that refuse O_DIRECT.
class PoolDisk : public Disk {
 public:
  // Up to `depth` operations at a time are accepted, and `threads` of them in the kernel. The file
  // stays open while the object lives. Throws Error{io} if threads cannot be started.
  PoolDisk(int descriptor, std::size_t depth, std::size_t threads);
  ~PoolDisk() override;

  bool start(const DiskOperation& operation) override;
  std::size_t retire(std::span<DiskResult> results, bool wait) override;
  void wake() override;

 private:
  void work();
  void stop();

  const int descriptor_;
  const std::size_t depth_;
  std::mutex mutex_;
  std::condition_variable work_;      // there is something to do
  std::condition_variable finished_;  // there is something to retire
  std::deque<DiskOperation> waiting_;
  std::deque<DiskResult> results_;
  std::size_t accepted_ = 0;  // not retired yet
  bool woken_ = false;
  bool stopped_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace sluice
