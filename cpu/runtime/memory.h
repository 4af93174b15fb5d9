// Host memory behind the tiers of a backend that computes on the CPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lib/memory_account.h"
#include "sluice/types.h"

namespace sluice::cpu {

// On the CPU every tier but disk is RAM: "device" is a bounded arena that stands for a GPU's
// memory, and only its account tells it from "host". Disk has an account, for the page store to
// charge, and no memory here.
class CpuMemory {
 public:
  CpuMemory(std::uint64_t device_cap, std::uint64_t host_cap) : accounts_(device_cap, host_cap) {}

  MemoryAccount& account(Tier tier) { return accounts_.of(tier); }

  // `bytes` > 0 zeroed bytes, aligned to at least kRowAlignment. The caller has charged them to
  // the tier's account. Throws Error{memory} when the machine has no more.
  std::byte* take(Tier tier, std::size_t bytes);
  void give_back(Tier tier, std::byte* data, std::size_t bytes) noexcept;

 private:
  TierAccounts accounts_;
};

}  // namespace sluice::cpu
