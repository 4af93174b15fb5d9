#include "io/uring_disk.h"

#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <string>
#include <vector>

#include "io/error_text.h"
#include "lib/check.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

// The newest setup flags first: completions are then processed when retire() asks for them instead
// of interrupting this thread. Older kernels refuse flags that they do not know.
constexpr std::array kSetupFlags = {
    IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN | IORING_SETUP_DEFER_TASKRUN,  // 6.1
    IORING_SETUP_COOP_TASKRUN,                                                            // 5.19
    0U};

constexpr std::size_t kMaxArenaBytes = std::size_t{1} << 30;  // of one registered buffer
constexpr std::uint64_t kWakeTag = ~std::uint64_t{0};
constexpr int kFile = 0;  // places in the table of registered files
constexpr int kWake = 1;

[[noreturn]] void throw_refused(const char* step, int error) {
  throw Error(ErrorCode::unsupported, std::string("io_uring: ") + step + ": " + error_text(error));
}

class UringDisk : public Disk {
 public:
  UringDisk(int descriptor, std::size_t depth, std::span<const std::span<std::byte>> arenas)
      : depth_(depth) {
    open_ring();
    try {
      register_files(descriptor);
      register_arenas(arenas);
      listen();
    } catch (...) {
      close();
      throw;
    }
  }

  ~UringDisk() override { close(); }

  bool start(const DiskOperation& operation) override {
    if (accepted_ == depth_) return false;
    io_uring_sqe* const entry = ::io_uring_get_sqe(&ring_);
    if (entry == nullptr) return false;
    prepare(*entry, operation);
    entry->flags |= IOSQE_FIXED_FILE;
    ::io_uring_sqe_set_data64(entry, operation.tag);
    ++accepted_;
    return true;
  }

  std::size_t retire(std::span<DiskResult> results, bool wait) override {
    const bool sleeps = wait && ::io_uring_cq_ready(&ring_) == 0;
    const int status =
        sleeps ? ::io_uring_submit_and_wait(&ring_, 1) : ::io_uring_submit_and_get_events(&ring_);
    const bool retryable =
        status == -EINTR || status == -EAGAIN || status == -EBUSY || status == -ETIME;
    if (status < 0 && !retryable) {
      throw Error(ErrorCode::io, "io_uring failed: " + error_text(-status));
    }
    std::size_t count = 0;
    while (count < results.size()) {
      io_uring_cqe* entry = nullptr;
      if (::io_uring_peek_cqe(&ring_, &entry) != 0) break;
      const DiskResult result = {::io_uring_cqe_get_data64(entry), entry->res};
      const bool goes_on = (entry->flags & IORING_CQE_F_MORE) != 0;
      ::io_uring_cqe_seen(&ring_, entry);
      if (result.tag == kWakeTag) {
        if (result.result == -EINVAL) polls_on_ = false;
        if (!goes_on) listen();
      } else {
        results[count++] = result;
      }
    }
    accepted_ -= count;
    return count;
  }

  void wake() override {
    const std::uint64_t one = 1;
    // Fails only if the counter is full, and then retire() wakes anyway.
    [[maybe_unused]] const ssize_t written = ::write(event_, &one, sizeof one);
  }

 private:
  void open_ring() {
    int status = 0;
    for (const unsigned flags : kSetupFlags) {
      // One more than `depth` for the wake-up.
      status = ::io_uring_queue_init(static_cast<unsigned>(depth_ + 1), &ring_, flags);
      if (status == 0) return;
      if (status != -EINVAL) break;
    }
    throw_refused("setup", -status);
  }

  void register_files(int descriptor) {
    event_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event_ < 0) throw_refused("eventfd", errno);
    const std::array files = {descriptor, event_};
    const int status = ::io_uring_register_files(&ring_, files.data(), files.size());
    if (status != 0) throw_refused("registering files", -status);
  }

  // The kernel takes buffers of up to 1 GiB; a refusal (RLIMIT_MEMLOCK) leaves all unregistered.
  void register_arenas(std::span<const std::span<std::byte>> arenas) {
    for (std::span<std::byte> arena : arenas) {
      while (!arena.empty()) {
        const std::size_t bytes = std::min(arena.size(), kMaxArenaBytes);
        registered_.push_back({arena.data(), bytes});
        arena = arena.subspan(bytes);
      }
    }
    if (registered_.empty()) return;
    std::sort(registered_.begin(), registered_.end(),
              [](const iovec& a, const iovec& b) { return a.iov_base < b.iov_base; });
    const int status = ::io_uring_register_buffers(&ring_, registered_.data(),
                                                   static_cast<unsigned>(registered_.size()));
    if (status != 0) registered_.clear();
  }

  // The place of a registered buffer that has all of `buffer`, or -1.
  int find_registered(const iovec& buffer) const {
    auto after =
        std::upper_bound(registered_.begin(), registered_.end(), buffer,
                         [](const iovec& a, const iovec& b) { return a.iov_base < b.iov_base; });
    if (after == registered_.begin()) return -1;
    const iovec& candidate = *--after;
    const auto* const end = static_cast<std::byte*>(candidate.iov_base) + candidate.iov_len;
    const auto* const buffer_end = static_cast<std::byte*>(buffer.iov_base) + buffer.iov_len;
    return buffer_end <= end ? static_cast<int>(after - registered_.begin()) : -1;
  }

  void prepare(io_uring_sqe& entry, const DiskOperation& operation) const {
    if (operation.action == DiskAction::flush) {
      ::io_uring_prep_fsync(&entry, kFile, IORING_FSYNC_DATASYNC);
      return;
    }
    const bool reads = operation.action == DiskAction::read;
    const auto count = static_cast<unsigned>(operation.buffers.size());
    const iovec& first = operation.buffers.front();
    if (count > 1) {
      reads
          ? ::io_uring_prep_readv(&entry, kFile, operation.buffers.data(), count, operation.offset)
          : ::io_uring_prep_writev(&entry, kFile, operation.buffers.data(), count,
                                   operation.offset);
      return;
    }
    const auto bytes = static_cast<unsigned>(first.iov_len);
    const int place = find_registered(first);
    if (place >= 0) {
      reads ? ::io_uring_prep_read_fixed(&entry, kFile, first.iov_base, bytes, operation.offset,
                                         place)
            : ::io_uring_prep_write_fixed(&entry, kFile, first.iov_base, bytes, operation.offset,
                                          place);
    } else {
      reads ? ::io_uring_prep_read(&entry, kFile, first.iov_base, bytes, operation.offset)
            : ::io_uring_prep_write(&entry, kFile, first.iov_base, bytes, operation.offset);
    }
  }

  // Polls the event, so that wake() becomes a completion. The entry for it is always free: it is
  // the one that start() leaves. Newer kernels go on polling, and every wake() is an event then,
  // whatever the counter is.
  void listen() {
    io_uring_sqe* entry = ::io_uring_get_sqe(&ring_);
    if (entry == nullptr) {
      ::io_uring_submit(&ring_);
      entry = ::io_uring_get_sqe(&ring_);
    }
    check(entry != nullptr, "io_uring: no entry left for the wake-up");
    polls_on_ ? ::io_uring_prep_poll_multishot(entry, kWake, POLLIN)
              : ::io_uring_prep_poll_add(entry, kWake, POLLIN);
    entry->flags |= IOSQE_FIXED_FILE;
    ::io_uring_sqe_set_data64(entry, kWakeTag);
    if (polls_on_) return;
    std::uint64_t ignored = 0;
    // Empties the counter before the poll begins; a wake() after this ends the next sleep.
    [[maybe_unused]] const ssize_t got = ::read(event_, &ignored, sizeof ignored);
  }

  void close() {
    ::io_uring_queue_exit(&ring_);
    if (event_ >= 0) ::close(event_);
  }

  const std::size_t depth_;
  io_uring ring_{};
  int event_ = -1;
  bool polls_on_ = true;           // 5.13
  std::size_t accepted_ = 0;       // not retired yet
  std::vector<iovec> registered_;  // by address
};

}  // namespace

std::unique_ptr<Disk> make_uring_disk(int descriptor, std::size_t depth,
                                      std::span<const std::span<std::byte>> arenas) {
  return std::make_unique<UringDisk>(descriptor, depth, arenas);
}

}  // namespace sluice
