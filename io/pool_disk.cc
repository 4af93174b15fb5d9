#include "io/pool_disk.h"

#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>

#include "sluice/errors.h"

namespace sluice {
namespace {

std::int64_t run(int descriptor, const DiskOperation& operation) {
  const auto count = static_cast<int>(operation.buffers.size());
  const auto offset = static_cast<off_t>(operation.offset);
  ssize_t result = 0;
  switch (operation.action) {
    case DiskAction::read:
      result = ::preadv(descriptor, operation.buffers.data(), count, offset);
      break;
    case DiskAction::write:
      result = ::pwritev(descriptor, operation.buffers.data(), count, offset);
      break;
    case DiskAction::flush:
      result = ::fdatasync(descriptor);
      break;
  }
  return result < 0 ? -errno : result;
}

}  // namespace

PoolDisk::PoolDisk(int descriptor, std::size_t depth, std::size_t threads)
    : descriptor_(descriptor), depth_(depth) {
  try {
    for (std::size_t i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
  } catch (const std::system_error& error) {
    stop();
    throw Error(ErrorCode::io, "the threads that read the disk cannot be started: " +
                                   std::string(error.what()) + "; raise the limit ('ulimit -u')");
  }
}

PoolDisk::~PoolDisk() { stop(); }

void PoolDisk::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

bool PoolDisk::start(const DiskOperation& operation) {
  {
    const std::lock_guard lock(mutex_);
    if (accepted_ == depth_) return false;
    ++accepted_;
    waiting_.push_back(operation);
  }
  work_.notify_one();
  return true;
}

std::size_t PoolDisk::retire(std::span<DiskResult> results, bool wait) {
  std::unique_lock lock(mutex_);
  if (wait) finished_.wait(lock, [&] { return woken_ || !results_.empty(); });
  woken_ = false;
  std::size_t count = 0;
  while (count < results.size() && !results_.empty()) {
    results[count++] = results_.front();
    results_.pop_front();
  }
  accepted_ -= count;
  return count;
}

void PoolDisk::wake() {
  {
    const std::lock_guard lock(mutex_);
    woken_ = true;
  }
  finished_.notify_one();
}

void PoolDisk::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [&] { return stopped_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    const DiskOperation operation = waiting_.front();
    waiting_.pop_front();
    lock.unlock();
    const std::int64_t result = run(descriptor_, operation);
    lock.lock();
    results_.push_back({operation.tag, result});
    finished_.notify_one();
  }
}

}  // namespace sluice
