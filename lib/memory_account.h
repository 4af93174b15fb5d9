// Counts the bytes allocated in one tier and holds them under a cap.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>

#include "sluice/types.h"

namespace sluice {

// Every allocation of a tier is charged to its account where the memory is taken, so `peak()` is
// evidence that a cap held, not a repetition of the planner's arithmetic.
// Thread-safe.
class MemoryAccount {
 public:
  static constexpr std::uint64_t kNoCap = std::numeric_limits<std::uint64_t>::max();

  explicit MemoryAccount(Tier tier, std::uint64_t cap = kNoCap) : tier_(tier), cap_(cap) {}
  MemoryAccount(const MemoryAccount&) = delete;
  MemoryAccount& operator=(const MemoryAccount&) = delete;

  // Takes `bytes` from the budget. Past the cap it takes nothing and throws Error{memory}.
  void charge(std::uint64_t bytes);
  void release(std::uint64_t bytes) noexcept;

  Tier tier() const { return tier_; }
  std::uint64_t cap() const { return cap_; }
  std::uint64_t used() const { return used_.load(std::memory_order_relaxed); }
  std::uint64_t peak() const { return peak_.load(std::memory_order_relaxed); }

 private:
  Tier tier_;
  std::uint64_t cap_;
  std::atomic<std::uint64_t> used_{0};
  std::atomic<std::uint64_t> peak_{0};
};

// Bytes charged to an account while this lives.
class Charge {
 public:
  // Throws Error{memory} past the cap.
  Charge(MemoryAccount& account, std::uint64_t bytes) : account_(&account), bytes_(bytes) {
    account.charge(bytes);
  }
  Charge(const Charge&) = delete;
  Charge& operator=(const Charge&) = delete;
  ~Charge() {
    if (account_ != nullptr) account_->release(bytes_);
  }
  // Drops the charge without releasing it, because the account is gone.
  void forget() { account_ = nullptr; }

 private:
  MemoryAccount* account_;
  std::uint64_t bytes_;
};

// The accounts of every tier.
class TierAccounts {
 public:
  TierAccounts(std::uint64_t device_cap, std::uint64_t host_cap)
      : device_(Tier::device, device_cap), host_(Tier::host, host_cap), disk_(Tier::disk) {}

  MemoryAccount& of(Tier tier) {
    return tier == Tier::device ? device_ : tier == Tier::host ? host_ : disk_;
  }

 private:
  MemoryAccount device_;
  MemoryAccount host_;
  MemoryAccount disk_;
};

}  // namespace sluice
