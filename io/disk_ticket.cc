#include "io/disk_ticket.h"

#include <algorithm>
#include <utility>

namespace sluice {

void DiskBatch::fail(std::size_t request, const Error& error) {
  const std::lock_guard lock(mutex_);
  const auto place = std::lower_bound(
      failures_.begin(), failures_.end(), request,
      [](const DiskFailure& failure, std::size_t r) { return failure.request < r; });
  if (place != failures_.end() && place->request == request) return;
  failures_.insert(place, {request, error});
}

void DiskBatch::finish_part() {
  if (left_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const std::lock_guard lock(mutex_);
  done_ = true;
  finished_.notify_all();
}

DiskTicket& DiskTicket::operator=(DiskTicket&& other) noexcept {
  if (this == &other) return *this;
  if (batch_) wait_until_done();
  batch_ = std::move(other.batch_);
  return *this;
}

DiskTicket::~DiskTicket() {
  if (batch_) wait_until_done();
}

bool DiskTicket::done() const {
  const std::lock_guard lock(batch_->mutex_);
  return batch_->done_;
}

bool DiskTicket::wait_for(std::chrono::nanoseconds timeout) const {
  std::unique_lock lock(batch_->mutex_);
  return batch_->finished_.wait_for(lock, timeout, [&] { return batch_->done_; });
}

void DiskTicket::wait_until_done() const {
  std::unique_lock lock(batch_->mutex_);
  batch_->finished_.wait(lock, [&] { return batch_->done_; });
}

void DiskTicket::wait() const {
  wait_until_done();
  if (!batch_->failures_.empty()) throw Error(batch_->failures_.front().error);
}

std::vector<DiskFailure> DiskTicket::failures() const {
  wait_until_done();
  return batch_->failures_;
}

}  // namespace sluice
