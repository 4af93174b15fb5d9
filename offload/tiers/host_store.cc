#include "offload/tiers/host_store.h"

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
#include "lib/process_limits.h"
#include "offload/plan/planner.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr std::uint64_t kHugePage = 2 << 20;
// Bytes per extra thread, and most threads, because other work runs beside them.
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
      region_bytes_(round_up(host_region_bytes(shape, rows), kHugePage)),
      committed_(static_cast<std::size_t>(shape.layers)) {
  const std::uint64_t total = regions() * region_bytes_;
  void* memory =
      ::mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw_refused(total);
  base_ = static_cast<std::byte*>(memory);
}

HostStore::~HostStore() {
  for (std::byte* piece : registered_) backend_->unregister_host(piece);
  ::munmap(base_, regions() * region_bytes_);
  backend_->account(Tier::host).release(regions() * host_region_bytes(shape_, charged_));
}

std::uint64_t HostStore::regions() const {
  return static_cast<std::uint64_t>(shape_.layers) * static_cast<std::uint64_t>(shape_.kv_heads);
}

std::byte* HostStore::region(int layer, int head) const {
  const auto index =
      static_cast<std::uint64_t>(layer) * static_cast<std::uint64_t>(shape_.kv_heads) +
      static_cast<std::uint64_t>(head);
  return base_ + index * region_bytes_;
}

std::byte* HostStore::row(int layer, int head, std::int64_t number) const {
  check(number >= 0 && number <= committed_[static_cast<std::size_t>(layer)],
        "row outside the committed part of its region");
  return region(layer, head) + static_cast<std::uint64_t>(number) * shape_.row_bytes();
}

void HostStore::grow(std::int64_t rows) {
  // Steps of a quarter bound both the number of system calls and the memory held in advance.
  grow_ahead(rows, std::max<std::int64_t>(kPageTokens, committed_rows() / 4));
}

void HostStore::grow_to(std::int64_t rows) {
  // At most a quarter: growing every region takes a system call each.
  constexpr std::uint64_t kLittle = std::uint64_t{64} << 20;
  const auto few = static_cast<std::int64_t>(kLittle / (regions() * shape_.row_bytes()));
  grow_ahead(rows, std::min(few, committed_rows() / 4));
}

void HostStore::grow_ahead(std::int64_t rows, std::int64_t ahead) {
  check(rows <= rows_, "more rows than were planned");
  if (rows <= committed_rows()) return;
  const std::int64_t before = charged_;
  const std::int64_t target = rounded(std::max(rows, committed_rows() + ahead));
  if (target > charged_) charge_to(target);
  try {
    commit(0, shape_.layers, target);
  } catch (...) {
    charge_to(before);
    throw;
  }
}

void HostStore::charge(std::int64_t rows) {
  check(rows <= rows_, "more rows than were planned");
  if (rows > charged_) charge_to(rounded(rows));
}

void HostStore::release_uncommitted() {
  charge_to(*std::max_element(committed_.begin(), committed_.end()));
}

void HostStore::charge_to(std::int64_t target) {
  MemoryAccount& account = backend_->account(Tier::host);
  const std::uint64_t before = regions() * host_region_bytes(shape_, charged_);
  const std::uint64_t after = regions() * host_region_bytes(shape_, target);
  if (after > before) account.charge(after - before);
  if (after < before) account.release(before - after);
  charged_ = target;
}

void HostStore::commit(int layer, std::int64_t rows) {
  charge(rows);
  if (rows > committed_[static_cast<std::size_t>(layer)]) commit(layer, layer + 1, rounded(rows));
}

std::int64_t HostStore::rounded(std::int64_t rows) const {
  std::uint64_t bytes = static_cast<std::uint64_t>(rows) * shape_.row_bytes();
  // Past the first huge page a step ends on a huge-page boundary, so that the next begins a whole
  // one.
  if (bytes > kHugePage) bytes = round_up(bytes, kHugePage);
  return std::min(rows_, static_cast<std::int64_t>(bytes / shape_.row_bytes()));
}

std::vector<HostStore::Piece> HostStore::missing(int first, int last, std::int64_t target) const {
  std::vector<Piece> pieces;
  const std::uint64_t to = host_region_bytes(shape_, target);
  for (int layer = first; layer < last; ++layer) {
    const std::uint64_t from =
        host_region_bytes(shape_, committed_[static_cast<std::size_t>(layer)]);
    for (int head = 0; head < shape_.kv_heads && from < to; ++head) {
      pieces.push_back({region(layer, head) + from, to - from});
    }
  }
  return pieces;
}

void HostStore::commit(int first, int last, std::int64_t target) {
  const std::vector<Piece> pieces = missing(first, last, target);
  const std::size_t registered = registered_.size();
  try {
    back(pieces);
    for (const Piece& piece : pieces) {
      backend_->register_host(piece.data, piece.bytes);
      registered_.push_back(piece.data);
    }
  } catch (...) {
    withdraw(pieces, registered);
    throw;
  }
  for (int layer = first; layer < last; ++layer) {
    std::int64_t& committed = committed_[static_cast<std::size_t>(layer)];
    committed = std::max(committed, target);
  }
}

namespace {

// Touches every page, so that missing memory is reported here and not by a signal later. Zeroing
// takes long, so several of the `usable` threads share large pieces.
template <typename Pieces>
bool populate(const Pieces& pieces, int usable) {
  std::atomic<std::size_t> next = 0;
  std::atomic<bool> refused = false;
  const auto work = [&] {
    for (std::size_t i = next++; i < pieces.size(); i = next++) {
      // Only ENOMEM matters: the call is advice otherwise.
      if (::madvise(pieces[i].data, pieces[i].bytes, MADV_POPULATE_WRITE) != 0 && errno == ENOMEM) {
        refused = true;
      }
    }
  };
  {
    std::vector<std::jthread> helpers;
    std::uint64_t bytes = 0;
    for (const auto& piece : pieces) bytes += piece.bytes;
    const std::uint64_t most = std::min(kMostThreads, static_cast<std::uint64_t>(usable));
    try {
      for (std::uint64_t i = 1; i < std::min(bytes / kBytesPerThread, most); ++i) {
        helpers.emplace_back(work);
      }
    } catch (const std::system_error&) {
      errno = 0;  // the threads already started do the work
    }
    work();
  }
  if (refused) errno = ENOMEM;
  return !refused;
}

}  // namespace

// Backs the pieces with memory. A limit that was lowered since the plan is an error here; otherwise
// the kernel would end the process.
void HostStore::back(std::span<const Piece> pieces) {
  std::uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  require_memory(bytes, Counted::resident, "the KV cache needs",
                 "shorten `context`, or raise the limit");
  for (const Piece& piece : pieces) {
    if (::mprotect(piece.data, piece.bytes, PROT_READ | PROT_WRITE) != 0) {
      throw_refused(piece.bytes);
    }
    // Huge pages only where they fit whole, because rounding up would take unplanned memory. Advice
    // only: without it the kernel hands out small pages.
    const auto from = static_cast<std::uint64_t>(piece.data - base_);
    const std::uint64_t huge_from = round_up(from, kHugePage);
    const std::uint64_t huge_to = (from + piece.bytes) / kHugePage * kHugePage;
    if (huge_from < huge_to) ::madvise(base_ + huge_from, huge_to - huge_from, MADV_HUGEPAGE);
  }
  if (!populate(pieces, process_limits().threads())) throw_refused(bytes);
}

// Undoes a failed commit(): `registered` pieces were registered before it.
void HostStore::withdraw(std::span<const Piece> pieces, std::size_t registered) noexcept {
  while (registered_.size() > registered) {
    backend_->unregister_host(registered_.back());
    registered_.pop_back();
  }
  for (const Piece& piece : pieces) {
    ::madvise(piece.data, piece.bytes, MADV_DONTNEED);
    ::mprotect(piece.data, piece.bytes, PROT_NONE);
  }
}

}  // namespace sluice
