#include "io/disk_queue.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "io/error_text.h"
#include "lib/check.h"

namespace sluice {
namespace {

constexpr std::size_t kResultsAtOnce = 64;
constexpr int kMaxAttempts = 256;  // without a byte of progress
// After this many urgent operations one in the background may begin, or it might never.
constexpr int kMaxUrgentRun = 64;

const char* verb(DiskAction action) {
  switch (action) {
    case DiskAction::read:
      return "reading";
    case DiskAction::write:
      return "writing";
    case DiskAction::flush:
      break;
  }
  return "flushing";
}

bool follows(const DiskRequest& next, const DiskRequest& last, std::uint64_t end) {
  return !next.alone && !last.alone && next.action == last.action && next.offset == end &&
         next.action != DiskAction::flush;
}

}  // namespace

DiskQueue::DiskQueue(Disk& disk, const SectorCheck& sums, std::string name, DiskLimits limits,
                     DiskWatch* watch, std::string file)
    : disk_(disk),
      sums_(sums),
      name_(std::move(name)),
      watch_(watch),
      file_(std::move(file)),
      limits_(limits),
      operations_(limits.depth),
      results_(kResultsAtOnce) {
  check(limits.depth >= 2 && limits.bytes_in_flight >= 2 * kMaxOperationBytes,
        "disk queue: limits too small");
  for (std::size_t slot = limits.depth; slot-- > 0;) free_.push_back(slot);
}

void DiskQueue::add(DiskRequest&& request) {
  check(request.bytes <= kMaxOperationBytes && request.bytes % kSectorBytes == 0 &&
            request.offset % kSectorBytes == 0,
        "disk queue: no whole sectors");
  (request.priority == DiskPriority::urgent ? urgent_ : background_).push_back(std::move(request));
}

void DiskQueue::step(bool wait) {
  bool has_room = true;
  // Retries go first, because they hold slots; one round only, or a full disk would loop forever.
  for (std::size_t i = refused_.size(); i > 0 && has_room; --i) {
    const std::size_t slot = refused_.front();
    refused_.pop_front();
    has_room = start(slot);
  }
  while (has_room && begin_next()) has_room = refused_.empty();
  const std::size_t count = disk_.retire(results_, wait);
  if (count > 0 && watch_ != nullptr) watch_->answered();
  for (std::size_t i = 0; i < count; ++i) retire(results_[i]);
}

bool DiskQueue::begin_next() {
  if (free_.empty()) return false;
  std::deque<DiskRequest>* const queue = next_queue();
  if (queue == nullptr) return false;
  const std::size_t slot = free_.back();
  free_.pop_back();
  Operation& operation = operations_[slot];
  build(operation, *queue);
  ++in_flight_;
  bytes_in_flight_ += operation.bytes;
  urgent_run_ = queue == &urgent_ ? urgent_run_ + 1 : 0;
  if (queue == &background_) {
    ++background_in_flight_;
    background_bytes_ += operation.bytes;
  }
  ++counts_.operations;
  start(slot);
  return true;
}

std::deque<DiskRequest>* DiskQueue::next_queue() {
  const bool its_turn = urgent_run_ >= kMaxUrgentRun && !background_.empty();
  if (its_turn && fits(background_, false)) return &background_;
  if (!urgent_.empty()) return fits(urgent_, false) ? &urgent_ : nullptr;
  if (!background_.empty() && fits(background_, true)) return &background_;
  return nullptr;
}

// Merging stops at the cap, too, so the first request decides.
bool DiskQueue::fits(const std::deque<DiskRequest>& queue, bool background) const {
  const std::size_t bytes = queue.front().bytes;
  if (bytes_in_flight_ + bytes > limits_.bytes_in_flight) return false;
  return !background || (background_in_flight_ < limits_.depth / 2 &&
                         background_bytes_ + bytes <= limits_.bytes_in_flight / 2);
}

void DiskQueue::build(Operation& operation, std::deque<DiskRequest>& queue) {
  const std::size_t room = std::min(kMaxOperationBytes, limits_.bytes_in_flight - bytes_in_flight_);
  operation.first_buffer = 0;
  operation.buffer_count = 0;
  operation.offset = queue.front().offset;
  operation.bytes = 0;
  operation.attempts = 0;
  do {
    append(operation, std::move(queue.front()));
    queue.pop_front();
  } while (!queue.empty() && operation.buffer_count < kMaxBuffers &&
           operation.bytes + queue.front().bytes <= room &&
           follows(queue.front(), operation.requests.back(), operation.offset + operation.bytes));
  operation.left = operation.bytes;
}

// Neighbours on disk that are neighbours in memory share a buffer.
void DiskQueue::append(Operation& operation, DiskRequest request) {
  if (operation.buffer_count > 0) {
    iovec& last = operation.buffers[operation.buffer_count - 1];
    if (static_cast<std::byte*>(last.iov_base) + last.iov_len == request.data) {
      last.iov_len += request.bytes;
      operation.bytes += request.bytes;
      operation.requests.push_back(std::move(request));
      return;
    }
  }
  operation.buffers[operation.buffer_count++] = {request.data, request.bytes};
  operation.bytes += request.bytes;
  operation.requests.push_back(std::move(request));
}

bool DiskQueue::start(std::size_t slot) {
  const Operation& operation = operations_[slot];
  const std::size_t count = operation.buffer_count - operation.first_buffer;
  const bool started =
      disk_.start({operation.requests.front().action, slot, operation.offset,
                   std::span(operation.buffers).subspan(operation.first_buffer, count)});
  if (!started) refused_.push_front(slot);
  return started;
}

void DiskQueue::start_again(std::size_t slot) {
  ++counts_.retries;
  refused_.push_back(slot);
}

void DiskQueue::retire(const DiskResult& result) {
  check(result.tag < operations_.size() && !operations_[result.tag].requests.empty(),
        "disk queue: the disk finished an operation that it was not given");
  const std::size_t slot = result.tag;
  Operation& operation = operations_[slot];
  if (result.result == -EAGAIN || result.result == -EINTR) {
    if (++operation.attempts < kMaxAttempts) return start_again(slot);
  }
  if (result.result < 0) return fail(slot, static_cast<int>(-result.result));
  const auto bytes = static_cast<std::uint64_t>(result.result);
  if (bytes > operation.left) return fail(slot, EPROTO);
  advance(slot, static_cast<std::size_t>(bytes));
}

// Resumes at a whole sector, because O_DIRECT takes no other offset.
void DiskQueue::advance(std::size_t slot, std::size_t bytes) {
  Operation& operation = operations_[slot];
  if (bytes == operation.left) return complete(slot);
  bytes -= bytes % kSectorBytes;
  if (bytes > 0) operation.attempts = 0;
  if (bytes == 0 && ++operation.attempts >= kMaxAttempts) return fail(slot, EIO);
  operation.left -= bytes;
  operation.offset += bytes;
  while (bytes > 0) {
    iovec& buffer = operation.buffers[operation.first_buffer];
    const std::size_t part = std::min(bytes, buffer.iov_len);
    buffer = {static_cast<std::byte*>(buffer.iov_base) + part, buffer.iov_len - part};
    if (buffer.iov_len == 0) ++operation.first_buffer;
    bytes -= part;
  }
  start_again(slot);
}

// A merged operation tells not which of its requests failed, so each is tried by itself.
void DiskQueue::fail(std::size_t slot, int error) {
  std::vector<DiskRequest>& requests = operations_[slot].requests;
  if (requests.size() == 1) {
    const Error message = io_error(requests.front(), error);
    finish(requests.front(), &message);
  } else {
    auto& queue = requests.front().priority == DiskPriority::urgent ? urgent_ : background_;
    for (std::size_t i = requests.size(); i-- > 0;) {
      requests[i].alone = true;
      queue.push_front(requests[i]);
    }
  }
  release(slot);
}

void DiskQueue::complete(std::size_t slot) {
  for (DiskRequest& request : operations_[slot].requests) {
    if (request.action == DiskAction::write) counts_.written_bytes += request.bytes;
    if (request.action != DiskAction::read) {
      finish(request, nullptr);
      continue;
    }
    counts_.read_bytes += request.bytes;
    const auto wrong = sums_.find_mismatch(request.sector, {request.data, request.bytes});
    if (!wrong) {
      finish(request, nullptr);
      continue;
    }
    const Error message = corrupt_error(request, *wrong);
    finish(request, &message);
  }
  release(slot);
}

void DiskQueue::release(std::size_t slot) {
  Operation& operation = operations_[slot];
  --in_flight_;
  bytes_in_flight_ -= operation.bytes;
  if (operation.requests.front().priority == DiskPriority::background) {
    --background_in_flight_;
    background_bytes_ -= operation.bytes;
  }
  operation.requests.clear();
  free_.push_back(slot);
}

void DiskQueue::finish(DiskRequest& request, const Error* error) {
  ++counts_.requests;
  if (error != nullptr) {
    ++counts_.failures;
    request.batch->fail(request.place, *error);
  }
  request.batch->finish_part();
}

void DiskQueue::abandon(const Error& error) {
  for (Operation& operation : operations_) {
    for (DiskRequest& request : operation.requests) finish(request, &error);
    operation.requests.clear();
  }
  for (std::deque<DiskRequest>* const queue : {&urgent_, &background_}) {
    for (DiskRequest& request : *queue) finish(request, &error);
    queue->clear();
  }
  refused_.clear();
  free_.clear();
  for (std::size_t slot = limits_.depth; slot-- > 0;) free_.push_back(slot);
  in_flight_ = background_in_flight_ = bytes_in_flight_ = background_bytes_ = 0;
}

Error DiskQueue::io_error(const DiskRequest& request, int error) const {
  return {ErrorCode::io, name_ + ": " + verb(request.action) + " " + std::to_string(request.bytes) +
                             " bytes at byte " + std::to_string(request.offset) + " of " + file_ +
                             " failed: " + error_text(error) + "; check the disk"};
}

Error DiskQueue::corrupt_error(const DiskRequest& request, std::uint64_t sector) const {
  const std::uint64_t offset = request.offset + (sector - request.sector) * kSectorBytes;
  return {ErrorCode::corrupt, name_ + ": the sector at byte " + std::to_string(offset) + " of " +
                                  file_ +
                                  " does not have the bytes that were last "
                                  "written there; check the disk and the memory"};
}

}  // namespace sluice
