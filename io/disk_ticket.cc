#include "io/disk_ticket.h"

#include <algorithm>
#include <utility>

namespace sluice {
namespace {

// The time of a disk is counted in parts, so that a process that was stopped for long finds the
// answers that came meanwhile before it gives up.
constexpr int kParts = 16;

}  // namespace

void DiskBatch::fail(std::size_t request, const Error& error) {
  const std::lock_guard lock(mutex_);
  if (done_) return;
  const auto place = std::lower_bound(
      failures_.begin(), failures_.end(), request,
      [](const DiskFailure& failure, std::size_t r) { return failure.request < r; });
  if (place != failures_.end() && place->request == request) return;
  failures_.insert(place, {request, error});
}

void DiskBatch::finish_part() {
  if (left_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
  }
  // After the lock is free, because the thread that wakes up takes it first.
  finished_.notify_all();
}

void DiskBatch::wait() {
  std::unique_lock lock(mutex_);
  if (watch_ == nullptr) return finished_.wait(lock, [&] { return done_; });
  const DiskPatience& patience = watch_->patience();
  std::uint64_t answers = watch_->answers();
  int silent = 0;
  while (!done_ && !watch_->is_given_up()) {
    const bool passed = patience.clock->wait(finished_, lock, patience.most / kParts);
    if (std::exchange(answers, watch_->answers()) != answers) {
      silent = 0;
    } else if (passed && ++silent == kParts && !done_) {
      watch_->give_up();
    }
  }
  if (done_) return;
  done_ = true;
  failures_.clear();
  for (std::size_t i = 0; i < requests_; ++i) failures_.push_back({i, watch_->error()});
  finished_.notify_all();
}

DiskTicket& DiskTicket::operator=(DiskTicket&& other) noexcept {
  if (this == &other) return *this;
  if (batch_) batch_->wait();
  batch_ = std::move(other.batch_);
  return *this;
}

DiskTicket::~DiskTicket() {
  if (batch_) batch_->wait();
}

bool DiskTicket::done() const {
  const std::lock_guard lock(batch_->mutex_);
  return batch_->done_;
}

bool DiskTicket::wait_for(std::chrono::nanoseconds timeout) const {
  std::unique_lock lock(batch_->mutex_);
  return batch_->finished_.wait_for(lock, timeout, [&] { return batch_->done_; });
}

void DiskTicket::wait() const {
  batch_->wait();
  if (!batch_->failures_.empty()) throw Error(batch_->failures_.front().error);
}

std::vector<DiskFailure> DiskTicket::failures() const {
  batch_->wait();
  return batch_->failures_;
}

}  // namespace sluice
