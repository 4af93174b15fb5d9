#include "kernels/runtime/memory.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "kernels/runtime/error.h"
#include "lib/bytes.h"
#include "lib/check.h"
#include "sluice/errors.h"

namespace sluice::cuda {
namespace {

PoolOwner make_pool(int ordinal) {
  cudaMemPoolProps props{};
  props.allocType = cudaMemAllocationTypePinned;
  props.location.type = cudaMemLocationTypeDevice;
  props.location.id = ordinal;
  cudaMemPool_t pool = nullptr;
  require(cudaMemPoolCreate(&pool, &props), "a memory pool");
  return PoolOwner(pool);
}

[[noreturn]] void throw_no_memory(Tier tier, std::size_t bytes, cudaError_t status) {
  ignore(status);
  const std::string name(to_string(tier));
  throw Error(ErrorCode::memory, "the " + name + " has no " + format_bytes(bytes) + " left (" +
                                     cudaGetErrorString(status) + "); lower `" + name +
                                     "_memory`, shorten the context or end what else uses it");
}

}  // namespace

std::size_t AddressMap::remove(const std::byte* data) {
  const auto run = runs_.find(data);
  check(run != runs_.end(), "memory given back that was not taken");
  const std::size_t bytes = run->second;
  runs_.erase(run);
  return bytes;
}

std::size_t AddressMap::reach(const std::byte* data, std::size_t bytes) const {
  const auto after = runs_.upper_bound(data);
  if (after == runs_.begin()) return 0;
  const auto run = std::prev(after);
  const auto offset = static_cast<std::size_t>(data - run->first);
  return offset >= run->second ? 0 : std::min(bytes, run->second - offset);
}

bool AddressMap::covers(const std::byte* data, std::size_t bytes) const {
  while (bytes > 0) {
    const std::size_t part = reach(data, bytes);
    if (part == 0) return false;
    data += part;
    bytes -= part;
  }
  return true;
}

CudaMemory::CudaMemory(int ordinal, std::uint64_t device_cap, std::uint64_t host_cap,
                       cudaStream_t stream)
    : stream_(stream), pool_(make_pool(ordinal)), accounts_(device_cap, host_cap) {}

std::byte* CudaMemory::take(Tier tier, std::size_t bytes) {
  check(tier != Tier::disk, "the disk tier has no memory");
  void* data = nullptr;
  if (tier == Tier::host) {
    const cudaError_t status =
        cudaHostAlloc(&data, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
    if (status != cudaSuccess) throw_no_memory(tier, bytes, status);
    PinnedBlock owner(data);
    host_runs_.add(static_cast<std::byte*>(data), bytes);
    std::memset(data, 0, bytes);
    return static_cast<std::byte*>(owner.release());
  }
  const cudaError_t status = cudaMallocFromPoolAsync(&data, bytes, pool_.get(), stream_);
  if (status != cudaSuccess) throw_no_memory(tier, bytes, status);
  try {
    require(cudaMemsetAsync(data, 0, bytes, stream_), "zeroing device memory");
    // Queues may use it at once.
    require(cudaStreamSynchronize(stream_), "zeroing device memory");
    device_runs_.add(static_cast<std::byte*>(data), bytes);
  } catch (...) {
    ignore(cudaFreeAsync(data, stream_));
    throw;
  }
  return static_cast<std::byte*>(data);
}

void CudaMemory::give_back(Tier tier, std::byte* data, std::size_t /*bytes*/) noexcept {
  // Waits because other streams may still read it; owners end rarely, so this costs nothing.
  ignore(cudaDeviceSynchronize());
  if (tier == Tier::host) {
    host_runs_.remove(data);
    ignore(cudaFreeHost(data));
  } else {
    device_runs_.remove(data);
    ignore(cudaFreeAsync(data, stream_));
  }
}

void CudaMemory::register_host(std::byte* data, std::size_t bytes) {
  const cudaError_t status =
      cudaHostRegister(data, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
  if (status != cudaSuccess) {
    ignore(status);
    throw Error(is_sticky(status) ? ErrorCode::internal : ErrorCode::memory,
                "this machine refused to pin " + format_bytes(bytes) +
                    " of host memory for the device (" + cudaGetErrorString(status) +
                    "); shorten `context`, free memory or raise the limit on locked memory "
                    "(ulimit -l)");
  }
  try {
    host_runs_.add(data, bytes);
  } catch (...) {
    ignore(cudaHostUnregister(data));
    throw;
  }
}

void CudaMemory::unregister_host(std::byte* data) noexcept {
  ignore(cudaDeviceSynchronize());
  host_runs_.remove(data);
  ignore(cudaHostUnregister(data));
}

}  // namespace sluice::cuda
