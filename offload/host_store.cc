#include "offload/host_store.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "lib/bytes.h"
#include "lib/check.h"
#include "offload/planner.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr std::uint64_t kHugePage = 2 << 20;

[[noreturn]] void throw_refused(std::uint64_t bytes) {
  throw Error(ErrorCode::memory, "this machine refused " + format_bytes(bytes) +
                                     " of host memory for the KV cache (" + std::strerror(errno) +
                                     "); shorten --context or free memory");
}

}  // namespace

HostStore::HostStore(Backend& backend, const KvShape& shape, std::int64_t context)
    : backend_(&backend),
      shape_(shape),
      context_(context),
      // Regions begin on huge-page boundaries, so that each can be backed by huge pages.
      region_bytes_(round_up(host_region_bytes(shape, context), kHugePage)) {
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

std::byte* HostStore::row(int layer, int head, std::int64_t position) const {
  check(position >= 0 && position <= committed_, "row outside the committed part of its region");
  const auto index =
      static_cast<std::uint64_t>(layer) * static_cast<std::uint64_t>(shape_.kv_heads) +
      static_cast<std::uint64_t>(head);
  return region(index) + static_cast<std::uint64_t>(position) * shape_.row_bytes();
}

void HostStore::grow(std::int64_t tokens) {
  check(tokens <= context_, "more rows than the planned context");
  if (tokens <= committed_) return;
  const std::int64_t target = next_size(tokens);
  const std::uint64_t from = host_region_bytes(shape_, committed_);
  const std::uint64_t to = host_region_bytes(shape_, target);
  backend_->account(Tier::host).charge(regions() * (to - from));
  try {
    commit(from, to);
  } catch (...) {
    backend_->account(Tier::host).release(regions() * (to - from));
    throw;
  }
  committed_ = target;
}

std::int64_t HostStore::next_size(std::int64_t tokens) const {
  // Steps of a quarter bound both the number of system calls and the memory held in advance.
  const std::int64_t ahead = std::max<std::int64_t>(kPageTokens, committed_ / 4);
  const auto rows = static_cast<std::uint64_t>(std::max(tokens, committed_ + ahead));
  std::uint64_t bytes = rows * shape_.row_bytes();
  // Past the first huge page a step ends where one ends, so that the next begins a whole one.
  if (bytes > kHugePage) bytes = round_up(bytes, kHugePage);
  return std::min(context_, static_cast<std::int64_t>(bytes / shape_.row_bytes()));
}

void HostStore::commit(std::uint64_t from, std::uint64_t to) {
  for (std::uint64_t index = 0; index < regions() && from < to; ++index) {
    std::byte* const begin = region(index) + from;
    if (::mprotect(begin, to - from, PROT_READ | PROT_WRITE) != 0) throw_refused(to - from);
    // Huge pages only where they fit whole: rounding up would take memory that nobody planned.
    // Both calls are advice; without them the kernel hands out small pages on first use.
    const std::uint64_t huge_from = round_up(from, kHugePage);
    const std::uint64_t huge_to = to / kHugePage * kHugePage;
    if (huge_from < huge_to) {
      ::madvise(region(index) + huge_from, huge_to - huge_from, MADV_HUGEPAGE);
    }
    if (::madvise(begin, to - from, MADV_POPULATE_WRITE) != 0 && errno == ENOMEM) {
      throw_refused(to - from);
    }
    backend_->register_host(begin, to - from);
    registered_.push_back(begin);
  }
}

}  // namespace sluice
