// Device and pinned host memory of a backend, and which addresses kernels can reach.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <map>

#include "kernels/runtime/owners.h"
#include "lib/memory_account.h"
#include "sluice/types.h"

namespace sluice::cuda {

// Runs of addresses that do not overlap.
class AddressMap {
 public:
  void add(const std::byte* data, std::size_t bytes) { runs_[data] = bytes; }
  // Returns the length of the run that was added there.
  std::size_t remove(const std::byte* data);
  // Bytes from `data` to the end of its run, at most `bytes`; 0 outside all runs.
  std::size_t reach(const std::byte* data, std::size_t bytes) const;
  // Returns true if the whole range lies in runs, one or several.
  bool covers(const std::byte* data, std::size_t bytes) const;

 private:
  std::map<const std::byte*, std::size_t> runs_;
};

// Memory of a backend, charged to its accounts. Every queue's kernels can use it.
class CudaMemory {
 public:
  CudaMemory(int ordinal, std::uint64_t device_cap, std::uint64_t host_cap, cudaStream_t stream);

  MemoryAccount& account(Tier tier) { return accounts_.of(tier); }
  // Zeroed. Device memory comes from a pool of its own; the account holds the cap, the pool may
  // hold up to an allocation's granularity (2 MiB) more.
  std::byte* take(Tier tier, std::size_t bytes);
  void give_back(Tier tier, std::byte* data, std::size_t bytes) noexcept;
  void register_host(std::byte* data, std::size_t bytes);
  void unregister_host(std::byte* data) noexcept;

  const AddressMap& device() const { return device_runs_; }
  const AddressMap& host() const { return host_runs_; }  // pinned

 private:
  cudaStream_t stream_;
  PoolOwner pool_;
  TierAccounts accounts_;
  AddressMap device_runs_;
  AddressMap host_runs_;
};

}  // namespace sluice::cuda
