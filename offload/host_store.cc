#include "offload/host_store.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>
#include <thread>

#include "lib/bytes.h"
#include "lib/check.h"
#include "offload/planner.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr std::uint64_t kHugePage = 2 << 20;
// Memory for which a thread is started, and most threads: other work goes on beside them.
constexpr std::uint64_t kBytesPerThread = 64 << 20;
constexpr std::uint64_t kMostThreads = 8;

[[noreturn]] void throw_refused(std::uint64_t bytes) {
  throw Error(ErrorCode::memory, "this machine refused " + format_bytes(bytes) +
                                     " of host memory for the KV cache (" + std::strerror(errno) +
                                     "); shorten `context` or free memory");
}

}  // namespace

HostStore::HostStore(Backend& backend, const KvShape& shape, std::int64_t rows)
    : backend_(&backend),
      shape_(shape),
      rows_(rows),
      // Regions begin on huge-page boundaries, so that each can be backed by huge pages.
      region_bytes_(round_up(host_region_bytes(shape, rows), kHugePage)) {
  const std::uint64_t total = regions() * region_bytes_;
  void* memory =
      ::mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw_refused(total);
  base_ = static_cast<std::byte*>(memory);
}

HostStore::~HostStore() {
  for (std::byte* piece : registered_) backend_->unregister_host(piece);
  const std::uint64_t bytes = host_region_bytes(shape_, committed_);
  ::munmap(base_, regions() * region_bytes_);
  backend_->account(Tier::host).release(regions() * bytes);
}

std::uint64_t HostStore::regions() const {
  return static_cast<std::uint64_t>(shape_.layers) * static_cast<std::uint64_t>(shape_.kv_heads);
}

std::byte* HostStore::row(int layer, int head, std::int64_t number) const {
  check(number >= 0 && number <= committed_, "row outside the committed part of its region");
  const auto index =
      static_cast<std::uint64_t>(layer) * static_cast<std::uint64_t>(shape_.kv_heads) +
      static_cast<std::uint64_t>(head);
  return region(index) + static_cast<std::uint64_t>(number) * shape_.row_bytes();
}

void HostStore::grow(std::int64_t rows) {
  check(rows <= rows_, "more rows than were planned");
  if (rows <= committed_) return;
  // Steps of a quarter bound both the number of system calls and the memory held in advance.
  const std::int64_t ahead = std::max<std::int64_t>(kPageTokens, committed_ / 4);
  extend(rounded(std::max(rows, committed_ + ahead)));
}

void HostStore::grow_to(std::int64_t rows) {
  check(rows <= rows_, "more rows than were planned");
  if (rows <= committed_) return;
  // A quarter as long as that is little: every region's growth is a system call of its own.
  constexpr std::uint64_t kLittle = std::uint64_t{64} << 20;
  const auto few = static_cast<std::int64_t>(kLittle / (regions() * shape_.row_bytes()));
  extend(rounded(std::max(rows, committed_ + std::min(few, committed_ / 4))));
}

void HostStore::extend(std::int64_t target) {
  const std::uint64_t from = host_region_bytes(shape_, committed_);
  const std::uint64_t to = host_region_bytes(shape_, target);
  backend_->account(Tier::host).charge(regions() * (to - from));
  try {
    commit(from, to);
  } catch (...) {
    withdraw(from, to);
    backend_->account(Tier::host).release(regions() * (to - from));
    throw;
  }
  committed_ = target;
}

std::int64_t HostStore::rounded(std::int64_t rows) const {
  std::uint64_t bytes = static_cast<std::uint64_t>(rows) * shape_.row_bytes();
  // Past the first huge page a step ends where one ends, so that the next begins a whole one.
  if (bytes > kHugePage) bytes = round_up(bytes, kHugePage);
  return std::min(rows_, static_cast<std::int64_t>(bytes / shape_.row_bytes()));
}

void HostStore::commit(std::uint64_t from, std::uint64_t to) {
  if (from >= to) return;
  for (std::uint64_t index = 0; index < regions(); ++index) {
    if (::mprotect(region(index) + from, to - from, PROT_READ | PROT_WRITE) != 0) {
      throw_refused(to - from);
    }
    // Huge pages only where they fit whole: rounding up would take memory that nobody planned.
    // Only advice; without it the kernel hands out small pages.
    const std::uint64_t huge_from = round_up(from, kHugePage);
    const std::uint64_t huge_to = to / kHugePage * kHugePage;
    if (huge_from < huge_to) {
      ::madvise(region(index) + huge_from, huge_to - huge_from, MADV_HUGEPAGE);
    }
  }
  if (!populate(from, to)) throw_refused(to - from);
  for (std::uint64_t index = 0; index < regions(); ++index) {
    backend_->register_host(region(index) + from, to - from);
    registered_.push_back(region(index) + from);
  }
}

// Undoes what commit() did before it failed.
void HostStore::withdraw(std::uint64_t from, std::uint64_t to) noexcept {
  const auto is_new = [&](const std::byte* piece) {
    return static_cast<std::uint64_t>(piece - base_) % region_bytes_ >= from;
  };
  while (!registered_.empty() && is_new(registered_.back())) {
    backend_->unregister_host(registered_.back());
    registered_.pop_back();
  }
  for (std::uint64_t index = 0; index < regions(); ++index) {
    ::madvise(region(index) + from, to - from, MADV_DONTNEED);
    ::mprotect(region(index) + from, to - from, PROT_NONE);
  }
}

// Touches every page, so that what the machine does not have is missed here and not by a signal
// later. Zeroing pages is what takes time: several threads share the regions if there is much.
bool HostStore::populate(std::uint64_t from, std::uint64_t to) const {
  std::atomic<std::uint64_t> next = 0;
  std::atomic<bool> refused = false;
  const auto work = [&] {
    for (std::uint64_t index = next++; index < regions(); index = next++) {
      // Advice, but for want of memory.
      if (::madvise(region(index) + from, to - from, MADV_POPULATE_WRITE) != 0 && errno == ENOMEM) {
        refused = true;
      }
    }
  };
  {
    std::vector<std::jthread> helpers;
    const std::uint64_t useful = regions() * (to - from) / kBytesPerThread;
    const std::uint64_t most =
        std::min<std::uint64_t>(kMostThreads, std::thread::hardware_concurrency());
    try {
      for (std::uint64_t i = 1; i < std::min(useful, most); ++i) helpers.emplace_back(work);
    } catch (const std::system_error&) {
      errno = 0;  // the threads that there are do it
    }
    work();
  }
  if (refused) errno = ENOMEM;
  return !refused;
}

}  // namespace sluice
