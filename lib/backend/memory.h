// Memory of the tiers and its owners.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

#include "lib/memory_account.h"
#include "sluice/types.h"

namespace sluice {

class Memory;

// Owned memory of one tier, aligned to 64 bytes and zeroed. Its bytes are charged to the tier's
// account while it lives.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Memory* owner, Tier tier, std::byte* data, std::size_t bytes)
      : owner_(owner), tier_(tier), data_(data), bytes_(bytes) {}
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  std::byte* data() const { return data_; }
  float* floats() const { return reinterpret_cast<float*>(data_); }
  std::size_t bytes() const { return bytes_; }

 private:
  Memory* owner_ = nullptr;
  Tier tier_ = Tier::host;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// The source of a backend's memory. It outlives its buffers.
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  virtual ~Memory() = default;

  virtual MemoryAccount& account(Tier tier) = 0;

  // Throws Error{memory} past the tier's cap or when the machine has no more.
  Buffer allocate(Tier tier, std::size_t bytes);

  // Whether an address lies in a buffer of Tier::device, and whether there is such a buffer. Any
  // thread may call them.
  bool is_on_device(const void* address) const;
  bool has_device_buffers() const;

  // Makes host memory reachable for transfers (pins it); release before unmapping.
  virtual void register_host(std::byte* data, std::size_t bytes) = 0;
  virtual void unregister_host(std::byte* data) noexcept = 0;

 private:
  friend class Buffer;
  virtual std::byte* take(Tier tier, std::size_t bytes) = 0;
  virtual void give_back(Tier tier, std::byte* data, std::size_t bytes) noexcept = 0;
  void release(Tier tier, std::byte* data, std::size_t bytes) noexcept;

  mutable std::mutex mutex_;
  std::map<const std::byte*, std::size_t> on_device_;  // bytes of buffers, by their first byte
};

}  // namespace sluice
