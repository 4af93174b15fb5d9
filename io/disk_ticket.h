// A caller's handle on a batch of disk requests: wait for it, poll it, see what failed.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "io/disk_watch.h"
#include "sluice/errors.h"

namespace sluice {

struct DiskFailure {
  std::size_t request;  // its place in the batch
  Error error;
};

// The state of a batch that its caller and the disk's threads share.
class DiskBatch {
 public:
  // `parts` of `requests` must be finished before the batch is. Without a watch, those who wait for
  // it are patient.
  explicit DiskBatch(std::size_t parts, std::size_t requests = 0,
                     std::shared_ptr<DiskWatch> watch = nullptr)
      : left_(parts), requests_(requests), watch_(std::move(watch)), done_(parts == 0) {}

  // Both do nothing once the disk was given up.
  void fail(std::size_t request, const Error& error);
  void finish_part();

 private:
  friend class DiskTicket;

  // Waits until done, or gives up and fails every request.
  void wait();

  std::atomic<std::size_t> left_;
  std::size_t requests_;
  std::shared_ptr<DiskWatch> watch_;
  std::mutex mutex_;
  std::condition_variable finished_;
  bool done_;
  std::vector<DiskFailure> failures_;
};

// Memory of a batch's requests belongs to the disk until done(), and for good if the disk was given
// up (see PageStore). Any one thread at a time may use a ticket. The destructor waits, because the
// disk would else write into memory that is gone.
class DiskTicket {
 public:
  explicit DiskTicket(std::shared_ptr<DiskBatch> batch) : batch_(std::move(batch)) {}
  DiskTicket(DiskTicket&&) noexcept = default;
  DiskTicket& operator=(DiskTicket&& other) noexcept;
  DiskTicket(const DiskTicket&) = delete;
  DiskTicket& operator=(const DiskTicket&) = delete;
  ~DiskTicket();

  bool done() const;
  // Returns done() after at most `timeout`.
  bool wait_for(std::chrono::nanoseconds timeout) const;
  // Waits until done, then throws the failed request's error, of the first one in the batch.
  void wait() const;
  // Waits until done. At most one failure per request, in the order of the batch; the other
  // requests have succeeded.
  std::vector<DiskFailure> failures() const;

 private:
  std::shared_ptr<DiskBatch> batch_;
};

}  // namespace sluice
