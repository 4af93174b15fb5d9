#include "cpu/runtime/memory.h"

#include <sys/mman.h>

#include <cstring>
#include <new>
#include <string>

#include "lib/bytes.h"
#include "lib/check.h"
#include "sluice/errors.h"

namespace sluice::cpu {
namespace {

// From this size on memory is mapped: zeroed without being touched, and in huge pages, because a
// scan over gigabytes of rows would otherwise miss the TLB on every 4 KiB.
constexpr std::size_t kMapFrom = std::size_t{4} << 20;

constexpr std::align_val_t kAlignment{kRowAlignment};

std::byte* map(std::size_t bytes) noexcept {
  void* const data =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  // Failure is ignored: without huge pages everything works, only slower.
  static_cast<void>(madvise(data, bytes, MADV_HUGEPAGE));
  return static_cast<std::byte*>(data);
}

std::byte* allocate(std::size_t bytes) noexcept {
  void* const data = ::operator new(bytes, kAlignment, std::nothrow);
  if (data != nullptr) std::memset(data, 0, bytes);
  return static_cast<std::byte*>(data);
}

}  // namespace

std::byte* CpuMemory::take(Tier tier, std::size_t bytes) {
  check(tier != Tier::disk, "the disk tier has no memory");
  std::byte* const data = bytes >= kMapFrom ? map(bytes) : allocate(bytes);
  if (data == nullptr) {
    throw Error(ErrorCode::memory, "the machine has no " + format_bytes(bytes) + " left for the " +
                                       std::string(to_string(tier)) +
                                       " tier; shorten the context or end what else uses it");
  }
  return data;
}

void CpuMemory::give_back(Tier /*tier*/, std::byte* data, std::size_t bytes) noexcept {
  if (bytes >= kMapFrom) {
    check(munmap(data, bytes) == 0, "memory given back that was not taken");
  } else {
    ::operator delete(data, kAlignment);
  }
}

}  // namespace sluice::cpu
