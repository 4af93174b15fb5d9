// Memory of the tiers of a backend that computes on the CPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lib/memory_account.h"
#include "sluice/types.h"

namespace sluice::cpu {

// Every tier except disk is RAM on the CPU. "Device" is a bounded arena that stands for GPU memory
// and differs from "host" only in its account. Disk has only an account, which the page store
// charges.
class CpuMemory {
 public:
  CpuMemory(std::uint64_t device_cap, std::uint64_t host_cap) : accounts_(device_cap, host_cap) {}

  MemoryAccount& account(Tier tier) { return accounts_.of(tier); }

  // Returns `bytes` > 0 zeroed bytes, aligned to at least kRowAlignment. The caller must have
  // charged them to the tier's account. Throws Error{memory} if the machine is out of memory.
  std::byte* take(Tier tier, std::size_t bytes);
  void give_back(Tier tier, std::byte* data, std::size_t bytes) noexcept;

 private:
  TierAccounts accounts_;
};

}  // namespace sluice::cpu
