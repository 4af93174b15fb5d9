#include "lib/memory_account.h"

#include <string>

#include "lib/bytes.h"
#include "lib/check.h"
#include "sluice/errors.h"

namespace sluice {

void MemoryAccount::charge(std::uint64_t bytes) {
  std::uint64_t used = used_.load(std::memory_order_relaxed);
  do {
    if (bytes > cap_ - used) {
      throw Error(ErrorCode::memory,
                  std::string(to_string(tier_)) + " memory: " + format_bytes(bytes) +
                      " more would exceed the cap of " + format_bytes(cap_) + " (" +
                      format_bytes(used) + " in use); raise `" + std::string(to_string(tier_)) +
                      "_memory` or shorten the context");
    }
  } while (!used_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
  const std::uint64_t now = used + bytes;
  std::uint64_t peak = peak_.load(std::memory_order_relaxed);
  while (peak < now && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
}

void MemoryAccount::release(std::uint64_t bytes) noexcept {
  const std::uint64_t before = used_.fetch_sub(bytes, std::memory_order_relaxed);
  check(before >= bytes, "more memory released than was charged");
}

}  // namespace sluice
